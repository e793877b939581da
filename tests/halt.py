"""Stop processes, for tests of what others do meanwhile."""

import os
import signal
import subprocess
from pathlib import Path
from time import sleep
from typing import Any

LOOK_S = 0.005


def halt(child: "subprocess.Popen[Any]") -> None:
    """Stop a child of this process, and wait until it has stopped: until then, it may answer once more."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def until_it_stands(pid: int) -> None:
    """Wait until all threads of a process have stopped. It need not be a child of this one."""
    while any(_state(stat) not in "TZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        sleep(LOOK_S)


def _state(stat: Path) -> str:
    """Return the kernel's letter for a thread's state; X for a thread that is gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]  # after its name, which may contain blanks and brackets
    except (FileNotFoundError, ProcessLookupError):
        return "X"
