"""What the simulator derives from a run: a prediction, other lags and numbers of generators, and the verdict."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import Program, load, trace
from penstock.graph.analysis import Bound
from penstock.runtime.cluster.placement import place
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.follow import NS, Work
from penstock.runtime.report.page import page, seconds
from penstock.runtime.report.run_history import StageHistory, read_facts
from penstock.runtime.report.summary import make_report
from penstock.runtime.report.what_if import (
    Case,
    Crowding,
    Empirical,
    Fit,
    SharedPace,
    WhatIfTable,
    bound,
    crowding,
    firings,
    fit,
    group_work,
    period,
    predict,
    verdict,
    what_if,
    with_crowding,
)
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.simulator import Durations

from .runs import DURATIONS, HOST, TOY, Made, simulated_run

SLOW = Durations({"fake_generate": 0.1, "fake_score": 0.0, "fake_update": 0.1})
GRAPH = trace(load(TOY), {})


def fitted(folder: RunFolder) -> tuple[StageHistory, Fit]:
    (stage,) = read_facts(folder).training
    found = fit(stage)
    assert found is not None
    return stage, found


def table_of(folder: RunFolder, out_of_time: Callable[[], bool] = lambda: False) -> WhatIfTable:
    table = what_if(*fitted(folder), out_of_time)
    assert table is not None
    return table


def periods(table: WhatIfTable) -> dict[int, float | None]:
    return {case.lag: case.period_s for case in table.cases if case.replicas == table.replicas}


def test_a_lag_of_one_hides_generation_behind_the_update(tmp_path: Path) -> None:
    found = periods(table_of(simulated_run(tmp_path / "r", lag=0, updates=10, durations=SLOW).folder))
    assert [found[lag] for lag in range(3)] == pytest.approx([0.2, 0.1, 0.1], rel=1e-6)


def test_the_table_holds_the_run_itself_and_every_wanted_case(made: Made) -> None:
    table = table_of(made.folder)
    assert (table.pool, table.lag, table.replicas, table.complete) == ("generator", 1, 2, True)
    assert table.case(1, 2) is not None
    assert {(c.lag, c.replicas) for c in table.cases} >= {(lag, n) for lag in range(5) for n in (1, 2, 3, 4)}


def test_where_time_runs_out_the_run_itself_comes_first(made: Made) -> None:
    calls = iter([False, True])
    table = table_of(made.folder, lambda: next(calls, True))
    assert [(c.lag, c.replicas) for c in table.cases] == [(1, 2)]
    assert not table.complete


def test_a_lag_too_small_for_how_seldom_weights_travel_has_no_period(tmp_path: Path) -> None:
    program = f"{Path(__file__).parents[2] / 'programs_for_language.py'}:seldom"
    made = simulated_run(tmp_path / "r", program=program, options={"lag": 3, "every": 3}, durations=SLOW)
    assert {lag for lag, period in periods(table_of(made.folder)).items() if period is None} == {0, 1}


def firing(index: int, start: int, end: int) -> Work:
    return Work("generator/0", "generate", index, start, end, "group", 0)


def test_a_firing_that_was_done_again_took_as_long_as_the_last_time() -> None:
    """A group starts again when its replica is lost: the time between the attempts belongs to no firing."""
    first = [firing(0, 0, 10), replace(firing(0, 1, 12), rank=1), replace(firing(0, 20, 30), segment=1)]
    again = [firing(0, 1000, 1040), replace(firing(0, 1001, 1050), rank=1)]
    assert firings(first) == {("generate", 0): pytest.approx(22 / NS)}
    assert firings([*first, *again]) == {("generate", 0): pytest.approx(50 / NS)}


def test_an_attempt_that_was_done_again_crowds_others_and_is_no_part_of_what_a_firing_takes(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    done = group_work(stage, "generator")
    crowd = Crowding(0.5, 1.0)
    lost = replace(done[-1], start=done[-1].end + 10**12, end=done[-1].end + 2 * 10**12)
    seconds = []
    for work in (stage.followed.work, [*stage.followed.work, replace(lost, index=done[0].index)]):
        again = replace(stage, followed=replace(stage.followed, work=work))
        shared = with_crowding(again, fitted.durations, "generator", crowd).nodes["fake_generate"]
        assert isinstance(shared, SharedPace)
        seconds.append(shared.work["fake_generate"]("fake_generate", done[0].index))
    assert seconds[0] < 500
    assert seconds[1] == pytest.approx(1000)


def test_what_a_group_owes_to_those_beside_it_is_fitted() -> None:
    """One, two or four groups at once, each taking 100 plus 50 for each other group."""
    work: list[Work] = []
    now = 0
    for beside in (1, 2, 4) * 8:
        took = 50 + 50 * beside
        work += [firing(len(work) + i, now, now + took) for i in range(beside)]
        now += took + 10
    mean = sum(n * n for n in (1, 2, 4)) / 7
    assert crowding(work).share == pytest.approx(50 * mean / (50 + 50 * mean), abs=0.01)
    assert Crowding(1.0, 2.0).pace(0) == Crowding(1.0, 2.0).pace(1) == 2.0  # no work is done between two firings


def test_a_firing_that_paused_lasted_as_long_as_its_segments() -> None:
    pieces = [replace(firing(3, start, end), segment=i) for i, (start, end) in enumerate([(0, 40), (90, 100)])]
    assert firings([*pieces, firing(4, 0, 30)]) == {("generate", 3): 50e-9, ("generate", 4): 30e-9}


def test_a_replica_without_work_has_a_pace_also_where_all_of_a_groups_time_is_due_to_others() -> None:
    """As between two batches of a run whose firings take time in proportion to the number of concurrent groups."""
    made = crowding([firing(64 * n + i, n * 1000, n * 1000 + 10 * n) for n in range(1, 9) for i in range(n)])
    assert made.share == 1
    assert made.pace(0) == made.pace(1) > made.pace(2)


def test_nothing_is_fitted_where_the_number_at_once_never_changes() -> None:
    assert crowding([firing(i, i * 100, i * 100 + 100) for i in range(40)]).share == 0
    assert crowding([firing(0, 0, 100)]).share == 0


def test_a_run_without_a_runtime_of_its_own_is_predicted_exactly(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    prediction = predict(stage)
    assert prediction is not None
    assert prediction.error == pytest.approx(0, abs=1e-6)
    ends = [(end - stage.begin) / NS for _, end in sorted(prediction.followed.ends.items())]
    assert ends == pytest.approx(made.simulation.ends, abs=1e-6)
    real, predicted = ([(w.name, w.index) for w in f.work] for f in (stage.followed, prediction.followed))
    assert sorted(real) == sorted(predicted)


def test_durations_are_fitted_by_node_and_the_parts_of_a_sync_by_their_medians(made: Made) -> None:
    _, found = fitted(made.folder)
    parts = (found.durations.publish, found.durations.wire, found.durations.swap)
    assert parts == pytest.approx((0.003, 0.002, 0.001), abs=1e-6)
    assert found.means["broadcast"] == pytest.approx(0.006, abs=1e-6)


def test_firings_that_a_run_did_not_do_draw_from_those_that_it_did() -> None:
    known = Empirical({("n", 0): 1.0, ("n", 1): 2.0}, (1.0, 2.0))
    assert (known("n", 0), known("n", 1)) == (1.0, 2.0)
    drawn = {known("n", index) for index in range(2, 40)}
    assert drawn == {1.0, 2.0}


def test_the_bound_counts_the_snapshots_as_work_of_the_trainer(tmp_path: Path) -> None:
    slow = replace(DURATIONS, nodes={**DURATIONS.nodes, "fake_update": 0.2}, publish=0.05)
    report = make_report(read_facts(simulated_run(tmp_path / "r", durations=slow).folder), lambda: True)
    assert report.bound is not None
    assert report.bound.pool == "trainer"
    assert report.bound.seconds == pytest.approx(0.25, abs=1e-6)


def test_the_bound_counts_no_snapshot_that_nobody_reads() -> None:
    """Of two broadcasts of the policy, one is read by a node that fires at every third update."""
    found = load(f"{Path(__file__).parents[2] / 'programs_for_language.py'}:clocks")
    assert isinstance(found, Program)
    graph = trace(found, {"look": 3})
    means = {node.name: 0.1 if node.name == "fake_update" else 0.0 for node in graph.nodes}
    limit = bound(graph, place([graph], HOST), means, 0.06, Rules(8, 6))
    assert limit.pool == "trainer"
    assert limit.seconds == pytest.approx(0.1 + 0.06 + 0.06 / 3)


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


def table(periods: dict[int, float], lag: int = 1, crowding: float = 0.0) -> WhatIfTable:
    cases = tuple(Case(at, 1, seconds, float(at), {}) for at, seconds in periods.items())
    return WhatIfTable("generator", lag, 1, 20, crowding, True, cases)


CYCLE = Bound(0.9, ("policy", "broadcast", "fake_generate", "fake_score", "fake_update"), 2)


@pytest.mark.parametrize(
    ("bound", "error", "periods", "busy", "said"),
    [
        (Bound(0.95, pool="generator"), -0.06, {0: 2.0, 1: 1.04, 2: 1.0, 3: 1.0}, {},
         "Generation bounds this run; lag 2 would gain up to 4 %; prediction error 6 %."),
        (CYCLE, None, {}, {},
         "The cycle fake_generate → fake_score → fake_update bounds this run, 2 updates at a time."),
        (Bound(0.3, pool="trainer"), None, {0: 1.0, 1: 1.0}, {"trainer": 0.3, "scorer": 0.5},
         "No pool and no cycle alone bounds this run, the busiest of them pool scorer (50 %); lag 0 would do as well."),
        (None, None, {}, {}, "No update could be followed, so nothing can be said of what bounds this run."),
    ],
)  # fmt: skip
def test_the_verdict_says_what_bounds_what_a_lag_would_gain_and_how_far_the_prediction_is_off(
    bound: Bound | None, error: float | None, periods: dict[int, float], busy: dict[str, float], said: str
) -> None:
    """A bound far below the period does not explain it."""
    assert verdict(GRAPH, bound, 1.0, error, table(periods) if periods else None, busy) == said


def test_what_a_lag_would_gain_is_a_limit_where_the_run_does_not_tell_how_groups_slow_each_other_down() -> None:
    bound, periods = Bound(0.95, pool="generator"), {0: 2.0, 1: 1.0, 2: 0.5}
    said = [verdict(GRAPH, bound, 1.0, None, table(periods, lag, crowding), {})
            for lag, crowding in ((1, 0.0), (1, 0.4), (2, 0.0))]  # fmt: skip
    assert ["up to" in each for each in said] == [True, False, False]


def test_what_a_pool_bounds_gains_no_more_by_another_lag_than_the_bound_leaves() -> None:
    """The table may be of first updates that took less. The generators' own bound may change with them."""
    faster = {0: 2.0, 1: 1.0, 2: 0.9}
    for limit, crowded, said in (
        (Bound(0.995, pool="scorer"), 0.4, "another lag would gain nothing"),
        (Bound(0.96, pool="scorer"), 0.4, "lag 2 would gain 4 %"),
        (Bound(0.995, pool="generator"), 0.4, "lag 2 would gain 11 %"),
        (Bound(0.96, pool="generator"), 0.0, "lag 2 would gain up to 4 %"),
        (replace(CYCLE, seconds=0.995), 0.4, "lag 2 would gain 11 %"),
    ):
        assert said in verdict(GRAPH, limit, 1.0, None, table(faster, 1, crowded), {})
    sizes = WhatIfTable("generator", 1, 1, 20, 0.0, True, (Case(1, 1, 1.0), Case(1, 2, 0.5)))
    for pool in ("generator", "scorer"):
        found = verdict(GRAPH, Bound(0.998, pool=pool), 1.0, None, sizes, {})
        assert ("2 generators would gain 100 %" in found) == (pool == "generator")


@pytest.mark.parametrize("later", [0.02, 0.03])
def test_cases_below_the_bound_of_the_whole_run_are_told_on_the_page(tmp_path: Path, later: float) -> None:
    """Of a run whose later groups took longer than those that are simulated."""
    scores = Empirical({("fake_score", index): 0.02 for index in range(40 * 8)}, (later,))
    slow = replace(DURATIONS, nodes={**DURATIONS.nodes, "fake_score": scores})
    report = make_report(read_facts(simulated_run(tmp_path / "r", updates=90, durations=slow).folder), lambda: False)
    assert report.bound is not None
    assert report.bound.pool == "scorer"
    assert report.table is not None
    best = min(case.period_s for case in report.table.cases if case.period_s)
    _, _, shown = page(report).partition('id="what-if"')
    assert (f"below {seconds(report.bound.seconds)}" in shown) == (later > 0.02) == (best < 0.98 * report.bound.seconds)


def test_the_page_gives_reasons_for_a_shorter_prediction_only_where_it_is_shorter(made: Made) -> None:
    report = make_report(read_facts(made.folder), lambda: True)
    assert report.prediction is not None
    for factor in (0.9, 1.1):
        prediction = replace(report.prediction, predicted_s=factor * report.prediction.compared_s)
        assert ("slows other work down" in page(replace(report, prediction=prediction))) == (factor < 1)
