"""What another lag, or another number of generators, would have made of a run."""

from pathlib import Path

import pytest

from penstock.runtime.report.follow import Work
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.what_if import Table, crowding, fit, generators, what_if, with_lag, with_replicas
from penstock.runtime.schedule.simulator import Durations

from .runs import Made, simulated_run


def table_of(path: Path, lag: int, **nodes: float) -> Table:
    durations = Durations({"fake_generate": 0.1, "fake_score": 0.0, "fake_update": 0.1, **nodes})
    (stage,) = read_facts(simulated_run(path, lag=lag, updates=10, durations=durations).folder).training
    fitted = fit(stage)
    assert fitted is not None
    table = what_if(stage, fitted, lambda: False)
    assert table is not None
    return table


def periods(table: Table) -> dict[int, float | None]:
    return {case.lag: case.period_s for case in table.cases if case.replicas == table.replicas}


def test_a_lag_of_one_hides_generation_behind_the_update(tmp_path: Path) -> None:
    found = periods(table_of(tmp_path / "r", 0))
    assert found[0] == pytest.approx(0.2, rel=1e-6)
    assert found[1] == pytest.approx(0.1, rel=1e-6)
    assert found[2] == pytest.approx(0.1, rel=1e-6)


def test_the_table_holds_the_run_itself_and_every_wanted_case(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    table = what_if(stage, fitted, lambda: False)
    assert table is not None
    assert (table.pool, table.lag, table.replicas, table.complete) == ("generator", 1, 2, True)
    assert table.case(1, 2) is not None
    assert {(c.lag, c.replicas) for c in table.cases} >= {(lag, n) for lag in range(5) for n in (1, 2, 3, 4)}


def test_where_time_runs_out_the_run_itself_comes_first(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    calls = iter([False, True])
    table = what_if(stage, fitted, lambda: next(calls, True))
    assert table is not None
    assert [(c.lag, c.replicas) for c in table.cases] == [(1, 2)]
    assert not table.complete


def test_lags_and_replicas_are_changed_in_copies_of_graph_and_plan(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    graph, plan = stage.origin.graph, stage.origin.plan
    assert [n.lag for n in with_lag(graph, 1, 3).nodes if n.construct == "broadcast"] == [3]
    assert [n.lag for n in graph.nodes if n.construct == "broadcast"] == [1]
    grown = with_replicas(plan, "generator", 3)
    assert [r.name for r in grown.replicas if r.name.startswith("gen")] == [f"generator/{i}" for i in range(3)]
    assert generators(stage.tables) == "generator"


def test_a_lag_too_small_for_how_seldom_weights_travel_has_no_period(tmp_path: Path) -> None:
    program = f"{Path(__file__).parents[2] / 'programs_for_language.py'}:seldom"
    durations = Durations({"fake_generate": 0.1, "fake_score": 0.0, "fake_update": 0.1})
    made = simulated_run(tmp_path / "r", program=program, options={"lag": 3, "every": 3}, durations=durations)
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    table = what_if(stage, fitted, lambda: False)
    assert table is not None
    assert {lag for lag, period in periods(table).items() if period is None} == {0, 1}


def firing(index: int, start: int, end: int) -> Work:
    return Work("generator/0", "generate", index, start, end, "group", 0)


def test_what_a_group_owes_to_those_beside_it_is_fitted() -> None:
    """One, two and four at once, each taking 100 + 50 for every other one."""
    work: list[Work] = []
    now = 0
    for beside in (1, 2, 4) * 8:
        took = 50 + 50 * beside
        work += [firing(len(work) + i, now, now + took) for i in range(beside)]
        now += took + 10
    mean = sum(n * n for n in (1, 2, 4)) / 7
    assert crowding(work).share == pytest.approx(50 * mean / (50 + 50 * mean), abs=0.01)


def test_nothing_is_fitted_where_the_number_at_once_never_changes() -> None:
    assert crowding([firing(i, i * 100, i * 100 + 100) for i in range(40)]).share == 0
    assert crowding([firing(0, 0, 100)]).share == 0
