"""What filters and environments decide in a simulation: by share, and by key alone."""

import pytest

from penstock.graph.ir import Firing
from penstock.runtime.schedule.simulator import Verdicts


def test_nothing_is_dropped_and_every_turn_is_taken_by_default() -> None:
    firings = [Firing("keep", g, t) for g in range(50) for t in range(3)]
    assert not any(map(Verdicts().dropped, firings))
    assert all(map(Verdicts().goes_on, firings))


def test_verdicts_have_the_given_shares() -> None:
    verdicts = Verdicts({"keep": 0.3}, {"answer": 0.7})
    assert sum(verdicts.dropped(Firing("keep", g)) for g in range(5000)) / 5000 == pytest.approx(0.3, abs=0.02)
    assert sum(verdicts.goes_on(Firing("answer", 1, t)) for t in range(5000)) / 5000 == pytest.approx(0.7, abs=0.02)
    assert not Verdicts(again={"answer": 0.0}).goes_on(Firing("answer", 0))
    assert Verdicts(drops={"keep": 1.0}).dropped(Firing("keep", 0))


def test_verdicts_depend_on_seed_node_group_and_turn() -> None:
    def drawn(seed: int, node: str, turn: int = 0) -> list[bool]:
        verdicts = Verdicts({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}, seed)
        return [verdict(Firing(node, g, turn)) for verdict in (verdicts.dropped, verdicts.goes_on) for g in range(40)]

    assert drawn(0, "a") == drawn(0, "a")
    others = [drawn(0, "a"), drawn(1, "a"), drawn(0, "b"), drawn(0, "a", 1)]
    assert len(set(map(tuple, others))) == 4
    assert drawn(0, "a")[:40] != drawn(0, "a")[40:]
