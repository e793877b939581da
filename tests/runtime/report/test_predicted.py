"""A run predicted from its own durations."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.summary import make_report
from penstock.runtime.report.what_if import Empirical, bound, fit, period, predict

from .runs import DURATIONS, Made, simulated_run


def test_a_run_without_a_runtime_of_its_own_is_predicted_exactly(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    prediction = predict(stage, fitted)
    assert prediction is not None
    assert prediction.error == pytest.approx(0, abs=1e-6)
    assert prediction.simulation.ends == pytest.approx(made.simulation.ends, abs=1e-6)
    real, predicted = ([(w.name, w.index) for w in f.work] for f in (stage.followed, prediction.followed))
    assert sorted(real) == sorted(predicted)


def test_durations_are_fitted_by_node_and_the_parts_of_a_sync_by_their_medians(made: Made) -> None:
    (stage,) = read_facts(made.folder).training
    fitted = fit(stage)
    assert fitted is not None
    assert fitted.medians["fake_score"] == pytest.approx(0.004, abs=1e-6)
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
