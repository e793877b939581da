"""The settings that rollouts were sampled with travel with them, and whoever scores their tokens applies them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph.types import Advantages, Context, Policy, Prompts, Rewards, Rollouts, Weights
from penstock.nodes.distill import distill_update, distillation_advantage, policy_logprobs, reference_logprobs
from penstock.nodes.generate import generate, make_engine
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import aipo_update, policy_update
from penstock.nodes.model import Llama, save_model
from penstock.nodes.policy import LanguagePolicy, make_policy, make_reference
from penstock.nodes.replay_buffer import open_buffer, replay
from penstock.runtime.tensor.codec import decode, encode

from .rollouts import random_rollouts
from .tiny_model import CONFIG, TOKENIZER
from .updating import FREE, LENGTHS, assert_same, batch, by_autograd, gradients, policy

TEMPERATURES = (0.6, 1.0, 1.7)
SAMPLES = 4


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("model")
    made = Llama(CONFIG)
    made.init_weights(1)
    save_model(made, folder)
    TOKENIZER.save(folder)
    return Context(node="generate", seed=3, model=str(folder), slots=16, max_tokens=8)


def learner(context: Context) -> LanguagePolicy:
    made = make_policy(replace(context, node="policy"))
    assert isinstance(made, LanguagePolicy)
    return made


def sampled(context: Context, ordinal: int, **options: Any) -> Rollouts:
    """A group of a policy's own."""
    behaviour = Weights(0, learner(context).weights())
    prompts = Prompts((ordinal,), (f"{ordinal}+58=",), ("0",))
    engine = make_engine(context, samples=SAMPLES, **options)
    return generate.fn(engine, prompts, behaviour, samples=SAMPLES, **options)[1]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def mixed(context: Context) -> Rollouts:
    """Groups of several temperatures, joined."""
    return Rollouts.concat([sampled(context, n, temperature=t) for n, t in enumerate(TEMPERATURES)])


def within(rollouts: Rollouts) -> torch.Tensor:
    steps_T = torch.arange(rollouts.versions_NT.shape[1])
    within_NT: torch.Tensor = steps_T < rollouts.response_lengths_N[:, None]
    return within_NT


def replayed(rollouts: Rollouts) -> Rollouts:
    """What comes out of a buffer when nothing fresh is left."""
    memory = open_buffer(Context(node="replay"))
    advantage = Advantages(torch.zeros(len(rollouts)))
    memory, _, _ = replay.fn(memory, rollouts, advantage)
    memory = decode(type(memory), *encode(memory))
    later = replace(rollouts.take([0]), ordinals=(9,))
    _, (both, _), _ = replay.fn(memory, later, advantage.take([0]))
    both = both.take(range(1, len(both)))
    assert isinstance(both, Rollouts)
    return both


def sent(rollouts: Rollouts) -> Rollouts:
    tensors, meta = encode(rollouts)
    return decode(Rollouts, tensors, json.loads(json.dumps(meta)))


@pytest.mark.parametrize("passed", [lambda rollouts: rollouts, sent, replayed], ids=["as it is", "sent", "replayed"])
def test_at_equal_weights_all_ratios_are_one_whatever_the_temperatures(
    context: Context, mixed: Rollouts, passed: Callable[[Rollouts], Rollouts]
) -> None:
    rollouts = passed(mixed)
    rows = [TEMPERATURES[ordinal] for ordinal in rollouts.ordinals]
    assert rollouts.temperature_N.tolist() == pytest.approx(rows)
    advantage = Advantages(torch.linspace(-1, 1, len(rollouts)))
    for update, options in ((policy_update, {"loss": ppo}), (aipo_update, {"rho": 1.001})):
        _, figures = update.fn(learner(context), rollouts, advantage, lr=0.0, micro_tokens=40, **options)
        assert figures["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert figures["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert figures["ratio_clipped"] == 0
        assert figures["ess"] == pytest.approx(1, abs=1e-6)
        assert figures["kl"] == pytest.approx(0, abs=1e-8)


def test_a_reference_and_a_teacher_that_are_the_policy_have_no_divergence(context: Context, mixed: Rollouts) -> None:
    twin: Any = make_reference(context)
    for logprobs in (reference_logprobs.fn(twin, mixed), policy_logprobs.fn(learner(context), mixed)):
        torch.testing.assert_close(logprobs.logprobs_NT, mixed.logprobs_NT * within(mixed), rtol=0, atol=1e-5)
    reference = reference_logprobs.fn(twin, mixed)
    rewards = Rewards(torch.arange(len(mixed)) * 1.0)
    _, figures = dpo_update.fn(learner(context), mixed, rewards, reference, lr=0.0)
    assert figures["pairs"] == len(TEMPERATURES)
    assert figures["margin"] == pytest.approx(0, abs=1e-5)
    assert distillation_advantage.fn(mixed, reference)[1]["teacher_kl"] == pytest.approx(0, abs=1e-5)
    assert distill_update.fn(learner(context), twin, mixed, lr=0.0)[1]["teacher_kl"] == pytest.approx(0, abs=1e-6)


def test_whole_distributions_are_compared_at_the_temperature_of_the_samples(tmp_path: Path) -> None:
    rollouts = replace(random_rollouts(), temperature_N=torch.tensor([0.5, 1.0, 2.0, 0.7, 1.0]))
    ours, twin, guide = policy(), policy(), policy(seed=2)
    total, count = torch.tensor(0.0), 0
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = rollouts.tokens_NS[row, None, : prompt + response - 1]
        divided = (
            m.logits(m(tokens))[0, prompt - 1 :] / rollouts.temperature_N[row] for m in (twin.model, guide.model)
        )
        student, teacher = (torch.distributions.Categorical(logits=logits) for logits in divided)
        total = total + torch.distributions.kl_divergence(student, teacher).sum()
        count += response
    teacher_of: Any = guide
    _, figures = distill_update.fn(ours, teacher_of, rollouts, clip_norm=FREE, micro_tokens=20)
    assert figures["teacher_kl"] == pytest.approx(float(total.detach()) / count, rel=1e-4)
    assert_same(gradients(ours), by_autograd(twin, total / count))


@pytest.mark.parametrize("chunk_elements", [1 << 22, 40])
def test_gradients_and_entropies_are_those_of_the_tempered_distribution(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle goes through each row alone, with torch's own categorical distribution."""
    from penstock.nodes.learn import logprobs

    monkeypatch.setattr(logprobs.token_logprobs, "__kwdefaults__", {"chunk_elements": chunk_elements})
    rollouts, advantage = batch()
    rollouts = replace(rollouts, temperature_N=torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3]))
    ours, twin = policy(), policy()
    losses, entropies = [], []
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = rollouts.tokens_NS[row, : prompt + response]
        logits = twin.model.logits(twin.model(tokens[None, :-1]))[0, prompt - 1 :]
        exact: Any = torch.distributions.Categorical(logits=logits / rollouts.temperature_N[row])
        ratio = (exact.log_prob(tokens[prompt:]) - rollouts.logprobs_NT[row, :response]).exp()
        a = advantage.values_N[row]
        losses.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
        entropies.append(exact.entropy().detach())
    mean = torch.cat(losses).mean()
    _, figures = policy_update.fn(ours, rollouts, advantage, loss=ppo, clip_norm=FREE, micro_tokens=20)
    assert figures["loss"] == pytest.approx(float(mean.detach()), rel=1e-4)
    assert figures["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    assert_same(gradients(ours), by_autograd(twin, mean))


def test_rollouts_that_say_nothing_of_it_were_sampled_from_the_model_as_it_is() -> None:
    rollouts = random_rollouts()
    assert rollouts.temperature_N.tolist() == [1.0] * len(rollouts)
    assert rollouts.cut_N.tolist() == [False] * len(rollouts)


@pytest.mark.parametrize(
    ("options", "given", "needed"),
    [
        ({"temperature": 0.0}, "4 of 8 responses sampled with temperature 0", "a temperature above 0"),
        ({"top_k": 5}, "4 of 8 responses sampled with top_k or top_p", "samples of the whole vocabulary"),
        ({"top_p": 0.9}, "4 of 8 responses sampled with top_k or top_p", "samples of the whole vocabulary"),
    ],
)
def test_rows_that_no_policy_can_score_are_refused_wherever_they_are_joined(
    context: Context, options: dict[str, Any], given: str, needed: str
) -> None:
    rollouts = Rollouts.concat([sampled(context, 0), sampled(context, 1, **options)])
    ours: Policy = learner(context)
    reference: Any = make_reference(context)
    ones = Advantages(torch.ones(8))
    calls: list[Callable[[], object]] = [
        lambda: policy_update.fn(ours, rollouts, ones, loss=ppo),
        lambda: policy_logprobs.fn(ours, rollouts),
        lambda: reference_logprobs.fn(reference, rollouts),
        lambda: distill_update.fn(ours, reference, rollouts),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"given {given}, needed {needed}"):
            call()


def test_mismatch_is_that_of_the_temperatures_of_the_rows(context: Context, mixed: Rollouts) -> None:
    model = learner(context).model
    assert mismatch(model, mixed) < 1e-5
    assert mismatch(model, replace(mixed, temperature_N=torch.ones(len(mixed)))) > 0.05
