"""The launcher: parent of a run's controller and of its local agents, and the one that leaves nothing behind.

It starts `python -m penstock.runtime.control.controller RUN_FOLDER`, which
- calls `die_with_parent()` first, and listens with `Server(Door.read(folder / "keys" / "controller.json"))`;
- says `{"kind": "listening", "endpoint": server.endpoint}` on stdout, and other JSON objects for the display, one per
  line, each flushed;
- hears lines on stdin: `stop WHY` (a checkpoint and the end, please; without WHY it was the user's wish), and
  `agent HOST REASON` (an agent died);
- exits with 0 (done), 130 (stopped) or 1 (failed, having said why in a line of `"kind": "error"`).

Then come the agents, one per host of the cluster. Every child has a session of its own, so that Ctrl-C reaches the
launcher alone: the first one asks the controller to stop, within STOP_S; the second one ends everything at once.
SIGTERM, SIGHUP and a display that cannot be written to any more ask too, but any number of them is one wish: a
terminal that closes sends several.
"""

import os
import selectors
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.endpoints import LOOPBACK, socket_file
from penstock.runtime.control.failure import Failure, FailureCode
from penstock.runtime.control.process import describe_exit, kill, read_line, start, sweep_processes, tail
from penstock.runtime.control.security import Keys
from penstock.runtime.control.signals import on_stop, unheard, while_heard
from penstock.runtime.record.errors import disk_fault
from penstock.runtime.record.folder import RunFolder, latest_checkpoint, make_folder, open_append, sweep_checkpoints
from penstock.runtime.tensor.shm import SHM, sweep

CONTROLLER = ("-m", "penstock.runtime.control.controller")
AGENT = ("-m", "penstock.runtime.control.agent")
DONE, FAILED, INTERRUPTED = 0, 1, 130
STOP_S = 4.5
"""Seconds from the first Ctrl-C to the end of everything, whether there is a checkpoint by then or not."""
LEAVE_S = 3.5
"""Seconds for agents to end after their controller has."""

LOST_S = 8.0
"""Seconds for a controller that has lost an agent to end the run."""
_TICK = 0.1
_LONGEST_LINE = 64 << 20
"""Bytes of a line that are kept before its end has come."""

Line = dict[str, Any]
Child = subprocess.Popen[bytes]


class _Controller:
    """The controller's process: lines in and lines out. `silent` once it has closed its stdout."""

    def __init__(self, process: Child) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout
        self._rest = b""
        self.silent = False
        os.set_blocking(self.stdout.fileno(), False)

    def lines(self, most: int = 1 << 18) -> list[bytes]:
        """The whole lines that it has written since the last call, up to about `most` bytes of them."""
        size = 0
        with suppress(BlockingIOError):
            while size < most:
                if not (data := os.read(self.stdout.fileno(), 1 << 16)):
                    self.silent = True
                    break
                size += len(data)
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest = b""  # no line of ours: something else writes there
        return [line for line in lines if line]

    def say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it is ending already, and is seen to have ended in a moment
            self.stdin.write(line.encode() + b"\n")
            self.stdin.flush()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


class Launcher:
    """One run's processes. `run` is a new id of letters and digits; `tell` gets every line of the controller, and the
    launcher's own: `{"kind": "error" | "note", "text": …}`, `{"kind": "external", "host": …, "join": file}`. An
    OSError that it raises is a wish to stop.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        cluster: Cluster,
        tell: Callable[[Line], None],
        *,
        environment: Mapping[str, str] | None = None,
        controller: Sequence[str] = CONTROLLER,
        agent: Sequence[str] = AGENT,
        modules: Sequence[str] = (),
    ) -> None:
        self.folder, self.run_id, self.cluster = folder.absolute(), run, cluster
        self.tell = while_heard(tell, self._wish)
        self.environment = dict(environment or {})
        self.commands, self.modules = (tuple(controller), tuple(agent)), tuple(modules)
        self.keys = Keys.make(run, cluster.endpoint(self.folder), [host.name for host in cluster.hosts])
        self.agents: dict[str, Child] = {}
        self.interrupts = 0
        self._deadline: float | None = None
        self._explained = False
        self._last: Line = {}
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def run(self) -> int:
        """Run to the end, in the main thread if Ctrl-C is to be heard; the exit status. Nothing is left behind."""
        try:
            with on_stop(self._interrupt):
                return self._run()
        finally:
            os.close(self._signal)

    def _run(self) -> int:
        held = RunFolder(self.folder)
        held.hold()
        try:
            sweep(None, (SHM, self.folder))  # of runs whose launcher could not do it
            _clear(self.folder)
            try:
                self.keys.door.write(self.folder / "keys" / "controller.json")
                make_folder(self.folder / "logs")
            except OSError as error:
                raise disk_fault(self.folder, error) from error
            controller = _Controller(self._start(self.commands[0], "controller", str(self.folder), report=True))
            try:
                self._watch(controller)
                return self._status(controller.process)
            finally:
                self._end(controller)
        finally:
            if left := _sweep(held, self.run_id, self.keys.door.endpoint):
                self.tell({"kind": "error", "text": f"still alive, and not to be killed: pids {left}"})
            held.release()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.interrupts:
            self.interrupts += 1
            os.eventfd_write(self._signal, 1)
        else:
            self._wish()

    def _wish(self) -> None:
        """Somebody wants the run to end, however often they say so."""
        if not self.interrupts:
            self.interrupts = 1
            os.eventfd_write(self._signal, 1)

    def _start(self, command: Sequence[str], name: str, argument: str, *, report: bool = False) -> Child:
        pipe = subprocess.PIPE if report else subprocess.DEVNULL
        with os.fdopen(open_append(self.folder / "logs" / f"{name}.err"), "ab") as log:
            return start(
                [*command, argument], self.run_id, environment=self.environment, stdin=pipe, stdout=pipe, stderr=log
            )

    # While the controller lives ---------------------------------------------------------------------------

    def _watch(self, controller: _Controller) -> None:
        """Until the controller has ended, or has been ended here."""
        asked, process = 0, controller.process
        pidfd = os.pidfd_open(process.pid)
        with selectors.DefaultSelector() as selector:
            for one in (controller.stdout, self._signal, pidfd):
                selector.register(one, selectors.EVENT_READ)
            while process.poll() is None:
                selector.select(_TICK)
                for line in controller.lines():
                    if self.interrupts > asked:  # before each line: to show them may take long
                        asked = self.interrupts
                        self._ask_to_stop(controller)
                    self._hear(line)
                if controller.silent and controller.stdout in selector.get_map():
                    selector.unregister(controller.stdout)
                if self.interrupts > asked:
                    asked = self.interrupts
                    self._ask_to_stop(controller)
                self._check_agents(controller)
                if self._deadline is not None and monotonic() > self._deadline:
                    kill(process)
                    process.wait()
        os.close(pidfd)
        for line in controller.lines():
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        message = read_line(line)
        if message is None:
            self.tell({"kind": "note", "level": "info", "text": line.decode(errors="replace")})
        elif message.get("kind") == "listening":
            self._start_agents(str(message["endpoint"]))
        else:
            self._explained = self._explained or message.get("kind") == "error"
            if message.get("kind") in ("stage", "status"):
                self._last |= message
            self.tell(message)

    def _start_agents(self, endpoint: str) -> None:
        for host in self.cluster.hosts:
            path = self.folder / "keys" / f"{host.name}.json"
            join = self.keys.join(host.name, endpoint, self.folder, host.address or LOOPBACK, self.modules)
            join.write(path)
            if host.agent == "local":
                self.agents[host.name] = self._start(self.commands[1], f"agent-{host.name}", str(path))
            else:
                self.tell({"kind": "external", "host": host.name, "join": str(path), "endpoint": endpoint})

    def _ask_to_stop(self, controller: _Controller) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        if self.interrupts > 1:
            self._deadline = 0.0
            return
        self._deadline = monotonic() + STOP_S
        controller.say(f"stop {unheard()}".rstrip())
        self.tell({"kind": "note", "level": "info", "text": f"stopping within {STOP_S:g} s; {_resumes(self.folder)}"})

    def _check_agents(self, controller: _Controller) -> None:
        """An agent that dies before its controller takes its ranks with it: the controller has to know."""
        for host, agent in list(self.agents.items()):
            if agent.poll() is None:
                continue
            del self.agents[host]
            if agent.returncode == 0:
                continue  # it has heard the controller's goodbye
            said = tail(self.folder / "logs" / f"agent-{host}.err").replace("\n", " | ")
            controller.say(f"agent {host} {describe_exit(agent)}" + (f": {said}" if said else ""))
            until = monotonic() + LOST_S
            self._deadline = until if self._deadline is None else min(self._deadline, until)

    # The end ----------------------------------------------------------------------------------------------

    def _status(self, controller: Child) -> int:
        """The run's exit status; a controller that did not say why it ended is reported."""
        if controller.returncode == DONE:
            return DONE
        if controller.returncode == INTERRUPTED or (self.interrupts and controller.returncode != FAILED):
            return INTERRUPTED
        if controller.returncode != FAILED or not self._explained:
            said = tail(self.folder / "logs" / "controller.err")
            how = f"the controller (pid {controller.pid}) ended: {describe_exit(controller)}{_doing(self._last)}"
            self.tell(Failure(FailureCode.CONTROLLER, f"{how}\n{said}" if said else how).line())
        return FAILED

    def _end(self, controller: _Controller) -> None:
        """Agents have heard the goodbye, or see that the controller is gone; what is left soon after is killed."""
        kill(controller.process)
        controller.process.wait()
        controller.close()
        until = monotonic() + LEAVE_S
        until = until if self._deadline is None else min(self._deadline, until)
        agents = self.agents.values()
        while any(agent.poll() is None for agent in agents) and monotonic() < until and self.interrupts < 2:
            sleep(0.01)
        for agent in agents:
            kill(agent)
            agent.wait()


def _resumes(folder: Path) -> str:
    """Where a resume begins if the update in work takes too long to be waited for."""
    saved = latest_checkpoint(RunFolder(folder))
    held = f"the last checkpoint is that of update {saved.update}" if saved else "there is no checkpoint yet"
    return f"{held}: a new one is written if the update in work ends in time"


def _doing(last: Line) -> str:
    """What a run was at when its controller was last heard."""
    if not last:
        return ", before it had begun"
    update = f", update {last['update']} of {last['updates']}" if "update" in last else ""
    pools = (f"{name} at {', '.join(pool['doing'])}" for name, pool in last.get("pools", {}).items())
    return "; ".join([f", last heard of in stage {last['stage']!r}{update}", *pools])


def _sweep(folder: RunFolder, run: str, endpoint: str) -> list[int]:
    """Remove every process, segment, socket and key of a run from this host; the pids that would not go. The folder may
    have been moved, and another one be in its place, of which nothing is removed."""
    left = sweep_processes(run)
    sweep(run, (SHM, folder.held))
    if (file := socket_file(endpoint)) is not None:
        (folder.held / file.name if file.parent == folder.path else file).unlink(missing_ok=True)
    _clear(folder.held)
    return left


def _clear(folder: Path) -> None:
    """Remove what a run keeps in its folder only while it is alive, and the cuts that it did not complete."""
    shutil.rmtree(folder / "keys", ignore_errors=True)
    (folder / "processes.json").unlink(missing_ok=True)
    RunFolder(folder).sweep()
    sweep_checkpoints(RunFolder(folder))
