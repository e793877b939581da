"""Children that die with their parent, and what a child is told: in its environment and on standard input, never in
its arguments, which every user of the machine can read."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from penstock.runtime.control.wire import Keys

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Address:
    """How a peer joins the controller: where, with which token and keys, under which name and from which host."""

    endpoint: str
    token: str
    name: str
    host: str
    folder: str
    keys: Keys | None = None
    rank: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Address":
        keys = data["keys"]
        made = None if keys is None else Keys(**{**keys, "allowed": tuple(keys["allowed"])})
        return Address(**{**data, "keys": made})


def read_address() -> Address:
    """What the parent wrote on this process's standard input, on one line."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("needed an address on standard input; this process is started by `penstock`, not by hand")
    return Address.from_json(json.loads(line))


def start(
    module: str,
    arguments: Sequence[str],
    told: Mapping[str, Any] | None,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `python -m module` in a process group of its own; `told` goes to its standard input as one line."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(environment or {}), "PENSTOCK_PARENT": str(os.getpid())},
        start_new_session=True,
    )
    if told is not None:
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; whoever watches it says so
    return child


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; called first, before anything can hang."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("PENSTOCK_PARENT", os.getppid())):
        os._exit(1)  # the parent ended before the kernel was asked


def describe_exit(status: int, stderr: Path | None = None) -> str:
    """How a process ended, with the last lines of what it said."""
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    tail = ""
    if stderr is not None and stderr.exists():
        lines = stderr.read_text(errors="replace").strip().splitlines()[-12:]
        tail = "".join(f"\n    {line}" for line in lines)
    return how + tail
