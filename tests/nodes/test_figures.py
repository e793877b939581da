"""Figures are means over tokens, whatever the micro-batches and the steps they came in."""

import pytest
import torch

from penstock.nodes.learn.losses import Sampled
from penstock.nodes.learn.update import StepSums, add_up, token_sums, update_metrics

LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])
BEHAVIOUR = torch.tensor([-1.2, -1.0, -0.5, -3.5, -1.0])
CLIPPED = torch.tensor([False, True, False, True, False])


def sums(rows: slice, version: int = 7, replayed: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    ones_P = torch.ones(5, dtype=torch.long)[rows]
    old_P = None if replayed is None else replayed[rows]
    known = Sampled(ones_P.float(), ones_P, torch.arange(5)[rows], ones_P * 0, {"behaviour": BEHAVIOUR[rows]}, old_P)
    return {**token_sums(LOGPROBS[rows], LOGPROBS[rows].exp(), CLIPPED[rows], known, version)}


def test_figures_do_not_depend_on_the_micro_batches() -> None:
    whole = update_metrics([StepSums(add_up([sums(slice(None))]), 0.5, 2.0, 0)])
    parts = update_metrics([StepSums(add_up([sums(slice(0, 2)), sums(slice(2, 5))]), 0.5, 2.0, 0)])
    assert whole == pytest.approx(parts)
    ratio = (LOGPROBS - BEHAVIOUR).exp()
    assert whole["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert whole["ratio_clipped"] == pytest.approx(0.4)
    assert (whole["lag_mean"], whole["lag_max"]) == (5, 7)
    assert whole["ess"] == pytest.approx(float(ratio.sum() ** 2 / ratio.square().sum() / 5))


def test_steps_of_an_epoch_are_parts_of_its_batch() -> None:
    once = update_metrics([StepSums(add_up([sums(slice(None))]), 0.5, 2.0, 0)])
    halves = [add_up([sums(slice(0, 2))]), add_up([sums(slice(2, 5))])]
    cut = update_metrics([StepSums(halves[0], 0.4, 1.0, 0), StepSums(halves[1], 0.6, 3.0, 0)])
    twice = update_metrics([StepSums(half, 0.5, 2.0, epoch) for epoch in range(2) for half in halves])
    assert {**cut, "optimizer_steps": 1.0} == pytest.approx(once)
    assert {**twice, "optimizer_steps": 1.0} == pytest.approx(once)
    assert (cut["optimizer_steps"], twice["optimizer_steps"], twice["tokens"]) == (2, 4, 5)


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_replayed_tokens_are_counted_apart_and_the_ratios_are_of_all(cut: int) -> None:
    """Versions are 0 to 4 at version 7: the two replayed tokens have lags 7 and 6, the others 5, 4 and 3."""
    replayed = torch.tensor([True, True, False, False, False])
    parts = [sums(rows, replayed=replayed) for rows in (slice(0, cut), slice(cut, 5)) if rows.start != rows.stop]
    plain = update_metrics([StepSums(add_up([sums(slice(None))]), 0.5, 2.0, 0)])
    mixed = update_metrics([StepSums(add_up(parts), 0.5, 2.0, epoch) for epoch in range(2)])
    assert (mixed["lag_mean"], mixed["lag_max"]) == (4, 5)
    assert (mixed["replayed_tokens"], mixed["replayed_lag_max"], mixed["tokens"]) == (2, 7, 5)
    same = ("ess", "ratio_mean", "ratio_max", "ratio_clipped", "kl", "entropy")
    assert {name: mixed[name] for name in same} == pytest.approx({name: plain[name] for name in same})
    assert not plain.keys() & {"replayed_tokens", "replayed_lag_max"}


def test_an_update_of_replayed_tokens_alone_has_no_lag_of_fresh_ones() -> None:
    figures = update_metrics(
        [StepSums(add_up([sums(slice(None), replayed=torch.ones(5, dtype=torch.bool))]), 0.5, 2.0, 0)]
    )
    assert (figures["lag_mean"], figures["lag_max"], figures["replayed_tokens"]) == (0, 0, 5)


def test_tokens_are_counted_by_lag_and_old_ones_together() -> None:
    figures = update_metrics([StepSums(add_up([sums(slice(None), version=17)]), 0.5, 2.0, epoch) for epoch in range(2)])
    counts = {name: count for name, count in figures.items() if name.startswith("tokens_lag_")}
    assert counts == {"tokens_lag_13": 1, "tokens_lag_14": 1, "tokens_lag_15": 3}
    replayed = torch.tensor([True, True, False, False, False])
    fresh = update_metrics([StepSums(add_up([sums(slice(None), replayed=replayed)]), 0.5, 2.0, 0)])
    assert {n for n in fresh if n.startswith("tokens_lag_")} == {"tokens_lag_3", "tokens_lag_4", "tokens_lag_5"}


def test_kl_is_never_negative_and_a_huge_ratio_leaves_one_effective_token() -> None:
    known = Sampled(
        torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2), {"behaviour": torch.tensor([-90.0, -1])}
    )
    found = add_up([token_sums(torch.tensor([-0.1, -1.0]), torch.zeros(2), torch.zeros(2), known, 0)])
    figures = update_metrics([StepSums(found, 0.0, 0.0, 0)])
    assert figures["ess"] == pytest.approx(0.5)
    assert figures["kl"] > 0


def test_rows_that_nobody_sampled_have_no_part_in_lags_ratios_and_divergence() -> None:
    """Their log μ is NaN, wherever a micro-batch begins; loss, entropy and the count of tokens are of all."""
    sampled, shown = [0, 2, 3], [1, 4]
    behaviour = BEHAVIOUR.clone()
    behaviour[shown] = torch.nan

    def figures(parts: list[list[int]]) -> dict[str, float]:
        found = []
        for rows in parts:
            ones_P = torch.ones(len(rows), dtype=torch.long)
            versions_P = torch.where(behaviour[rows].isnan(), 0, 5 + torch.tensor(rows))
            known = Sampled(ones_P.float(), ones_P, versions_P, ones_P * 0, {"behaviour": behaviour[rows]})
            found.append(token_sums(LOGPROBS[rows], LOGPROBS[rows].exp(), CLIPPED[rows], known, 10))
        return update_metrics([StepSums(add_up(found), 0.5, 2.0, 0)])

    alone, beside = figures([sampled]), figures([[0, 1, 2, 3, 4]])
    assert beside == pytest.approx(figures([[0, 1], [4], [2, 3]]))
    only = ("ratio_mean", "ratio_max", "ess", "kl", "lag_mean", "lag_max", "tokens_lag_5", "tokens_lag_3")
    assert {name: beside[name] for name in only} == pytest.approx({name: alone[name] for name in only})
    assert not {name for name in beside if name.startswith("tokens_lag_")} - alone.keys()
    assert (beside["tokens"], alone["tokens"]) == (5, 3)
    assert beside["entropy"] == pytest.approx(float(LOGPROBS.exp().mean()))
    assert not figures([shown]).keys() & {*only, "lag_max"}
