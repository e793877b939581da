"""What run and resume do before and after the processes."""

import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cli import run
from penstock.runtime.cli.flags import StartFlags
from penstock.runtime.cli.launching import finish, go, summary_text
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster, ClusterError
from penstock.runtime.control.launcher import FAILED, INTERRUPTED
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import LogError, LogWriter
from penstock.runtime.record.folder import FORMAT, RunFolder, begin_checkpoint, complete_checkpoint
from penstock.runtime.tensor.checkpoint import save_state

from .conftest import SUMMARY, WALL_S, Processes

Output = pytest.CaptureFixture[str]


def test_a_run_writes_what_it_is_before_it_starts(processes: Processes, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "run"
    assert run.main(["toy", "--lag", "2", "--updates", "7", "--generators", "2", "--out", str(out), "--json"]) == 0
    (config,) = processes.configs
    assert (config.graph["broadcast"].lag, config.flags.updates) == (2, 7)
    assert [len(pool.replicas) for pool in config.plan.pools if pool.name == "generator"] == [2]
    asked = json.loads((out / "config.json").read_text())["asked"]
    assert asked["program"] == "toy"
    assert asked["command"][:3] == ["toy", "--lag", "2"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["status"], last["accuracy_before"], last["accuracy_after"]) == ("done", 0.382, 0.934)
    assert {"updates", "groups", "wall_s", "command_s"} <= last.keys()


def test_a_way_of_weights_that_the_plan_rules_out_is_refused_before_anything_is_there(
    processes: Processes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    said = r"^--transport: given cuda_ipc: trainer/0 rank 0 is on the CPU, needed a GPU; auto takes what all ranks can"
    with pytest.raises(CommandError, match=said):
        run.main(["toy", "--device", "cpu", "--transport", "cuda_ipc", "--out", str(out)])
    assert not out.exists()
    assert run.main(["toy", "--device", "cpu", "--transport", "shm", "--out", str(out)]) == 0
    assert processes.configs[0].flags.transport == "shm"


def test_a_run_folder_is_never_overwritten(processes: Processes, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run.main(["toy", "--out", out])
    with pytest.raises(RecordError, match="holds a run already"):
        run.main(["toy", "--out", out])
    assert len(processes.configs) == 1


def test_a_failed_run_says_why_and_has_a_summary(processes: Processes, tmp_path: Path, capsys: Output) -> None:
    processes.status, processes.summary = FAILED, None
    processes.lines = [{"kind": "error", "text": "generator/0 rank 0 died: killed by SIGKILL"}]
    out = tmp_path / "run"
    assert run.main(["toy", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "generator/0 rank 0 died" in said.err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "generator/0 rank 0 died: killed by SIGKILL")


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    summary = finish(folder, INTERRUPTED, [], 1.0)
    assert "penstock resume runs/x" in summary_text(summary, 10, "runs/x")
    assert "penstock resume 'my runs/x'" in summary_text(summary, 10, "my runs/x")


def test_a_summary_tells_where_a_resume_begins(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    assert finish(folder, INTERRUPTED, [], 1.0)["checkpoint"] == 0
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), CUT, {})
    folder.write_json("summary.json", SUMMARY | {"status": "stopped", "updates": 7})
    summary = finish(folder, INTERRUPTED, [], 1.0)
    assert summary["checkpoint"] == 5
    shown = summary_text(summary, 10, "runs/x")
    assert "from the last checkpoint, of update 5 (2 updates will be done again)" in shown
    assert "from the beginning" in summary_text(summary | {"checkpoint": 0}, 10, "runs/x")
    assert "from update 7" in summary_text(summary | {"checkpoint": 7}, 10, "runs/x")
    assert summary_text(summary | {"checkpoint": 0, "updates": 0}, 10, "runs/x").endswith("runs/x, from the beginning")


def test_a_controller_that_could_not_write_leaves_a_summary_of_what_it_did(
    processes: Processes, tmp_path: Path, capsys: Output
) -> None:
    out = tmp_path / "run"
    processes.status, processes.summary = FAILED, None
    processes.lines = [{"kind": "error", "text": "events.log: cannot be written: the disk is full"}]
    row = {"update": 4, "version": 5, "groups": 8, "reward_mean": 0.5}
    processes.files = {"metrics.jsonl": json.dumps({**row, "update": 3, "version": 4}) + "\n" + json.dumps(row) + "\n"}
    assert run.main(["toy", "--out", str(out), "--json"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((out / "summary.json").read_text())
    assert (last["status"], last["updates"], last["groups"], last["reward_mean"]) == ("failed", 5, 16, 0.5)
    assert last["error"] == "events.log: cannot be written: the disk is full"


def test_a_run_whose_folder_was_moved_has_its_summary_there_and_nothing_in_its_place(
    processes: Processes, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"

    def move(folder: RunFolder, cluster: Cluster, tell: Any) -> int:
        processes(folder, cluster, tell)
        complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), {"update": 5}, {})
        out.rename(moved)
        return FAILED

    monkeypatch.setattr("penstock.runtime.cli.launching.launch", move)
    assert run.main(["toy", "--out", str(out), "--json"]) == 1
    assert list(tmp_path.iterdir()) == [moved]
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary == json.loads((moved / "summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]) == ("failed", 5)
    assert f"{out}: the run folder was moved to {moved}" in summary["error"]


def test_a_summary_that_cannot_be_written_is_printed_all_the_same(
    processes: Processes, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.status, processes.summary = FAILED, None
    write = RunFolder.write_json

    def full(folder: RunFolder, name: str, value: Any) -> None:
        if name == "summary.json":
            raise RecordError("summary.json: cannot be written: the disk is full")
        write(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", full)
    assert run.main(["toy", "--out", str(tmp_path / "run"), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["status"] == "failed"
    assert "summary.json: cannot be written" in said.err


def test_a_summary_that_the_controller_outlived_takes_its_status(processes: Processes, tmp_path: Path) -> None:
    processes.status, processes.lines = FAILED, [{"kind": "error", "text": "trace.json: cannot be written"}]
    assert run.main(["toy", "--out", str(tmp_path / "run")]) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "trace.json: cannot be written")


def test_the_summary_reads_well() -> None:
    assert summary_text(SUMMARY, 60, "runs/aipo-1").splitlines() == [
        "status     done",
        "accuracy   38.2 % → 93.4 %",
        "updates    60 of 60, 1920 prompt groups",
        "time       31.2 s",
        "folder     runs/aipo-1",
    ]


def test_the_summary_counts_what_was_lost() -> None:
    lost = {"fates": {"consumed": 8, "dropped": 3, "failed": 2}, "retried": 5, "not_finite": {"loss": {}, "kl": {}}}
    shown = summary_text(SUMMARY | lost, 60, "runs/aipo-1").splitlines()
    assert "updates    60 of 60, 1920 prompt groups, 3 dropped, 2 failed, 5 firings tried again" in shown
    assert "no number  loss, kl: null in metrics.jsonl" in shown


def test_a_report_that_cannot_be_drawn_changes_nothing_of_the_run(
    processes: Processes, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that the stand-in for the processes leaves has no log; and a fault of our own is no reason either."""
    assert run.main(["toy", "--out", str(tmp_path / "one")]) == 0
    assert "report     " in capsys.readouterr().out
    assert (tmp_path / "one" / "report.html").is_file()

    def broken(folder: RunFolder) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("penstock.runtime.report.write.read_facts", broken)
    assert run.main(["toy", "--out", str(tmp_path / "two"), "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "two" / "summary.json").read_text())
    assert last["status"] == "done"


def test_faults_stop_a_run_before_it_has_a_folder(processes: Processes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(CommandError, match=r"(?s)given   -1.*1 fault"):
        run.main(["toy", "--lag", "-1", "--out", str(out)])
    with pytest.raises(CommandError, match="--generators: given 0, needed at least 1"):
        run.main(["toy", "--generators", "0", "--out", str(out)])
    with pytest.raises(ClusterError, match="cannot be read"):
        run.main(["toy", "--cluster", "/nowhere.toml", "--out", str(out)])
    assert not out.exists()


def test_a_file_of_problems_needs_a_model(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    with pytest.raises(CommandError, match="needed --model DIR") as error:
        run.main(["aipo", "--data", str(tmp_path / "d.jsonl"), "--out", str(tmp_path / "run")])
    assert error.value.status == 2


def test_a_language_model_starts_from_the_base(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "base_model", lambda data, tell: Path("/cache/base"))
    run.main(["aipo", "--out", str(tmp_path / "a")])
    run.main(["aipo", "--model", "new", "--out", str(tmp_path / "b")])
    run.main(["sft", "--out", str(tmp_path / "c")])
    assert [config.flags.model for config in processes.configs] == ["/cache/base", "", ""]


def test_a_base_that_fails_leaves_no_folder(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: str, tell: object) -> None:
        raise CommandError("the base model could not be built")

    monkeypatch.setattr(run, "base_model", fail)
    with pytest.raises(CommandError):
        run.main(["aipo", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_tensorboard_can_be_insisted_on(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install 'penstock\[track\]'"):
        run.main(["toy", "--tensorboard", "--out", str(tmp_path / "run")])


CUT = {"update": 5, "earlier": 0, "next": 0, "lost": [], "fates": {"consumed": 0}, "groups": []}


@pytest.fixture
def finished(processes: Processes, tmp_path: Path) -> RunFolder:
    """A run of five updates that is done."""
    run.main(["toy", "--updates", "5", "--out", str(tmp_path / "run")])
    folder = RunFolder.open(tmp_path / "run")
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), CUT, {})
    return folder


def test_a_finished_run_goes_on_with_more_updates(finished: RunFolder, processes: Processes) -> None:
    with pytest.raises(CommandError, match="all 5 updates are done"):
        run.resume([str(finished.path)])
    with pytest.raises(CommandError, match="given 3, but 5 are done already"):
        run.resume([str(finished.path), "--updates", "3"])
    assert run.resume([str(finished.path), "--updates", "9", "--plain"]) == 0
    assert [config.flags.updates for config in processes.configs] == [5, 9]
    assert processes.configs[0].graph == processes.configs[1].graph


def test_a_folder_of_another_user_is_not_resumed_unasked(
    finished: RunFolder, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [str(finished.path), "--updates", "9", "--plain"]
    (finished.path / "graph.json").chmod(0o666)
    assert finished.foreign() == ""  # since nobody else can enter the folder
    finished.path.chmod(0o755)
    assert "every user may change" in finished.foreign()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4321)
        before = sorted((path, path.stat().st_mtime_ns) for path in finished.path.rglob("*"))
        with pytest.raises(CommandError, match=r"belongs to user .*--trust"):
            run.resume(argv)
        for typed in ("n\n", "", "why?\n"):
            patch.setattr(sys, "stdin", Terminal(typed))
            patch.setattr(sys, "stderr", Terminal())
            with pytest.raises(CommandError, match="no yes"):
                run.resume(argv)
        assert sorted((path, path.stat().st_mtime_ns) for path in finished.path.rglob("*")) == before
        assert len(processes.configs) == 1
        patch.setattr(sys, "stdin", Terminal("yes\n"))
        assert run.resume(argv) == 0
    assert run.resume([*argv[:2], "12", "--plain", "--trust"]) == 0
    assert len(processes.configs) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_wall_time_is_that_of_all_lives(finished: RunFolder, processes: Processes) -> None:
    for number, updates in enumerate((9, 12), 2):
        assert run.resume([str(finished.path), "--updates", str(updates), "--plain"]) == 0
        assert finished.read_json("summary.json")["wall_s"] == pytest.approx(number * WALL_S)
    (finished.path / "summary.json").unlink()  # as if the last life had been killed: the log has the seconds of all
    log = LogWriter(finished.events)
    for cut in (None, 9, 12):
        log.segment(cut, {})
        log.stage({})
        log.step(2.5, b"", [])
    log.close()
    assert run.resume([str(finished.path), "--updates", "20", "--plain"]) == 0
    assert finished.read_json("summary.json")["wall_s"] == pytest.approx(3 * 2.5 + WALL_S)


def test_a_damaged_log_is_refused_before_anything_starts(finished: RunFolder, processes: Processes) -> None:
    log = LogWriter(finished.events)
    log.segment(None, {})
    log.end({"status": "done"})
    data = bytearray(finished.events.read_bytes())
    data[-20] ^= 1
    finished.events.write_bytes(data)
    before = finished.read_json("summary.json")
    with pytest.raises(LogError, match="record 1 does not follow"):
        run.resume([str(finished.path), "--updates", "9"])
    assert finished.read_json("summary.json") == before
    assert RunConfig.load(finished).flags.updates == 5
    assert len(processes.configs) == 1


def test_a_port_in_use_changes_nothing_of_the_run(finished: RunFolder, processes: Processes) -> None:
    kept = finished.read_json("config.json")
    before = finished.read_json("summary.json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        kept["asked"]["cluster"]["bind"] = bind
        finished.write_json("config.json", kept)
        with pytest.raises(CommandError, match=f"cannot listen on tcp://{bind}: the port is in use"):
            run.resume([str(finished.path), "--updates", "9"])
    assert (finished.read_json("config.json"), finished.read_json("summary.json")) == (kept, before)
    assert len(processes.configs) == 1


def test_a_checkpoint_that_no_rank_could_read_is_refused_before_anything_starts(
    finished: RunFolder, processes: Processes
) -> None:
    path = finished.checkpoints / "00000005" / "trainer-0-0.safetensors"
    save_state(path, {}, {"carried": {}, "encoded": {}, "keys": []})  # as before there were ranks
    with pytest.raises(CommandError, match=rf"{path}: given a checkpoint of format 1, needed 2: go on with"):
        run.resume([str(finished.path), "--updates", "9"])
    path.write_bytes(b"torn")
    with pytest.raises(CommandError, match=rf"{path}: not a readable state"):
        run.resume([str(finished.path), "--updates", "9"])
    save_state(path, {}, {"format": FORMAT})
    assert run.resume([str(finished.path), "--updates", "9", "--plain"]) == 0
    assert len(processes.configs) == 2


def test_checkpoints_that_lie_elsewhere_by_a_link_are_refused_before_anything_starts(
    finished: RunFolder, processes: Processes, tmp_path: Path
) -> None:
    finished.checkpoints.rename(tmp_path / "elsewhere")
    finished.checkpoints.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="checkpoints: given a symbolic link"):
        run.resume([str(finished.path), "--updates", "9"])
    assert len(processes.configs) == 1


def test_a_run_that_is_alive_is_not_resumed(finished: RunFolder) -> None:
    finished.lock()
    with pytest.raises(RecordError, match="a run is alive there"):
        run.resume([str(finished.path), "--updates", "9"])


def test_only_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such folder"):
        run.resume([str(tmp_path / "none")])


def test_a_display_is_closed_before_the_summary(processes: Processes, finished: RunFolder, capsys: Output) -> None:
    config = RunConfig.load(finished)
    assert go(finished, config, Cluster.local(), StartFlags(plain=True), 0.0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("training …") < lines.index("status     done")
