"""The critic by hand: its values, what GAE makes of them, the gradient of its loss, and its state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.protocols import Carried
from penstock.graph.types import Context, Critic, Logprobs, Returns, Rewards, Values
from penstock.nodes.critic import LanguageCritic, critic_update, critic_values, gae, make_critic
from penstock.nodes.model import ModelError, load_scorer
from penstock.nodes.policy import make_policy

from .rollouts import assert_gradients, first_gradients, numbers_of_row, random_rollouts

CONTEXT = Context(node="critic", seed=1, updates=10)
FREE = float("inf")
REWARDS = Rewards(torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]))
CLIP = 0.05


def critic(head: float = 0.0, **changes: Any) -> LanguageCritic:
    """A critic whose head has weights of about `head`."""
    made = make_critic(replace(CONTEXT, **changes))
    assert isinstance(made, LanguageCritic)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        made.masters["score.weight"].copy_(torch.randn(1, 128, generator=generator) * head)
    return made


def lesson(learner: LanguageCritic, **options: Any) -> None:
    """One update from its own values and the rewards."""
    rollouts = random_rollouts()
    values = critic_values.fn(learner, rollouts)
    _, returns, _ = gae.fn(REWARDS, values, rollouts)
    critic_update.fn(learner, rollouts, values, returns, **options)


def test_a_new_critic_expects_nothing_and_has_the_policys_decoder() -> None:
    made, policy = critic(), make_policy(CONTEXT)
    assert isinstance(made, Carried)
    assert isinstance(made, Critic)
    assert critic_values.fn(made, random_rollouts()).values_NT.abs().max() == 0
    ours, theirs = made.weights(), policy.weights()
    assert ours.keys() ^ theirs.keys() == {"score.weight", "lm_head.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())


def test_a_critic_of_a_directory_has_its_decoder_and_a_head_of_zero(tmp_path: Path) -> None:
    policy = make_policy(replace(CONTEXT, seed=5))
    policy.export(str(tmp_path))
    made = critic(model=str(tmp_path))
    assert all(torch.equal(w, policy.weights()[n]) for n, w in made.weights().items() if n != "score.weight")
    assert made.weights()["score.weight"].abs().max() == 0


@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_values_are_the_numbers_before_each_token_whatever_the_packing(micro_tokens: int) -> None:
    made, rollouts = critic(0.3), random_rollouts()
    values = critic_values.fn(made, rollouts, micro_tokens=micro_tokens).values_NT
    for row in range(len(rollouts)):
        first, length = int(rollouts.prompt_lengths_N[row]) - 1, int(rollouts.response_lengths_N[row])
        needed = numbers_of_row(made.model, rollouts, row)[first : first + length]
        torch.testing.assert_close(values[row, :length], needed.detach(), rtol=1e-4, atol=1e-5)
        assert values[row, length:].abs().sum() == 0


def test_gae_of_one_response_by_hand() -> None:
    """γ = ½, λ = ½, three tokens: δ = ½ · V_2 − V_1, ½ · V_3 − V_2, r − V_3."""
    rollouts = random_rollouts([(2, 3)])
    values = Values(torch.tensor([[0.5, 0.25, 1.0]]))
    found, returns, figures = gae.fn(Rewards(torch.tensor([2.0])), values, rollouts, gamma=0.5, lam=0.5, whitened=False)
    by_hand = torch.tensor([[-0.375 + 0.25 * 0.25 + 0.0625 * 1.0, 0.25 + 0.25 * 1.0, 1.0]])
    torch.testing.assert_close(found.values_N, by_hand)
    torch.testing.assert_close(returns.returns_NT, by_hand + values.values_NT)
    assert figures["return_mean"] == pytest.approx(float(returns.returns_NT.mean()))


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_sampled_tokens() -> None:
    rollouts = random_rollouts(unsampled=[(2, 1)])
    advantages, _, _ = gae.fn(REWARDS, critic_values.fn(critic(0.3), rollouts), rollouts)
    within = torch.arange(4) < rollouts.response_lengths_N[:, None]
    within[2, 1] = False
    assert float(advantages.values_N[within].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.values_N[within].std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    assert advantages.values_N[~within].abs().max() == 0


def test_an_environments_token_is_no_action() -> None:
    """With γ = λ = 1 and V = 0 every sampled token's advantage is the reward, and the environment's has none."""
    rollouts = random_rollouts([(2, 4)], unsampled=[(0, 1), (0, 3)])
    found, returns, _ = gae.fn(
        Rewards(torch.tensor([3.0])), Values(torch.zeros(1, 4)), rollouts, lam=1.0, whitened=False
    )
    assert found.values_N.tolist() == returns.returns_NT.tolist() == [[3.0, 0.0, 3.0, 0.0]]


def test_each_token_pays_for_leaving_the_reference() -> None:
    rollouts = random_rollouts([(2, 2)])
    reference = Logprobs(rollouts.logprobs_NT - torch.tensor([[0.5, 0.25]]))
    found, _, _ = gae.fn(
        Rewards(torch.tensor([1.0])), Values(torch.zeros(1, 2)), rollouts, reference, lam=1.0, kl=0.1, whitened=False
    )
    torch.testing.assert_close(found.values_N, torch.tensor([[1 - 0.05 - 0.025, 1 - 0.025]]))


def test_the_price_of_leaving_a_reference_needs_mu_and_the_rest_does_not() -> None:
    rollouts = replace(random_rollouts([(2, 2)]), logprobs_NT=None)
    values, rewards = Values(torch.zeros(1, 2)), Rewards(torch.tensor([1.0]))
    gae.fn(rewards, values, rollouts)
    with pytest.raises(
        ValueError, match=r"gae, with a reference: given rollouts without log μ .*needed rollouts whose"
    ):
        gae.fn(rewards, values, rollouts, Logprobs(torch.zeros(1, 2)), kl=0.1)


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gae: given values of shape \[5, 3\], needed \[5, 4\]"):
        gae.fn(REWARDS, Values(torch.zeros(5, 3)), random_rollouts())
    learner, rollouts = critic(), random_rollouts()
    values = critic_values.fn(learner, rollouts)
    with pytest.raises(
        ValueError, match=r"critic_update: given returns of shape \[5\], needed \[5, 4\], one for each token"
    ):
        critic_update.fn(learner, rollouts, values, Returns(torch.zeros(5)))
    with pytest.raises(ValueError, match=r"gae: given rewards of shape \[4\], needed \[5\], one for each response"):
        gae.fn(Rewards(REWARDS.values_N[:4]), values, rollouts)


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_the_clipped_value_loss(clip: float | None, micro_tokens: int) -> None:
    """An environment's token is left out, and old values that lie beyond the clip take the larger of the two errors."""
    rollouts = random_rollouts(unsampled=[(2, 1)])
    learner, twin = critic(0.3), critic(0.3)
    generator = torch.Generator().manual_seed(3)
    old, returns = (torch.randn(5, 4, generator=generator) for _ in range(2))
    critic_update.fn(
        learner, rollouts, Values(old), Returns(returns), clip=clip, clip_norm=FREE, micro_tokens=micro_tokens
    )
    losses: list[Tensor] = []
    for row in range(5):
        numbers = numbers_of_row(twin.model, rollouts, row)[int(rollouts.prompt_lengths_N[row]) - 1 :]
        for step in range(int(rollouts.response_lengths_N[row])):
            if (row, step) == (2, 1):
                continue
            error = (numbers[step] - returns[row, step]) ** 2
            if clip is not None:
                near = torch.clamp(numbers[step], old[row, step] - clip, old[row, step] + clip)
                error = torch.maximum(error, (near - returns[row, step]) ** 2)
            losses.append(error / 2)
    assert len(losses) == 12
    assert_gradients(learner, torch.stack(losses).sum() / 12, twin.masters)


def test_epochs_and_minibatches_are_steps_of_one_version() -> None:
    learner = critic()
    lesson(learner, epochs=2, minibatches=5)
    assert learner.state()[1] == {"version": 1, "steps": 10}


def test_a_response_without_an_action_teaches_nothing_whatever_the_packing() -> None:
    """The second response is an environment's alone."""
    rollouts, learners = random_rollouts(unsampled=[(1, 0)]), [critic(0.1), critic(0.1)]
    for learner, micro_tokens in zip(learners, (1, 1000), strict=True):
        values = critic_values.fn(learner, rollouts, micro_tokens=micro_tokens)
        _, returns, _ = gae.fn(REWARDS, values, rollouts)
        _, figures = critic_update.fn(learner, rollouts, values, returns, clip_norm=FREE, micro_tokens=micro_tokens)
        assert figures["critic_grad_norm"] > 0
    for name, ours in first_gradients(learners[0]).items():
        torch.testing.assert_close(ours, first_gradients(learners[1])[name], rtol=1e-4, atol=1e-6)


def test_a_critic_learns_what_follows() -> None:
    learner, rollouts = critic(), random_rollouts()
    for _ in range(30):
        values = critic_values.fn(learner, rollouts)
        _, returns, figures = gae.fn(REWARDS, values, rollouts, lam=1.0)
        critic_update.fn(learner, rollouts, values, returns, clip=None, lr=1e-2)
    assert figures["explained_variance"] > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_restored_critic_goes_on_to_the_bit(dtype: str, steps: int) -> None:
    whole, resumed = critic(dtype=dtype), critic(dtype=dtype, seed=2)
    for _ in range(steps):
        lesson(whole, minibatches=5)
    tensors, facts = whole.state()
    resumed.restore({name: t.clone() for name, t in tensors.items()}, dict(facts))
    for learner in (whole, resumed):
        resumed.context = whole.context  # keys follow the run's seed, which a resumed run shares
        lesson(learner, minibatches=5)
    (ours, our_facts), (theirs, their_facts) = whole.state(), resumed.state()
    assert our_facts == their_facts == {"version": steps + 1, "steps": 5 * (steps + 1)}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_critic_of_the_wrong_shape_is_refused() -> None:
    tensors, facts = critic().state()
    broken = {**tensors, "master.score.weight": torch.zeros(2, 128)}
    with pytest.raises(ModelError, match=r"state of the critic: master\.score\.weight: given shape \[2, 128\]"):
        critic().restore(broken, facts)
    with pytest.raises(TypeError, match="critic: given a Critic, needed a LanguageCritic"):
        critic_values.fn(Critic(), random_rollouts())


def test_an_exported_critic_is_a_directory_with_a_head(tmp_path: Path) -> None:
    learner = critic(0.3)
    learner.export(str(tmp_path))
    loaded = dict(load_scorer(tmp_path).named_parameters())
    assert all(torch.equal(w, loaded[name]) for name, w in learner.weights().items())
