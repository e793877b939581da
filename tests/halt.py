"""Processes that stand still, as a test instrument."""

import os
import signal
import subprocess
from typing import Any


def halt(child: "subprocess.Popen[Any]") -> None:
    """Stop a child of this process, and wait until it stands: on another core, it may answer once more until then."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
