"""Losses of single tokens for `policy_update`, and the parts that they are made of.

    policy_update(policy, rollouts, advantage, loss=partial(gspo, clip_low=3e-4, clip_high=4e-4))

A loss is a function of log π and of `Sampled`, its tokens. It returns a number for each token and does not average (see
`batching.normaliser`). Your own loss is such a function in your own file. Declare the inputs that it needs with
`@requires(reads(…))`, so that a missing one is reported before a run starts. For metrics of its own, it returns
`loss_P, {"late": late_P}`: a number for each token by name, whose mean is the metric `late` of the update.

Below the losses are their parts: importance weights, divergences, and sums over responses.

Shapes: P sampled tokens of N responses, one response after the other; `sequence_P` (int64) says which response each
belongs to. V words of the vocabulary, S segments.
Symbols: π is the policy that learns, μ the one that sampled, r = π / μ a token's ratio, A its advantage, sg a stop
gradient. Log-probabilities are in nats.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from penstock.graph import requires
from penstock.graph.requires import Call, requirements
from penstock.graph.types import Rollouts
from penstock.nodes.option_checks import above, bound, ordered, positive

Other = Literal["behaviour", "reference", "proximal"]
# Log-probabilities that a loss may read, and where they come from.
NEEDED: Mapping[Other, str] = {
    "behaviour": "rollouts whose logprobs_NT were recorded when they were sampled",
    "reference": "a frozen policy's log-probabilities as the input `reference` of the update (see reference_logprobs)",
    "proximal": "the trainer's own log-probabilities as the input `proximal` of the update (see policy_logprobs)",
}


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens of a micro-batch, as a loss gets them. Nothing here has a gradient.

    Tokens that no policy sampled, such as an environment's reply, are left out. A micro-batch holds whole responses, so
    a sum over `sequence_P` (see `segment_sum`) is a sum over responses. With `@requires(reads("group"))` above the loss
    it also holds whole prompt groups, which `group_P` and `group_N` number.

    Attributes:
        advantages_P: the advantage of each token (its response's, unless there is one per token), float [P].
        lengths_P: sampled tokens of each token's response, int64 [P].
        versions_P: version of the weights that sampled each token, int64 [P].
        sequence_P: the row of each token's response in the batch, int64 [P].
        given: log-probabilities (nats) of the same tokens under other policies, by name: see the properties below.
        replayed_P: tokens that an earlier update has learnt from, bool [P]; None without a buffer.
        whole_groups_N: the prompt group of each row; None if a micro-batch may cut groups.
    """

    advantages_P: Tensor
    lengths_P: Tensor
    versions_P: Tensor
    sequence_P: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)
    replayed_P: Tensor | None = None
    whole_groups_N: Tensor | None = None

    @property
    def group_N(self) -> Tensor:
        """The prompt group of each row of the batch. Raises ValueError if micro-batches may cut groups."""
        if self.whole_groups_N is None:
            raise ValueError('loss: given micro-batches that may cut groups, needed @requires(reads("group")) above it')
        return self.whole_groups_N

    @property
    def group_P(self) -> Tensor:
        """The prompt group of each token, as `group_N`."""
        return self.group_N[self.sequence_P]

    @property
    def behaviour_P(self) -> Tensor:
        """log μ: of the policy that sampled the tokens. As the next two, it raises ValueError if it is not given."""
        return self._given("behaviour")

    @property
    def reference_P(self) -> Tensor:
        """log π_ref: of a frozen policy to stay close to."""
        return self._given("reference")

    @property
    def proximal_P(self) -> Tensor:
        """log π_old: of the policy as it was before this update's first step."""
        return self._given("proximal")

    def _given(self, name: Other) -> Tensor:
        if name not in self.given:
            have = ", ".join(self.given) or "none"
            raise ValueError(f"loss: given no {name}_P (log-probabilities there are: {have}), needed {NEEDED[name]}")
        return self.given[name]


LossAndClipped = tuple[Tensor, Tensor]
LossAndFigures = tuple[Tensor, Mapping[str, Tensor]]
# (log π of the sampled tokens [P] with a gradient, the tokens) → the loss of each [P]; or that and, for the metrics,
# whether its ratio was clipped (bool [P]), or figures by name, [P] each, whose means over the tokens are metrics of the
# update. Threads call it at the same time, so it must not change anything.
Loss = Callable[[Tensor, Sampled], Tensor | LossAndClipped | LossAndFigures]


def reads(*names: Other | Literal["group"]) -> Callable[[Call], None]:
    """Requirement of a loss: the log-probabilities with these names as inputs of its update, or micro-batches of whole
    prompt groups ("group"):

    @requires(reads("behaviour", "proximal"))
    def tis(logprobs_P: Tensor, sampled: Sampled) -> Tensor: ...
    """

    def check(call: Call) -> None:
        for name in names:
            if name == "behaviour":
                first = call.first("rollouts")
                lacks = isinstance(first, Rollouts) and first.logprobs_NT is None
            else:
                lacks = name in call.left_out
            if name != "group" and lacks:
                raise call.lack(f"no {name}_P for it", NEEDED[name], code=f"missing-{name}")

    check.reads = frozenset(names)  # type: ignore[attr-defined]
    return check


def reads_groups(loss: Callable[..., object]) -> bool:
    """True if a loss, or a function that is bound to it, declares that it reads whole prompt groups."""
    bound_to_it: list[Callable[..., object]] = []
    while isinstance(loss, partial):
        bound_to_it += (option for option in loss.keywords.values() if callable(option))
        loss = loss.func
    said = any("group" in getattr(check, "reads", ()) for check in requirements(loss))
    return said or any(map(reads_groups, bound_to_it))


def reinforce(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """−A · log π, for any policy that sampled: Williams 1992, "Simple statistical gradient-following algorithms"."""
    return -sampled.advantages_P * logprobs_P


def imitate(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """−log π: the cross-entropy of the responses, such as demonstrations or the best samples; ignores advantages."""
    return -logprobs_P


@requires(reads("behaviour"), positive("rho"))
def aipo(logprobs_P: Tensor, sampled: Sampled, *, rho: float = 4.0) -> LossAndClipped:
    """−sg(min(r, ρ)) · A · log π, so that the gradient of the sum is −Σ_t min(r_t, ρ) · A · ∇ log π.

    LlamaRL (Wu et al. 2025, arXiv 2505.24034), section 6. A token counts as clipped if r > ρ.
    """
    ratio_P = ratio(logprobs_P, sampled.behaviour_P)
    # A constant weight: with min(r, ρ) · A instead, the gradient would vanish wherever r > ρ.
    weight_P = ratio_P.clamp(max=rho).detach()
    return -weight_P * sampled.advantages_P * logprobs_P, ratio_P > rho


@requires(reads("behaviour"), positive("rho"))
def distillation(logprobs_P: Tensor, sampled: Sampled, *, rho: float = 4.0) -> LossAndClipped:
    """`aipo` with the advantage log π_T − log π, where `distillation_advantage` has log π_T − log μ.

    Averaged over samples of μ, its gradient is that of KL(π ‖ π_T) for any age of μ, as long as no ratio exceeds ρ.
    """
    advantages_P = sampled.advantages_P + sampled.behaviour_P - logprobs_P.detach()
    return aipo(logprobs_P, replace(sampled, advantages_P=advantages_P), rho=rho)


@requires(reads("behaviour"), bound("clip_low", "clip_high"))
def cispo(logprobs_P: Tensor, sampled: Sampled, *, clip_high: float = 4.0, clip_low: float = 1.0) -> LossAndClipped:
    """−sg(clip(r, 1 − ε_low, 1 + ε_high)) · A · log π: no token loses its gradient, for any ratio.

    CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5. The paper sets no lower bound, which is ε_low = 1.
    """
    ratio_P = ratio(logprobs_P, sampled.behaviour_P)
    low, high = 1 - clip_low, 1 + clip_high
    # The weight has no gradient, so that a token beyond the bounds still changes its log π.
    weight_P = ratio_P.clamp(low, high).detach()
    return -weight_P * sampled.advantages_P * logprobs_P, (ratio_P < low) | (ratio_P > high)


@requires(reads("behaviour"), bound("clip_low", "clip_high"), above(1, "dual_clip"))
def ppo(
    logprobs_P: Tensor,
    sampled: Sampled,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossAndClipped:
    """−min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A), the clip centred on μ.

    PPO (Schulman et al. 2017, arXiv 1707.06347), equation 7, with the two sides apart as in DAPO's clip-higher
    (arXiv 2503.14476), equation 10. `dual_clip`, c > 1, bounds the loss of tokens with A < 0 by −c · A (Ye et al. 2019,
    arXiv 1912.09729, the section on dual-clip PPO).
    """
    ratio_P, advantages_P = ratio(logprobs_P, sampled.behaviour_P), sampled.advantages_P
    loss_P, clipped_P = _clipped(ratio_P, advantages_P, clip_low, clip_high)
    if dual_clip is None:
        return loss_P, clipped_P
    # PPO's minimum is unbounded if a bad response has become much likelier.
    bounded_P = torch.where(advantages_P < 0, torch.minimum(loss_P, -dual_clip * advantages_P), loss_P)
    return bounded_P, clipped_P | ((advantages_P < 0) & (ratio_P > dual_clip))


@requires(reads("behaviour"), bound("clip_low", "clip_high"))
def gspo(logprobs_P: Tensor, sampled: Sampled, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossAndClipped:
    """−min(s_t · A, clip(s_t, 1 − ε_low, 1 + ε_high) · A), s_t = sg(s) · π / sg(π), s = exp(mean_t log r_t).

    GSPO-token (Zheng et al. 2025, arXiv 2507.18071), equations 13 and 14: the ratio of the response, the gradient of
    the token. With `average="sequence_mean"` and advantages of whole responses it is GSPO, equations 5 and 7, in value
    and gradient. The defaults are the paper's, section 5.1.
    """
    log_ratios_P = segment_mean((logprobs_P - sampled.behaviour_P).detach(), sampled.sequence_P)[sampled.sequence_P]
    # The value is the response's ratio, the gradient is the token's.
    ratio_P = torch.exp(log_ratios_P + (logprobs_P - logprobs_P.detach()))
    return _clipped(ratio_P, sampled.advantages_P, clip_low, clip_high)


@requires(reads("behaviour", "proximal"), bound("clip_low", "clip_high"))
def decoupled_ppo(
    logprobs_P: Tensor, sampled: Sampled, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossAndClipped:
    """sg(π_old / μ) times PPO's clip centred on π_old, which is newer than the policy that sampled. Needs `proximal`.

    AReaL (Fu et al. 2025, arXiv 2505.24298), equation 5, after Hilton et al. 2021, arXiv 2110.00641.
    """
    return tis(logprobs_P, sampled, cap=math.inf, clip_low=clip_low, clip_high=clip_high)


@requires(reads("behaviour", "proximal"), bound("clip_low", "clip_high"), positive("cap"))
def tis(
    logprobs_P: Tensor, sampled: Sampled, *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossAndClipped:
    """sg(min(π_old / μ, C)) times PPO's clip centred on π_old. The trainer computes π_old, the generator μ. Needs
    `proximal`.

    Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025). A token counts as clipped if its weight is above C or its ratio is beyond PPO's bounds.
    """
    ratio_P = ratio(logprobs_P, sampled.proximal_P)
    loss_P, clipped_P = _clipped(ratio_P, sampled.advantages_P, clip_low, clip_high)
    weights_P = ratio(sampled.proximal_P, sampled.behaviour_P).detach()
    return weights_P.clamp(max=cap) * loss_P, clipped_P | (weights_P > cap)


Level = Literal["token", "sequence"]
Bound = Literal["truncate", "mask"]


@requires(reads("behaviour"), positive("cap"), bound("floor"), ordered("floor", "cap"))
def importance_weighted(
    logprobs_P: Tensor,
    sampled: Sampled,
    *,
    level: Level = "sequence",
    bound: Bound = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> LossAndClipped:
    """−w · A · log π, w = π / μ of the token or of its response, truncated or masked (see `importance_weights`)."""
    given = logprobs_P, sampled.behaviour_P, sampled.sequence_P
    free_P = importance_weights(*given, level=level, bound="truncate", cap=math.inf)
    weights_P = importance_weights(*given, level=level, bound=bound, cap=cap, floor=floor)
    return weights_P * reinforce(logprobs_P, sampled), weights_P != free_P


def _clipped(ratio_P: Tensor, advantages_P: Tensor, clip_low: float, clip_high: float) -> LossAndClipped:
    """(PPO's −min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A), True for tokens of which the minimum is the clipped side,
    so that they have no gradient)."""
    low, high = 1 - clip_low, 1 + clip_high
    loss_P = -torch.minimum(ratio_P * advantages_P, ratio_P.clamp(low, high) * advantages_P)
    return loss_P, ((advantages_P > 0) & (ratio_P > high)) | ((advantages_P < 0) & (ratio_P < low))


def ratio(logprobs_P: Tensor, other_P: Tensor) -> Tensor:
    """π / π_other of each token, with a gradient only through π."""
    return torch.exp(logprobs_P - other_P.detach())


def importance_weights(
    target_P: Tensor,
    behaviour_P: Tensor,
    sequence_P: Tensor,
    *,
    level: Level,
    bound: Bound,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """The weight w = π / μ of each token, bounded, without a gradient.

    On `level` "token" w is the token's own ratio, on "sequence" the product of the ratios of its response, the same
    for all its tokens. `bound` "truncate" clamps w to [floor, cap]; "mask" makes it 0 outside. `target_P` are the
    log-probabilities under π.

    Truncated by token: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    masked by token, both sides: IcePop (Ling team, arXiv 2510.18855); by sequence, both ways: Liu et al., "When Speed
    Kills Stability" (2025), section 4.2.
    """
    log_weights_P = (target_P - behaviour_P).detach()
    if level == "sequence":
        # A sum of logarithms: the product itself may overflow half-way.
        log_weights_P = segment_sum(log_weights_P, sequence_P)[sequence_P]
    weights_P = log_weights_P.exp()
    if bound == "truncate":
        return weights_P.clamp(floor, cap)
    return weights_P.masked_fill((weights_P < floor) | (weights_P > cap), 0.0)


def effective_sample_size(weights_N: Tensor) -> Tensor:
    """(Σ w)² / Σ w², a scalar between 0 and N (Kish, "Survey Sampling", 1965); 0 if all weights are 0.

    N equal weights count as N samples, a single large one as 1.
    """
    # As shares of the largest weight, so that no square overflows.
    shares_N = weights_N / weights_N.max().clamp(min=torch.finfo(weights_N.dtype).tiny)
    return shares_N.sum().square() / shares_N.square().sum().clamp(min=torch.finfo(weights_N.dtype).tiny)


Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_P: Tensor, reference_P: Tensor, *, estimator: Estimator) -> Tensor:
    """KL(π ‖ π_ref) from tokens sampled with π, by an estimator of Schulman, "Approximating KL divergence" (2020).

    With q = π_ref / π: k1 = −log q, unbiased; k2 = (log q)² / 2, biased; k3 = q − 1 − log q, unbiased, never negative.
    As terms of a loss they differ, since the gradient does not go through the sampling: the mean gradient of k1 is
    zero, that of k2 is the gradient of KL(π ‖ π_ref), and that of k3 is the gradient of KL(π_ref ‖ π). GRPO (Shao et
    al. 2024, arXiv 2402.03300, equations 3 and 4) adds k3.
    """
    log_q_P = reference_P - logprobs_P
    if estimator == "k1":
        return -log_q_P
    if estimator == "k2":
        return log_q_P.square() / 2
    return torch.exp(log_q_P) - log_q_P - 1


def reverse_kl(logprobs_PV: Tensor, teacher_PV: Tensor) -> Tensor:
    """Σ_v π(v) · (log π(v) − log π_T(v)) of each token [P], with a gradient through all of π.

    The token-level reverse KL of on-policy distillation: GKD (Agarwal et al. 2023, arXiv 2306.13649), section 3.
    Both are log-probabilities over the whole vocabulary, finite.
    """
    return (logprobs_PV.exp() * (logprobs_PV - teacher_PV)).sum(-1)


# Reductions over segments of rows, such as the tokens of a response or the responses to a prompt. `segment_P` (int64)
# is the segment of each row, 0 to S − 1, in any order. S is `num_segments`, or one more than the largest segment.


def segment_lengths(segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """The number of rows of each segment, int64 [S]."""
    return torch.bincount(segment_P, minlength=num_segments)


def segment_sum(values_P: Tensor, segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Sum of each segment [S]; 0 if it has no row."""
    return _reduce(values_P, segment_P, num_segments, "sum")


def segment_mean(values_P: Tensor, segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Mean of each segment [S]; 0 if it has no row."""
    lengths_S = segment_lengths(segment_P, num_segments)
    return segment_sum(values_P, segment_P, num_segments) / lengths_S.clamp(min=1)


def segment_max(values_P: Tensor, segment_P: Tensor, num_segments: int = 0) -> Tensor:
    """Largest value of each segment [S]; −∞ if it has no row."""
    return _reduce(values_P, segment_P, num_segments, "max")


def _reduce(values_P: Tensor, segment_P: Tensor, num_segments: int, reduction: str) -> Tensor:
    # index_add_ adds in no fixed order on a GPU; sorted rows are added in order, so equal rows make equal bits
    order_P = torch.argsort(segment_P, stable=True)
    return torch.segment_reduce(values_P[order_P], reduction, lengths=segment_lengths(segment_P, num_segments))
