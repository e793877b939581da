"""A log as a run writes it, from a simulated schedule."""

import json
from pathlib import Path

import pytest

from penstock.graph import load, trace
from penstock.runtime.cli import report
from penstock.runtime.cli.simulate import timing
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place, served
from penstock.runtime.control.messages import record_bytes
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import LogError, LogWriter
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Command, Event
from penstock.runtime.schedule.replay import ReplayError, SegmentOrigin
from penstock.runtime.schedule.simulator import simulate


def record(path: Path, *, lag: int = 1, told: int = 1) -> RunFolder:
    """A run's folder with a log of a schedule at `lag` that says it was one at `told`."""
    folder = RunFolder.create(path)
    folder.write_json("config.json", {})
    graphs = {n: trace(load("toy"), {"lag": n}) for n in (lag, told)}
    plan = served(graphs[lag], place([graphs[lag]], Cluster(hosts=(Host(name="local", cores=2),))))
    rules = Rules(batch=4, end=5)
    log = LogWriter(folder.events)
    log.segment(None, {})
    log.stage(SegmentOrigin("train", graphs[told], plan, rules).to_json())

    def observe(time: float, event: Event, commands: list[Command]) -> None:
        log.step(time, record_bytes(event), map(record_bytes, commands))

    simulate(Tables(graphs[lag], plan), rules, timing(graphs[lag], ())[0], observe=observe)
    log.end({"status": "done"})
    folder.write_json("summary.json", {"status": "done", "records": log.records})
    folder.unlock()
    return folder


def test_a_recorded_run_replays_to_equal_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "run")
    assert report.replay([str(folder.path)]) == 0
    shown = capsys.readouterr().out
    assert "20 consumed" in shown
    assert "Equal: all" in shown
    assert report.replay([str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert [(s["stage"], s["updates"], s["status"]) for s in found["stages"]] == [("train", 5, "done")]


def test_an_edited_log_is_refused_with_the_record(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    data = bytearray(folder.events.read_bytes())
    data[-200] ^= 1
    folder.events.write_bytes(data)
    with pytest.raises(LogError, match=r"record \d+ does not follow"):
        report.replay([str(folder.path)])


def test_a_log_of_another_schedule_is_refused_with_the_record(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", lag=1, told=0)
    with pytest.raises(ReplayError, match=r"record \d+"):
        report.replay([str(folder.path)])


def test_a_run_that_was_killed_is_said_to_have_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "run")
    folder.events.write_bytes(folder.events.read_bytes()[:-5])
    (folder.path / "summary.json").unlink()
    report.replay([str(folder.path)])
    assert "part 1 of the log has no end: its process was killed" in capsys.readouterr().out


@pytest.mark.parametrize("cut", [5, 200, 2000])
def test_a_log_that_was_cut_after_the_run_had_ended_is_refused(tmp_path: Path, cut: int) -> None:
    folder = record(tmp_path / "run")
    folder.events.write_bytes(folder.events.read_bytes()[:-cut])
    with pytest.raises(LogError, match=r"given \d+ records, needed the \d+ that the run wrote: it was cut"):
        report.replay([str(folder.path)])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run"):
        report.replay([str(tmp_path)])
