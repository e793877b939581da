"""What runs on a node of Ray: an actor that holds an agent. Ray is not imported: it makes an actor of the class."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from penstock.runtime.control.process import describe_exit, last_text, start

# Bytes of what an agent says last that go to the launcher.
SAID_BYTES = 2000


class AgentHolder:
    """An actor with one agent, which ends with it."""

    def run(self, ticket: bytes, environment: Mapping[str, str], folder: str, wait: float) -> tuple[int, str]:
        """Start an agent with the text of this ticket, and wait for its end: its exit status, and what it said last.
        It runs in `folder`, the launcher's, if that is here, too, so that it finds the same modules; it waits for the
        launcher for `wait` seconds."""
        if Path(folder).is_dir():
            os.chdir(folder)
        # In memory, readable by this user alone, and gone with the last process that has it, however that ends.
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
