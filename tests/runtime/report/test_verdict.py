"""The run in one line."""

from penstock.graph import Graph, Program, load, trace
from penstock.graph.analysis import Bound
from penstock.runtime.report.what_if import Case, Table, verdict

from .runs import TOY


def toy() -> Graph:
    program = load(TOY)
    assert isinstance(program, Program)
    return trace(program, {})


def table(periods: dict[int, float], lag: int = 1) -> Table:
    cases = tuple(Case(at, 1, seconds, float(at), {}) for at, seconds in periods.items())
    return Table("generator", lag, 1, 20, None, 0.0, cases, True)


def test_it_says_what_bounds_what_a_lag_would_gain_and_how_far_the_model_is_off() -> None:
    said = verdict(toy(), Bound(0.95, pool="generator"), 1.0, -0.06, table({0: 2.0, 1: 1.04, 2: 1.0, 3: 1.0}), {})
    assert said == "Generation bounds this run; lag 2 would gain 4 %; model error 6 %."


def test_a_cycle_is_named_by_its_nodes() -> None:
    cycle = Bound(0.9, ("policy", "broadcast", "fake_generate", "fake_score", "fake_update"), 2)
    said = verdict(toy(), cycle, 1.0, None, None, {})
    assert said == "The cycle fake_generate → fake_score → fake_update bounds this run, 2 updates at a time."


def test_a_bound_far_below_the_period_explains_nothing() -> None:
    said = verdict(
        toy(), Bound(0.3, pool="trainer"), 1.0, 0.001, table({0: 1.0, 1: 1.0}), {"trainer": 0.3, "scorer": 0.5}
    )
    assert said.startswith(
        "No pool and no cycle alone bounds this run, the busiest of them pool scorer (50 %); lag 0 would"
    )


def test_a_run_without_an_update_has_no_verdict() -> None:
    assert "No update could be followed" in verdict(toy(), None, None, None, None, {})
