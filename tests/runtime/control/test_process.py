"""Children end with their parent and leave nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.control.process import (
    PARENT,
    describe_exit,
    die_with_parent,
    kill,
    processes_of,
    read_line,
    start,
    sweep_processes,
    tail,
)

from .sockets import until

pytestmark = pytest.mark.timeout(300)
SLEEP = ("-c", "import time; time.sleep(1000)")
TETHERED = "from penstock.runtime.control.process import die_with_parent; die_with_parent()\n"


def test_a_child_dies_with_its_parent() -> None:
    run = f"t{os.getpid()}a"
    parent = (
        "import sys, time\n"
        "from penstock.runtime.control.process import start\n"
        f"start(['-c', {TETHERED + 'import time; time.sleep(1000)'!r}], {run!r})\n"
        "print('started', flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        until(lambda: len(processes_of(run)) == 1)
        process.kill()
    until(lambda: not processes_of(run))


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    environment = {**os.environ, PARENT: "1000000000"}
    child = subprocess.run([sys.executable, "-c", TETHERED + "print('alive')"], env=environment, capture_output=True)
    assert (child.returncode, child.stdout) == (1, b"")


def test_a_process_that_was_not_started_here_is_not_tied_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    die_with_parent()
    reader, writer = os.pipe()
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_killing_a_child_ends_what_it_has_started() -> None:
    run = f"t{os.getpid()}b"
    child = start(["-c", "import subprocess; subprocess.run(['sleep', '1000'])"], run)
    until(lambda: len(processes_of(run)) == 2)
    kill(child)
    child.wait()
    until(lambda: not processes_of(run))
    kill(child)  # has ended: its pid may be another's


def test_the_sweep_finds_what_left_its_session_and_spares_other_runs() -> None:
    run, other = f"t{os.getpid()}c", f"t{os.getpid()}cc"
    leaver = start(["-c", "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"], run)
    spared = start(SLEEP, other)
    until(lambda: len(processes_of(other)) == 1)
    leaver.wait()
    until(lambda: len(processes_of(run)) == 1)
    assert sweep_processes(run) == []
    assert processes_of(other) == [spared.pid]
    kill(spared)
    spared.wait()


def test_an_exit_is_described_by_signal_or_status() -> None:
    died = start(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], "t1")
    failed = start(["-c", "raise SystemExit(3)"], "t1")
    died.wait()
    failed.wait()
    assert describe_exit(died) == f"killed by {signal.Signals.SIGSEGV.name}"
    assert describe_exit(failed) == "exit status 3"


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.err"
    assert tail(log) == ""
    log.write_bytes(b"first\n" + b"\xff long" * 2000 + b"\n" + b"".join(b"line %d\n" % k for k in range(20)))
    assert tail(log).splitlines() == [f"line {k}" for k in range(8, 20)]


def test_a_line_that_is_no_json_object_is_none() -> None:
    assert read_line(b'{"type": "x"}') == {"type": "x"}
    assert [read_line(line) for line in (b"hello", b"3", b"[1]", b"\xff", b"")] == [None] * 5
