"""The launcher: parent of a run's controller and of its local agents. It cleans up at the end.

It starts `python -m penstock.runtime.control.controller RUN_FOLDER`, which
- calls `die_with_parent()` first, and listens with `Server(ServerKeys.read(folder / "keys" / "controller.json"))`;
- writes `{"kind": "listening", "endpoint": server.endpoint}` to stdout, and other JSON objects for the display, one per
  line, each flushed;
- reads lines from stdin: `stop WHY` (checkpoint and end; without WHY the user asked for it), `preempt WHY` (the same
  for a cluster manager), `agent HOST LIFE REASON` (an agent died; LIFE agents had this host before it), and
  `refused TEXT` (an agent was refused a slot, and why);
- exits with a status of `signals`; with 1 (failed) it has written the reason in a line of `"kind": "error"`.

The controller and the first local agent may have been started before the run (`early`).

Then come the agents, one per host of the cluster: children of this process, agents that the user starts with a join
file, or agents that `starter` has started and that enrol at the `desk`. Every child has a session of its own, so that
Ctrl-C reaches only the launcher. The first signal asks the controller to stop within `grace` seconds; a second Ctrl-C
or SIGTERM ends everything at once (`signals.StopRequest`). If the user asked, the launcher waits for a checkpoint that
is still being written after `grace`. If a cluster manager asked, it does not, since that would kill it. A display that
can no longer be written to counts as the user's wish to stop.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, Queue
from time import monotonic, sleep
from types import FrameType
from typing import IO, Any

from penstock.host import PrivateFolderError
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.endpoints import LOOPBACK, relay_endpoint, socket_file
from penstock.runtime.control.agents import Agents
from penstock.runtime.control.desk import Desk
from penstock.runtime.control.early import AGENT, CONTROLLER, Early
from penstock.runtime.control.failure import Failure, FailureCode
from penstock.runtime.control.messages import signal_name
from penstock.runtime.control.process import describe_exit, kill, read_line, start, sweep_processes, tail
from penstock.runtime.control.security import Keys
from penstock.runtime.control.signals import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    StopRequest,
    on_stop,
    output_fault,
    stop_if_output_closes,
)
from penstock.runtime.control.silence import AwakeClock
from penstock.runtime.record.checkpoints import newest_usable, sweep_checkpoints
from penstock.runtime.record.errors import disk_fault
from penstock.runtime.record.folder import RunFolder, make_folder, open_append
from penstock.runtime.tensor.shm import SHM, sweep

# Seconds for agents to end after their controller has ended.
LEAVE_S = 3.5

# Seconds for a controller that has lost an agent to end the run.
LOST_S = 8.0
_TICK = 0.1
# Seconds to wait for a line of a controller that has ended, if another process keeps its stdout open.
LAST_LINE_S = 1.0
# Once a stage has begun, the controller writes a line each second. Seconds without a line after which the user is told
# why; seconds for a killed controller to end.
QUIET_S, KILLED_S = 15.0, 5.0
# Kernel states of a process in which a controller writes nothing.
HELD_UP = {
    "D": "waits for a disk or a network file system",
    "T": "is stopped, by SIGSTOP or a debugger",
    "t": "is stopped by a debugger",
}
# Largest line in bytes; a longer one is read as several.
_LONGEST_LINE = 64 << 20

Line = dict[str, Any]
Child = subprocess.Popen[bytes]


def _read_lines(stdout: IO[bytes], lines: "Queue[bytes | None]") -> None:
    """Put each line into the queue, and None at the end. Runs in its own thread. A full queue blocks the writer."""
    with stdout:
        for line in iter(partial(stdout.readline, _LONGEST_LINE), b""):
            lines.put(line)
    lines.put(None)


class Launcher:
    """The processes of one run. `run` is a new id of letters and digits. `tell` gets every line of the controller, and
    the launcher's own: `{"kind": "error" | "note", "text": …}`, `{"kind": "external", "host": …, "join": file}`; an
    OSError that it raises counts as a wish to stop. `grace` is the seconds from a wish to stop to the end of
    everything, `deadline` the seconds for which a controller may be silent. `starter` starts agents that are not local,
    and they enrol at the `desk`, if there is one. `early` has processes of this run that were started before. `again`:
    a run that fails by the loss of a process is restarted automatically. `stop_request` has what signals have asked for
    so far.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        cluster: Cluster,
        tell: Callable[[Line], None],
        *,
        grace: float,
        deadline: float = inf,
        environment: Mapping[str, str] | None = None,
        controller: Sequence[str] = CONTROLLER,
        agent: Sequence[str] = AGENT,
        modules: Sequence[str] = (),
        desk: Desk | None = None,
        starter: Agents | None = None,
        early: Early | None = None,
        again: bool = False,
        stop_request: StopRequest | None = None,
    ) -> None:
        self.desk, self.starter, self.early = desk, starter, early
        self.folder, self.run_id, self.cluster = folder.absolute(), run, cluster
        self.grace, self.deadline, self.stop_request = grace, deadline, stop_request or StopRequest()
        self.tell = stop_if_output_closes(tell, self.stop_request.ask)
        self.environment = dict(environment or {})
        self.controller, self.agent, self.modules = tuple(controller), tuple(agent), tuple(modules)
        self.again = again
        self.keys = Keys.make(run, cluster.endpoint(self.folder), [host.name for host in cluster.hosts])
        self.agents: dict[str, Child] = {}
        self._deadline = inf
        self._explained = False
        self._silent = ""  # the message about a controller that is killed for its silence
        self._last: Line = {}

    def run(self) -> int:
        """Run to the end, clean up, and return the exit status. Call it in the main thread if Ctrl-C is to work."""
        held = RunFolder(self.folder)
        held.hold()
        with on_stop(self._interrupt), ExitStack() as stack:
            # In reverse order at the end: first the processes, then their leftovers, then the hold of the folder.
            stack.callback(held.release)
            stack.callback(self._sweep, held)
            sweep(None, (SHM, self.folder))  # left by runs whose launcher was killed
            _clear(self.folder)
            try:
                self.keys.server.write(self.folder / "keys" / "controller.json")
                make_folder(self.folder / "logs")
            except OSError as error:
                raise disk_fault(self.folder, error) from error
            if self.early is not None:
                stack.callback(self.early.close)
            controller = self._start(self.controller, "controller", str(self.folder), report=True)
            stack.callback(self._end, controller)
            self._watch(controller)
            return self._status(controller)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.stop_request.hear(number)

    def _start(self, command: Sequence[str], name: str, argument: str, *, report: bool = False) -> Child:
        pipe, path = subprocess.PIPE if report else subprocess.DEVNULL, self.folder / "logs" / f"{name}.err"
        with os.fdopen(open_append(path), "ab") as log:
            if self.early is not None and (child := self.early.take(command, argument, path)):
                return child
            return start(
                [*command, argument], self.run_id, environment=self.environment, stdin=pipe, stdout=pipe, stderr=log
            )

    # While the controller lives ---------------------------------------------------------------------------

    def _watch(self, controller: Child) -> None:
        """Read the controller's lines until it has ended, or has been killed here."""
        asked, ended, closed, told = False, False, False, False
        # Time in which this process was suspended, or blocked by its terminal, does not count as silence.
        clock = AwakeClock()
        heard = monotonic()
        # Bounded, so that a controller that writes faster than the terminal shows is slowed down.
        lines: Queue[bytes | None] = Queue(maxsize=1000)
        assert controller.stdout is not None
        threading.Thread(target=_read_lines, args=(controller.stdout, lines), daemon=True).start()
        while True:
            line: bytes | None = b""
            with suppress(Empty):
                line = lines.get(timeout=LAST_LINE_S if ended and not closed else _TICK)
            closed = closed or line is None
            if self.stop_request.status and not asked:  # check before each line: showing one may take long
                asked = True
                self._ask_to_stop(controller)
            if self.stop_request.at_once:
                self._deadline = 0.0
            now = clock.counted(monotonic())
            if line:
                heard, told = now, False
                self._hear(line.rstrip(b"\n"))
            elif ended:
                return
            elif now - heard > self.deadline:
                self._silent, self._deadline = self._silence(controller, self.deadline), 0.0
            elif now - heard > QUIET_S and not told and (why := self._silence(controller, QUIET_S)):
                told = True
                self.tell({"kind": "note", "level": "warning", "text": f"{why}; the run folder is {self.folder}"})
            self._check_agents(controller)
            if monotonic() > self._deadline:
                self._kill(controller, "the controller")
            ended = controller.poll() is not None

    def _silence(self, controller: Child, seconds: float) -> str:
        """The message about a controller that has been silent for `seconds`; "" if it may have nothing to write yet."""
        state = ""
        with suppress(OSError, IndexError):
            # The state follows the process name, which may contain blanks and brackets.
            state = Path(f"/proc/{controller.pid}/stat").read_text().rpartition(")")[2].split()[0]
        why = HELD_UP.get(state, "hangs, or gets no CPU time" if self._last or seconds >= self.deadline else "")
        return f"the controller (process {controller.pid}) {why}, and has not answered for {seconds:g} s" if why else ""

    def _kill(self, child: Child, who: str) -> None:
        """Kill a child, and wait for its end."""
        kill(child)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=KILLED_S)
            return
        # A process that waits for a disk cannot be killed, and its folder could not be cleaned up either.
        text = f"{who} (process {child.pid}) is killed, and ends when {self.folder} answers again"
        self.tell({"kind": "note", "level": "warning", "text": text})
        child.wait()

    def _hear(self, line: bytes) -> None:
        message = read_line(line)
        if message is None:  # such as a library's print
            self.tell({"kind": "note", "level": "info", "text": line.decode(errors="replace")})
        elif message.get("kind") == "listening":
            self._start_agents(str(message["endpoint"]))
        elif message.get("kind") == "without":  # the run goes on without a host whose agent has died
            self._deadline = self._deadline if self.stop_request.status else inf
        elif message.get("kind") == "gone":  # the same, but the controller noticed the death first
            if self.desk is not None:
                self.desk.vacate(str(message["host"]), int(str(message["life"])))
        else:
            if message.get("kind") == "writing" and self.stop_request.status == INTERRUPTED:
                self._deadline = monotonic() + float(str(message["seconds"])) + self.grace
            self._explained = self._explained or message.get("kind") == "error"
            if message.get("kind") in ("stage", "status"):
                self._last |= message
            elif isinstance(row := message.get("row"), dict):  # the next status may come only later
                self._last["update"] = row["update"] + 1
            self.tell(message)

    def _start_agents(self, endpoint: str) -> None:
        for host in self.cluster.hosts:
            path = self.folder / "keys" / f"{host.name}.json"
            address = host.address or LOOPBACK
            join = self.keys.join(
                host.name,
                endpoint,
                self.folder,
                address,
                self.modules,
                self.grace,
                self.again and self.desk is not None,
            )
            if host.agent != "local" and self.desk is not None:
                self.desk.admit(host.name, join)
                continue
            join.write(path)
            if host.agent == "local":
                self.agents[host.name] = self._start(self.agent, f"agent-{host.name}", str(path))
            else:
                self.tell({"kind": "external", "host": host.name, "join": str(path), "endpoint": endpoint})
        if self.early is not None:  # end an early agent that no host needs
            self.early.close()

    def _ask_to_stop(self, controller: Child) -> None:
        self._deadline = monotonic() + self.grace
        engine = self.stop_request.status == PREEMPTED
        word, why = (
            ("preempt", signal_name(self.stop_request.number)) if engine else ("stop", output_fault(self.stop_request))
        )
        _say(controller, f"{word} {why}".rstrip())
        saved, _ = newest_usable(RunFolder(self.folder))
        held = f"the last checkpoint is that of update {saved.update}" if saved else "there is no checkpoint yet"
        text = f"stopping within {self.grace:g} s; {held}: a new one is written if the update in work ends in time"
        self.tell({"kind": "note", "level": "info", "text": text})

    def _check_agents(self, controller: Child) -> None:
        """Tell the controller of agents that died: their ranks died with them."""
        for host, agent in list(self.agents.items()):
            if agent.poll() is None:
                continue
            del self.agents[host]
            if agent.returncode == 0:
                continue  # it got the controller's goodbye
            said = tail(self.folder / "logs" / f"agent-{host}.err").replace("\n", " | ")
            self._lost(controller, host, 0, describe_exit(agent) + (f": {said}" if said else ""))
        for host, why in self.starter.poll() if self.starter is not None else ():
            if self.desk is not None and host in {each.name for each in self.cluster.hosts}:
                if (life := self.desk.ended(host)) is not None:
                    self._lost(controller, host, life, why)
            else:
                self.tell({"kind": "note", "level": "warning", "text": f"an agent {host} ended: {why}"})
        if self.desk is None:
            return
        for host, life, why in self.desk.losses():
            self.desk.vacate(host, life)
            self._lost(controller, host, life, why)
        for text in self.desk.news():
            if text.startswith("refused "):  # the controller shows it, and keeps it for the summary
                _say(controller, " ".join(text.split()))
                continue
            self.tell({"kind": "note", "level": "info", "text": text})

    def _lost(self, controller: Child, host: str, life: int, why: str) -> None:
        """Tell the controller that the agent of a host has ended before the run."""
        _say(controller, f"agent {host} {life} {' '.join(why.split())}")
        self._deadline = min(self._deadline, monotonic() + LOST_S)

    # The end ----------------------------------------------------------------------------------------------

    def _status(self, controller: Child) -> int:
        """The run's exit status. If the controller did not say why it ended, report its end."""
        if controller.returncode in (DONE, PREEMPTED, INTERRUPTED):
            return controller.returncode
        if self.stop_request.status and controller.returncode != FAILED:
            return self.stop_request.status
        if controller.returncode != FAILED or not self._explained:
            said = tail(self.folder / "logs" / "controller.err")
            how = self._silent or f"the controller (pid {controller.pid}) ended: {describe_exit(controller)}"
            if not self._last:
                how += ", before it had begun"
            else:
                pools = (f"{name} at {', '.join(pool['doing'])}" for name, pool in self._last.get("pools", {}).items())
                update = f", update {self._last['update']} of {self._last['updates']}" if "update" in self._last else ""
                how += "; ".join([f", last seen in stage {self._last['stage']!r}{update}", *pools])
            self.tell(Failure(FailureCode.CONTROLLER, f"{how}\n{said}" if said else how).line())
        return FAILED

    def _end(self, controller: Child) -> None:
        """Wait for agents to end: they got a goodbye, or see that the controller is gone. Then kill what is left."""
        self._kill(controller, "the controller")
        assert controller.stdin is not None
        controller.stdin.close()
        clock, agents = AwakeClock(), self.agents.values()
        until = clock.counted(monotonic()) + LEAVE_S
        # After a second Ctrl-C, do not wait for goodbyes.
        while any(agent.poll() is None for agent in agents) and not self.stop_request.at_once:
            if clock.counted(monotonic()) > until or monotonic() > self._deadline:
                break
            sleep(0.01)
        for host, agent in self.agents.items():
            self._kill(agent, f"the agent of host {host}")

    def _sweep(self, folder: RunFolder) -> None:
        """Remove every process, segment, socket and key of the run from this host. If the folder was moved and another
        one is in its place, nothing of that one is removed."""
        left = sweep_processes(self.run_id)
        sweep(self.run_id, (SHM, folder.held))
        given = {host: max(1, self.desk.given(host) if self.desk else 1) for host in self.keys.hosts}
        endpoints = [self.keys.server.endpoint]
        with suppress(PrivateFolderError):  # then no agent had a socket there
            for host, lives in given.items():
                endpoints += [relay_endpoint(folder.path, host, self.run_id, life) for life in range(lives)]
        for file in filter(None, map(socket_file, endpoints)):
            (folder.held / file.name if file.parent == folder.path else file).unlink(missing_ok=True)
        _clear(folder.held)
        if left:
            self.tell({"kind": "error", "text": f"still alive, and could not be killed: pids {left}"})


def _say(controller: Child, line: str) -> None:
    assert controller.stdin is not None
    with suppress(BrokenPipeError):  # it is ending, which `_watch` sees soon
        controller.stdin.write(line.encode() + b"\n")
        controller.stdin.flush()


def _clear(folder: Path) -> None:
    """Remove the files that a run's folder has only while the run is alive, and its incomplete checkpoints."""
    shutil.rmtree(folder / "keys", ignore_errors=True)
    for left in folder.glob("agent-*.sock"):  # left by agents that were killed, perhaps before a resume
        left.unlink(missing_ok=True)
    (folder / "processes.json").unlink(missing_ok=True)
    RunFolder(folder).sweep()
    sweep_checkpoints(RunFolder(folder))
