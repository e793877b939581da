"""`report`, `replay` and `simulate --from` on complete folders, and on what is left of damaged ones."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.record.event_log import LogWriter, new_records, read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.what_if import Crowding, Empirical, SharedPace
from penstock.runtime.report.write import end_with_report
from penstock.runtime.schedule.simulator import Durations
from tests.runtime.report.runs import Made, simulated_run

from .conftest import Facts, Output, Patch, Refuse, Say


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("runs") / "whole", updates=6, batch=4).folder.path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def change(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def flipped(data: bytes, place: float = 0.75) -> bytes:
    at = int(len(data) * place)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def shortened(data: bytes) -> bytes:
    return data[: len(data) * 3 // 4]


def test_it_writes_the_page_into_the_folder_or_elsewhere_and_says_where(folder: Path, say: Say, tmp_path: Path) -> None:
    say("report", folder, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()
    mine = tmp_path / "authorized_keys"
    mine.write_text("mine\n")
    for name in ("report.html", f".report.html.{os.getpid()}"):
        (folder / name).symlink_to(mine)  # a planted link: the report must not be written through it
    said = say("report", folder)
    assert "bounds this run" in said
    assert str(folder / "report.html") in said
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (mine.read_text(), (folder / "report.html").is_symlink()) == ("mine\n", False)


def test_its_figures_add_up(folder: Path, facts: Facts) -> None:
    found = facts("report", folder)
    assert (found["updates"], found["status"], found["notes"]) == (6, "done", [])
    for rank in found["ranks"]:
        assert sum(rank["whole_ns"].values()) == rank["wall_ns"] == found["wall_ns"]
        assert sum(rank["training_ns"].values()) == found["training_ns"]
    assert found["model_error"] == pytest.approx(0, abs=1e-6)
    assert sum(found["lags"].values()) == 24
    assert max(map(int, found["lags"])) <= found["lag_bound"] == 1
    assert sum(found["tokens_by_version"].values()) == 6 * 512
    assert found["bound_s"] <= found["period_s"] * (1 + 1e-6)


def without_lines(kept: int) -> Callable[[bytes], bytes]:
    return lambda data: b"".join(data.splitlines(keepends=True)[:kept])


@pytest.mark.parametrize(
    ("name", "how", "told", "updates"),
    [
        ("summary.json", None, "no summary.json", {6}),
        ("metrics.jsonl", None, "no rows", {6}),
        ("events.log", None, "no events.log", {0}),
        ("events.log", lambda data: b"", "^Nothing was written into events.log: no schedule can be shown.", {0}),
        (
            "events.log",
            lambda data: data[: len(data) * 3 // 4],
            r"^The event log ends early: it has \d+ of the \d+ records that the run wrote\. Its summary says done\.$",
            set(range(1, 6)),
        ),
        ("events.log", lambda data: data[: len(data) // 40 + 4000], "", {0, 1, 2}),
        ("events.log", flipped, "damaged", set(range(1, 6))),
        ("metrics.jsonl", lambda data: data[:-20], r"damaged; .* is shown\. .*metrics.jsonl:6: given half a line", {6}),
        (
            "metrics.jsonl",
            lambda data: data.replace(b'"update": 3', b'"upd', 1),
            r"metrics.jsonl:4: given something that is not JSON",
            {6},
        ),
        ("metrics.jsonl", without_lines(4), r"no rows of 2 updates, 4 and later", {6}),
        ("metrics.jsonl", without_lines(5), r"no rows of update 5, which the event log has", {6}),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_drawn(
    name: str, how: Callable[[bytes], bytes] | None, told: str, updates: set[int], folder: Path, facts: Facts
) -> None:
    if how is None:
        (folder / name).unlink()
    else:
        change(folder / name, how)
    found = facts("report", folder)
    assert re.search(told, found["notes"][0])
    assert found["updates"] in updates
    assert all(sum(rank["whole_ns"].values()) == found["wall_ns"] for rank in found["ranks"])
    page = (folder / "report.html").read_text()
    assert name != "metrics.jsonl" or how is None or ('id="learning"' in page and len(found["notes"]) == 1)


def test_a_killed_run_is_said_to_be_killed(folder: Path, facts: Facts) -> None:
    change(folder / "events.log", shortened)
    killed = "The event log has no end: its process was killed."
    assert facts("report", folder)["notes"] != [killed]  # the summary counts the records of a run that ended
    RunFolder(folder).write_json("summary.json", {"status": "failed"})  # as the command writes it for a killed process
    assert facts("report", folder)["notes"] == [killed]


@pytest.mark.parametrize("place", ["summary.json", "the log"])
@pytest.mark.parametrize(
    ("status", "why", "told", "heading"),
    [
        ("failed", "score[1] raised ScoreError: the scorer is broken", "The run failed: ", "Why it failed"),
        ("stopped", "preempted (SIGTERM)", "The run was stopped: ", "Why it was stopped"),
    ],
)
def test_a_run_that_was_not_done_says_why(
    folder: Path, say: Say, facts: Facts, place: str, status: str, why: str, told: str, heading: str
) -> None:
    if place == "summary.json":
        RunFolder(folder).write_json("summary.json", {"status": status, "error": why})
    else:
        (folder / "summary.json").unlink()
        (folder / "events.log").unlink()
        log = LogWriter(folder / "events.log")
        log.segment(None, {"run": "abcdef012345"})
        log.end({"status": status, "error": why})
    assert say("report", folder).startswith(f"{told}{why}\n")
    assert facts("report", folder)["error"] == why
    page = (folder / "report.html").read_text()
    assert (why in page, f">{heading}<" in page) == (True, True)


def test_a_run_that_goes_on_is_said_to_and_nothing_of_it_is_missed(folder: Path, facts: Facts) -> None:
    change(folder / "events.log", shortened)
    (folder / "summary.json").unlink()
    run = RunFolder.open(folder)
    run.lock()
    try:
        found = facts("report", folder)
    finally:
        run.unlock()
    assert found["notes"] == ["The run is in progress; this is what it has written so far."]
    assert (found["status"], 0 < found["updates"] < 6) == ("running", True)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        (
            "config.json",
            lambda data: data.replace(b'"format": 1', b'"format": 2'),
            r"another format, written by penstock 0\.1\.0 .*given format 2.*newer penstock",
        ),
        (
            "config.json",
            lambda data: data.replace(b'"flags": {', b'"flags": {"telepathy": true,'),
            "telepathy.*newer penstock",
        ),
        (
            "events.log",
            lambda data: data.replace(b"penstock events 4", b"penstock events 1", 1),
            "needed an event log of format 4",
        ),
    ],
)
def test_a_folder_of_a_newer_version_is_refused(
    name: str, how: Callable[[bytes], bytes], said: str, folder: Path, refuse: Refuse
) -> None:
    change(folder / name, how)
    status, told = refuse("report", folder)
    assert (status, bool(re.search(said, told))) == (2, True), told


def test_a_page_that_cannot_be_written_names_the_flag(folder: Path, refuse: Refuse) -> None:
    assert refuse("report", folder, "--out", folder / "none" / "report.html")[1].endswith("(--out FILE)")


def test_a_stopped_run_with_a_long_log_is_not_kept_waiting(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("penstock.runtime.report.write.LARGE_LOG", 100)
    path, reason = end_with_report(RunFolder.open(folder), 10.0, stopped=True)
    assert (path, "not drawn yet" in reason) == (None, True)
    assert end_with_report(RunFolder.open(folder), 10.0, stopped=False) == (folder / "report.html", "")


def test_a_run_that_is_taken_away_draws_nothing_in_the_time_that_is_left(folder: Path) -> None:
    path, reason = end_with_report(RunFolder.open(folder), 10.0, stopped=True, in_haste=True)
    assert (path, "preempted" in reason, (folder / "report.html").exists()) == (None, True, False)


# Replay --------------------------------------------------------------------------------------------------------------


def test_a_recorded_run_replays_to_equal_commands(folder: Path, say: Say, facts: Facts) -> None:
    shown = say("replay", folder)
    assert "24 consumed" in shown
    assert "Equal: all" in shown
    found = facts("replay", folder)
    assert found["equal"]
    assert [(s["stage"], s["updates"], s["status"]) for s in found["stages"]] == [("train", 6, "done")]
    change(folder / "events.log", lambda data: data[:-5])
    (folder / "summary.json").unlink()
    assert "part 1 of the log has no end: its process was killed" in say("replay", folder)


@pytest.mark.parametrize("cut", [5, 200, 2000, 0])
def test_a_log_that_was_cut_or_edited_is_refused(folder: Path, refuse: Refuse, cut: int) -> None:
    counted = len(list(new_records(folder / "events.log")))
    change(folder / "summary.json", lambda data: json.dumps({**json.loads(data), "records": counted}).encode())
    change(folder / "events.log", lambda data: data[:-cut] if cut else flipped(data))
    needed = (
        r"given \d+ records, needed the \d+ that the run wrote: it was cut" if cut else r"record \d+ does not follow"
    )
    status, said = refuse("replay", folder)
    assert (status, bool(re.search(needed, said))) == (2, True), said


def test_a_log_of_another_schedule_is_refused_with_the_record(folder: Path, whole: Path, refuse: Refuse) -> None:
    (segment,) = read_log(RunFolder.open(whole).events)
    (stage,) = segment.stages
    (folder / "events.log").unlink()
    log = LogWriter(folder / "events.log")
    log.segment(None, {})
    log.stage({**stage.facts, "rules": {**stage.facts["rules"], "batch": 3}})
    for step in stage.steps:
        log.step(step.time, step.event, [])
    log.close()
    (folder / "summary.json").unlink()
    status, said = refuse("replay", folder)
    assert (status, bool(re.search(r"record \d+", said))) == (1, True), said


# Another lag, or other replicas, with a run's own durations -----------------------------------------------------------

CONSTANT = Durations(
    {"fake_generate": 0.05, "fake_score": 0.004, "fake_update": 0.03}, publish=0.003, wire=0.002, swap=0.001
)
Simulated = Callable[..., Any]


def made(path: Path, *, lag: int = 1, generators: int = 1, updates: int = 16, durations: Durations = CONSTANT) -> Made:
    return simulated_run(path, lag=lag, generators=generators, updates=updates, durations=durations)


@pytest.fixture
def simulated(facts: Facts) -> Simulated:
    return lambda run, *words: facts("simulate", "--from", run.folder.path, *words)


def test_with_unchanged_settings_the_period_is_the_runs_own(tmp_path: Path, simulated: Simulated) -> None:
    run = made(tmp_path / "r")
    found = simulated(run)
    assert found["unchanged"] is True
    assert found["period_s"] == pytest.approx(run.simulation.steady_s, rel=1e-6)
    assert found["measured_s"] == pytest.approx(run.simulation.steady_s, rel=1e-6)
    assert (found["updates"], found["lag"], found["generators"]) == (16, 1, 1)
    for replica, idle in run.simulation.idle.items():
        assert found["idle_s"][replica] == pytest.approx(idle, abs=1e-6)


@pytest.mark.parametrize(("lag", "generators"), [(0, 2), (2, 1), (1, 3)])
def test_another_lag_and_other_replicas_give_what_a_run_with_them_gives(
    tmp_path: Path, simulated: Simulated, lag: int, generators: int
) -> None:
    other = made(tmp_path / "other", lag=lag, generators=generators).simulation
    found = simulated(made(tmp_path / "run", generators=2), "--lag", lag, "--generators", generators)
    assert found["unchanged"] is False
    assert found["period_s"] == pytest.approx(other.steady_s, rel=1e-6)
    assert found["lags"] == {str(age): count for age, count in other.lags.items()}


@pytest.mark.parametrize(("own", "lag"), [(2, 0), (0, 2)])
def test_a_lag_at_which_so_few_updates_only_fill_the_pipeline_is_compared_by_the_mean_of_all(
    tmp_path: Path, simulated: Simulated, own: int, lag: int
) -> None:
    run, other = (made(tmp_path / str(each), lag=each, updates=6) for each in (own, lag))
    found = simulated(run, "--lag", lag)
    assert found["period_of"] == "all updates"
    assert found["period_s"] == pytest.approx(other.simulation.wall_s / 6, rel=1e-6)
    assert found["measured_s"] == pytest.approx(run.simulation.ends[-1] / 6, rel=1e-6)


def test_more_updates_and_other_durations_give_what_a_run_with_them_gives(tmp_path: Path, simulated: Simulated) -> None:
    run, longer = (made(tmp_path / str(n), updates=n) for n in (10, 40))
    found = simulated(run, "--updates", 40)
    assert (found["updates"], found["period_s"]) == (40, pytest.approx(longer.simulation.steady_s, rel=1e-6))
    slow = replace(CONSTANT, nodes={**CONSTANT.nodes, "fake_update": 0.2}, publish=0.01)
    other = made(tmp_path / "slow", updates=10, durations=slow).simulation
    found = simulated(run, "--duration", "fake_update=0.2", "publish=0.01")
    assert (found["unchanged"], found["period_s"]) == (False, pytest.approx(other.steady_s, rel=1e-6))
    assert any("fake_update=0.2" in said for said in found["assumptions"])


def test_groups_beside_each_other_slow_each_other_down_as_in_the_run(tmp_path: Path, simulated: Simulated) -> None:
    # With eight groups at once, four fifths of a group's time are due to the others.
    work = {("fake_generate", index): 0.03 + 0.0007 * (index * 7 % 13) for index in range(400)}
    shared = SharedPace({"fake_generate": Empirical(work, tuple(work.values()))}, Crowding(0.8, 8.0))
    durations = replace(CONSTANT, nodes={**CONSTANT.nodes, "fake_generate": shared})
    run, other = (made(tmp_path / str(n), generators=n, updates=20, durations=durations) for n in (1, 2))
    assert simulated(run)["period_s"] == pytest.approx(run.simulation.steady_s, rel=1e-3)
    assert other.simulation.steady_s < 0.9 * run.simulation.steady_s
    found = simulated(run, "--generators", 2)
    assert found["period_s"] == pytest.approx(other.simulation.steady_s, rel=0.02)
    assert any("slow each other down" in said for said in found["assumptions"])


def test_failures_of_the_run_are_named_since_the_simulation_repeats_none(tmp_path: Path, simulated: Simulated) -> None:
    run = made(tmp_path / "run")
    assert not any("fail" in said for said in simulated(run)["assumptions"])
    summary = json.loads((run.folder.path / "summary.json").read_text())
    run.folder.write_json("summary.json", {**summary, "fates": {**summary["fates"], "failed": 3}, "retried": 2})
    assert any("3 groups failed, 2 firings were tried again" in said for said in simulated(run)["assumptions"])


def test_the_text_says_what_was_assumed_and_files_are_written(tmp_path: Path, say: Say) -> None:
    files = {name: tmp_path / f"schedule.{name}" for name in ("svg", "html", "trace")}
    words = (word for name, file in files.items() for word in (f"--{name}", file))
    run = made(tmp_path / "run").folder.path
    said = " ".join(say("simulate", "--from", run, "--lag", 2, "--width", 90, *words).split())
    for needed in (
        "with lag 2, generators 1, versions free, order strict",
        "assumed A firing takes as long as it did in the run (updates 0 to 15)",
        "Replicas are as fast as those of the run",
    ):
        assert needed in said
    assert all(file.stat().st_size > 500 for file in files.values())


def test_an_interrupted_run_is_simulated_from_what_it_has_done(
    tmp_path: Path, simulated: Simulated, refuse: Refuse, capsys: Output
) -> None:
    run = made(tmp_path / "run")
    change(run.folder.events, lambda data: data[: len(data) // 2])
    (run.folder.path / "summary.json").unlink()
    found = simulated(run)
    assert 4 <= found["updates"] < 12
    assert found["period_s"] == pytest.approx(found["measured_s"], rel=1e-6)
    assert any("summary.json" in note for note in found["notes"])
    run.folder.events.unlink()
    status, said = refuse("simulate", "--from", run.folder.path)
    assert (status, "has finished 0 updates" in said) == (2, True)
