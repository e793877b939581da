"""The command itself, in its own processes."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from penstock.runtime.record.metrics import read_rows

NODE = """
from penstock.graph import Rewards, Rollouts, broadcast, node, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update

@node(pool="scorer")
def looked_at(rollouts: Rollouts, rewards: Rewards) -> Rewards:
    if rollouts.ordinals[0] == 3:
        breakpoint()
    return rewards

@program
def mine(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, looked_at(rollouts, fake_score(rollouts)))
"""


PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")
TOY = "run toy --updates 100000 --generate-ms 5 --update-ms 5 --batch 4 --grace 60 --out here"
LONG = [*PENSTOCK, *TOY.split()]


def penstock(words: str, cwd: Path, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PENSTOCK, *words.split()], cwd=cwd, capture_output=True, text=True, timeout=120, **more)


@pytest.mark.parametrize("words", [[], ["--version"], ["simulat"], ["check", "toy"], ["run", "--help"]])
def test_the_package_is_the_command_as_a_module(words: list[str]) -> None:
    ways = [[sys.executable, "-m", "penstock"], [str(Path(sys.executable).with_name("penstock"))]]
    ends = [subprocess.run([*way, *words], capture_output=True, text=True, timeout=60, check=False) for way in ways]
    one, other = ((end.returncode, end.stdout, end.stderr) for end in ends)
    assert one == other
    assert one[1] + one[2]


@pytest.mark.parametrize("program", ["toy", "mine:mine", "mine.py:mine"])
def test_files_of_the_current_folder_shadow_no_other_modules(tmp_path: Path, program: str) -> None:
    for name in ("types", "random", "torch", "penstock"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "mine.py").write_text(NODE.replace("breakpoint()", "pass"))
    # Like the script `penstock`, -P leaves the current folder out of the path.
    words = f"run {program} --updates 2 --batch 2 --out here"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock", *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


RUN = "run toy --updates 2 --batch 2 --out ü漢"


@pytest.mark.parametrize(
    ("words", "encoding"), [(RUN, "latin-1"), *((words, "ascii") for words in (RUN, "run toy --help", "simulate toy"))]
)
def test_a_terminal_that_lacks_characters_ends_no_command(tmp_path: Path, words: str, encoding: str) -> None:
    done = penstock(words, tmp_path, env={**os.environ, "PYTHONIOENCODING": encoding}, errors="replace")
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


def test_the_command_line_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import importlib, sys\n"
        "from penstock.runtime.cli.main import VERBS\n"
        "for verb in VERBS.values(): importlib.import_module(f\"penstock.runtime.cli.{verb.function.split(':')[0]}\")\n"
        "import penstock.runtime.control.controller\n"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('penstock.nodes')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_run_leaves_a_folder_that_replays(tmp_path: Path) -> None:
    done = penstock("run toy --updates 4 --batch 3 --generate-ms 5 --update-ms 5 --out here --json", tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["updates"], summary["groups"]) == ("done", 4, 12)
    folder = tmp_path / "here"
    assert [row["update"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert not (folder / "processes.json").exists()
    assert "Equal: all" in penstock("replay here", tmp_path).stdout


def ended(command: "subprocess.Popen[bytes]", folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit status and summary of a run whose output is not read; none of its processes may be left."""
    status = command.wait(60)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]
    assert left == []
    return status, json.loads((folder / "summary.json").read_text())


SMALL_FILES = """
import resource, sys
if "penstock.runtime.control.controller" in sys.orig_argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    done = subprocess.run(
        f"{' '.join(PENSTOCK)} check toy {closed}",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_stops_a_run_in_order(tmp_path: Path) -> None:
    with subprocess.Popen([*LONG, "--plain"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        while not running.stdout.readline().startswith(b"update"):
            pass
        running.stdout.close()
        status, summary = ended(running, tmp_path / "here")
        assert b"Traceback" not in running.stderr.read()
    assert (status, summary["status"], summary["error"]) == (130, "stopped", "stopped, since its output was closed")
    assert 0 < summary["checkpoint"] == summary["updates"]


def test_a_run_whose_output_cannot_be_written_does_not_say_that_the_user_stopped_it(tmp_path: Path) -> None:
    """For example, the output goes to a log on a full disk."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LONG, "--plain"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 130
    assert b"stopped, since its output cannot be written" in done.stderr
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "controlling"), [((), True), (("--plain",), False)])
def test_a_closed_terminal_stops_a_run_in_order(tmp_path: Path, words: tuple[str, ...], controlling: bool) -> None:
    """A controlling terminal sends SIGHUP; of another one, the run sees the write errors."""
    master, slave = pty.openpty()

    def begin() -> None:
        os.setsid()
        if controlling:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        [*LONG, *words], cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, preexec_fn=begin
    ) as running:
        os.close(slave)
        metrics, end = tmp_path / "here" / "metrics.jsonl", monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                os.read(master, 1 << 16)
        os.close(master)
        status, summary = ended(running, tmp_path / "here")
    assert (status, summary["status"]) == (130, "stopped")
    assert 0 < summary["checkpoint"] == summary["updates"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the process", "its terminal"])
def test_an_interrupt_of_a_run_in_one_process_is_heard_once_whoever_gets_it(tmp_path: Path, to: str) -> None:
    master, slave = pty.openpty()

    def begin() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    command, pipe = [*LONG, "--in-process"], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=slave, stdout=pipe, stderr=pipe, preexec_fn=begin) as running:
        os.close(slave)
        assert running.stdout is not None
        assert running.stderr is not None
        while not running.stdout.readline().startswith(b"update"):
            pass
        if to == "the process":
            running.send_signal(signal.SIGINT)
        else:
            os.write(master, b"\x03")
        threading.Thread(target=running.stdout.read, daemon=True).start()
        status, summary = ended(running, tmp_path / "here")
        assert b"Traceback" not in running.stderr.read()
    os.close(master)
    assert (status, summary["status"]) == (130, "stopped")
    assert 0 < summary["checkpoint"] == summary["updates"]


@pytest.mark.slow
def test_a_full_disk_is_one_clear_message_and_a_summary(tmp_path: Path) -> None:
    """A limit on the controller's file sizes stands in for a full disk: writing fails in the same way."""
    (tmp_path / "sitecustomize.py").write_text(SMALL_FILES)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = penstock(f"{TOY} --plain --json", tmp_path, env=environment)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, summary["status"]) == (1, "failed")
    assert re.search(r"cannot be written: the file would be larger .* room for \d+ bytes more", summary["error"])
    assert summary["updates"] == len(read_rows(tmp_path / "here" / "metrics.jsonl")) > 0
    assert done.stderr.splitlines() == [f"penstock: {summary['error']}"]


@pytest.mark.parametrize("words", [("--help",), ("run", "toy", "--help")])
def test_output_that_is_not_read_to_its_end_is_no_success(tmp_path: Path, words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PENSTOCK, *words], cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_debugger_stops_in_a_users_node(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NODE)
    typed = "p 'ordinal', rollouts.ordinals[0] * 14\nc\n"
    done = penstock("run mine.py:mine --in-process --updates 3 --batch 2 --out here", tmp_path, input=typed)
    assert done.returncode == 0, done.stderr
    assert "('ordinal', 42)" in done.stdout
    assert "status     done" in done.stdout
