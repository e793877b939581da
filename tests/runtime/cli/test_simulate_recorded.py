"""`penstock simulate --from RUN`: a run's own durations under another lag, or on other replicas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cli import simulate
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.record.errors import RecordError
from penstock.runtime.report.what_if import Crowding, Empirical, SharedPace
from penstock.runtime.schedule.simulator import Durations
from tests.runtime.report.runs import Made, simulated_run

CONSTANT = Durations(
    {"fake_generate": 0.05, "fake_score": 0.004, "fake_update": 0.03}, publish=0.003, wire=0.002, swap=0.001
)
LANGUAGE = Path(__file__).parents[2] / "programs_for_language.py"


def constant_run(path: Path, *, lag: int, generators: int = 1, updates: int = 16) -> Made:
    return simulated_run(path, lag=lag, generators=generators, updates=updates, durations=CONSTANT)


def facts(capsys: pytest.CaptureFixture[str], made: Made, *words: str) -> dict[str, Any]:
    assert simulate.main(["--from", str(made.folder.path), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_with_unchanged_settings_the_period_is_the_runs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = constant_run(tmp_path / "r", lag=1)
    found = facts(capsys, made)
    assert found["unchanged"] is True
    assert found["period_s"] == pytest.approx(made.simulation.steady_s, rel=1e-6)
    assert found["measured_s"] == pytest.approx(made.simulation.steady_s, rel=1e-6)
    assert (found["updates"], found["lag"], found["generators"]) == (16, 1, 1)
    for replica, idle in made.simulation.idle.items():
        assert found["idle_s"][replica] == pytest.approx(idle, abs=1e-6)


@pytest.mark.parametrize(("lag", "generators"), [(0, 2), (2, 1), (1, 3)])
def test_another_lag_and_other_replicas_give_what_a_run_with_them_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lag: int, generators: int
) -> None:
    other = constant_run(tmp_path / "other", lag=lag, generators=generators).simulation
    run = constant_run(tmp_path / "run", lag=1, generators=2)
    found = facts(capsys, run, "--lag", str(lag), "--generators", str(generators))
    assert found["unchanged"] is False
    assert found["period_s"] == pytest.approx(other.steady_s, rel=1e-6)
    assert found["lags"] == {str(age): count for age, count in other.lags.items()}


def test_more_updates_than_the_run_had_go_on_at_its_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, longer = (constant_run(tmp_path / str(n), lag=1, updates=n) for n in (10, 40))
    found = facts(capsys, run, "--updates", "40")
    assert found["updates"] == 40
    assert found["period_s"] == pytest.approx(longer.simulation.steady_s, rel=1e-6)


def test_a_duration_that_is_given_stands_for_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = constant_run(tmp_path / "run", lag=1)
    slow = replace(CONSTANT, nodes={**CONSTANT.nodes, "fake_update": 0.2}, publish=0.01)
    other = simulated_run(tmp_path / "other", updates=16, durations=slow).simulation
    found = facts(capsys, run, "--duration", "fake_update=0.2", "publish=0.01")
    assert found["period_s"] == pytest.approx(other.steady_s, rel=1e-6)
    assert found["unchanged"] is False
    assert any("fake_update=0.2" in said for said in found["assumptions"])


def crowded_run(path: Path, generators: int = 1) -> Made:
    """At eight groups at once, four fifths of a group's time are due to those beside it."""
    work = {("fake_generate", index): 0.03 + 0.0007 * (index * 7 % 13) for index in range(400)}
    shared = SharedPace({"fake_generate": Empirical(work, tuple(work.values()))}, Crowding(0.8, 8.0))
    durations = replace(CONSTANT, nodes={**CONSTANT.nodes, "fake_generate": shared})
    return simulated_run(path, lag=1, generators=generators, updates=20, durations=durations)


def test_groups_beside_each_other_slow_each_other_down_as_in_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = crowded_run(tmp_path / "run"), crowded_run(tmp_path / "other", 2).simulation
    assert facts(capsys, run)["period_s"] == pytest.approx(run.simulation.steady_s, rel=1e-3)
    assert other.steady_s < 0.9 * run.simulation.steady_s
    found = facts(capsys, run, "--generators", "2")
    assert found["period_s"] == pytest.approx(other.steady_s, rel=0.02)
    assert any("slow each other down" in said for said in found["assumptions"])


def test_the_text_says_what_was_assumed_and_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = constant_run(tmp_path / "run", lag=1)
    files = {name: tmp_path / f"schedule.{name}" for name in ("svg", "html", "trace")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert simulate.main(["--from", str(run.folder.path), "--lag", "2", "--width", "90", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with lag 2, generators 1, versions free" in said
    assert "assumed A firing takes as long as it did in the run (updates 0 to 15)" in said
    assert "Replicas are as fast as those of the run" in said
    assert all(file.stat().st_size > 500 for file in files.values())


def test_an_interrupted_run_is_simulated_from_what_it_has_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = constant_run(tmp_path / "run", lag=1)
    log = made.folder.events.read_bytes()
    made.folder.events.write_bytes(log[: len(log) // 2])
    (made.folder.path / "summary.json").unlink()
    found = facts(capsys, made)
    assert 4 <= found["updates"] < 12
    assert found["period_s"] == pytest.approx(found["measured_s"], rel=1e-6)
    assert any("summary.json" in note for note in found["notes"])


def test_a_run_that_has_finished_nothing_is_refused(tmp_path: Path) -> None:
    made = constant_run(tmp_path / "run", lag=1)
    made.folder.events.unlink()
    with pytest.raises(CommandError, match="has finished 0 updates") as caught:
        simulate.main(["--from", str(made.folder.path)])
    assert caught.value.status == 2


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run"):
        simulate.main(["--from", str(tmp_path)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples", "8"], "--samples: given an option of the program beside --from"),
        (["--batch", "16"], "--batch: given a flag of programs and plans beside --from"),
        (["--cluster", "8x8xH100"], "--cluster: given a flag of programs and plans beside --from"),
        (["--lag", "-1"], "--lag: given -1, needed at least 0"),
        (["--generators", "0"], "--generators: given 0, needed at least 1"),
        (["--updates", "0"], "--updates: given 0, needed at least 1"),
        (["--duration", "other=1"], "needed one of fake_generate, fake_score, fake_update"),
        (["--lagg", "1"], "the nearest: --lag"),
    ],
)
def test_flags_that_a_run_cannot_vary_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    made = constant_run(tmp_path / "run", lag=1, updates=3)
    with pytest.raises(CommandError) as caught:
        simulate.main(["--from", str(made.folder.path), *words])
    assert said in str(caught.value)
    assert caught.value.status == 2


@pytest.mark.parametrize("words", [["toy", "--from", "RUN"], ["--from"], ["--lag", "1", "--from="]])
def test_a_program_beside_a_run_and_no_run_at_all_are_refused(words: list[str]) -> None:
    with pytest.raises(CommandError, match="--from") as caught:
        simulate.main(words)
    assert caught.value.status == 2


def test_a_lag_too_small_for_how_seldom_weights_travel_is_refused(tmp_path: Path) -> None:
    options = {"lag": 3, "every": 3}
    made = simulated_run(tmp_path / "r", program=f"{LANGUAGE}:seldom", options=options, durations=CONSTANT)
    with pytest.raises(CommandError, match="--lag 1"):
        simulate.main(["--from", str(made.folder.path), "--lag", "1"])
