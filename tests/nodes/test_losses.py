"""Losses, the logprobs that they read, and the terms of an update, each by hand from its paper."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph import Advantages, Context, Policy, Prompts, Rewards, Rollouts, Weights, requires
from penstock.nodes.distill import distill_update, distillation_advantage, policy_logprobs, reference_logprobs
from penstock.nodes.generate import generate, make_engine
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.batching import STEP, Aggregation, normaliser, pack, token_weights
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.learn.logprobs import packed_distributions, packed_logprobs, token_logprobs
from penstock.nodes.learn.losses import (
    Bound,
    Estimator,
    Level,
    Loss,
    Sampled,
    aipo,
    cispo,
    decoupled_ppo,
    distillation,
    effective_sample_size,
    gspo,
    imitate,
    importance_weighted,
    importance_weights,
    kl_estimate,
    ppo,
    reads,
    reinforce,
    reverse_kl,
    segment_lengths,
    segment_max,
    segment_mean,
    segment_sum,
    tis,
)
from penstock.nodes.learn.update import Term, aipo_update, policy_update, term
from penstock.nodes.model import CausalLM, save_model
from penstock.nodes.policy import LanguagePolicy, make_policy, make_reference
from penstock.nodes.replay_buffer import open_buffer, replay
from penstock.runtime.tensor.codec import decode, encode
from tests.nodes.rollouts import random_rollouts
from tests.nodes.tiny_model import CONFIG, TOKENIZER
from tests.nodes.updating import FREE, LENGTHS, assert_same, batch, by_autograd, equal, gradients, policy, unpacked

# Each loss and its gradient are those of the paper, and not of its well-known wrong versions; so are importance weights
# and divergences. The tokens that count as clipped are those that the clip silences or bounds.


def known(advantages: Tensor, sequence: Tensor | None = None, **given: Tensor) -> Sampled:
    """Return the `Sampled` of tokens. Without a `sequence`, each token is a response of its own."""
    sequence = torch.arange(len(advantages)) if sequence is None else sequence
    return Sampled(advantages, torch.bincount(sequence)[sequence], torch.zeros(len(advantages)), sequence, given)


def loss_of(result: Tensor | tuple[Tensor, object]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    return grad


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_imitation_is_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7)
    targets = torch.tensor([0, 3, 6, 1])
    logprobs = logits.log_softmax(-1)[range(4), targets]
    loss = loss_of(imitate(logprobs, known(torch.full((4,), 7.0))))
    torch.testing.assert_close(loss.mean(), torch.nn.functional.cross_entropy(logits, targets))


# ratios on both sides of the clip at 1 − 0.2 and 1 + 0.5 (or 0.3), for both signs of the advantage
RATIOS = float64([1.0, 0.9, 1.4, 1.6, 0.5] * 2)
ADVANTAGES = float64([2.0] * 5 + [-3.0] * 5)
BEHAVIOUR = torch.linspace(-4, -2, 10, dtype=torch.float64)
LOGPROBS = BEHAVIOUR + RATIOS.log()
OLD = {"behaviour": BEHAVIOUR}
# π_prox / μ of each token: the weights of the corrected losses
WEIGHTS = float64([0.5, 3.0, 1.0, 2.0, 4.0, 0.25, 1.0, 3.0, 2.0, 4.0])
CORRECTED = {"behaviour": BEHAVIOUR - WEIGHTS.log(), "proximal": BEHAVIOUR}
PPO = float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.8, 2.4])
PPO_SLOPES = float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
SIDES: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.5}


def weighted(weights: list[float]) -> tuple[Tensor, Tensor]:
    """Return −w · A · log π with a constant weight, and its slope."""
    return -float64(weights) * ADVANTAGES * LOGPROBS, -float64(weights) * ADVANTAGES


def changed(values: Tensor, **places: float) -> Tensor:
    """Return the same values except at these places, `_3` for token 3."""
    found = values.clone()
    for place, value in places.items():
        found[int(place[1:])] = value
    return found


@pytest.mark.parametrize(
    ("loss", "given", "by_hand", "slopes"),
    [
        (reinforce, {}, *weighted([1.0] * 10)),
        # The weight is constant: with a loss of min(r, ρ) · A there would be no gradient where r > ρ.
        (partial(aipo, rho=1.5), OLD, *weighted([1.0, 0.9, 1.4, 1.5, 0.5] * 2)),
        # On policy it is REINFORCE.
        (partial(aipo, rho=2.0), {"behaviour": LOGPROBS}, *weighted([1.0] * 10)),
        # Without a lower bound it is AIPO.
        (partial(cispo, clip_high=0.5), OLD, *weighted([1.0, 0.9, 1.4, 1.5, 0.5] * 2)),
        (partial(cispo, clip_high=0.3, clip_low=0.2), OLD, *weighted([1.0, 0.9, 1.3, 1.3, 0.8] * 2)),
        # For A > 0 only 1 + ε_high bounds, for A < 0 only 1 − ε_low; the gradient of r is r.
        (partial(ppo, **SIDES), OLD, PPO, PPO_SLOPES),
        (
            partial(ppo, clip_low=0.2, clip_high=0.3),
            OLD,
            changed(PPO, _2=-2.6, _3=-2.6),
            changed(PPO_SLOPES, _2=0.0),
        ),
        # c = 1.5 touches only A < 0 with r > 1.5.
        (partial(ppo, **SIDES, dual_clip=1.5), OLD, changed(PPO, _8=4.5), changed(PPO_SLOPES, _8=0.0)),
        # The ratio is π / π_prox, the weight π_prox / μ; the product π / μ is never clipped as one.
        (partial(decoupled_ppo, **SIDES), CORRECTED, WEIGHTS * PPO, WEIGHTS * PPO_SLOPES),
        (partial(tis, **SIDES, cap=math.inf), CORRECTED, WEIGHTS * PPO, WEIGHTS * PPO_SLOPES),
        (partial(tis, **SIDES, cap=2.0), CORRECTED, WEIGHTS.clamp(max=2) * PPO, WEIGHTS.clamp(max=2) * PPO_SLOPES),
    ],
)
def test_a_loss_and_its_gradient_by_hand(loss: Loss, given: dict[str, Tensor], by_hand: Tensor, slopes: Tensor) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    found = loss_of(loss(logprobs, known(ADVANTAGES, **given)))
    torch.testing.assert_close(found, by_hand)
    torch.testing.assert_close(gradient(found, logprobs), slopes)


def test_ppo_learns_from_the_first_step_where_the_old_policy_is_the_live_one() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, _ = ppo(logprobs, known(ADVANTAGES, behaviour=logprobs))
    torch.testing.assert_close(gradient(loss, logprobs), -ADVANTAGES)


def test_the_correcting_weight_is_a_constant_where_the_middle_policy_is_the_live_one() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    live = known(ADVANTAGES, behaviour=BEHAVIOUR, proximal=logprobs)
    for loss in (decoupled_ppo(logprobs, live, clip_high=0.5)[0], tis(logprobs, live, clip_high=0.5, cap=9.0)[0]):
        torch.testing.assert_close(gradient(loss, logprobs), -RATIOS * ADVANTAGES)


# responses of 2, 1 and 3 tokens; the geometric means of their ratios are 2, 0.5 and 1
SEQUENCE = torch.tensor([0, 0, 1, 2, 2, 2])
TOKEN_RATIOS = float64([1.0, 4.0, 0.5, 2.0, 0.5, 1.0])


def responses() -> tuple[Tensor, Tensor]:
    """Return (log π with a gradient, log μ)."""
    behaviour = torch.linspace(-3, -1, 6, dtype=torch.float64)
    return (behaviour + TOKEN_RATIOS.log()).requires_grad_(), behaviour


def of_responses(logprobs: Tensor, behaviour: Tensor, advantages_P: Tensor) -> Tensor:
    loss, _ = gspo(logprobs, known(advantages_P, SEQUENCE, behaviour=behaviour), clip_low=0.2, clip_high=0.3)
    return loss


@pytest.mark.parametrize(
    ("advantages", "loss_by_hand", "slopes"),
    [
        ([1.0, 1.0, 1.0], [-1.3, -0.5, -1.0], [0.0, -0.5, -1.0]),
        ([-1.0, -1.0, -1.0], [2.0, 0.8, 1.0], [2.0, 0.0, 1.0]),
    ],
)
def test_gspo_clips_whole_responses(advantages: list[float], loss_by_hand: list[float], slopes: list[float]) -> None:
    """∂s/∂ log π_t = s / |y|, so every token of a response has its response's slope, −s · A / |y|, or none."""
    logprobs, behaviour = responses()
    loss = segment_mean(of_responses(logprobs, behaviour, float64(advantages)[SEQUENCE]), SEQUENCE)
    torch.testing.assert_close(loss, float64(loss_by_hand))
    by_hand = float64([slopes[0] / 2] * 2 + [slopes[1]] + [slopes[2] / 3] * 3)
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)


def test_gspo_averaged_over_a_response_is_the_sequence_objective() -> None:
    """Equations 5 and 7 of the paper, differentiated through the geometric mean itself."""
    logprobs, behaviour = responses()
    for advantages in (float64([1.0, 2.0, -1.0]), float64([-2.0, -1.0, 3.0])):
        ratios = segment_mean(logprobs - behaviour, SEQUENCE).exp()
        whole = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.3) * advantages)
        tokens = segment_mean(of_responses(logprobs, behaviour, advantages[SEQUENCE]), SEQUENCE)
        torch.testing.assert_close(tokens, whole)
        torch.testing.assert_close(gradient(tokens, logprobs), gradient(whole, logprobs))


def test_gspo_lets_tokens_of_a_response_differ_and_none_leans_on_anothers_gradient() -> None:
    logprobs, behaviour = responses()
    loss = of_responses(logprobs, behaviour, float64([1.0, -1.0, 1.0, 3.0, -2.0, 0.5]))
    torch.testing.assert_close(loss, float64([-1.3, 2.0, -0.5, -3.0, 2.0, -0.5]))
    torch.testing.assert_close(gradient(loss, logprobs), float64([0.0, 2.0, -0.5, -3.0, 2.0, -0.5]))


FAR = torch.tensor([0.0, 0.5, -0.5, 0.05, 0.0, 0.9, 0.9, -0.9])
ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
SIGNS = torch.tensor([1.0, 1, 1, -1, -1, 1, 1, -1])


def far(logprobs: Tensor, advantages: Tensor = SIGNS) -> Sampled:
    behaviour = (logprobs - FAR).detach()
    return known(advantages, ROWS, behaviour=behaviour, proximal=behaviour)


@pytest.mark.parametrize(
    "loss", [ppo, gspo, decoupled_ppo, partial(ppo, dual_clip=2.0), partial(tis, cap=float("inf"))]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_token_that_ppos_clip_takes_has_no_gradient(loss: Loss, sign: float) -> None:
    logprobs = torch.linspace(-3, -1, 8).requires_grad_()
    loss_P, clipped_P = loss(logprobs, far(logprobs, sign * SIGNS))
    assert isinstance(clipped_P, Tensor)
    (grad,) = torch.autograd.grad(loss_P.sum(), logprobs)
    assert clipped_P.tolist() == (grad == 0).tolist()
    assert clipped_P.any()
    assert not clipped_P.all()


@pytest.mark.parametrize("age", [0.0, 0.3, 2.0])
def test_samples_of_any_age_bring_a_student_to_its_teacher(age: float) -> None:
    """The mean over all tokens that μ may sample, each with its probability, has the gradient of KL(π ‖ π_T)."""
    generator = torch.Generator().manual_seed(3)
    student, move, teacher = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    logits = student.requires_grad_()
    logprobs, guide = logits.log_softmax(0), teacher.log_softmax(0)
    behaviour = (student + age * move).log_softmax(0).detach()

    def mean_gradient(guide: Tensor) -> Tensor:
        sampled = known(guide - behaviour, behaviour=behaviour)
        loss_P = loss_of(distillation(logprobs, sampled, rho=math.inf))
        found: Tensor = torch.autograd.grad((behaviour.exp() * loss_P).sum(), logits, retain_graph=True)[0]
        return found

    whole = torch.autograd.grad(reverse_kl(logprobs[None], guide[None]).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(mean_gradient(guide), whole)
    assert mean_gradient(logprobs.detach()).abs().max() < 1e-12


def test_what_a_bound_takes_is_counted() -> None:
    logprobs = torch.linspace(-3, -1, 8)
    tokens = far(logprobs)
    ratio = FAR.exp()
    for loss in (aipo, distillation):
        assert torch.equal(loss(logprobs, tokens, rho=2.0)[1], ratio > 2)
    assert torch.equal(cispo(logprobs, tokens, clip_low=0.5, clip_high=1.0)[1], (ratio < 0.5) | (ratio > 2))
    by_token = importance_weighted(logprobs, tokens, level="token", bound="mask", cap=2.0, floor=0.5)
    assert torch.equal(by_token[1], (ratio < 0.5) | (ratio > 2))
    assert torch.equal(by_token[0] == 0, by_token[1])
    by_sequence = importance_weighted(logprobs, tokens, level="sequence", cap=2.0)
    assert by_sequence[1].tolist() == [False] * 5 + [True, True, False]
    apart = known(SIGNS, ROWS, behaviour=tokens.behaviour_P, proximal=logprobs)
    assert torch.equal(tis(logprobs, apart, cap=2.0)[1], ratio > 2)


# the first response has ratios 2, 3, ½ and product 3; the second one ½, ½ and product ¼
TWO_RATIOS = torch.tensor([2.0, 3.0, 0.5, 0.5, 0.5], dtype=torch.float64)
WEIGHERS = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], dtype=torch.float64)
WEIGHED = WEIGHERS + TWO_RATIOS.log()
TWO_ROWS = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("level", "bound", "cap", "floor", "by_hand"),
    [
        ("token", "truncate", 2.5, 0.0, [2.0, 2.5, 0.5, 0.5, 0.5]),
        ("token", "mask", 2.5, 0.0, [2.0, 0.0, 0.5, 0.5, 0.5]),
        ("token", "mask", 2.5, 0.8, [2.0, 0.0, 0.0, 0.0, 0.0]),
        ("sequence", "truncate", 2.5, 0.0, [2.5, 2.5, 2.5, 0.25, 0.25]),
        ("sequence", "mask", 2.5, 0.0, [0.0, 0.0, 0.0, 0.25, 0.25]),
        ("sequence", "mask", 3.5, 0.3, [3.0, 3.0, 3.0, 0.0, 0.0]),
        ("sequence", "truncate", 9.0, 0.3, [3.0, 3.0, 3.0, 0.3, 0.3]),
    ],
)
def test_weights_by_hand(level: Level, bound: Bound, cap: float, floor: float, by_hand: list[float]) -> None:
    target = WEIGHED.clone().requires_grad_()
    weights = importance_weights(target, WEIGHERS, TWO_ROWS, level=level, bound=bound, cap=cap, floor=floor)
    torch.testing.assert_close(weights, float64(by_hand))
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("logs", "bound", "cap", "by_hand"),
    [
        ([1.0] * 2000, "truncate", 2.0, 2.0),
        ([1.0] * 2000, "mask", 2.0, 0.0),
        ([100.0, 100.0, -100.0, -99.0], "mask", 3.0, math.e),
    ],
)
def test_a_product_beyond_all_numbers_is_bounded_as_a_whole(
    logs: list[float], bound: Bound, cap: float, by_hand: float
) -> None:
    target, sequence = torch.tensor(logs), torch.zeros(len(logs), dtype=torch.long)
    weights = importance_weights(target, target * 0, sequence, level="sequence", bound=bound, cap=cap)
    torch.testing.assert_close(weights, torch.full((len(logs),), by_hand))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_effective_sample_size_by_hand_knows_no_scale(scale: float) -> None:
    for weights, by_hand in (([1.0, 2.0, 3.0], 36 / 14), ([0.3] * 7, 7.0), ([0.0, 5.0, 0.0], 1.0), ([0.0] * 3, 0.0)):
        assert effective_sample_size(scale * torch.tensor(weights)).item() == pytest.approx(by_hand, rel=1e-5)


LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)


def sampled_gradient(estimator: Estimator) -> Tensor:
    """Return the mean, over tokens sampled by π, of the estimator's gradient with respect to the logits."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.exp().detach() * kl_estimate(logprobs, REFERENCE, estimator=estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    logprobs = LOGITS.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, REFERENCE, estimator="k1")).sum(), exact)
    k3 = kl_estimate(logprobs, REFERENCE, estimator="k3")
    torch.testing.assert_close((logprobs.exp() * k3).sum(), exact)
    assert (k3 >= 0).all()
    assert (kl_estimate(logprobs, REFERENCE, estimator="k1") < 0).any()


@pytest.mark.parametrize(
    ("estimator", "by_hand", "slopes"),
    [
        ("k1", [-1.0, 1.0], [1.0, 1.0]),
        ("k2", [0.5, 0.5], [-1.0, 1.0]),
        ("k3", [math.e - 2, 1 / math.e], [1 - math.e, 1 - 1 / math.e]),
    ],
)
def test_an_estimator_and_its_gradient_by_hand(estimator: Estimator, by_hand: list[float], slopes: list[float]) -> None:
    """log q is 1 and −1."""
    logprobs = float64([-2.0, -0.5]).requires_grad_()
    found = kl_estimate(logprobs, float64([-1.0, -1.5]), estimator=estimator)
    torch.testing.assert_close(found, float64(by_hand))
    torch.testing.assert_close(gradient(found, logprobs), float64(slopes))


def test_as_a_loss_k1_does_nothing_k2_follows_reverse_kl_and_k3_forward_kl() -> None:
    logprobs, probs = LOGITS.log_softmax(-1), LOGITS.softmax(-1)
    reverse = probs * (logprobs - REFERENCE - (probs * (logprobs - REFERENCE)).sum())
    forward = probs - REFERENCE.exp()
    torch.testing.assert_close(sampled_gradient("k1"), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(sampled_gradient("k2"), reverse)
    torch.testing.assert_close(sampled_gradient("k3"), forward)
    assert (reverse - forward).abs().max() > 0.1


def test_reverse_kl_by_hand_for_each_token() -> None:
    student = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.25, 0.75], [0.9, 0.1]], dtype=torch.float64).log()
    by_hand = [0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75), 0.0]
    torch.testing.assert_close(reverse_kl(student, teacher), torch.tensor(by_hand, dtype=torch.float64))
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert abs(forward - by_hand[0]) > 1e-2, "the other direction is another number"


def test_the_gradient_of_reverse_kl_goes_through_the_whole_vocabulary() -> None:
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(reverse_kl(logits.log_softmax(-1), REFERENCE), logits)
    probs, gap = LOGITS.softmax(-1), LOGITS.log_softmax(-1) - REFERENCE
    torch.testing.assert_close(grad, probs * (gap - (probs * gap).sum()))
    assert torch.autograd.gradcheck(lambda x: reverse_kl(x.log_softmax(-1), REFERENCE), (logits,))


def test_distillation_of_sampled_tokens_has_the_mean_gradient_of_reverse_kl() -> None:
    """The mean is over all tokens, weighted by π. Neither the plain log ratio nor a weight with a gradient has that
    mean gradient."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)

    def gap(tokens: Tensor) -> Tensor:
        mean = (logprobs.exp().detach() * tokens).sum() - reverse_kl(logprobs, REFERENCE)
        return torch.autograd.grad(mean, logits, retain_graph=True)[0].abs().max()

    assert gap(reinforce(logprobs, known((REFERENCE - logprobs).detach()))) < 1e-12
    assert gap(logprobs - REFERENCE) > 0.05
    assert gap((logprobs - REFERENCE) * logprobs) > 0.05


VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
SEGMENTS = torch.tensor([2, 0, 2, 0, 0])


def test_segments_are_summed_in_any_order_of_rows_and_empty_ones_are_zero() -> None:
    assert segment_lengths(SEGMENTS, 4).tolist() == [3, 0, 2, 0]
    assert segment_sum(VALUES, SEGMENTS, 4).tolist() == [26.0, 0.0, 5.0, 0.0]
    torch.testing.assert_close(segment_mean(VALUES, SEGMENTS, 4), torch.tensor([26 / 3, 0, 2.5, 0]).double())
    assert segment_max(VALUES, SEGMENTS, 4).tolist() == [16.0, float("-inf"), 4.0, float("-inf")]
    assert segment_sum(VALUES, SEGMENTS).tolist() == [26.0, 0.0, 5.0]  # as many as the largest index needs


def test_the_gradient_of_a_mean_is_one_over_the_length() -> None:
    values = VALUES.clone().requires_grad_()
    weights = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((weights * segment_mean(values, SEGMENTS)).sum(), values)
    assert grad.tolist() == [3.5, 1.0, 3.5, 1.0, 1.0]
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, SEGMENTS), (values,))


def test_a_segment_sums_to_the_same_bits_wherever_its_rows_lie() -> None:
    torch.manual_seed(0)
    values, segments = torch.randn(999), torch.arange(999) % 3
    end_to_end = torch.argsort(segments, stable=True)
    assert torch.equal(segment_sum(values, segments), segment_sum(values[end_to_end], segments[end_to_end]))


# Chunks change nothing but memory.


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(13, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 8, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(11, (13,))


@pytest.mark.parametrize("chunk_elements", [1, 11, 50, 142])
def test_chunks_give_the_same_values_and_gradients(chunk_elements: int) -> None:
    found = []
    for size in (1 << 20, chunk_elements):
        hidden, weight, targets = inputs(torch.float32)
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_elements=size)
        grads = torch.autograd.grad((logprobs * torch.linspace(-1, 2, 13)).sum(), (hidden, weight))
        assert not entropy.requires_grad
        found.append((logprobs.detach(), entropy, *grads))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def test_the_chunked_form_keeps_no_logits_for_the_backward_pass() -> None:
    hidden, weight, targets = inputs(torch.float32)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(hidden, weight, targets, chunk_elements=22)
    assert max(kept) < 13 * 11


def test_bfloat16_gradients_come_back_in_bfloat16() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, targets, chunk_elements=22)
    assert logprobs.dtype == torch.float32
    for grad in torch.autograd.grad(logprobs.sum(), (hidden, weight)):
        assert grad.dtype == torch.bfloat16


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the shapes of the factors of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("linear", "aten.mm", "aten.addmm")):
            self.shapes.add(tuple(tuple(x.shape) for x in args if isinstance(x, Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_the_head_come_back_whatever_the_lengths(dtype: str) -> None:
    """oneDNN compiles a product for each new shape, and keeps it."""
    learner = policy(dtype=dtype)
    lengths, widths = Random(0), (learner.model.config.vocab_size, learner.model.config.hidden_size)
    with Products() as seen:
        for seed in range(12):
            rollouts = random_rollouts([(2, lengths.randint(1, 30)) for _ in range(16)], seed=seed)
            aipo_update.fn(learner, rollouts, Advantages(torch.ones(16)))
    head = [shape for shape in seen.shapes if any(widths[0] in factor for factor in shape)]
    rows = {size for shape in head for factor in shape for size in factor} - {*widths}
    assert rows
    assert all(size % STEP == 0 for size in rows)


@pytest.mark.parametrize("chunk_elements", [1 << 22, 40])
def test_rows_that_fill_a_step_change_no_log_probability_and_no_gradient(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, found = random_rollouts(), []
    for step in (1, STEP):
        monkeypatch.setattr("penstock.nodes.learn.logprobs.STEP", step)
        model = policy(logit_elements=chunk_elements).model
        (packed,) = pack(replace(rollouts, temperature_N=torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3])), 100)
        values_P, entropy_P = packed_logprobs(model, packed)
        assert len(values_P) == len(entropy_P) == len(packed.targets_P) < STEP
        gradients = torch.autograd.grad((values_P * torch.linspace(-1, 2, len(values_P))).sum(), [*model.parameters()])
        found.append([values_P, entropy_P, packed_distributions(model, packed), *gradients])
    for alone, filled in zip(*found, strict=True):
        torch.testing.assert_close(filled, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_elements", [1 << 20, 11, 50])
def test_each_token_has_its_own_temperature(chunk_elements: int) -> None:
    hidden, weight, targets = inputs()
    temperature = torch.linspace(0.3, 3, 13)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, chunk_elements=chunk_elements)
    exact: Any = torch.distributions.Categorical(logits=hidden @ weight.T / temperature[:, None].double())
    torch.testing.assert_close(logprobs, exact.log_prob(targets).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, exact.entropy().detach().float(), rtol=1e-5, atol=1e-6)
    scale = torch.linspace(-1, 2, 13)
    grads = torch.autograd.grad((logprobs * scale).sum(), (hidden, weight))
    needed = torch.autograd.grad((exact.log_prob(targets) * scale).sum(), (hidden, weight))
    for found, gradient in zip(grads, needed, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


# The three ways to weigh tokens, by hand, and over micro-batches.


AGGREGATION_LENGTHS = torch.tensor([1, 3])
LENGTHS_P = torch.tensor([1, 3, 3, 3])
LOSSES = torch.tensor([6.0, 1.0, 2.0, 6.0])


@pytest.mark.parametrize(
    ("aggregation", "by_hand"),
    [("token_mean", 15 / 4), ("sequence_mean", (6 + 9 / 3) / 2), ("constant", 15 / (2 * 5))],
)
@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3]], [[0], [1, 2, 3]]])
def test_an_update_by_hand_however_it_is_cut(
    aggregation: Aggregation, by_hand: float, micro_batches: list[list[int]]
) -> None:
    """The mean of the micro-batches' means would be another number."""
    weighted = [token_weights(LENGTHS_P[rows], aggregation=aggregation) * LOSSES[rows] for rows in micro_batches]
    total = float(torch.cat(weighted).sum())
    assert total / normaliser(AGGREGATION_LENGTHS, aggregation=aggregation, max_tokens=5) == pytest.approx(by_hand)
    with pytest.raises(ValueError, match="max_tokens"):
        normaliser(AGGREGATION_LENGTHS, aggregation="constant")


# Several terms in one gradient, each with a weight and a normaliser; losses that see whole prompt groups.


TERMS_ROWS = [0, 2, 3]
"""The rows of the batch that are demonstrations."""


def demonstrations() -> Rollouts:
    return replace(batch()[0].take(TERMS_ROWS), logprobs_NT=None)


def beside(weight: float = 0.25, **options: Any) -> Term:
    made = term.fn(demonstrations(), loss=imitate, weight=weight, **options)
    assert isinstance(made, Term)
    return made


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_an_update_steps_along_the_weighted_sum_of_its_terms(average: Any, micro_tokens: int) -> None:
    """Each term has a normaliser of its own: the second has 9 tokens of 3 responses."""
    learner, (rollouts, advantage) = policy(max_tokens=7), batch()
    logprobs = unpacked(learner, rollouts)
    shown = [logprobs[row].mean() if average == "sequence_mean" else logprobs[row].sum() for row in TERMS_ROWS]
    imitated = -torch.stack(shown).sum() / {"token_mean": 9, "sequence_mean": 3, "constant": 3 * 7}[average]
    reinforced = -sum((a * lp.sum() for a, lp in zip(advantage.values_N, logprobs, strict=True)), torch.zeros(())) / 13
    needed = by_autograd(learner, 0.5 * reinforced + 0.25 * imitated)
    options = {"weight": 0.5, "clip_norm": FREE, "micro_tokens": micro_tokens}
    _, figures = policy_update.fn(
        learner, rollouts, advantage, beside=(beside(average=average),), loss=reinforce, **options
    )
    assert_same(gradients(learner), needed)
    assert figures["reinforce_loss"] == pytest.approx(reinforced.item(), rel=1e-4)
    assert figures["imitate_loss"] == pytest.approx(imitated.item(), rel=1e-4)
    assert figures["loss"] == pytest.approx(0.5 * reinforced.item() + 0.25 * imitated.item(), rel=1e-4)
    assert (figures["reinforce_tokens"], figures["imitate_tokens"], figures["optimizer_steps"]) == (13, 9, 1)
    assert figures["tokens"] == 13 + 9
    assert {"lag_mean", "ratio_mean"} < figures.keys()
    assert not {"imitate_lag_mean", "imitate_ratio_mean", "imitate_grad_norm"} & figures.keys()


def test_one_loss_in_two_halves_is_the_loss() -> None:
    one, other = policy(), policy()
    again = term.fn(*batch(), loss=aipo, weight=0.5, name="again")
    policy_update.fn(one, *batch(), loss=aipo, clip_norm=FREE)
    _, figures = policy_update.fn(other, *batch(), beside=(again,), loss=aipo, weight=0.5, clip_norm=FREE)
    assert_same(gradients(other), gradients(one))
    assert figures["again_kl"] == figures["kl"]
    assert figures["loss"] == pytest.approx(figures["aipo_loss"])


def test_a_term_of_nothing_changes_nothing() -> None:
    """For example, no response was good enough, or an environment wrote all tokens."""
    silent = replace(demonstrations(), versions_NT=torch.full((3, 4), -1))
    for rollouts in (demonstrations().take([]), silent):
        one, other = policy(), policy()
        nothing = term.fn(rollouts, loss=imitate)
        policy_update.fn(one, *batch(), loss=aipo, epochs=2, minibatches=2)
        _, figures = policy_update.fn(other, *batch(), beside=(nothing,), loss=aipo, epochs=2, minibatches=2)
        assert equal(one, other)
        assert (figures["imitate_loss"], figures["imitate_tokens"]) == (0, 0)


def test_a_first_term_of_nothing_leaves_the_others() -> None:
    one, other, (rollouts, advantage) = policy(), policy(), batch()
    silent = replace(rollouts, versions_NT=torch.full((5, 4), -1))
    _, figures = policy_update.fn(one, silent, advantage, beside=(beside(1.0),), loss=aipo, clip_norm=FREE)
    policy_update.fn(other, demonstrations(), Advantages(torch.ones(3)), loss=imitate, clip_norm=FREE)
    assert_same(gradients(one), gradients(other))
    assert (figures["tokens"], figures["aipo_tokens"], figures["imitate_tokens"]) == (9, 0, 9)
    nothing = term.fn(silent, loss=imitate)
    with pytest.raises(ValueError, match="2 terms, aipo and imitate, without a sampled token, needed at least one"):
        policy_update.fn(policy(), silent, advantage, beside=(nothing,), loss=aipo)


def test_every_term_is_in_every_step_with_minibatches_of_its_own() -> None:
    learner = policy()
    _, figures = policy_update.fn(learner, *batch(), beside=(beside(),), loss=aipo, epochs=2, minibatches=3)
    assert (figures["optimizer_steps"], learner.version) == (6, 1)
    assert (figures["aipo_tokens"], figures["imitate_tokens"]) == (13, 9)


def test_a_term_of_fewer_groups_than_minibatches_is_in_as_many_steps() -> None:
    """A term's number of groups may depend on rewards, so too few do not end a run."""
    for rows, tokens in (([0, 1, 2], 9), ([1], 4)):
        few = term.fn(demonstrations().take(rows), loss=imitate)
        _, figures = policy_update.fn(policy(), *batch(), beside=(few,), loss=aipo, epochs=2, minibatches=4)
        assert (figures["optimizer_steps"], figures["aipo_tokens"], figures["imitate_tokens"]) == (8, 13, tokens)
        assert figures["imitate_loss"] > 0
    with pytest.raises(ValueError, match="minibatches=4 for a batch of 3 prompt groups"):
        policy_update.fn(policy(), demonstrations(), Advantages(torch.ones(3)), loss=imitate, minibatches=4)


def test_terms_of_one_name_are_refused() -> None:
    both = (beside(), beside(name="imitate"))
    with pytest.raises(ValueError, match="given terms aipo, imitate, imitate, needed names of their own"):
        policy_update.fn(policy(), *batch(), beside=both, loss=aipo)


def test_a_term_crosses_processes() -> None:
    one, other, (rollouts, advantage) = policy(), policy(), batch()
    made = term.fn(rollouts, advantage, loss=partial(aipo, rho=1.1), weight=0.5, name="again", average="sequence_mean")
    policy_update.fn(one, *batch(), beside=(made,), loss=reinforce)
    policy_update.fn(other, *batch(), beside=(decode(Term, *encode(made)),), loss=reinforce)
    assert equal(one, other)


@requires(reads("group"))
def listwise(logprobs_P: Tensor, sampled: Sampled, *, sign: float = 1.0) -> Tensor:
    """Return, at each token, −A · log of the response's share among the responses to its prompt, over its length."""
    group_N, row_P = sampled.group_N, sampled.sequence_P
    whole_N = segment_sum(logprobs_P, row_P, len(group_N))
    share_N = whole_N - segment_sum(whole_N.exp(), group_N).log()[group_N]
    return -sign * sampled.advantages_P * share_N[row_P] / sampled.lengths_P


GROUPED = (7, 8, 7, 8, 7)


@pytest.mark.parametrize("loss", [listwise, partial(listwise, sign=1.0)])
@pytest.mark.parametrize("micro_tokens", [1, 24, 1000])
def test_a_loss_that_reads_groups_sees_them_whole_whatever_the_packing(loss: Any, micro_tokens: int) -> None:
    learner, (rollouts, advantage) = policy(), batch()
    rollouts = replace(rollouts, ordinals=GROUPED)
    wholes = torch.stack([lp.sum() for lp in unpacked(learner, rollouts)])
    shares = [
        wholes[row] - wholes[[r for r in range(5) if GROUPED[r] == g]].logsumexp(0) for row, g in enumerate(GROUPED)
    ]
    total = -(advantage.values_N * torch.stack(shares)).sum() / 5
    needed = by_autograd(learner, total)
    options = {"average": "sequence_mean", "clip_norm": FREE, "micro_tokens": micro_tokens}
    _, figures = policy_update.fn(learner, rollouts, advantage, loss=partial(spread, base=loss), **options)
    assert_same(gradients(learner), needed)
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-4)


@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_prompts_of_two_sources_are_two_groups_though_both_have_one_ordinal(micro_tokens: int) -> None:
    learner, other, (rollouts, advantage) = policy(), policy(), batch()
    joined = replace(rollouts, ordinals=(7,) * 5, prompts=tuple("ab"[number - 7] for number in GROUPED))
    apart = replace(rollouts, ordinals=GROUPED, prompts=("a",) * 5)
    options = {"loss": listwise, "minibatches": 2, "micro_tokens": micro_tokens}
    assert policy_update.fn(learner, joined, advantage, **options)[1]["optimizer_steps"] == 2
    policy_update.fn(other, apart, advantage, **options)
    assert equal(learner, other)


def spread(logprobs_P: Tensor, sampled: Sampled, *, base: Any) -> Tensor:
    """Return the loss of a response at each of its tokens, so that their mean is the response's loss."""
    found: Tensor = base(logprobs_P, sampled) * sampled.lengths_P
    return found


def careless(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    return logprobs_P * sampled.group_P


def test_a_loss_that_does_not_say_that_it_reads_groups_is_told() -> None:
    with pytest.raises(ValueError, match=r'micro-batches that may cut groups, needed @requires\(reads\("group"\)\)'):
        policy_update.fn(policy(), *batch(), loss=careless)


def test_minibatches_are_groups_too() -> None:
    rollouts, advantage = batch()
    rollouts = replace(rollouts, ordinals=(3, 3, 5, 5, 5))
    learner = policy()
    _, figures = policy_update.fn(learner, rollouts, advantage, loss=listwise, minibatches=2, micro_tokens=1)
    assert (figures["optimizer_steps"], figures["tokens"]) == (2, sum(length for _, length in LENGTHS))


# Rollouts carry the settings with which they were sampled, and nodes that score their tokens apply them.


TEMPERATURES = (0.6, 1.0, 1.7)
SAMPLES = 4


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("model")
    made = CausalLM(CONFIG)
    made.init_weights(1)
    save_model(made, made.state_dict(), folder)
    TOKENIZER.save(folder)
    return Context(node="generate", seed=3, model=str(folder), slots=16, max_tokens=8)


def learner(context: Context) -> LanguagePolicy:
    made = make_policy(replace(context, node="policy"))
    assert isinstance(made, LanguagePolicy)
    return made


def settings_sampled(context: Context, ordinal: int, **options: Any) -> Rollouts:
    """Sample a group with a policy's own weights."""
    behaviour = Weights(0, learner(context).weights())
    prompts = Prompts((ordinal,), (f"{ordinal}+58=",), ("0",))
    engine = make_engine(context, samples=SAMPLES, **options)
    return generate.fn(engine, prompts, behaviour, samples=SAMPLES, **options)[1]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def mixed(context: Context) -> Rollouts:
    """Return joined groups of several temperatures."""
    return Rollouts.concat([settings_sampled(context, n, temperature=t) for n, t in enumerate(TEMPERATURES)])


def within(rollouts: Rollouts) -> torch.Tensor:
    steps_T = torch.arange(rollouts.versions_NT.shape[1])
    within_NT: torch.Tensor = steps_T < rollouts.response_lengths_N[:, None]
    return within_NT


def replayed(rollouts: Rollouts) -> Rollouts:
    """Return what comes out of a replay buffer, without fresh rows."""
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


@pytest.mark.parametrize("bonus", [0.0, 0.3, -0.3])
@pytest.mark.parametrize("chunk_elements", [1 << 22, 40])
def test_gradients_and_entropies_are_those_of_the_tempered_distribution(chunk_elements: int, bonus: float) -> None:
    """The oracle computes each row alone, with torch's own categorical distribution. `bonus` is that of entropy."""
    rollouts, advantage = batch()
    rollouts = replace(rollouts, temperature_N=torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3]))
    ours, twin = policy(logit_elements=chunk_elements), policy()
    losses, entropies = [], []
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = rollouts.tokens_NS[row, : prompt + response]
        logits = twin.model.logits(twin.model(tokens[None, :-1]))[0, prompt - 1 :]
        exact: Any = torch.distributions.Categorical(logits=logits / rollouts.temperature_N[row])
        ratio = (exact.log_prob(tokens[prompt:]) - rollouts.logprobs_NT[row, :response]).exp()
        a = advantage.values_N[row]
        losses.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
        entropies.append(exact.entropy())
    entropy = torch.cat(entropies).mean()
    mean = torch.cat(losses).mean() - bonus * entropy
    options: Any = {"loss": ppo, "entropy": bonus, "clip_norm": FREE, "micro_tokens": 20}
    _, figures = policy_update.fn(ours, rollouts, advantage, **options)
    assert figures["loss"] == pytest.approx(float(mean.detach()), rel=1e-4)
    assert figures["entropy"] == pytest.approx(float(entropy.detach()), rel=1e-4)
    assert_same(gradients(ours), by_autograd(twin, mean))


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
    rollouts = Rollouts.concat([settings_sampled(context, 0), settings_sampled(context, 1, **options)])
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
