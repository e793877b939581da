"""Models beside the policy: critic, reward model, teacher, reference, moving average."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor, nn

from penstock.graph import Logprobs, Rewards
from penstock.graph.protocols import Carried
from penstock.graph.types import Average, Critic, PreferenceModel, Reference, Returns, RewardModel, Teacher, Values
from penstock.nodes.critic import (
    LanguageCritic,
    critic_update,
    critic_values,
    gae,
    generalized_advantages,
    make_critic,
    value_loss,
)
from penstock.nodes.data import Pairs
from penstock.nodes.distill import (
    distill_update,
    distillation_advantage,
    open_teacher,
    policy_logprobs,
    reference_logprobs,
)
from penstock.nodes.ema import FollowingPolicy, ema, make_average, refresh
from penstock.nodes.model import CausalLM, ModelConfig, ModelError, Scorer, load_model
from penstock.nodes.policy import FrozenPolicy, LanguageModel, make_reference
from penstock.nodes.reward_model import (
    FrozenRewardModel,
    LearningRewardModel,
    make_preference_model,
    open_reward_model,
    preference_update,
    reward_scores,
)
from penstock.nodes.tokenizer import byte_tokenizer
from tests.nodes.rollouts import assert_gradients, first_gradients, numbers_of_row, random_rollouts
from tests.nodes.tiny_model import export, model, save
from tests.nodes.updating import CONTEXT, batch, conversation, policy, unpacked

# The critic by hand: its values, their advantages by GAE, the gradient of its loss, and its state.


FREE = float("inf")
REWARDS = Rewards(torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]))
CLIP = 0.05


def critic(head: float = 0.0, **changes: Any) -> LanguageCritic:
    """Return a critic whose head has weights of about `head`."""
    made = make_critic(replace(CONTEXT, node="critic", **changes))
    assert isinstance(made, LanguageCritic)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        made.masters["score.weight"].copy_(torch.randn(1, 128, generator=generator) * head)
    return made


def lesson(learner: LanguageCritic, **options: Any) -> None:
    """Update a critic once, from its own values and the rewards."""
    rollouts = random_rollouts()
    values = critic_values.fn(learner, rollouts)
    _, returns, _ = gae.fn(REWARDS, values, rollouts)
    critic_update.fn(learner, rollouts, values, returns, **options)


def test_a_new_critic_expects_nothing_and_has_the_policys_decoder(tmp_path: Path) -> None:
    """The decoder is that of the run's model, or of a directory."""
    made = critic()
    export(policy(seed=5), tmp_path)
    assert isinstance(made, Carried)
    assert isinstance(made, Critic)
    assert critic_values.fn(made, random_rollouts()).values_NT.abs().max() == 0
    for ours, theirs in (
        (made.weights(), policy().weights()),
        (critic(model=str(tmp_path)).weights(), policy(seed=5).weights()),
    ):
        assert ours.keys() ^ theirs.keys() == {"score.weight", "lm_head.weight"}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
        assert ours["score.weight"].abs().max() == 0


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


def test_an_environments_token_is_no_action_and_each_other_one_pays_for_leaving_the_reference() -> None:
    """With γ = λ = 1 and V = 0 a sampled token's advantage is the reward, minus what it and later tokens pay."""
    rollouts, rewards = random_rollouts([(2, 4)], unsampled=[(0, 1), (0, 3)]), Rewards(torch.tensor([3.0]))
    values, options = Values(torch.zeros(1, 4)), {"lam": 1.0, "whitened": False}
    found, returns, _ = gae.fn(rewards, values, rollouts, **options)
    assert found.values_N.tolist() == returns.returns_NT.tolist() == [[3.0, 0.0, 3.0, 0.0]]
    reference = Logprobs(rollouts.logprobs_NT - torch.tensor([[0.5, 9.0, 0.25, 9.0]]))
    found, _, _ = gae.fn(rewards, values, rollouts, reference, kl=0.1, **options)
    torch.testing.assert_close(found.values_N, torch.tensor([[3 - 0.05 - 0.025, 0.0, 3 - 0.025, 0.0]]))
    # Tokens of older weights pay for where the policy itself is now.
    proximal = Logprobs(reference.logprobs_NT + torch.tensor([[1.0, 9.0, -2.0, 9.0]]))
    bare = replace(rollouts, logprobs_NT=None)
    for each in (rollouts, bare):
        found, _, _ = gae.fn(rewards, values, each, reference, proximal, kl=0.1, **options)
        torch.testing.assert_close(found.values_N, torch.tensor([[3 - 0.1 + 0.2, 0.0, 3 + 0.2, 0.0]]))
    gae.fn(rewards, values, bare)
    with pytest.raises(
        ValueError, match=r"gae, with a reference: given rollouts without log μ .*needed rollouts whose"
    ):
        gae.fn(rewards, values, bare, reference, kl=0.1)


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
    """An environment's token is left out. Beyond the clip around the old value, the larger of the two errors counts."""
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
    """An environment wrote all of the second response."""
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


def test_a_critic_of_the_wrong_shape_is_refused() -> None:
    tensors, facts = critic().state()
    broken = {**tensors, "master.score.weight": torch.zeros(2, 128)}
    with pytest.raises(ModelError, match=r"state of the critic: master\.score\.weight: given shape \[2, 128\]"):
        critic().restore(broken, facts)


# GAE by hand and against the recursion, response by response; the critic's clipped loss.


SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2])
VALUES = torch.tensor([0.5, 0.25, 1.0, 0.75, -1.0, 2.0], dtype=torch.float64)
GAE_REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.0, -1.0], dtype=torch.float64)


def recursion(rewards: Tensor, values: Tensor, sequence: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = δ_t + γλ · A_{t+1} from each response's end, token by token."""
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(values))):
        goes_on = t + 1 < len(values) and sequence[t + 1] == sequence[t]
        next_value = float(values[t + 1]) if goes_on else 0.0
        next_advantage = float(advantages[t + 1]) if goes_on else 0.0
        advantages[t] = rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
    return advantages


def test_advantages_by_hand() -> None:
    """γ = ½, λ = ½: δ of the first response is ½·¼ − ½, ½·1 − ¼, 1 − 1."""
    values = VALUES.clone().requires_grad_()
    advantages, returns = generalized_advantages(GAE_REWARDS, values, SEQUENCE, gamma=0.5, lam=0.5)
    assert not torch.cat([advantages, returns]).requires_grad
    by_hand = [-0.375 + 0.25 * 0.25, 0.25, 0.0, 0.5 - 0.75, (0.5 * 2 + 1) + 0.25 * -3, -1.0 - 2.0]
    assert advantages.tolist() == by_hand
    torch.testing.assert_close(returns, advantages + VALUES)


@pytest.mark.parametrize("lengths", [[1], [2, 1], [7, 1, 8, 9, 16, 3], [33, 64, 1]])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_are_the_recursion_for_any_lengths(lengths: list[int], gamma: float, lam: float) -> None:
    torch.manual_seed(0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn(2, len(sequence), dtype=torch.float64)
    advantages, _ = generalized_advantages(rewards, values, sequence, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, recursion(rewards, values, sequence, gamma, lam))


def test_clipped_value_loss_takes_the_larger_error_and_stops_only_where_the_clip_is_worse() -> None:
    """V_old = 1, ε = ½: inside; moved towards R beyond the clip; moved past R; moved away from R."""
    values = torch.tensor([1.25, 2.5, 4.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(4, dtype=torch.float64), torch.full((4,), 3.0, dtype=torch.float64)
    loss = value_loss(values, old, returns, clip=0.5)
    assert loss.tolist() == [1.75**2 / 2, 1.5**2 / 2, 1.5**2 / 2, 3.0**2 / 2]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [-1.75, 0.0, 0.0, -3.0]
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, clip=0.5), (values,))
    free = value_loss(values, old, returns)
    assert free.tolist() == [1.75**2 / 2, 0.5**2 / 2, 1.0**2 / 2, 3.0**2 / 2]
    assert torch.autograd.grad(free.sum(), values)[0].tolist() == [-1.75, -0.5, 1.0, -3.0]


# The reward model by hand: a response's score is the number at its last token, and it learns the order of pairs.


SCORES_CONTEXT = replace(CONTEXT, node="reward_model")
PAIRS = Pairs(("12+34=", "50-9=", "7+8="), ("046", "041", "15"), ("45", "1:041", "16"))


def learning(head: float = 0.3, **changes: Any) -> LearningRewardModel:
    """Return a reward model whose head has weights of about `head`."""
    made = make_preference_model(replace(SCORES_CONTEXT, **changes))
    assert isinstance(made, LearningRewardModel)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        weight_1D = made.masters["score.weight"]
        weight_1D.copy_(torch.randn(weight_1D.shape, generator=generator) * head)
    return made


def frozen(folder: Path, **changes: Any) -> FrozenRewardModel:
    made = open_reward_model(replace(SCORES_CONTEXT, options={"reward_model": str(folder)}, **changes))
    assert isinstance(made, FrozenRewardModel)
    return made


@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_a_score_is_the_number_at_the_last_token_whatever_the_packing(tmp_path: Path, micro_tokens: int) -> None:
    export(learning(), tmp_path)
    model, rollouts = frozen(tmp_path), random_rollouts(unsampled=[(2, 3)])
    assert isinstance(model, Carried)
    assert model.state() == ({}, {})
    assert model.tokenizer.encode("1+2=") == policy().tokenizer.encode("1+2=")
    rewards, figures = reward_scores.fn(model, rollouts, micro_tokens=micro_tokens)
    needed = torch.stack([numbers_of_row(model.model, rollouts, row)[-1] for row in range(len(rollouts))])
    torch.testing.assert_close(rewards.values_N, needed, rtol=1e-4, atol=1e-5)
    assert figures["learned_reward"] == pytest.approx(float(needed.mean()), rel=1e-4)


@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_the_bradley_terry_loss(micro_tokens: int) -> None:
    """The mean of −log σ(r(chosen) − r(rejected)), each score the number at the end token."""
    learner, twin = learning(), learning()
    _, figures = preference_update.fn(learner, PAIRS, clip_norm=FREE, micro_tokens=micro_tokens)
    losses = []
    for text, chosen, rejected in zip(PAIRS.texts, PAIRS.chosen, PAIRS.rejected, strict=True):
        scores = []
        for response in (chosen, rejected):
            words = twin.tokenizer
            tokens = torch.tensor([[*words.encode(text), *words.encode(response), words.eos]])
            scores.append((twin.model(tokens)[0, -1] @ twin.model.score.weight[0]).double())
        losses.append(-torch.log(1 / (1 + torch.exp(scores[1] - scores[0]))))
    loss = torch.stack(losses).mean()
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_gradients(learner, loss, twin.masters)


def test_a_new_reward_model_has_no_preference_and_soon_has_one() -> None:
    learner = learning(head=0.0)
    figures = [preference_update.fn(learner, PAIRS, lr=3e-3)[1] for _ in range(15)]
    assert (figures[0]["accuracy"], figures[0]["margin"]) == (0.5, 0.0)
    words = learner.tokenizer
    assert figures[0]["tokens"] == sum(len(words.encode(text)) + 1 for text in (*PAIRS.chosen, *PAIRS.rejected))
    assert figures[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert figures[-1]["accuracy"] == 1.0
    assert figures[-1]["loss"] < 0.2


def test_a_reward_model_without_a_directory_or_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="reward_model: given no directory, needed a directory that a run of"):
        open_reward_model(SCORES_CONTEXT)
    export(policy(), tmp_path)
    with pytest.raises(ModelError, match=r"given a reward model without a head, needed score\.weight"):
        frozen(tmp_path)


def test_a_pair_longer_than_the_models_context_is_named() -> None:
    with pytest.raises(ValueError, match=r"demonstration '1\+1=': given 46 tokens, needed at most 32"):
        preference_update.fn(learning(), Pairs(("1+1=",), ("2",), ("3" * 41,)))


# A scorer is a LlamaForSequenceClassification with one label: transformers reads ours, and we read theirs.


TOKENS = torch.arange(1, 61).view(2, 30)
PAD = 0
SHAPE = ModelConfig(300, 32, 48, 2, 4, 2, 8, 64, eos_token_ids=(256,), pad_token_id=PAD)


def scorer() -> Scorer:
    made = Scorer(SHAPE)
    made.init_weights(1)
    nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(7))
    return made


@pytest.mark.parametrize("writer", ["transformers", "penstock"])
def test_transformers_and_we_read_the_same_numbers_from_a_scorers_directory(tmp_path: Path, writer: str) -> None:
    transformers = pytest.importorskip("transformers")
    if writer == "penstock":
        save(scorer(), tmp_path)
    else:
        shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = transformers.LlamaConfig(**shape, **heads, num_labels=1, pad_token_id=PAD)
        transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ours = load_model(Scorer, tmp_path)
    assert (type(theirs).__name__, theirs.num_labels) == ("LlamaForSequenceClassification", 1)
    with torch.no_grad():
        torch.testing.assert_close(ours.values(ours(TOKENS))[:, -1:], theirs(TOKENS).logits, rtol=1e-5, atol=1e-6)
    if writer == "penstock":
        assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in scorer().state_dict().items())


@pytest.mark.parametrize(
    ("special", "given", "pad"),
    [
        (["<unused>", "<|image_pad|>"], "<eos>", "<|image_pad|>"),
        (["<unused>"], None, "<unused>"),
        ([], "<eos>", None),
        ([], None, None),
        (["<unused>"], "<pad>", "<pad>"),
    ],
)
def test_an_exported_reward_model_scores_alike_in_transformers_whatever_pads_its_base(
    tmp_path: Path, special: list[str], given: str | None, pad: str | None
) -> None:
    """transformers reads the score before trailing padding. Without a pad token it takes single rows alone."""
    transformers = pytest.importorskip("transformers")
    words, base, folder = byte_tokenizer(), tmp_path / "base", tmp_path / "export"
    words.backend.add_special_tokens([AddedToken(word, special=True) for word in special])
    words.pad = words.backend.token_to_id(given) if given else None
    # So that texts have a use for the byte tokenizer's own.
    words.template = "<pad>{{ messages[0].content }}"
    words.save(base)
    # In transformers Qwen2's tokenizer has a pad token if its file does not say that there is none.
    save(model(config=replace(SHAPE, eos_token_ids=words.stops, pad_token_id=words.pad, model_type="qwen2")), base)
    export(learning(model=str(base)), folder)
    ours, theirs = frozen(folder), transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, texts = transformers.AutoTokenizer.from_pretrained(folder), ["ab<eos>", "abbab<eos>"]
    assert (tokenizer.pad_token, theirs.config.pad_token_id) == (pad, tokenizer.pad_token_id)
    rows = [torch.tensor([ours.tokenizer.encode(text)]) for text in texts]
    assert {int(row[0, -1]) for row in rows} == {words.eos}
    with torch.no_grad():
        needed = torch.cat([ours.model.values(ours.model(row))[:, -1:] for row in rows])
        torch.testing.assert_close(torch.cat([theirs(row).logits for row in rows]), needed, rtol=1e-5, atol=1e-6)
        if pad is not None:
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            torch.testing.assert_close(theirs(**batch).logits, needed, rtol=1e-5, atol=1e-6)
            return
        with pytest.raises(ValueError, match="batch sizes > 1"):
            theirs(torch.cat([rows[0]] * 2))


@pytest.mark.parametrize("tied", [True, False])
def test_a_scorer_grows_on_any_decoder_with_a_head_of_zero(tmp_path: Path, tied: bool) -> None:
    decoder = model(config=replace(SHAPE, tie_word_embeddings=tied))
    save(decoder, tmp_path / "language")
    save(scorer(), tmp_path / "reward")
    for folder in ("language", "reward"):
        grown = load_model(Scorer, tmp_path / folder, new_head=True)
        assert grown.score.weight.abs().max() == 0
        with torch.no_grad():
            assert torch.equal(grown(TOKENS), decoder(TOKENS))


# Distillation by hand: advantages by the teacher, the gradient of the whole divergence, the teacher.


def teacher(folder: Path) -> Teacher:
    """Return a teacher with another model than the policy's."""
    export(policy(seed=2), folder)
    made = open_teacher(replace(CONTEXT, options={"teacher_model": str(folder)}))
    assert isinstance(made, Teacher)
    assert isinstance(made, Carried)
    return made


def test_the_advantage_is_what_the_teacher_thinks_of_a_sampled_token() -> None:
    rollouts = random_rollouts([(2, 3), (1, 1)], unsampled=[(0, 1)])
    opinions = Logprobs(rollouts.logprobs_NT + torch.tensor([[0.5, 9.0, -0.25], [1.0, 9.0, 9.0]]))
    advantage, figures = distillation_advantage.fn(rollouts, opinions)
    torch.testing.assert_close(advantage.values_N, torch.tensor([[0.5, 0.0, -0.25], [1.0, 0.0, 0.0]]))
    assert figures["teacher_kl"] == pytest.approx(-(0.5 - 0.25 + 1.0) / 3)
    needed = "distillation_advantage: given rollouts without log μ .*, needed rollouts whose logprobs_NT were recorded"
    with pytest.raises(ValueError, match=needed):
        distillation_advantage.fn(replace(rollouts, logprobs_NT=None), opinions)


@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_the_reverse_kl(tmp_path: Path, micro_tokens: int) -> None:
    """An environment wrote the second token of the third response, and all of the second."""
    learner, twin, guide = policy(), policy(), teacher(tmp_path)
    rollouts = random_rollouts(unsampled=[(2, 1), (1, 0)])
    _, figures = distill_update.fn(learner, guide, rollouts, clip_norm=float("inf"), micro_tokens=micro_tokens)
    assert isinstance(guide, LanguageModel)
    divergences = []
    for row in range(len(rollouts)):
        prompt, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
        tokens = rollouts.tokens_NS[row, None, : prompt + length - 1]
        ours, theirs = (m.logits(m(tokens))[0, prompt - 1 :].log_softmax(-1) for m in (twin.model, guide.model))
        kl = (ours.exp() * (ours - theirs)).sum(-1)
        divergences += [kl[step] for step in range(length) if (row, step) not in ((2, 1), (1, 0))]
    loss = torch.stack(divergences).sum() / 11
    assert figures["teacher_kl"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_gradients(learner, loss, twin.masters)


def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    learner, guide, rollouts = policy(), teacher(tmp_path), random_rollouts()
    figures = [distill_update.fn(learner, guide, rollouts, lr=3e-3)[1] for _ in range(10)]
    assert figures[-1]["teacher_kl"] < figures[0]["teacher_kl"] / 2
    silent = random_rollouts([(2, 1), (1, 1)], unsampled=[(0, 0), (1, 0)])
    with pytest.raises(ValueError, match=r"given 2 responses without a sampled token .* needed at least one"):
        distill_update.fn(learner, guide, silent)


def with_rows(folder: Path, more: int) -> str:
    """Return the directory of the model in `folder` with `more` rows of its embedding and head, or fewer."""
    whole = load_model(CausalLM, str(folder))
    words = whole.config.vocab_size
    other = model(seed=4, config=replace(whole.config, vocab_size=words + more))
    for name, weight in other.named_parameters():
        weight.data[: whole.get_parameter(name).shape[0]] = whole.get_parameter(name).data[: weight.shape[0]]
    save(other, folder)
    return str(folder)


@pytest.mark.parametrize("padded", ["teacher", "policy"])
def test_rows_that_only_one_of_the_two_models_has_are_left_out_of_the_divergence(tmp_path: Path, padded: str) -> None:
    folders = {name: tmp_path / name for name in ("teacher", "policy")}
    for name, folder in folders.items():
        export(policy(seed=2 if name == "teacher" else 1), folder)
    teachers, rollouts = {"teacher_model": str(folders["teacher"])}, random_rollouts()
    figures = []
    for _ in range(2):
        learner = policy(model=str(folders["policy"]))
        guide = open_teacher(replace(CONTEXT, model=str(folders["policy"]), options=teachers))
        assert isinstance(guide, Teacher)
        figures.append(distill_update.fn(learner, guide, rollouts)[1])
        with_rows(folders[padded], 7)
    assert figures[1]["teacher_kl"] == pytest.approx(figures[0]["teacher_kl"], rel=1e-5)
    assert figures[1]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=1e-5)


def test_a_token_that_another_model_has_no_row_for_is_told_with_the_model(tmp_path: Path) -> None:
    guide, rollouts = teacher(tmp_path), random_rollouts()
    assert isinstance(guide, LanguageModel)
    rows = guide.model.config.vocab_size
    rollouts.tokens_NS[1, 0] = rows + 2
    said = (
        rf"token {rows + 2}, .* at least {rows + 3}, needed tokens below {rows}, the vocab_size of policy \({tmp_path}"
    )
    with pytest.raises(ValueError, match=said):
        reference_logprobs.fn(guide, rollouts)
    export(policy(), tmp_path / "more")
    learner = policy(model=with_rows(tmp_path / "more", 7))
    with pytest.raises(ValueError, match=said):
        distill_update.fn(learner, guide, rollouts)


def test_a_teacher_reads_tokens_as_a_reference_does(tmp_path: Path) -> None:
    logprobs = reference_logprobs.fn(teacher(tmp_path), random_rollouts()).logprobs_NT
    other = reference_logprobs.fn(policy(seed=2), random_rollouts()).logprobs_NT
    assert torch.equal(logprobs, other)


def test_a_teacher_without_a_directory_or_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="teacher_model: given no directory, needed a model directory"):
        open_teacher(CONTEXT)
    export(policy(data="other"), tmp_path)
    with pytest.raises(
        ModelError, match=r"given a tokenizer of 258 tokens, needed the policy's own tokenizer, which has"
    ):
        open_teacher(replace(CONTEXT, options={"teacher_model": str(tmp_path)}))


# Log-probabilities under another policy are those of its model, at each sampled token.


def test_reference_logprobs_are_those_of_the_frozen_model_and_zero_past_the_end() -> None:
    rollouts, _ = batch()
    reference = make_reference(CONTEXT)
    assert isinstance(reference, FrozenPolicy)
    for micro_tokens in (20, 1000):
        found = reference_logprobs.fn(reference, rollouts, micro_tokens=micro_tokens).logprobs_NT
        for row, logprobs in enumerate(unpacked(policy(), rollouts)):
            torch.testing.assert_close(found[row, : len(logprobs)], logprobs.detach(), rtol=1e-4, atol=1e-5)
            assert (found[row, len(logprobs) :] == 0).all()


def test_the_policys_own_are_those_it_has_now_and_need_no_behaviour() -> None:
    rollouts, _ = conversation()
    rollouts.logprobs_NT = None
    found = policy_logprobs.fn(policy(), rollouts).logprobs_NT
    needed = unpacked(policy(), rollouts)
    torch.testing.assert_close(found[0, :3], needed[0].detach(), rtol=1e-4, atol=1e-5)
    assert (found[1] == 0).all()
    assert (found[2] != 0).tolist() == [True, False, False, True]
    assert not found.requires_grad


# Models that follow the policy: its moving average by hand, snapshots, and their state.


def average(**changes: Any) -> FollowingPolicy:
    made = make_average(replace(CONTEXT, node="average", **changes))
    assert isinstance(made, FollowingPolicy)
    return made


def test_an_average_starts_where_the_policy_does() -> None:
    made, first = average(), policy()
    assert isinstance(made, Carried)
    assert isinstance(made, Average)
    assert isinstance(made, Reference)
    assert all(torch.equal(w, first.weights()[name]) for name, w in made.weights().items())


def test_the_average_is_the_formula() -> None:
    """After two steps towards policies p and q: d² · a + d · (1 − d) · p + (1 − d) · q."""
    made, start, first, second = average(), average(), policy(seed=2), policy(seed=3)
    figures = [ema.fn(made, learnt, decay=0.75)[1] for learnt in (first, second)]
    for name, found in made.masters.items():
        needed = 0.5625 * start.masters[name] + 0.1875 * first.masters[name] + 0.25 * second.masters[name]
        torch.testing.assert_close(found, needed, rtol=1e-5, atol=1e-6)
    gaps = torch.cat([(start.masters[n] - p).detach().flatten() for n, p in first.masters.items()])
    whole = torch.cat([p.detach().flatten() for p in first.masters.values()])
    assert figures[0]["average_distance"] == pytest.approx(float(gaps.norm() / whole.norm()), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refreshed_copy_is_the_policy_to_the_bit_and_does_not_move_with_it(dtype: str) -> None:
    made, learnt = average(dtype=dtype), policy(seed=2, dtype=dtype)
    refresh.fn(made, learnt)
    assert all(torch.equal(w, made.weights()[name]) for name, w in learnt.weights().items())
    assert all(torch.equal(w, made.masters[name]) for name, w in learnt.masters.items())
    with torch.no_grad():
        learnt.masters["model.norm.weight"].zero_()
    assert made.masters["model.norm.weight"].min() > 0


LESSONS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "critic": (critic, lambda learner: lesson(learner, minibatches=5)),
    "reward model": (partial(learning, 0.0), lambda learner: preference_update.fn(learner, PAIRS)),
    "average": (average, lambda learner: ema.fn(learner, policy(seed=2))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", LESSONS)
def test_what_is_restored_goes_on_to_the_bit_and_is_exported(tmp_path: Path, kind: str, steps: int, dtype: str) -> None:
    make, learn = LESSONS[kind]
    whole, resumed = make(dtype=dtype), make(dtype=dtype, seed=9)
    for _ in range(steps):
        learn(whole)
    tensors, facts = whole.state()
    resumed.restore({name: t.clone() for name, t in tensors.items()}, dict(facts))
    if kind != "average":
        resumed.context = whole.context  # keys follow the run's seed, which a resumed run shares
    for learner in (whole, resumed):
        learn(learner)
    (ours, our_facts), (theirs, their_facts) = whole.state(), resumed.state()
    assert our_facts == their_facts
    assert our_facts["version"] == steps + 1
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    export(whole, tmp_path)
    loaded = load_model(CausalLM if kind == "average" else Scorer, tmp_path, dtype).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in whole.weights().items())


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda: refresh.fn(Average(), policy()), "given a Average, needed a FollowingPolicy"),
        (lambda: critic_values.fn(Critic(), random_rollouts()), "given a Critic, needed a LanguageCritic"),
        (lambda: reward_scores.fn(RewardModel(), random_rollouts()), "given a RewardModel, needed a FrozenRewardModel"),
        (lambda: preference_update.fn(PreferenceModel(), PAIRS), "given a PreferenceModel, needed a LearningRewardMo"),
    ],
)
def test_a_model_of_another_maker_is_refused(call: Callable[[], Any], needed: str) -> None:
    with pytest.raises(TypeError, match=needed):
        call()


def test_the_state_of_another_average_is_refused() -> None:
    tensors, facts = average().state()
    kept = {name: tensor for name, tensor in tensors.items() if name != "master.lm_head.weight"}
    with pytest.raises(ModelError, match=r"state of the average: given no master\.lm_head\.weight, needed all"):
        average().restore(kept, facts)
