"""An update is one AdamW step on the loss's gradient, however its tokens are packed."""

import pytest
import torch
from torch import Tensor

from penstock.graph.types import Advantages, Context, Logprobs, Rollouts
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.update import aipo_update, grpo_update, reference_logprobs, sft_update
from penstock.nodes.policy import FrozenPolicy, LanguagePolicy, make_policy, make_reference

CONTEXT = Context(node="policy", seed=1, updates=10)
FREE = float("inf")
LENGTHS = ((6, 3), (2, 1), (4, 4), (1, 2), (3, 3))
RHO = 1.1


def policy(**changes: object) -> LanguagePolicy:
    made = make_policy(Context(**{**CONTEXT.to_json(), **changes}))
    assert isinstance(made, LanguagePolicy)
    return made


def batch(versions: int = 0) -> tuple[Rollouts, Advantages]:
    """Five responses of random tokens; μ is near the new model's log π, so that some ratios are above ρ."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor(LENGTHS).unbind(1)
    width = int(responses.max())
    within = torch.arange(width) < responses[:, None]
    rollouts = Rollouts(
        ordinals=tuple(range(5)),
        prompts=("",) * 5,
        answers=("",) * 5,
        texts=("",) * 5,
        tokens_NS=torch.randint(13, (5, int((prompts + responses).max())), generator=generator),
        prompt_lengths_N=prompts,
        response_lengths_N=responses,
        logprobs_NT=(torch.randn(5, width, generator=generator) * 0.3 - 2.7) * within,
        versions_NT=versions * within,
        finished_N=torch.ones(5, dtype=torch.bool),
    )
    return rollouts, Advantages(torch.tensor([1.0, -0.5, 0.25, -2.0, 1.5]))


def gradients(learner: LanguagePolicy) -> dict[str, Tensor]:
    """The gradient of the first step, out of the optimizer's first moment (1 − β₁ = 0.1 of it)."""
    tensors, _ = learner.state()
    return {name: t / 0.1 for name, t in tensors.items() if name.startswith("exp_avg.")}


def unpacked(learner: LanguagePolicy, rollouts: Rollouts) -> list[Tensor]:
    """log π of each response, one sequence at a time, without any padding."""
    found = []
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = rollouts.tokens_NS[row, : prompt + response]
        logprobs = learner.model.logits(learner.model(tokens[None, :-1]))[0].log_softmax(-1)
        found.append(logprobs[range(prompt + response - 1), tokens[1:]][prompt - 1 :])
    return found


def by_autograd(learner: LanguagePolicy, loss: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(learner.masters.values()))
    return {f"exp_avg.{name}": grad for name, grad in zip(learner.masters, grads, strict=True)}


def assert_same(given: dict[str, Tensor], needed: dict[str, Tensor]) -> None:
    assert given.keys() == needed.keys()
    for name, tensor in needed.items():
        torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_aipo_update_steps_along_the_formula_whatever_the_packing(micro_tokens: int) -> None:
    learner, (rollouts, advantage) = policy(), batch()
    total = torch.tensor(0.0)
    for row, logprobs in enumerate(unpacked(learner, rollouts)):
        ratio = (logprobs - rollouts.logprobs_NT[row, : len(logprobs)]).exp().detach()
        total = total - (ratio.clamp(max=RHO) * advantage.values_N[row] * logprobs).sum()
    loss = total / 13
    needed = by_autograd(learner, loss)
    _, metrics = aipo_update.fn(learner, rollouts, advantage, rho=RHO, clip_norm=FREE, micro_tokens=micro_tokens)
    assert_same(gradients(learner), needed)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["tokens"] == 13


@pytest.mark.parametrize("micro_tokens", [20, 1000])
def test_grpo_update_averages_each_response_then_the_responses(micro_tokens: int) -> None:
    learner, (rollouts, advantage) = policy(), batch()
    total = torch.tensor(0.0)
    for row, logprobs in enumerate(unpacked(learner, rollouts)):
        ratio = (logprobs - rollouts.logprobs_NT[row, : len(logprobs)]).exp()
        a = advantage.values_N[row]
        total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    needed = by_autograd(learner, total / 5)
    grpo_update.fn(learner, rollouts, advantage, clip_norm=FREE, micro_tokens=micro_tokens)
    assert_same(gradients(learner), needed)


def test_equal_rollouts_make_equal_weights_to_the_bit() -> None:
    learners = [policy(), policy()]
    for learner in learners:
        for _ in range(2):
            aipo_update.fn(learner, *batch(), micro_tokens=20)
    first, second = (learner.weights() for learner in learners)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], policy().weights()["model.norm.weight"])


def test_the_gradient_is_clipped_and_its_norm_reported_as_it_was() -> None:
    free, clipped = policy(), policy()
    _, before = aipo_update.fn(free, *batch(), clip_norm=FREE)
    _, metrics = aipo_update.fn(clipped, *batch(), clip_norm=0.01)
    norm = torch.stack([g.norm() for g in gradients(clipped).values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(before["grad_norm"]) != pytest.approx(0.01)


def test_the_update_counts_versions_lags_and_clipped_ratios() -> None:
    learner = policy()
    learner.version = 5
    rollouts, advantage = batch(versions=3)
    rollouts.versions_NT[0, 0] = 5
    expected = torch.cat([lp.detach() for lp in unpacked(learner, rollouts)])
    behaviour = torch.cat([rollouts.logprobs_NT[row, :length] for row, (_, length) in enumerate(LENGTHS)])
    ratio = (expected - behaviour).exp()
    _, metrics = aipo_update.fn(learner, rollouts, advantage, rho=RHO)
    assert learner.version == 6
    assert metrics["lag_max"] == 2
    assert metrics["lag_mean"] == pytest.approx(2 * 12 / 13)
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)
    assert metrics["ratio_clipped"] == pytest.approx(float((ratio > RHO).float().mean()))
    assert 0 < metrics["ratio_clipped"] < 1
    assert 0 < metrics["entropy"] < 3


def test_reference_logprobs_are_those_of_the_frozen_model_and_zero_past_the_end() -> None:
    rollouts, _ = batch()
    reference = make_reference(CONTEXT)
    assert isinstance(reference, FrozenPolicy)
    for micro_tokens in (20, 1000):
        found = reference_logprobs.fn(reference, rollouts, micro_tokens=micro_tokens).logprobs_NT
        for row, logprobs in enumerate(unpacked(policy(), rollouts)):
            torch.testing.assert_close(found[row, : len(logprobs)], logprobs.detach(), rtol=1e-4, atol=1e-5)
            assert (found[row, len(logprobs) :] == 0).all()


def test_kl_pulls_only_a_policy_that_has_left_the_reference() -> None:
    rollouts, advantage = batch()
    reference = reference_logprobs.fn(make_reference(CONTEXT), rollouts)
    plain, same, far = policy(), policy(), policy()
    grpo_update.fn(plain, rollouts, advantage, clip_norm=FREE)
    grpo_update.fn(same, rollouts, advantage, reference, kl=0.5, clip_norm=FREE)
    assert_same(gradients(same), gradients(plain))
    grpo_update.fn(far, rollouts, advantage, Logprobs(reference.logprobs_NT - 1), kl=0.5, clip_norm=FREE)
    assert any(not torch.allclose(g, gradients(plain)[name], rtol=1e-2) for name, g in gradients(far).items())


def test_sft_learns_the_demonstrations_and_ends_each_with_the_end_token() -> None:
    learner = policy(updates=30)
    demonstrations = Demonstrations(("1+1=", "10-3="), ("2", "7"))
    losses = [sft_update.fn(learner, demonstrations, lr=3e-3, warmup=2, final=0.1)[1] for _ in range(30)]
    assert losses[0]["tokens"] == 4
    assert losses[-1]["loss"] < 0.1 * losses[0]["loss"]
    assert losses[0]["lr"] < losses[2]["lr"] == pytest.approx(3e-3, rel=0.02)
    assert losses[-1]["lr"] == pytest.approx(3e-4, rel=0.1)


def test_a_demonstration_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="given 37 tokens, needed at most 32"):
        sft_update.fn(policy(), Demonstrations(("1+1=",), ("2" * 32,)))


def test_bfloat16_computes_in_bfloat16_and_learns_in_float32() -> None:
    learner, exact = policy(dtype="bfloat16"), policy()
    for each in (learner, exact):
        aipo_update.fn(each, *batch(), lr=1e-4, clip_norm=FREE, micro_tokens=20)
    for name, master in learner.masters.items():
        assert learner.weights()[name].dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(learner.weights()[name], master.detach().bfloat16())
    ours = torch.cat([g.flatten() for g in gradients(learner).values()])
    theirs = torch.cat([g.flatten() for g in gradients(exact).values()])
    assert float(torch.cosine_similarity(ours, theirs, 0)) > 0.99


def test_a_gradient_that_is_not_finite_stops_the_update_before_the_weights_change() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    before = {name: w.clone() for name, w in learner.weights().items()}
    advantage.values_N[2] = float("inf")
    with pytest.raises(FloatingPointError, match="update of version 0: given a gradient of norm"):
        aipo_update.fn(learner, rollouts, advantage)
    assert all(torch.equal(w, before[name]) for name, w in learner.weights().items())


def test_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="given a str, needed a LanguagePolicy"):
        aipo_update.fn("policy", *batch())
