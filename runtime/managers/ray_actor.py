"""The actor on a node of Ray, which holds an agent. Ray is not imported here: it makes an actor of the class."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from penstock.runtime.control.process import describe_exit, last_text, start

# Bytes of the end of an agent's output that go to the launcher.
SAID_BYTES = 2000


class AgentHolder:
    """An actor with one agent, which ends with the actor."""

    def run(self, ticket: bytes, environment: Mapping[str, str], folder: str, wait: float) -> tuple[int, str]:
        """Start an agent with the text of this ticket, wait for its end, and return its exit status and the end of its
        output. It runs in the launcher's `folder`, if that exists here, too, so that it finds the same modules. It
        waits for the launcher for `wait` seconds."""
        if Path(folder).is_dir():
            os.chdir(folder)
        # A file in memory that only this user can read; it is gone with the last process that has it open.
        held = os.memfd_create("ticket", os.MFD_CLOEXEC)
        os.fchmod(held, 0o600)
        with os.fdopen(held, "wb") as file, TemporaryFile() as said:
            file.write(ticket)
            file.flush()
            command = ["-m", "penstock.agent", "--ticket", "/proc/self/fd/0", "--wait", f"{wait:g}"]
            agent = start(command, "", environment=environment, stdin=held, stdout=subprocess.DEVNULL, stderr=said)
            agent.wait()
            last = last_text(said, SAID_BYTES)
        return agent.returncode, f"{describe_exit(agent)}\n{last}".strip()
