"""What `run` and `resume` do before and after the processes run, and the base model that runs start from."""

import fcntl
import hashlib
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from shutil import copytree, rmtree
from threading import Thread
from time import monotonic, sleep
from types import ModuleType
from typing import Any, NoReturn, cast

import pytest

from penstock.graph import load, trace
from penstock.runtime.cli import base_model, run, starting, tracing
from penstock.runtime.cli import resume as resume_module
from penstock.runtime.cli.display import Line
from penstock.runtime.cli.flags import RunFlags
from penstock.runtime.cli.launching import finish, going_on, summary_text
from penstock.runtime.cli.planned import require_devices
from penstock.runtime.cli.run import absolute_paths
from penstock.runtime.cli.sources import own_files
from penstock.runtime.cli.tracing import CommandError, Traced, ask_child, require_inputs
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.gpus import kind_of
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.signals import DONE, FAILED, INTERRUPTED, PREEMPTED
from penstock.runtime.record import trackers
from penstock.runtime.record.checkpoints import FORMAT, begin_checkpoint, complete_checkpoint
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import LogError, LogWriter
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.tensor.checkpoint import save_state
from tests.runtime.report.runs import simulated_run

from .conftest import SUMMARY, WALL_S, Output, Patch, Processes

CUT = {"update": 5, "earlier": 0, "next": 0, "lost": [], "fates": {"consumed": 0}, "groups": []}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def summary_of(path: Path) -> Any:
    return json.loads((path / "summary.json").read_text())


def test_a_run_writes_what_it_is_before_it_starts(processes: Processes, out: Path, capsys: Output) -> None:
    words = ["--lag", "2", "--updates", "7", "--generators", "2", "--transport", "shm", "--data", "arithmetic"]
    (out.parent / "arithmetic").write_text("a file of that name is not meant")
    assert starting.run(["toy", *words, "--out", str(out), "--json"]) == 0
    (config,) = processes.configs
    assert (config.graph["broadcast"].lag, config.flags.updates, config.flags.transport) == (2, 7, "shm")
    assert config.flags.data == "arithmetic"
    assert [len(pool.replicas) for pool in config.plan.pools if pool.name == "generator"] == [2]
    asked = json.loads((out / "config.json").read_text())["asked"]
    assert (asked["program"], asked["command"][:3]) == ("toy", ["toy", "--lag", "2"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["status"], last["accuracy_before"], last["accuracy_after"]) == ("done", 0.382, 0.934)
    assert {"updates", "groups", "wall_s", "command_s"} <= last.keys()
    with pytest.raises(RecordError, match="holds a run already"):
        starting.run(["toy", "--out", str(out)])
    assert len(processes.configs) == 1


def test_a_summary_tells_where_a_resume_begins(out: Path) -> None:
    folder = RunFolder.create(out)
    summary = finish(folder, INTERRUPTED, [], 1.0)
    assert summary["checkpoint"] == 0
    assert "penstock resume 'my runs/x'" in summary_text(summary, 10, "my runs/x")
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), CUT, {})
    folder.write_json("summary.json", SUMMARY | {"status": "stopped", "updates": 7})
    summary = finish(folder, INTERRUPTED, [], 1.0)
    assert summary["checkpoint"] == 5
    again = "from the last checkpoint, of update 5 (2 updates will be done again)"
    for change, said in (
        ({}, again),
        ({"checkpoint": 0}, "from the beginning"),
        ({"checkpoint": 7}, "from update 7"),
        ({"checkpoint": 0, "updates": 0}, "penstock resume runs/x, from the beginning"),
    ):
        assert said in summary_text(summary | change, 10, "runs/x")


def test_a_summary_tells_what_helps_where_a_checkpoint_is_damaged(out: Path) -> None:
    folder = RunFolder.create(out)
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), CUT, {})
    failed = SUMMARY | {"status": "failed", "updates": 5}
    for update, ended, said in (
        (
            5,
            {"cause": "checkpoint"},
            "move runs/x/checkpoints/00000005 away, then penstock resume runs/x, from the beg",
        ),
        (6, {"cause": "checkpoint"}, "checkpoints/00000006 away, then penstock resume runs/x, from update 5"),
        (6, {"cause": "rank-raised"}, "to go on   penstock resume runs/x, from update 6"),
        (7, {"cause": "rank-raised"}, "checkpoints/00000007 away, then penstock resume runs/x, from update 6"),
    ):
        if update > 5:
            complete_checkpoint(folder, begin_checkpoint(folder, "r", update), {**CUT, "update": update}, {})
        if update == 7:
            (folder.checkpoints / "00000007" / "cut.json").write_bytes(b"")
        folder.write_json("summary.json", failed | ended)
        assert said in summary_text(finish(folder, FAILED, [], 1.0), 10, "runs/x")
        if ended["cause"] == "checkpoint":
            rmtree(folder.checkpoints / f"{update:08d}") if update == 6 else None
    assert summary_of(out)["checkpoint"] == 6


def test_the_summary_reads_well() -> None:
    assert summary_text(SUMMARY, 60, "runs/aipo-1").splitlines() == [
        "status     done",
        "accuracy   38.2 % → 93.4 %",
        "updates    60 of 60, 1920 prompt groups",
        "time       31.2 s",
        "folder     runs/aipo-1",
    ]
    for change, said in (
        ({"accuracy_after": None}, "accuracy   38.2 % → -"),
        ({"accuracy_after": None, "updates": 0}, "accuracy   38.2 %"),
        ({"accuracy_before": None, "accuracy_after": None, "accuracy": 0.5}, "accuracy   50.0 %"),
    ):
        assert said in summary_text(SUMMARY | change, 60, "runs/aipo-1").splitlines()
    lost = {"fates": {"consumed": 8, "dropped": 3, "failed": 2}, "retried": 5, "not_finite": {"loss": {}, "kl": {}}}
    shown = summary_text(SUMMARY | lost, 60, "runs/aipo-1").splitlines()
    assert "updates    60 of 60, 1920 prompt groups, 3 dropped, 2 failed, 5 firings tried again" in shown
    assert "no number  loss, kl: null in metrics.jsonl" in shown


def test_a_controller_that_could_not_write_leaves_a_summary_of_what_it_did(
    processes: Processes, out: Path, capsys: Output
) -> None:
    why = "events.log: cannot be written: the disk is full"
    processes.status, processes.summary, processes.lines = FAILED, None, [{"kind": "error", "text": why}]
    rows = [{"update": n, "version": n + 1, "groups": 8, "reward_mean": 0.5} for n in (3, 4)]
    processes.files = {"metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    assert starting.run(["toy", "--out", str(out), "--json"]) == 1
    said = capsys.readouterr()
    last = json.loads(said.out.splitlines()[-1])
    assert last == summary_of(out)
    assert (last["status"], last["updates"], last["groups"], last["reward_mean"]) == ("failed", 5, 16, 0.5)
    assert (last["error"], why in said.err) == (why, True)


def test_what_a_killed_controller_has_not_written_into_its_log_is_counted_by_its_rows(tmp_path: Path) -> None:
    folder = simulated_run(tmp_path / "r", updates=3, batch=2).folder
    lines = [json.loads(line) | {"dropped": 2, "failed": 0, "retried": 1} for line in folder.metrics.open()]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.path / "summary.json").unlink(missing_ok=True)
    found = finish(folder, FAILED, [], 1.0)
    assert (found["fates"]["dropped"], found["fates"]["failed"], found["retried"]) == (6, 0, 3)


def test_a_run_whose_folder_was_moved_has_its_summary_there_and_nothing_in_its_place(
    processes: Processes, out: Path, capsys: Output
) -> None:
    def move(folder: RunFolder) -> None:
        complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), {"update": 5}, {})
        out.rename(out.with_name("moved"))

    processes.status, processes.last = FAILED, move
    assert starting.run(["toy", "--out", str(out), "--json"]) == 1
    assert [path.name for path in out.parent.iterdir()] == ["moved"]
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary == summary_of(out.with_name("moved"))
    assert (summary["status"], summary["checkpoint"]) == ("failed", 5)
    assert f"{out}: the run folder was moved to {out.with_name('moved')}" in summary["error"]


def test_a_summary_that_cannot_be_written_is_printed_all_the_same(
    processes: Processes, out: Path, capsys: Output, monkeypatch: Patch
) -> None:
    processes.status, processes.summary = FAILED, None
    write = RunFolder.write_json

    def full(folder: RunFolder, name: str, value: Any) -> None:
        if name == "summary.json":
            raise RecordError("summary.json: cannot be written: the disk is full")
        write(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", full)
    assert starting.run(["toy", "--out", str(out), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["status"] == "failed"
    assert "summary.json: cannot be written" in said.err


def test_a_summary_that_the_controller_outlived_takes_its_status(processes: Processes, out: Path) -> None:
    processes.status, processes.lines = FAILED, [{"kind": "error", "text": "trace.json: cannot be written"}]
    assert starting.run(["toy", "--out", str(out)]) == 1
    summary = summary_of(out)
    assert (summary["status"], summary["error"]) == ("failed", "trace.json: cannot be written")


def test_a_report_that_cannot_be_drawn_changes_nothing_of_the_run(
    processes: Processes, tmp_path: Path, capsys: Output, monkeypatch: Patch
) -> None:
    assert starting.run(["toy", "--out", str(tmp_path / "one")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown.index("training …") < shown.index("status     done")  # the display is closed first
    assert any(line.startswith("report     ") for line in shown)
    assert (tmp_path / "one" / "report.html").is_file()

    def broken(folder: RunFolder) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("penstock.runtime.report.write.read_facts", broken)
    assert starting.run(["toy", "--out", str(tmp_path / "two"), "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == summary_of(tmp_path / "two")
    assert last["status"] == "done"


def test_a_signal_that_comes_before_the_launcher_is_kept_for_it(here: None, out: Path, monkeypatch: Patch) -> None:
    load = RunConfig.load

    def signalled(folder: RunFolder) -> RunConfig:
        monkeypatch.setattr(RunConfig, "load", load)
        signal.raise_signal(signal.SIGTERM)
        return load(folder)

    monkeypatch.setattr(RunConfig, "load", signalled)
    assert starting.run(["toy", "--updates", "3000", "--batch", "1", "--grace", "60", "--out", str(out)]) == PREEMPTED
    assert summary_of(out)["status"] == "stopped"


def test_a_language_model_starts_from_the_base(processes: Processes, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(run, "base_model", lambda data, tell: Path("/cache/base"))
    for name, words in (("a", ["aipo"]), ("b", ["aipo", "--model", "new"]), ("c", ["sft"])):
        starting.run([*words, "--out", str(tmp_path / name)])
    assert [config.flags.model for config in processes.configs] == ["/cache/base", "", ""]

    def fail(data: str, tell: object) -> None:
        raise CommandError("the base model could not be built")

    monkeypatch.setattr(run, "base_model", fail)
    with pytest.raises(CommandError, match="could not be built"):
        starting.run(["aipo", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


# A resume ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(processes: Processes, out: Path) -> RunFolder:
    """A finished run of five updates."""
    starting.run(["toy", "--updates", "5", "--out", str(out)])
    folder = RunFolder.open(out)
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), CUT, {})
    return folder


def resume(folder: RunFolder, *words: object) -> int:
    return resume_module.resume([str(folder.path), "--plain", *map(str, words)])


def test_a_tracker_without_its_client_is_refused_before_anything_is_written(
    processes: Processes, finished: RunFolder, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    before = finished.config.read_bytes()
    for name in trackers.NAMES:
        match = rf"(?s)^--track {name} \[missing-module\].* pip install 'penstock\[{name}\]'"
        with pytest.raises(CommandError, match=match):
            starting.run(["toy", "--out", str(tmp_path / "new"), "--track", name])
        with pytest.raises(CommandError, match=match):
            resume(finished, "--updates", 9, "--track", name)
    assert len(processes.configs) == 1
    assert not (tmp_path / "new").exists()
    assert finished.config.read_bytes() == before


def test_a_finished_run_goes_on_with_more_updates(finished: RunFolder, processes: Processes) -> None:
    for words, said in (((), "all 5 updates are done"), (("--updates", 3), "given 3, but 5 are done already")):
        with pytest.raises(CommandError, match=said):
            resume(finished, *words)
    assert resume(finished, "--updates", 9) == 0
    assert [config.flags.updates for config in processes.configs] == [5, 9]
    assert processes.configs[0].graph == processes.configs[1].graph


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_folder_of_another_user_is_not_resumed_unasked(
    finished: RunFolder, processes: Processes, monkeypatch: Patch
) -> None:
    (finished.path / "graph.json").chmod(0o666)
    assert finished.foreign() == ""  # no other user can enter the folder
    finished.path.chmod(0o755)
    assert "every user may change" in finished.foreign()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4321)
        before = sorted((path, path.stat().st_mtime_ns) for path in finished.path.rglob("*"))
        with pytest.raises(CommandError, match=r"belongs to user .*--trust"):
            resume(finished, "--updates", 9)
        patch.setattr(sys, "stderr", Terminal())
        for typed in ("n\n", "", "why?\n"):
            patch.setattr(sys, "stdin", Terminal(typed))
            with pytest.raises(CommandError, match="another answer than yes"):
                resume(finished, "--updates", 9)
        assert sorted((path, path.stat().st_mtime_ns) for path in finished.path.rglob("*")) == before
        assert len(processes.configs) == 1
        patch.setattr(sys, "stdin", Terminal("yes\n"))
        assert resume(finished, "--updates", 9) == 0
    assert resume(finished, "--updates", 12, "--trust") == 0
    assert len(processes.configs) == 3


def test_the_wall_time_is_that_of_all_lives(finished: RunFolder) -> None:
    for number, updates in enumerate((9, 12), 2):
        assert resume(finished, "--updates", updates) == 0
        assert summary_of(finished.path)["wall_s"] == pytest.approx(number * WALL_S)
    (finished.path / "summary.json").unlink()  # as if the last life was killed: the log has the seconds of all lives
    log = LogWriter(finished.events)
    for cut in (None, 9, 12):
        log.segment(cut, {})
        log.stage({})
        log.step(2.5, b"", [])
    log.close()
    assert resume(finished, "--updates", 20) == 0
    assert summary_of(finished.path)["wall_s"] == pytest.approx(3 * 2.5 + WALL_S)


def damaged_log(folder: RunFolder) -> None:
    log = LogWriter(folder.events)
    log.segment(None, {})
    log.end({"status": "done"})
    data = bytearray(folder.events.read_bytes())
    data[-20] ^= 1
    folder.events.write_bytes(data)


def cut_log(folder: RunFolder) -> None:
    """Valid frames without the last ones, which record the checkpoint."""
    log = LogWriter(folder.events)
    log.segment(None, {})
    log.close()
    complete_checkpoint(folder, begin_checkpoint(folder, "r", 5), CUT, {}, records=2)


def lost_log(folder: RunFolder) -> None:
    cut_log(folder)
    folder.events.unlink()


def log_that_a_summary_counts(folder: RunFolder) -> None:
    cut_log(folder)
    folder.write_json("summary.json", SUMMARY | {"records": 7})


def damaged_row(folder: RunFolder) -> None:
    folder.metrics.write_text('{"update": 0}\noops\n')


def part(folder: RunFolder) -> Path:
    return folder.checkpoints / "00000005" / "trainer-0-0.safetensors"


def linked(folder: RunFolder) -> None:
    folder.checkpoints.rename(folder.path.with_name("elsewhere"))
    folder.checkpoints.symlink_to(folder.path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (damaged_log, LogError, "record 1 does not follow"),
        (cut_log, LogError, r"events\.log: given 1 records, needed the 2 that the run wrote: it was cut"),
        (log_that_a_summary_counts, LogError, "given 1 records, needed the 7 that the run wrote: it was cut"),
        (lost_log, LogError, r"events\.log: cannot be read: No such file"),
        (
            damaged_row,
            RecordError,
            r"metrics\.jsonl:2: given something that is not JSON.*or the file without this line",
        ),
        (linked, RecordError, "checkpoints: given a symbolic link"),
        (RunFolder.lock, RecordError, "a run is alive there"),
        (
            lambda folder: part(folder).write_bytes(b"torn"),
            CommandError,
            "safetensors: not a readable state.*begins with update 0",
        ),
        (
            lambda folder: save_state(part(folder), {}, {"carried": {}, "encoded": {}, "keys": []}),
            CommandError,
            "given a checkpoint of format 1, needed 3: go on with",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_is_touched(
    finished: RunFolder, processes: Processes, change: Callable[[RunFolder], object], error: type[Exception], said: str
) -> None:
    change(finished)
    before = finished.read_json("summary.json")
    with pytest.raises(error, match=said):
        resume(finished, "--updates", 9)
    assert (finished.read_json("summary.json"), RunConfig.load(finished).flags.updates) == (before, 5)
    assert len(processes.configs) == 1


def test_a_checkpoint_of_this_format_goes_on_whatever_numbers_it_has(finished: RunFolder) -> None:
    save_state(part(finished), {}, {"format": FORMAT, "carried": {"best": {"mean": -inf, "last": nan}}})
    assert resume(finished, "--updates", 9) == 0


def test_an_option_that_a_resume_leaves_as_it_was_is_told_with_its_value(finished: RunFolder) -> None:
    config = RunConfig.load(finished)
    for name, value in (("lag", dict(config.graph.options)["lag"]), ("batch", config.flags.batch)):
        with pytest.raises(CommandError, match=rf"given --{name}, which is {value} in this run") as refused:
            resume(finished, f"--{name}", 3)
        assert refused.value.status == 2


def test_a_port_in_use_changes_nothing_of_the_run(finished: RunFolder, processes: Processes) -> None:
    kept, before = finished.read_json("config.json"), finished.read_json("summary.json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        kept["asked"]["cluster"]["bind"] = bind
        finished.write_json("config.json", kept)
        with pytest.raises(CommandError, match=f"cannot listen on tcp://{bind}: the port is in use"):
            resume(finished, "--updates", 9)
    assert (finished.read_json("config.json"), finished.read_json("summary.json")) == (kept, before)
    assert len(processes.configs) == 1


DATA = '{"question": "1+1?", "answer": "#### 2"}\n'
NEEDY = """
from pathlib import Path
from shutil import rmtree
from penstock.graph import Rewards, broadcast, node, program, requires
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score

def look(context):
    if not Path(context.options["shelf"]).is_dir():
        raise ValueError(f"shelf: given {context.options['shelf']}, needed a folder")

@requires(look)
def make(context):
    return FakePolicy(context)

class Shelved(FakePolicy):
    maker = f"{__file__}:make"

@node(pool="trainer", clock="update")
def step(policy: Shelved, rewards: Rewards) -> Shelved:
    return policy

@program
def needy(policy: Shelved, prompts: FakePrompts, *, shelf: Path | None = None):
    return step(policy, fake_score(fake_generate(prompts, broadcast(policy, lag=1))))
"""
ONE_GPU = """
import sys, types
card = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.1 * 2**30), major=9, minor=0)
sees_one = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: card
)
sys.modules["torch"] = types.SimpleNamespace(cuda=sees_one)
"""


@pytest.fixture
def stopped(processes: Processes, tmp_path: Path, monkeypatch: Patch) -> RunFolder:
    """A stopped run of the user's own program, given by relative paths; the current folder is now another one."""
    home = tmp_path / "home"
    for name in ("m", "shelf", "e"):
        (home / name).mkdir(parents=True)
    for name, text in (("m/config.json", "{}"), ("d.jsonl", DATA), ("e/test.jsonl", DATA), ("needy.py", NEEDY)):
        (home / name).write_text(text)
    monkeypatch.chdir(home)
    processes.status, processes.summary = INTERRUPTED, {**SUMMARY, "status": "stopped"}
    given = "--shelf shelf --data d.jsonl --eval-data e --row needy.py:row --model m --device cpu"
    assert starting.run(["needy.py:needy", *given.split(), "--out", "run"]) == INTERRUPTED
    monkeypatch.chdir(tmp_path)
    processes.status, processes.summary = DONE, SUMMARY
    return RunFolder.open(home / "run")


@pytest.mark.parametrize("data", ["arithmetic", "arithmetic:2", "calculator"])
def test_problems_that_are_made_are_no_folder_of_that_name(tmp_path: Path, monkeypatch: Patch, data: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (data, "rows"):
        (tmp_path / name).mkdir()
    flags = absolute_paths(RunFlags(data=data, eval_data="rows"))
    assert (flags.data, flags.eval_data) == (data, str(tmp_path / "rows"))


def test_paths_are_kept_absolute_so_that_a_run_goes_on_from_anywhere(stopped: RunFolder, processes: Processes) -> None:
    home, (config,) = stopped.path.parent, processes.configs
    flags = config.flags
    assert (flags.data, flags.eval_data, flags.model) == tuple(str(home / name) for name in ("d.jsonl", "e", "m"))
    assert flags.row == f"{home / 'needy.py'}:row"
    assert dict(config.graph.options) == {"shelf": str(home / "shelf")}
    digests = stopped.read_json("config.json")["asked"]["digests"]
    digest = hashlib.sha256(DATA.encode()).hexdigest()
    listed = hashlib.sha256(f"test.jsonl {digest}\n".encode()).hexdigest()
    code = hashlib.sha256(NEEDY.encode()).hexdigest()
    assert digests == {str(home / "d.jsonl"): digest, str(home / "e"): listed, str(home / "needy.py"): code}
    assert resume(stopped) == 0
    (home / "shelf").rmdir()
    (stopped.path / "summary.json").unlink()
    with pytest.raises(CommandError, match=f"shelf: given {home}/shelf, needed a folder"):
        resume(stopped)
    assert len(processes.configs) == 2


def test_a_run_goes_on_with_code_that_was_edited_and_says_so(stopped: RunFolder, capsys: Output) -> None:
    file = stopped.path.parent / "needy.py"
    capsys.readouterr()
    assert resume(stopped) == 0
    assert str(file) not in capsys.readouterr().err
    (stopped.path / "summary.json").unlink()
    file.write_text(f"{NEEDY}\n# mended")
    assert resume(stopped) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"penstock: {file} has changed")]
    resume(stopped, "--updates", 99, "--micro-tokens", 64)
    notes = [(note["level"], note["text"]) for note in stopped.read_notes()[0]]
    assert ("info", "from update 0 on: --micro-tokens 64 in place of 0") in notes
    assert [level for level, text in notes if text.startswith(f"from update 0 on: {file} has changed")] == [
        "warning"
    ] * 2


@pytest.mark.parametrize(("decay", "level"), [("cosine", "warning"), ("constant", "info")])
def test_a_schedule_that_a_resume_stretches_is_told(stopped: RunFolder, decay: Any, level: str) -> None:
    config = RunConfig.load(stopped)
    asked = stopped.read_json("config.json")["asked"]
    replace(config, flags=replace(config.flags, lr_decay=decay)).write(stopped, asked)
    resume(stopped, "--updates", 99)
    (note,) = [note for note in stopped.read_notes()[0] if "--updates 99 in place of" in note["text"]]
    assert (note["level"], "the learning rate" in note["text"]) == (level, level == "warning")


def test_a_module_that_the_program_imports_and_no_node_names_is_watched_too(
    processes: Processes, tmp_path: Path, monkeypatch: Patch, capsys: Output
) -> None:
    """For example, in a package that is installed in editable mode."""
    home, lib = tmp_path / "home", tmp_path / "lib"
    (lib / "watched_package").mkdir(parents=True)
    home.mkdir()
    files = home / "watched_helper.py", lib / "watched_package" / "__init__.py", lib / "watched_package" / "inner.py"
    files[0].write_text("from watched_package import inner\n")
    for file in files[1:]:
        file.write_text("")
    (home / "mine.py").write_text(f"import watched_helper\n{NEEDY}")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(lib)
    monkeypatch.syspath_prepend(home)
    for name in ("m", "shelf"):
        (home / name).mkdir()
    (home / "m" / "config.json").write_text("{}")
    given = "--shelf shelf --model m --device cpu --out run"
    assert starting.run(["mine.py:needy", *given.split()]) == DONE
    folder = RunFolder.open(home / "run")
    digests = folder.read_json("config.json")["asked"]["digests"]
    assert digests.keys() == {str(file) for file in (home / "mine.py", *files)}
    capsys.readouterr()
    for file in files:
        file.write_text("# mended\n" + file.read_text())
        assert resume(folder, "--updates", 99) == 0
        assert f"penstock: {file} has changed since the run began" in capsys.readouterr().err
    files[-1].unlink()
    assert resume(folder, "--updates", 99) == 0
    assert f"penstock: {files[-1]} is gone since the run began" in capsys.readouterr().err


def test_modules_that_load_or_raise_when_they_are_asked_are_not_asked(tmp_path: Path) -> None:
    class Asked(ModuleType):
        def __getattr__(self, name: str) -> NoReturn:
            raise ImportError(name)

    plain, pathlike = ModuleType("plain"), ModuleType("pathlike")
    plain.__file__, vars(pathlike)["__file__"] = str(tmp_path / "plain.py"), tmp_path / "pathlike.py"
    modules = {"asked": Asked("asked"), "blocked": cast(ModuleType, None), "plain": plain, "pathlike": pathlike}
    assert own_files(modules) == [str(tmp_path / "plain.py")]


def test_what_own_code_would_import_within_functions_is_own_code_and_is_not_imported(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Follow absolute and relative imports from file to file; skip installed and missing modules."""
    monkeypatch.syspath_prepend(tmp_path)
    texts = {
        "late_rule.py": "def rule():\n    from late_package import inner\n    import json, torch.nn, not_there.at\n",
        "late_package/__init__.py": "raise RuntimeError\n",
        "late_package/inner.py": "def call():\n    from . import last\n    from ... import out\n",
        "late_package/last.py": "not Python\n",
        "late_package/other.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rule = ModuleType("late_rule")
    rule.__file__ = str(tmp_path / "late_rule.py")
    assert own_files({"late_rule": rule}) == sorted(str(tmp_path / name) for name in [*texts][:4])
    assert not {"late_package", "late_package.inner"} & sys.modules.keys()


@pytest.mark.parametrize("content", [b"", b'{"status": "do', b'{"status": 3}'])
def test_a_run_goes_on_without_a_summary_that_was_damaged_and_says_so(
    finished: RunFolder, content: bytes, capsys: Output
) -> None:
    path = finished.path / "summary.json"
    path.write_bytes(content)
    assert resume(finished, "--updates", 9) == 0
    assert f"penstock: {path}: " in capsys.readouterr().err
    assert summary_of(finished.path)["status"] == "done"


def test_inputs_that_are_missing_or_have_changed_are_said_before_anything_is_touched(
    stopped: RunFolder, processes: Processes
) -> None:
    home = stopped.path.parent
    for name in ("d.jsonl", "e/test.jsonl"):
        (home / name).write_text(DATA.replace("2", "3"))
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file() and path.name != "lock"}
    said = r"(?s)nothing was changed.*d.jsonl: it has changed.*given.*needed \w{64}.*/e: it has changed"
    with pytest.raises(CommandError, match=said):
        resume(stopped, "--updates", 999)
    assert {path: path.read_bytes() for path in before} == before
    for name in ("d.jsonl", "needy.py", "m/config.json"):
        (home / name).unlink()
    graphs = stopped.read_json("graph.json")
    graphs["graph"]["nodes"][1]["op"] = f"{home / 'needy.py'}:own_score"
    graphs["graph"]["nodes"][2]["op"] = "their_package.scores:score"
    stopped.write_json("graph.json", graphs)
    with pytest.raises(CommandError) as error:
        resume(stopped)
    for needed in (
        f"the model {home / 'm'}: given a folder without config.json",
        f"the data {home / 'd.jsonl'}: given no file there",
        f"the program's file {home / 'needy.py'}: given no file there",
        f"the program's module their_package.scores: given a folder from which it cannot be imported, needed a resume "
        f"from {home}",
    ):
        assert needed in str(error.value)
    assert (summary_of(stopped.path)["status"], len(processes.configs)) == ("stopped", 1)


def test_a_child_looks_for_gpus_and_for_the_nodes_before_any_process_of_a_run_starts(
    stopped: RunFolder, processes: Processes, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tracing, "ask_child", ask_child)
    (config,), file = processes.configs, stopped.path.parent / "needy.py"
    on_gpu = replace(config.flags, device="cuda", model="", data="", eval_data="")
    assert require_inputs(config.graphs, on_gpu) == ()
    file.write_text(NEEDY + ONE_GPU)  # a fake torch, imported with the nodes
    (gpu,) = require_inputs(config.graphs, on_gpu)
    assert (kind_of(gpu.name, gpu.memory_gib), round(gpu.memory_gib, 1), gpu.major) == ("H100", 79.1, 9)
    # A rank on this machine needs a GPU that is here. Ranks of another machine check their own GPUs.
    host = Cluster.local(1).hosts[0]
    here = Cluster(hosts=(host,))
    plan = RunConfig.make(config.graph, None, here, on_gpu).plan
    require_devices(plan, here, "bfloat16", [gpu])
    elsewhere = Cluster(hosts=(host.model_copy(update={"agent": "external"}),), bind="127.0.0.1:0")
    require_devices(plan, elsewhere, "bfloat16", [])
    for seen, code in (([], "no-device"), ([gpu._replace(major=7)], "no-precision")):
        with pytest.raises(CommandError, match=code):
            require_devices(plan, here, "bfloat16", seen)
    file.write_text(NEEDY.replace("def step", "def stride").replace("step(", "stride("))
    with pytest.raises(CommandError, match=r"needy\.py:step'\n.*stride"):
        require_inputs(config.graphs, replace(on_gpu, device="cpu"))


# The base model ------------------------------------------------------------------------------------------------------


class Builder:
    """Stands in for the processes that train the base model; counts its calls."""

    def __init__(self) -> None:
        self.status, self.calls, self.lines = DONE, 0, list[Line]()

    def __call__(self, folder: RunFolder, cluster: Cluster, tell: Callable[[Line], None]) -> int:
        self.calls += 1
        tell({"kind": "row", "row": {"version": 7, "loss": 1.5}})
        if self.status == FAILED:
            tell({"kind": "error", "text": "trainer/0 rank 0 died"})
        if self.status == DONE:
            name = begin_checkpoint(folder, "r", 7)
            model = folder.checkpoints / name / "policy"
            model.mkdir()
            (model / "config.json").write_text("{}")
            complete_checkpoint(folder, name, {}, {})
        return self.status

    def build(self, data: str = "") -> Path:
        return base_model.base_model(data, self.lines.append)


@pytest.fixture
def builder(monkeypatch: Patch, tmp_path: Path) -> Builder:
    made, program = Builder(), load("sft")
    traced = Traced("sft", program.path, RunFlags(model="new", device="cpu", eval_groups=0), trace(program), None, ())
    monkeypatch.setattr(base_model, "launch", made)
    monkeypatch.setattr(base_model, "trace_program", lambda verb, words: traced)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return made


def cached(path: Path) -> set[str]:
    return {item.name for item in (path / "base").iterdir()}


def test_a_base_is_built_once_for_each_recipe_and_data_and_then_found(
    builder: Builder, tmp_path: Path, monkeypatch: Patch
) -> None:
    place = builder.build()
    assert (place / "config.json").is_file()
    assert builder.lines[0] == {"kind": "stage", "stage": "base"}
    assert builder.lines[1]["kind"] == "base"
    assert (builder.build(), builder.calls, cached(tmp_path)) == (place, 1, {place.name, f"{place.name}.lock"})
    other = builder.build("arithmetic:2")
    monkeypatch.setattr(base_model, "RECIPE", (*base_model.RECIPE, "--lr", "0.001"))
    assert len({place, other, builder.build()}) == 3


@pytest.mark.parametrize("source", ["programs/sft.py", "nodes/model/decoder.py", "nodes/model/causal.c"])
def test_a_base_is_built_again_once_what_computes_it_has_changed(
    builder: Builder, tmp_path: Path, monkeypatch: Patch, source: str
) -> None:
    tree = tmp_path / "tree"
    for folder in ("nodes", "programs"):
        copytree(Path(__file__).parents[3] / folder, tree / folder)
    monkeypatch.setattr(base_model, "roots", [tree])
    place = builder.build()
    with (tree / source).open("a") as file:
        file.write("\n")
    assert builder.build() != place


def test_what_a_killed_builder_has_left_is_removed_by_the_next_one_and_by_who_finds_the_base(
    builder: Builder, tmp_path: Path
) -> None:
    place = builder.build()
    for other in (place.name, "x1"):
        left = tmp_path / "base" / f"building-{other}" / "run"
        for found in (False, True):
            left.mkdir(parents=True)
            (left / "weights").touch()
            if not found:
                rmtree(place)
            assert builder.build() == place
            assert {name for name in cached(tmp_path) if not name.endswith(".lock")} == {place.name}
    left.mkdir(parents=True)
    with (tmp_path / "base" / "x1.lock").open("w") as lock:  # as a builder at work holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert builder.build() == place
    assert left.is_dir()
    assert builder.calls == 3


def test_who_waits_for_another_builder_of_the_same_base_says_so(builder: Builder, tmp_path: Path) -> None:
    place = builder.build()
    rmtree(place)
    builder.lines.clear()
    builder.calls = 0
    waiting = Thread(target=builder.build)
    with place.with_suffix(".lock").open("w") as lock:  # as a builder at work holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        until = monotonic() + WALL_S
        while not builder.lines:
            assert monotonic() < until
            sleep(0.01)
        assert (builder.lines, builder.calls) == ([{"kind": "stage", "stage": "queue"}], 0)
        other = builder.build("arithmetic:2")  # nobody is building this one
        assert (other.is_dir(), place.is_dir(), builder.calls) == (True, False, 1)
    waiting.join(WALL_S)
    assert (place.is_dir(), builder.calls) == (True, 2)


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (FAILED, CommandError, r"the base model could not be built:\ntrainer/0 rank 0 died"),
        (INTERRUPTED, KeyboardInterrupt, None),
    ],
)
def test_a_base_that_failed_or_was_stopped_leaves_nothing(
    builder: Builder, tmp_path: Path, status: int, error: type[BaseException], said: str | None
) -> None:
    builder.status = status
    with pytest.raises(error, match=said):
        builder.build()
    assert all(name.endswith(".lock") for name in cached(tmp_path))


def test_a_cache_that_cannot_be_written_says_so(builder: Builder, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(RecordError, match=r"cannot be written: .* \(PENSTOCK_CACHE=DIR\)"):
        builder.build()


# One command for a job's first start and for all others --------------------------------------------------------------


AUTO = ("toy", "--lag", "1", "--resume", "auto", "--plain")


def saved_at(folder: RunFolder, update: int) -> None:
    complete_checkpoint(folder, begin_checkpoint(folder, "r", update), CUT | {"update": update}, {})


def test_one_command_line_starts_a_run_goes_on_with_it_and_ends_well_when_all_is_done(
    processes: Processes, out: Path, capsys: Output
) -> None:
    command = [*AUTO, "--updates", "9", "--out", str(out)]
    processes.status, processes.summary = PREEMPTED, SUMMARY | {"status": "stopped"}
    processes.last = lambda folder: saved_at(folder, 5)
    assert starting.run(command) == 75
    processes.status, processes.summary = DONE, SUMMARY
    processes.last = lambda folder: saved_at(folder, 9)
    assert starting.run([*command, "--grace", "60", "--keep", "3"]) == 0
    first, second = processes.configs
    assert second == replace(first, flags=replace(first.flags, grace=60.0, keep=3))
    capsys.readouterr()
    assert starting.run(command) == 0
    assert "all 9 updates are done" in capsys.readouterr().out
    assert starting.run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary_of(out)
    assert len(processes.configs) == 2
    assert starting.run([*AUTO, "--updates", "12", "--out", str(out)]) == 0
    assert processes.configs[2].flags.updates == 12


def test_a_run_of_a_version_that_wrote_0_for_what_was_not_given_goes_on(processes: Processes, out: Path) -> None:
    command = [*AUTO, "--updates", "9", "--out", str(out)]
    processes.status, processes.last = PREEMPTED, lambda folder: saved_at(folder, 5)
    assert starting.run(command) == 75
    config, older = RunFolder.open(out).read_json("config.json"), {"lora_alpha": 0.0, "mismatch_limit": 0.0}
    config["flags"] |= older
    config["asked"]["wanted"]["options"] |= older
    RunFolder.open(out).write_json("config.json", config)
    processes.status, processes.last = DONE, bool
    assert starting.run(command) == 0
    assert processes.configs[1] == processes.configs[0]


def test_a_run_of_a_version_without_an_option_goes_on_unless_that_is_given_now(processes: Processes, out: Path) -> None:
    command = [*AUTO, "--updates", "9", "--out", str(out)]
    processes.status, processes.last = PREEMPTED, lambda folder: saved_at(folder, 5)
    assert starting.run(command) == 75
    config = RunFolder.open(out).read_json("config.json")
    for option in ("chat_template_kwargs", "first_generators", "lr_decay"):
        del config["flags"][option]
        del config["asked"]["wanted"]["options"][option]
    RunFolder.open(out).write_json("config.json", config)
    with pytest.raises(CommandError, match="--first-generators: given 1, needed 0"):
        starting.run([*command, "--first-generators", "1"])
    processes.status, processes.last = DONE, bool
    assert starting.run(command) == 0
    assert processes.configs[1] == processes.configs[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("toy", "--lag", "2"), ["--lag: given 2, needed 1"]),
        (
            ("toy", "--lag", "1", "--seed", "7", "--batch", "3"),
            ["--seed: given 7, needed 0", "--batch: given 3, needed"],
        ),
        (("sft", "--model", "new"), ["PROGRAM: given penstock.programs.sft:sft, needed penstock.programs.toy:toy"]),
    ],
    ids=["program's option", "run's options", "program"],
)
def test_a_run_of_another_command_line_is_refused_with_the_differences(
    processes: Processes, out: Path, words: tuple[str, ...], said: list[str]
) -> None:
    assert starting.run([*AUTO, "--out", str(out)]) == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
    with pytest.raises(CommandError) as refused:
        starting.run([*words, "--resume", "auto", "--out", str(out)])
    assert [text for text in said if text not in str(refused.value)] == []
    assert refused.value.status == 2
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before
    assert len(processes.configs) == 1


def test_going_on_by_itself_needs_a_folder_that_is_named_and_no_run_that_is_alive(
    processes: Processes, out: Path
) -> None:
    with pytest.raises(CommandError, match="given no --out DIR"):
        starting.run([*AUTO])
    assert starting.run([*AUTO, "--out", str(out)]) == 0
    alive = RunFolder.open(out)
    alive.lock()
    with pytest.raises(RecordError, match="a run is alive there"):
        starting.run([*AUTO, "--updates", "99", "--out", str(out)])
    alive.unlock()


def test_what_was_killed_before_it_had_begun_is_begun_anew(processes: Processes, out: Path) -> None:
    killed = RunFolder.create(out)
    killed.write_json("graph.json", {})
    killed.unlock()
    with pytest.raises(RecordError, match="holds files already"):
        starting.run(["toy", "--out", str(out)])
    assert starting.run([*AUTO, "--out", str(out)]) == 0
    (out / "config.json").unlink()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match="holds"):
        starting.run([*AUTO, "--out", str(out)])
    assert (out / "notes.txt").read_text() == "mine"


# Other hosts ---------------------------------------------------------------------------------------------------------


def hosts_file(path: Path, *names: str, cores: int = 2, pools: str = "") -> Path:
    tables = "".join(f'[[hosts]]\nname = "{name}"\ncores = {cores}\n' for name in names)
    path.write_text(tables + (f"[pools]\n{pools}\n" if pools else ""))
    return path


def hosts_of(config: RunConfig) -> dict[str, str]:
    return {replica.name: ", ".join(replica.hosts) for replica in config.plan.replicas}


@pytest.fixture
def on_two(processes: Processes, tmp_path: Path, out: Path) -> RunFolder:
    """A preempted run on hosts a and b."""
    processes.status, processes.last = PREEMPTED, lambda folder: saved_at(folder, 5)
    cluster = hosts_file(tmp_path / "two.toml", "a", "b", pools='generator = "b"')
    assert starting.run([*AUTO, "--updates", "9", "--cluster", str(cluster), "--out", str(out)]) == 75
    assert hosts_of(processes.configs[0]) == {"generator/0": "b", "scorer/0": "a", "trainer/0": "a"}
    processes.status, processes.last = DONE, bool
    return RunFolder.open(out)


@pytest.mark.parametrize("pools", ["", 'generator = "n8"'])
@pytest.mark.parametrize("how", ["resume", "auto"])
def test_hosts_of_other_names_take_the_places_of_the_former_ones(
    processes: Processes, on_two: RunFolder, tmp_path: Path, capsys: Output, pools: str, how: str
) -> None:
    cluster = hosts_file(tmp_path / "others.toml", "n7", "n8", "n9", pools=pools)
    if how == "resume":
        assert resume(on_two, "--cluster", cluster) == 0
    else:
        words = ("--updates", "9", "--cluster", str(cluster), "--out", str(on_two.path))
        assert starting.run([*AUTO, *words]) == 0
    first, second = processes.configs
    assert hosts_of(second) == {"generator/0": "n8", "scorer/0": "n7", "trainer/0": "n7"}
    assert [r.ranks[0].threads for r in first.plan.replicas] == [r.ranks[0].threads for r in second.plan.replicas]
    assert "a new plan is made" not in capsys.readouterr().out
    # The next resume does not need the file again.
    assert resume(on_two, "--updates", 99) == 0
    assert hosts_of(processes.configs[2]) == hosts_of(second)


@pytest.mark.parametrize(
    ("names", "cores", "pools", "said"),
    [
        (("n7", "n8"), 1, 'generator = "n8"', "host n7 in the place of host a: cores: given 1, needed 2"),
        (("n7",), 2, "", "given 1 hosts, needed 2 as before"),
        (("a", "b"), 2, 'trainer = "b"', "pools.generator: given a, needed b"),
    ],
    ids=["cores", "number", "pools"],
)
def test_where_other_hosts_have_another_shape_the_plan_is_made_anew_and_says_why(
    processes: Processes,
    on_two: RunFolder,
    tmp_path: Path,
    capsys: Output,
    names: tuple[str, ...],
    cores: int,
    pools: str,
    said: str,
) -> None:
    cluster = hosts_file(tmp_path / "others.toml", *names, cores=cores, pools=pools)
    assert resume(on_two, "--cluster", cluster) == 0
    assert said in capsys.readouterr().out
    assert set(hosts_of(processes.configs[1]).values()) <= set(names)


@pytest.mark.parametrize(("words", "script", "needed"), [
    (["--on", "agents", "--agents", "2"], "", "penstock resume {} --on agents --agents 2"),
    (["--on", "slurm"], "job.sh", "sbatch {}/job.sh"),
    (["--on", "slurm"], "../job.sh", "sbatch --array=run {}/job.sh"),
    (["--on", "slurm"], "", "penstock resume {} --on slurm"),
])  # fmt: skip
def test_a_run_whose_agents_have_ended_says_how_it_goes_on(
    processes: Processes, on_two: RunFolder, tmp_path: Path, words: list[str], script: str, needed: str
) -> None:
    said = json.loads(on_two.config.read_text())
    on_two.config.write_text(json.dumps(said | {"asked": said["asked"] | {"agents": words}}))
    if script:
        (on_two.path / script).write_text("")
    place = on_two.path.parent if script.startswith("..") else on_two.path
    assert going_on(on_two) == needed.format(place)
    with pytest.raises(CommandError, match=re.escape(f"needed: {needed.format(place)}")):
        resume(on_two)
    # Hosts given by a file are stored, so that the next resume does not need the file.
    cluster = hosts_file(tmp_path / "others.toml", "n7", "n8")
    assert (resume(on_two, "--cluster", cluster), resume(on_two, "--updates", 99)) == (0, 0)
