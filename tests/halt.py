"""Processes that stand still, as a test instrument."""

import os
import signal
import subprocess
from pathlib import Path
from time import sleep
from typing import Any

LOOK_S = 0.005


def halt(child: "subprocess.Popen[Any]") -> None:
    """Stop a child of this process, and wait until it stands: on another core, it may answer once more until then."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def until_it_stands(pid: int) -> None:
    """Of a process that was stopped, no child of this one perhaps: all of its threads stand."""
    while any(_state(stat) not in "TZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        sleep(LOOK_S)


def _state(stat: Path) -> str:
    """By the letter that the kernel has for it; X for a thread that has gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]  # behind its name, which may have blanks and brackets
    except (FileNotFoundError, ProcessLookupError):
        return "X"
