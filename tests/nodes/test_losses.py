"""Each loss and its gradient are the paper's formula, and not those of its well-known wrong versions; so are importance
weights and divergences. Tokens that are said to be clipped are those that the clip silences or bounds."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.nodes.learn.losses import (
    Bound,
    Estimator,
    Level,
    Loss,
    Sampled,
    aipo,
    cispo,
    decoupled_ppo,
    effective_sample_size,
    gspo,
    imitate,
    importance_weighted,
    importance_weights,
    kl_estimate,
    ppo,
    reinforce,
    reverse_kl,
    segment_lengths,
    segment_max,
    segment_mean,
    segment_sum,
    tis,
)


def known(advantages: Tensor, sequence: Tensor | None = None, **given: Tensor) -> Sampled:
    """What is known of tokens; without a `sequence` each is a response of its own."""
    sequence = torch.arange(len(advantages)) if sequence is None else sequence
    return Sampled(advantages, torch.bincount(sequence)[sequence], torch.zeros(len(advantages)), sequence, given)


def loss_of(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


RHO = 4.0
# log π − log μ: on policy, below ρ, just above ρ, far above ρ, and less likely than before
LOG_RATIOS = (0.0, 0.7, math.log(RHO) + 0.1, 3.0, -2.0)


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    return grad


def sampled(sign: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log π with a gradient, log μ, A)."""
    log_ratios = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    logprobs = torch.linspace(-3, -1, len(LOG_RATIOS), dtype=torch.float64)
    advantages = sign * torch.linspace(0.5, 1.5, len(LOG_RATIOS), dtype=torch.float64)
    return logprobs.requires_grad_(), logprobs.detach() - log_ratios, advantages


def through_the_ratio(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """The well-known wrong version: −min(r, ρ) · A, differentiated through the ratio."""
    return -torch.exp(logprobs - behaviour).clamp(max=RHO) * advantages


def by_hand(advantages: Tensor) -> Tensor:
    """∂/∂ log π_t of −Σ min(r_t, ρ) · A · log π_t with a constant weight."""
    return torch.tensor([-min(math.exp(r), RHO) for r in LOG_RATIOS], dtype=torch.float64) * advantages


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_aipo_gradient_is_the_formula_below_and_above_rho(sign: float) -> None:
    logprobs, behaviour, advantages = sampled(sign)
    grad = gradient(aipo(logprobs, known(advantages, behaviour=behaviour), rho=RHO)[0], logprobs)
    torch.testing.assert_close(grad, by_hand(advantages))
    assert (grad != 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_formula_refuses_the_version_that_differentiates_through_the_ratio(sign: float) -> None:
    logprobs, behaviour, advantages = sampled(sign)
    wrong = gradient(through_the_ratio(logprobs, behaviour, advantages), logprobs)
    assert (wrong[2:4] == 0).all(), "above ρ it learns nothing"
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, by_hand(advantages))


def test_aipo_on_policy_is_reinforce_with_a_baseline() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -0.25])
    grad = gradient(aipo(logprobs, known(advantages, behaviour=logprobs.detach()), rho=2.0)[0], logprobs)
    torch.testing.assert_close(grad, -advantages)


def test_ppo_clip_stops_the_gradient_only_where_the_policy_has_moved_far_enough() -> None:
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    logprobs = torch.log(ratios).requires_grad_()
    loss, _ = ppo(logprobs, known(advantages, behaviour=torch.zeros(5)))
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.0, -1.2, -0.5, 1.5, 0.8]))
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([-1.0, 0.0, -0.5, 1.5, 0.0]))


def test_imitation_is_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7)
    targets = torch.tensor([0, 3, 6, 1])
    logprobs = logits.log_softmax(-1)[range(4), targets]
    loss = loss_of(imitate(logprobs, known(torch.full((4,), 7.0))))
    torch.testing.assert_close(loss.mean(), torch.nn.functional.cross_entropy(logits, targets))


# ratios on both sides of the clip at 1 − 0.2 and 1 + 0.5 (or 0.3), for both signs of the advantage
RATIOS = torch.tensor([1.0, 0.9, 1.4, 1.6, 0.5, 1.0, 0.9, 1.4, 1.6, 0.5], dtype=torch.float64)
ADVANTAGES = torch.tensor([2.0] * 5 + [-3.0] * 5, dtype=torch.float64)
BEHAVIOUR = torch.linspace(-4, -2, 10, dtype=torch.float64)


OLD = known(ADVANTAGES, behaviour=BEHAVIOUR)


def moved() -> Tensor:
    """log π with a gradient, RATIOS away from BEHAVIOUR."""
    return (BEHAVIOUR + RATIOS.log()).requires_grad_()


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_reinforce_and_its_gradient_by_hand() -> None:
    logprobs = float64([-1.0, -2.0]).requires_grad_()
    loss = reinforce(logprobs, known(float64([0.5, -0.25])))
    assert loss.tolist() == [0.5, -0.5]
    assert gradient(loss, logprobs).tolist() == [-0.5, 0.25]


def test_ppo_with_two_sides_and_its_gradient_by_hand() -> None:
    """For A > 0 only 1 + ε_high bounds, for A < 0 only 1 − ε_low; the gradient of r is r."""
    logprobs = moved()
    loss, _ = ppo(logprobs, OLD, clip_low=0.2, clip_high=0.5)
    torch.testing.assert_close(loss, float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.8, 2.4]))
    by_hand = float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)
    assert torch.autograd.gradcheck(lambda x: ppo(x, OLD, clip_low=0.2, clip_high=0.5)[0], logprobs)


def test_clip_higher_moves_the_upper_side_alone() -> None:
    logprobs = moved()
    narrow, _ = ppo(logprobs, OLD, clip_low=0.2, clip_high=0.3)
    wide, _ = ppo(logprobs, OLD, clip_low=0.2, clip_high=0.5)
    assert (narrow != wide).nonzero().squeeze(1).tolist() == [2, 3]


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    """c = 1.5 touches only A < 0 with r > 1.5."""
    logprobs = moved()
    loss, clipped = ppo(logprobs, OLD, clip_low=0.2, clip_high=0.5, dual_clip=1.5)
    torch.testing.assert_close(loss, float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.5, 2.4]))
    by_hand = float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 0.0, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)
    assert clipped.tolist() == (by_hand == 0).tolist()


def test_ppo_learns_from_the_first_step_where_the_old_policy_is_the_live_one() -> None:
    logprobs = moved()
    loss, _ = ppo(logprobs, known(ADVANTAGES, behaviour=logprobs))
    torch.testing.assert_close(gradient(loss, logprobs), -ADVANTAGES)


def test_cispo_and_its_gradient_by_hand() -> None:
    logprobs = moved()
    loss, _ = cispo(logprobs, OLD, clip_high=0.3)
    weights = float64([1.0, 0.9, 1.3, 1.3, 0.5] * 2)
    torch.testing.assert_close(loss, -weights * ADVANTAGES * logprobs.detach())
    torch.testing.assert_close(gradient(loss, logprobs), -weights * ADVANTAGES)


def test_cispo_with_a_lower_bound_raises_small_weights() -> None:
    logprobs = moved()
    loss, _ = cispo(logprobs, OLD, clip_high=0.3, clip_low=0.2)
    torch.testing.assert_close(gradient(loss, logprobs), -float64([1.0, 0.9, 1.3, 1.3, 0.8] * 2) * ADVANTAGES)


def test_cispo_without_a_lower_bound_is_aipo() -> None:
    logprobs = moved()
    torch.testing.assert_close(cispo(logprobs, OLD, clip_high=0.5)[0], aipo(logprobs, OLD, rho=1.5)[0])


# π_prox / μ of each token: the weights of the corrected losses
WEIGHTS = float64([0.5, 3.0, 1.0, 2.0, 4.0, 0.25, 1.0, 3.0, 2.0, 4.0])
CORRECTED = known(ADVANTAGES, behaviour=BEHAVIOUR - WEIGHTS.log(), proximal=BEHAVIOUR)


def test_decoupled_ppo_and_its_gradient_by_hand() -> None:
    """The ratio is π / π_prox, the weight π_prox / μ; the product π / μ is never clipped as one."""
    logprobs = moved()
    loss, _ = decoupled_ppo(logprobs, CORRECTED, clip_low=0.2, clip_high=0.5)
    torch.testing.assert_close(loss, WEIGHTS * float64([-2.0, -1.8, -2.8, -3.0, -1.0, 3.0, 2.7, 4.2, 4.8, 2.4]))
    by_hand = WEIGHTS * float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)


def test_tis_caps_the_weight_and_is_decoupled_ppo_without_a_cap() -> None:
    logprobs = moved()
    loss, _ = tis(logprobs, CORRECTED, clip_low=0.2, clip_high=0.5, cap=2.0)
    capped = float64([0.5, 2.0, 1.0, 2.0, 2.0, 0.25, 1.0, 2.0, 2.0, 2.0])
    by_hand = capped * float64([-2.0, -1.8, -2.8, 0.0, -1.0, 3.0, 2.7, 4.2, 4.8, 0.0])
    torch.testing.assert_close(gradient(loss, logprobs), by_hand)
    free, _ = tis(logprobs, CORRECTED, clip_low=0.2, clip_high=0.5, cap=math.inf)
    decoupled, _ = decoupled_ppo(logprobs, CORRECTED, clip_low=0.2, clip_high=0.5)
    assert torch.equal(free, decoupled)


def test_the_correcting_weight_is_a_constant_where_the_middle_policy_is_the_live_one() -> None:
    logprobs = moved()
    live = known(ADVANTAGES, behaviour=BEHAVIOUR, proximal=logprobs)
    for loss in (decoupled_ppo(logprobs, live, clip_high=0.5)[0], tis(logprobs, live, clip_high=0.5, cap=9.0)[0]):
        torch.testing.assert_close(gradient(loss, logprobs), -RATIOS * ADVANTAGES)


# responses of 2, 1 and 3 tokens; the geometric means of their ratios are 2, 0.5 and 1
SEQUENCE = torch.tensor([0, 0, 1, 2, 2, 2])
TOKEN_RATIOS = float64([1.0, 4.0, 0.5, 2.0, 0.5, 1.0])


def responses() -> tuple[Tensor, Tensor]:
    """(log π with a gradient, log μ)."""
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


# Which tokens count as clipped

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
    (grad,) = torch.autograd.grad(loss_P.sum(), logprobs)
    assert clipped_P.tolist() == (grad == 0).tolist()
    assert clipped_P.any()
    assert not clipped_P.all()


@pytest.mark.parametrize("loss", [aipo, cispo])
def test_a_bounded_weight_keeps_its_gradient(loss: Loss) -> None:
    logprobs = torch.linspace(-3, -1, 8).requires_grad_()
    loss_P, _ = loss(logprobs, far(logprobs))
    (grad,) = torch.autograd.grad(loss_P.sum(), logprobs)
    assert (grad != 0).all()


def test_what_a_bound_takes_is_counted() -> None:
    logprobs = torch.linspace(-3, -1, 8)
    tokens = far(logprobs)
    ratio = FAR.exp()
    assert torch.equal(aipo(logprobs, tokens, rho=2.0)[1], ratio > 2)
    assert torch.equal(cispo(logprobs, tokens, clip_low=0.5, clip_high=1.0)[1], (ratio < 0.5) | (ratio > 2))
    by_token = importance_weighted(logprobs, tokens, level="token", bound="mask", cap=2.0, floor=0.5)
    assert torch.equal(by_token[1], (ratio < 0.5) | (ratio > 2))
    assert torch.equal(by_token[0] == 0, by_token[1])
    by_sequence = importance_weighted(logprobs, tokens, level="sequence", cap=2.0)
    assert by_sequence[1].tolist() == [False] * 5 + [True, True, False]


def test_a_weight_above_the_cap_is_counted_beside_ppos_clip() -> None:
    logprobs = torch.linspace(-3, -1, 8)
    tokens = far(logprobs)
    apart = known(SIGNS, ROWS, behaviour=tokens.behaviour_P, proximal=logprobs)
    assert torch.equal(tis(logprobs, apart, cap=2.0)[1], FAR.exp() > 2)


# Importance weights

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
    weights = importance_weights(WEIGHED, WEIGHERS, TWO_ROWS, level=level, bound=bound, cap=cap, floor=floor)
    torch.testing.assert_close(weights, torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
def test_weights_are_constants(level: Level, bound: Bound) -> None:
    target = WEIGHED.clone().requires_grad_()
    assert not importance_weights(target, WEIGHERS, TWO_ROWS, level=level, bound=bound, cap=2.5).requires_grad


def test_a_product_beyond_all_numbers_is_still_bounded() -> None:
    target, sequence = torch.full((2000,), 1.0), torch.zeros(2000, dtype=torch.long)
    behaviour = torch.zeros(2000)
    truncated = importance_weights(target, behaviour, sequence, level="sequence", bound="truncate", cap=2.0)
    assert set(truncated.tolist()) == {2.0}
    masked = importance_weights(target, behaviour, sequence, level="sequence", bound="mask", cap=2.0)
    assert set(masked.tolist()) == {0.0}


def test_a_product_that_overflows_half_way_is_the_product() -> None:
    logs = torch.tensor([100.0, 100.0, -100.0, -99.0])
    sequence = torch.zeros(4, dtype=torch.long)
    weights = importance_weights(logs, torch.zeros(4), sequence, level="sequence", bound="mask", cap=3.0)
    torch.testing.assert_close(weights, torch.full((4,), math.e))


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert effective_sample_size(weights).item() == pytest.approx(36 / 14)
    assert effective_sample_size(torch.full((7,), 0.3)).item() == pytest.approx(7.0)
    assert effective_sample_size(torch.tensor([0.0, 5.0, 0.0])).item() == 1.0
    assert effective_sample_size(torch.zeros(3)).item() == 0.0


def test_effective_sample_size_knows_no_scale() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    for scale in (1e-30, 1e30):
        assert effective_sample_size(scale * weights).item() == pytest.approx(36 / 14, rel=1e-5)


# Divergences

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)


def sampled_gradient(estimator: Estimator) -> Tensor:
    """The mean over tokens of π of the estimator's gradient by the logits: what sampling estimates."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.exp().detach() * kl_estimate(logprobs, REFERENCE, estimator=estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 2 - math.log(2) - 1)],
)
def test_estimators_by_hand_where_the_reference_is_twice_as_likely(estimator: Estimator, value: float) -> None:
    logprobs = torch.tensor([math.log(0.2)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.4)], dtype=torch.float64)
    assert kl_estimate(logprobs, reference, estimator=estimator).item() == pytest.approx(value, abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    logprobs = LOGITS.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, REFERENCE, estimator="k1")).sum(), exact)
    k3 = kl_estimate(logprobs, REFERENCE, estimator="k3")
    torch.testing.assert_close((logprobs.exp() * k3).sum(), exact)
    assert (k3 >= 0).all()
    assert (kl_estimate(logprobs, REFERENCE, estimator="k1") < 0).any()


@pytest.mark.parametrize(
    ("estimator", "slopes"),
    [("k1", [1.0, 1.0]), ("k2", [-1.0, 1.0]), ("k3", [1 - math.e, 1 - 1 / math.e])],
)
def test_the_gradient_of_a_token_is_the_estimators_derivative(estimator: Estimator, slopes: list[float]) -> None:
    """log q is 1 and −1."""
    logprobs = torch.tensor([-2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5], dtype=torch.float64)
    (grad,) = torch.autograd.grad(kl_estimate(logprobs, reference, estimator=estimator).sum(), logprobs)
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator=estimator), (logprobs,))


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


def mean_gradient(tokens: Tensor, logprobs: Tensor, logits: Tensor) -> Tensor:
    """Of the tokens' losses over all tokens, each as often as π samples it."""
    return torch.autograd.grad((logprobs.exp().detach() * tokens).sum(), logits, retain_graph=True)[0]


def exact_gradient() -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(reverse_kl(logits.log_softmax(-1), REFERENCE), logits)[0]


def test_distillation_of_sampled_tokens_has_the_mean_gradient_of_reverse_kl() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    loss = reinforce(logprobs, known((REFERENCE - logprobs).detach()))
    torch.testing.assert_close(mean_gradient(loss, logprobs, logits), exact_gradient())


def test_neither_the_plain_log_ratio_nor_a_live_weight_has_that_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    for wrong in (logprobs - REFERENCE, (logprobs - REFERENCE) * logprobs):
        gap = mean_gradient(wrong, logprobs, logits) - exact_gradient()
        assert gap.abs().max() > 0.05


# Sums over segments

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
SEGMENTS = torch.tensor([2, 0, 2, 0, 0])


def test_segments_are_summed_in_any_order_of_rows_and_empty_ones_are_zero() -> None:
    assert segment_lengths(SEGMENTS, 4).tolist() == [3, 0, 2, 0]
    assert segment_sum(VALUES, SEGMENTS, 4).tolist() == [26.0, 0.0, 5.0, 0.0]
    torch.testing.assert_close(segment_mean(VALUES, SEGMENTS, 4), torch.tensor([26 / 3, 0, 2.5, 0]).double())
    assert segment_max(VALUES, SEGMENTS, 4).tolist() == [16.0, float("-inf"), 4.0, float("-inf")]


def test_without_a_number_there_are_as_many_segments_as_the_largest_index_needs() -> None:
    assert segment_sum(VALUES, SEGMENTS).tolist() == [26.0, 0.0, 5.0]


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
