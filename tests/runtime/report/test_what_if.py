"""What the simulator makes of a run: its prediction, other lags and numbers of generators, the verdict."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import Graph, Program, load, trace
from penstock.graph.analysis import Bound
from penstock.runtime.report.follow import NS, Work
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.summary import make_report
from penstock.runtime.report.what_if import (
    Case,
    Empirical,
    Table,
    bound,
    crowding,
    fit,
    generators,
    period,
    predict,
    verdict,
    what_if,
    with_lag,
    with_replicas,
)
from penstock.runtime.schedule.simulator import Durations

from .runs import DURATIONS, TOY, Made, simulated_run


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


def test_a_run_without_a_runtime_of_its_own_is_predicted_exactly(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    prediction = predict(stage)
    assert prediction is not None
    assert prediction.error == pytest.approx(0, abs=1e-6)
    assert [(end - stage.begin) / NS for _, end in sorted(prediction.followed.ends.items())] == pytest.approx(
        made.simulation.ends, abs=1e-6
    )
    real, predicted = ([(w.name, w.index) for w in f.work] for f in (stage.followed, prediction.followed))
    assert sorted(real) == sorted(predicted)


def test_durations_are_fitted_by_node_and_the_parts_of_a_sync_by_their_medians(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    parts = (fitted.durations.publish, fitted.durations.wire, fitted.durations.swap)
    assert parts == pytest.approx((0.003, 0.002, 0.001), abs=1e-6)
    assert fitted.means["broadcast"] == pytest.approx(0.006, abs=1e-6)


def test_firings_that_a_run_did_not_do_draw_from_those_that_it_did() -> None:
    known = Empirical({("n", 0): 1.0, ("n", 1): 2.0}, (1.0, 2.0))
    assert (known("n", 0), known("n", 1)) == (1.0, 2.0)
    drawn = {known("n", index) for index in range(2, 40)}
    assert drawn == {1.0, 2.0}


def test_the_bound_counts_the_snapshots_as_work_of_the_trainer(tmp_path: Path) -> None:
    slow = replace(DURATIONS, nodes={**DURATIONS.nodes, "fake_update": 0.2}, publish=0.05)
    (stage,) = read_facts(simulated_run(tmp_path / "r", durations=slow).folder).training
    fitted = fit(stage)
    assert fitted is not None
    found = bound(stage.origin.graph, stage.origin.plan, fitted.means, fitted.durations.publish, stage.origin.rules)
    assert found.pool == "trainer"
    assert found.seconds == pytest.approx(0.25, abs=1e-6)


def test_no_bound_is_above_what_the_run_took_though_its_first_groups_were_slow(tmp_path: Path) -> None:
    scores = Empirical({("fake_score", index): 0.5 for index in range(16)}, (0.02,))
    slow = replace(DURATIONS, nodes={**DURATIONS.nodes, "fake_score": scores})
    report = make_report(read_facts(simulated_run(tmp_path / "r", updates=12, durations=slow).folder), lambda: True)
    assert report.bound is not None
    assert report.prediction is not None
    assert report.bound.pool == "scorer"
    assert report.bound.seconds == pytest.approx(8 * 0.02, rel=1e-6)
    assert report.bound.seconds <= report.prediction.measured_s


def test_the_period_leaves_out_what_fills_the_pipeline() -> None:
    assert period(0.0, [5.0, 6.0, 7.0, 8.0], 2) == 1.0
    assert period(0.0, [5.0], 2) == 5.0
    assert period(1.0, [3.0, 5.0], 0) == 2.0


def toy() -> Graph:
    program = load(TOY)
    assert isinstance(program, Program)
    return trace(program, {})


def table(periods: dict[int, float], lag: int = 1) -> Table:
    cases = tuple(Case(at, 1, seconds, float(at), {}) for at, seconds in periods.items())
    return Table("generator", lag, 1, 20, 0.0, True, cases)


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
