"""The figures of an update: what its optimizer steps say of it, as sums over tokens until the end.

Shapes: P sampled tokens of a micro-batch, L lags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.graph.types import Metrics
from penstock.nodes.learn.divergences import kl_estimate
from penstock.nodes.learn.sampled import Sampled

LAGS = 16
"""Lags that tokens are counted by, each for itself; the last count is of all that are as old or older."""

Sums = dict[str, float]
"""By name: sums over the tokens of an optimizer step, and `*_max`, the largest."""


def token_sums(
    logprobs_P: Tensor, entropy_P: Tensor, clipped_P: Tensor, sampled: Sampled, version: int
) -> dict[str, Tensor]:
    """The sums of one micro-batch, float64 scalars on its device. `version` is that of the policy that learns."""
    sums = {
        "tokens": torch.ones_like(entropy_P, dtype=torch.float64).sum(),
        "entropy": entropy_P.double().sum(),
        "ratio_clipped": clipped_P.double().sum(),
    }
    if "behaviour" not in sampled.given:  # no policy of this run sampled them: there is no lag, and no ratio
        return sums
    # Of rows that nobody sampled, which were joined with others, log μ is NaN: they have no lag and no ratio either.
    recorded_P = ~sampled.behaviour_P.isnan()
    replayed_P = torch.zeros_like(recorded_P) if sampled.replayed_P is None else sampled.replayed_P & recorded_P
    lag_P = (version - sampled.versions_P).double()
    fresh_P = (recorded_P & ~replayed_P).double()
    sums |= {"recorded": recorded_P.double().sum(), "fresh": fresh_P.sum()}
    sums |= {"lag": (lag_P * fresh_P).sum(), "lag_max": (lag_P * fresh_P).max()}
    counted_PL = lag_P.clamp(0, LAGS - 1)[:, None] == torch.arange(LAGS, device=lag_P.device)
    by_lag_L = (counted_PL * fresh_P[:, None]).sum(0)
    sums |= {f"tokens_lag_{lag}": count for lag, count in enumerate(by_lag_L.unbind())}
    if sampled.replayed_P is not None:
        sums |= {"replayed": replayed_P.double().sum(), "replayed_lag_max": (lag_P * replayed_P).max()}
    # in float64, where the square of no float32's exponential is infinite
    now_P = logprobs_P.detach().double()
    behaviour_P = torch.where(recorded_P, sampled.behaviour_P.double(), now_P)
    ratio_P = torch.exp(now_P - behaviour_P) * recorded_P
    sums |= {"ratio": ratio_P.sum(), "ratio_max": ratio_P.max(), "ratio_squared": ratio_P.square().sum()}
    sums["kl"] = kl_estimate(behaviour_P, now_P, estimator="k3").sum()
    return sums


def add_up(parts: Sequence[Mapping[str, Tensor]]) -> Sums:
    """The sums of several micro-batches as one, by a single copy from the device."""
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name] for name in names]) for part in parts])
    totals, peaks = table.sum(0).tolist(), table.amax(0).tolist()
    return {name: peaks[i] if name.endswith("_max") else totals[i] for i, name in enumerate(names)}


@dataclass(frozen=True)
class Taken:
    """An optimizer step on a term of the loss: the sums over its tokens, its mean loss, the norm of the whole gradient,
    its epoch."""

    sums: Sums
    loss: float
    grad_norm: float
    epoch: int


def update_figures(steps: Sequence[Taken]) -> Metrics:
    """The figures of a term of the loss, of the steps of an update in which it had tokens. Means are over all of these.

    `tokens` counts those of one epoch. `loss` and `grad_norm` are means over the steps, `entropy` that of the
    distribution that was sampled from, at its temperature.

    Lags, ratios, `ess` and `kl` are of the tokens that a policy sampled, those with a recorded log μ, and are means
    over these: demonstrations have none. `kl` is the last epoch's estimate (k3) of KL(μ ‖ π): how far the policy had
    gone from the one that sampled. `ess` is the effective sample size (Kish) of the ratios π / μ, as a share of the
    tokens.

    `lag_mean` and `lag_max` are of fresh tokens, 0 of none; `tokens_lag_K` counts those of one epoch that are K updates
    old, where there are any. Where past groups are learnt from beside them,
    `replayed_tokens` counts theirs (of one epoch) and `replayed_lag_max` is the largest lag of them. All other figures,
    `ess` and the ratios among them, are of fresh and replayed tokens alike: of what the update used.
    """
    if not steps:
        return {"loss": 0.0, "tokens": 0.0}  # of a term that had nothing to learn from
    whole = _total([step.sums for step in steps])
    last = _total([step.sums for step in steps if step.epoch == steps[-1].epoch])
    tokens = whole["tokens"]
    figures = {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "optimizer_steps": float(len(steps)),
        "tokens": last["tokens"],
        "entropy": whole["entropy"] / tokens,
        "ratio_clipped": whole["ratio_clipped"] / tokens,
    }
    if recorded := whole.get("recorded"):
        figures["lag_mean"] = whole["lag"] / max(1.0, whole["fresh"])
        figures["lag_max"] = whole["lag_max"]
        figures |= {name: count for name, count in last.items() if name.startswith("tokens_lag_") and count}
        figures["ratio_mean"] = whole["ratio"] / recorded
        figures["ratio_max"] = whole["ratio_max"]
        figures["ess"] = whole["ratio"] ** 2 / (whole["ratio_squared"] * recorded)
        figures["kl"] = last["kl"] / max(1.0, last["recorded"])
    if "replayed_lag_max" in whole:
        figures["replayed_tokens"] = last["replayed"]
        figures["replayed_lag_max"] = whole["replayed_lag_max"]
    return figures


def _total(parts: Sequence[Sums]) -> Sums:
    joined = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: max(values) if name.endswith("_max") else sum(values) for name, values in joined.items()}
