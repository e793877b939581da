"""One agent per host: starts the ranks that the controller asks for, and reports their ends. No rank outlives it.

The launcher starts `python -m penstock.runtime.control.agent JOIN_FILE`; on another host it is `penstock agent`. With
`--early SOCKET MODULE…` it is started before the run (see `early`), and so is the child that forks ranks.

A cluster manager that takes the host away sends SIGTERM or SIGUSR1, and ends everything some seconds later. The agent
tells the controller (`Leaving`); the ranks live on until the run has ended or the grace period is over. A second
SIGTERM, Ctrl-C or a closed terminal ends the agent and its ranks at once.

A child of the agent, `python -m penstock.runtime.control.worker` (`process.serve_forks`), forks the ranks. A pool with
an interpreter of its own has a child that runs in that interpreter. Each rank has a session of its own, stdout and
stderr in `logs/<pool>-<replica>-<rank>.out` and `.err`, and in its environment
    PENSTOCK_JOIN      the file to connect with: `Join.read(Path(os.environ["PENSTOCK_JOIN"]))`
    PENSTOCK_ENDPOINT  where to connect: the controller's Unix socket or, where the controller is reached over a
                       network, a socket of the agent, which forwards messages in both directions (`relay`)
    PENSTOCK_FOLDER    the run folder on this host
    PENSTOCK_REPLICA, PENSTOCK_RANK, PENSTOCK_RUN, PENSTOCK_PARENT
    PENSTOCK_LIFE      how often the replica has been lost before
    OMP_NUM_THREADS, MKL_NUM_THREADS: the rank's threads
    GOMP_SPINCOUNT     how long a thread spins before it sleeps (`process.short_spins`)
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import monotonic
from types import FrameType

from penstock.graph.machine import memory_kills, usable_memory_gib
from penstock.host import PrivateFolderError
from penstock.runtime.control.early import EARLY, awaited
from penstock.runtime.control.listener import WireError
from penstock.runtime.control.messages import (
    AgentReady,
    Delivery,
    End,
    Exited,
    GivenUp,
    Goodbye,
    Heartbeat,
    Launch,
    Leaving,
    Message,
    Note,
    Waits,
    rank_peer,
    signal_name,
)
from penstock.runtime.control.process import (
    PACKET_BYTES,
    RUN,
    borrowed,
    die_with_parent,
    huge_pages,
    keep_newest,
    kill,
    short_spins,
    start,
    tail,
    taken,
)
from penstock.runtime.control.relay import Relay
from penstock.runtime.control.rendezvous import INTERVAL, agent_interval
from penstock.runtime.control.security import Join
from penstock.runtime.control.signals import PREEMPTED, StopRequest, on_stop
from penstock.runtime.control.silence import AwakeClock
from penstock.runtime.control.sockets import SILENCE, Client
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.folder import make_folder, open_append
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.tensor.shm import SHM, sweep

# Seconds for the kernel to end killed processes.
LAST_S = 10.0
# A rank's log that exceeds this many bytes loses its older half: a node may print without end. Seconds between checks.
LOG_BYTES, LOG_S = 64 << 20, 1.0
# Libraries that read these at their import would otherwise start threads in the process that forks ranks.
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


WORKER_MODULE = "penstock.runtime.control.worker"
WORKER = ("-m", WORKER_MODULE)
# Seconds for ranks to end by themselves after a goodbye.
LEAVE_S = 3.0


@dataclass
class ForkServer:
    """A child that forks ranks, the socket to it, and the names of its ranks that have not ended. `memory` is the
    in-memory file that the stderr of an early child goes to before there is a log."""

    control: socket.socket
    child: "subprocess.Popen[bytes]"
    ranks: set[str] = field(default_factory=set)
    memory: int | None = None

    @classmethod
    def begin(
        cls, command: Sequence[str], run: str, log: Path | None, python: str = "", asks: int | None = None
    ) -> "ForkServer":
        """Start the child. Without a `log` it does not know its run folder yet. It takes over the socket `asks` from
        this process. Raises OSError for an interpreter that cannot be started."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Room for the orders of some hundred ranks: the child reads none before it has imported torch.
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        stderr = os.memfd_create("ranks") if log is None else open_append(log)
        try:
            with theirs:
                child = start(
                    command,
                    run,
                    python=python,
                    environment=ALONE | huge_pages() | short_spins(),
                    stdin=theirs.fileno(),
                    stderr=stderr,
                    passed=() if asks is None else (asks,),
                )
        except OSError:
            control.close()
            os.close(stderr)
            raise
        finally:
            if asks is not None:
                os.close(asks)
        if log is None:
            return cls(control, child, memory=stderr)
        os.close(stderr)
        return cls(control, child)

    def close(self) -> None:
        self.control.close()
        if self.memory is not None:
            os.close(self.memory)


class Agent:
    """The ranks of one host. Children of this process fork them; a rank ends when its child ends.

    `worker` is the program of such a child (see `serve_forks`). `early` is a child that was started before the run.
    """

    def __init__(
        self,
        join: Join,
        join_file: Path,
        worker: Sequence[str] = WORKER,
        early: ForkServer | None = None,
    ) -> None:
        self._join, self._join_file = join, join_file
        # A Unix socket breaks only when the controller is gone; a connection between hosts may come back.
        local = join.endpoint.startswith("ipc://")
        self._silence = 1.0 if local else SILENCE
        self._client = Client(join, "agent", join.host)
        self._relay = None if local else Relay(join, agent_interval(len(join.hosts)))
        if self._relay is not None:
            self._client.watch(self._relay.socket)
        self._wish, self._until = StopRequest(), inf
        self._logs = make_folder(Path(join.folder) / "logs")
        self._log = self._logs / f"ranks-{join.host}.err"
        self._stderr: dict[str, Path] = {}  # by the name of each rank that has not ended
        self._kills = memory_kills()
        self._untold = ""  # why a message could not be sent to the controller
        # True if the run resumes by itself and needs this host again.
        self.again = False
        # By interpreter; "" is this process's. Its imports begin before the first rank is asked for.
        if early is None or early.child.poll() is not None:  # the new child will end for the same reason, and log it
            early = ForkServer.begin(worker, join.run, self._log)
        self._forks = {"": self._opened(early)}
        self._worker = tuple(worker)

    def _opened(self, fork_server: ForkServer) -> ForkServer:
        """Tell a child that forks ranks about the run, and listen to it from now on."""
        log = "" if fork_server.memory is None else str(self._log)
        with suppress(ConnectionError):  # `_tell_ended` finds that the child has ended
            fork_server.control.send(json.dumps([self._join.folder, self._join.modules, log]).encode())
        # `_hear` reads until nothing is left, and must not delay the next heartbeat.
        fork_server.control.setblocking(False)
        self._client.watch(fork_server.control.fileno())
        return fork_server

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal. Raises _Ended if it ends the agent at once."""
        self._wish.hear(number)
        if self._wish.at_once or self._wish.status != PREEMPTED:
            # An exception rather than a flag: it also interrupts a wait for messages.
            raise _Ended(number)
        self._client.wake()

    def run(self) -> str:
        """Serve until the controller says goodbye, and return ""; if it cannot be reached any more, return why. At the
        end, no rank is left, and no shared-memory segment of a run whose processes on this host have all ended.
        """
        folders = (SHM, Path(self._join.folder))
        sweep(None, folders)  # left by agents that were killed
        try:
            self._say(AgentReady(self._join.host, os.getpid(), self._join.life))
            beat = look = 0.0
            while True:
                for message in self._carry(INTERVAL / 2):
                    if isinstance(message, Goodbye):
                        self.again = message.lost and self._join.again
                        self._await_ends(LEAVE_S)  # ranks get goodbyes of their own
                        return ""
                    if isinstance(message, Waits):
                        other = f"another agent of host {self._join.host}, process {message.pid}, counts as alive"
                        print(visible(f"penstock agent: {other}; waiting until it is given up"), file=sys.stderr)
                    if isinstance(message, GivenUp):
                        needed = "needed another agent on this host, if the run is to use it again"
                        return f"the run goes on without this agent: {message.reason}; {needed}"
                    if isinstance(message, Launch):
                        self._launch(message)
                    if isinstance(message, End):
                        self._kill(f"{message.replica}.{message.rank}")
                self._tell_ended()
                now = monotonic()
                if self._wish.status and self._until == inf:
                    self._until = now + self._join.grace
                    self._say(Leaving(self._join.host, self._join.grace))
                if now >= self._until:
                    raise _Ended(self._wish.number)
                if now >= beat and self._relay is None:
                    beat = now + INTERVAL
                    self._say(Heartbeat())
                if now >= look:
                    look = now + LOG_S
                    for stderr in self._stderr.values():
                        _bound_logs(stderr)
                if gone := self._client.gone(self._silence) or self._untold:
                    return gone
        except _Ended as ended:
            # Report this before the ranks are killed: it is the reason of their deaths.
            by = f"ended by {signal_name(ended.number)}"
            self._client.send(Note("error", f"the agent of host {self._join.host} was {by}, and with it its ranks"))
            raise
        finally:
            for fork_server in self._forks.values():
                fork_server.control.shutdown(socket.SHUT_WR)  # the child then kills its remaining ranks
            self._await_ends(LAST_S)
            for fork_server in self._forks.values():
                kill(fork_server.child)
                with suppress(subprocess.TimeoutExpired):  # blocked on a disk; it ends when the disk answers
                    fork_server.child.wait(timeout=LAST_S)
            self._tell_ended()
            for fork_server in self._forks.values():
                fork_server.close()
            sweep(None, folders)
            self._client.close()
            if self._relay is not None:
                self._relay.close()

    def _say(self, message: Message) -> None:
        """Send a message to the controller. If it cannot be sent, the agent ends: a rank's answer may be lost."""
        if not self._client.send(message) and not self._untold:
            self._untold = f"the controller at {self._join.endpoint} reads no messages (the send queue is full)"

    def _carry(self, seconds: float) -> Iterator[Message]:
        """Yield the controller's messages to this agent, after a wait of at most `seconds`. Forward the messages
        between the controller and the ranks."""
        if self._relay is None:
            yield from self._client.receive(seconds)
            return
        for message in self._client.receive(min(seconds, self._relay.wait(monotonic()))):
            if isinstance(message, Delivery):
                self._relay.deliver(message)
            else:
                yield message
        for said in self._relay.take(monotonic()):
            self._say(said)

    def _launch(self, launch: Launch) -> None:
        """Start a rank. Its output goes to files with its name."""
        name = f"{launch.replica}.{launch.rank}"
        # In a file name, a slash would mean a folder, and the dot a suffix.
        stem = "-".join(name.replace("/", "-").rsplit(".", 1))
        stdout, stderr = self._logs / f"{stem}.out", self._logs / f"{stem}.err"
        environment = {
            "PENSTOCK_JOIN": str(self._join_file),
            "PENSTOCK_ENDPOINT": self._join.endpoint if self._relay is None else self._relay.endpoint,
            "PENSTOCK_REPLICA": launch.replica,
            "PENSTOCK_RANK": str(launch.rank),
            "PENSTOCK_LIFE": str(launch.life),
            "PENSTOCK_START": str(launch.start),
            "OMP_NUM_THREADS": str(launch.threads),
            "MKL_NUM_THREADS": str(launch.threads),
        }
        assert name not in self._stderr, name
        self._stderr[name] = stderr
        if self._relay is not None:
            self._relay.begin(rank_peer(launch.replica, launch.rank))
        before = self._forks.get(launch.python)
        if before is None or before.child.poll() is not None:  # it was killed, with all ranks that it had forked
            try:
                if before is not None:
                    self._hear(before)
                    self._forks.pop(launch.python).close()
                worker = borrowed(WORKER_MODULE) if launch.python else self._worker
                begun = ForkServer.begin(worker, self._join.run, self._log, launch.python)
                self._forks[launch.python] = self._opened(begun)
            except OSError as error:
                what, given = f"pools.{pool_of(launch.replica)}.python", f"{launch.python!r} ({error.strerror})"
                with os.fdopen(open_append(stderr), "w") as file:
                    needed = "needed an interpreter that can be started there"
                    file.write(f"{what}: given {given} on host {self._join.host}, {needed}\n")
                self._exited(name, 0, 1)
                return
        fork_server = self._forks[launch.python]
        fork_server.ranks.add(name)
        with suppress(ConnectionError):  # `_tell_ended` finds that the child has ended
            fork_server.control.send(json.dumps([name, environment, str(stdout), str(stderr)]).encode())

    def _kill(self, name: str) -> None:
        """Kill a rank, if it has not ended. Its end is reported like any other."""
        for fork_server in self._forks.values():
            if name in fork_server.ranks:
                with suppress(ConnectionError):
                    fork_server.control.send(json.dumps([name]).encode())

    def _await_ends(self, seconds: float) -> None:
        """Report ranks that end, until all have ended or `seconds` are over. Time in which the whole machine was
        suspended does not count."""
        clock = AwakeClock()
        until = clock.counted(monotonic()) + seconds
        self._tell_ended()
        while self._stderr and clock.counted(monotonic()) < until:
            deque(self._carry(0.05), maxlen=0)
            self._tell_ended()

    def _tell_ended(self) -> None:
        """Tell the controller which ranks have ended since the last call, and which will never begin."""
        for fork_server in self._forks.values():
            self._hear(fork_server)

    def _hear(self, fork_server: ForkServer) -> None:
        """Report the ends that a child has told of; once the child has ended, also those of its remaining ranks."""
        packet = b"more"
        while packet:
            try:
                packet = fork_server.control.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:  # the child ended with unread orders; the packets that it sent are read next
                continue
            if packet:
                name, pid, status = json.loads(packet)
                fork_server.ranks.discard(name)
                self._exited(name, pid, status)
        self._client.unwatch(fork_server.control.fileno())  # a closed socket stays readable and would wake every wait
        if fork_server.ranks:
            status = fork_server.child.wait(timeout=LAST_S)
            if fork_server.memory is not None:  # output that it did not copy into the log before it ended
                with os.fdopen(open_append(self._log), "ab") as log:
                    log.write(taken(fork_server.memory))
            for name in sorted(fork_server.ranks):
                self._exited(name, fork_server.child.pid, status, fork_server=True)
            fork_server.ranks.clear()

    def _exited(self, name: str, pid: int, status: int, fork_server: bool = False) -> None:
        """Report a rank's end. `status` is negative for a signal. `forks`: pid and status are those of the child that
        forked the rank."""
        replica, _, rank = name.rpartition(".")
        stderr = self._stderr.pop(name)
        _bound_logs(stderr)  # the last time for this rank
        last_lines = tail(stderr) or tail(self._log)
        # Nothing in a process causes its SIGKILL: what it has printed is worth a look only if it raised before.
        if status == -signal.SIGKILL and 'File "' not in last_lines:
            last_lines = ""
        # In a container this also counts kills of other processes.
        if status == -signal.SIGKILL and (kills := memory_kills() - self._kills) > 0:
            given = f"given {usable_memory_gib():.0f} GiB of memory on host {self._join.host}"
            ended = f"its OOM killer has ended {kills} process{'es' * (kills > 1)} since the run began"
            last_lines = (
                f"{given}, needed more: {ended} (--recompute layer, fewer --slots, --lora)\n{last_lines}".strip()
            )
        if self._relay is not None:
            self._relay.end(rank_peer(replica, int(rank)))
        self._say(Exited(replica, int(rank), pid, max(0, status), max(0, -status), last_lines, fork_server))


def _bound_logs(stderr: Path) -> None:
    """Keep the newest part of the logs of the rank with this stderr."""
    for log in (stderr, stderr.with_suffix(".out")):
        keep_newest(log, LOG_BYTES)


def serve(
    join_file: Path, folder: Path | None = None, grace: float | None = None, early: ForkServer | None = None
) -> int:
    """Be the agent of this host until the run is over, and return the exit status. `folder` is the run folder here, if
    its path differs from the launcher's; it is created if needed. `grace` is this host's, if it is not the run's.
    `early` is a child that fork_server ranks and is running already.
    """
    return serve_once(join_file, folder, grace, early)[0]


def serve_once(
    join_file: Path, folder: Path | None = None, grace: float | None = None, early: ForkServer | None = None
) -> tuple[int, bool]:
    """As `serve`; also return whether the run is about to resume by itself from its last checkpoint."""
    join = Join.read(join_file)
    if grace is not None:
        join = replace(join, grace=grace)
    if folder is not None:
        # A host that shares no file system with the launcher has no run folder yet.
        if lack := make_own_folder(folder):
            print(visible(f"penstock agent: {lack}"), file=sys.stderr)
            return 2, False
        join = replace(join, folder=str(folder.absolute()))
    elif not Path(join.folder).is_dir():
        needed = "needed a file system that the hosts share, or a folder of this host's own for its logs and its part"
        said = f"penstock agent: host {join.host} has no {join.folder}: {needed} of checkpoints (--folder)"
        print(visible(said), file=sys.stderr)
        return 2, False
    try:
        agent = Agent(join, join_file, early=early)
    except (WireError, PrivateFolderError) as error:
        print(visible(f"penstock agent: {error.strerror or error}"), file=sys.stderr)
        return 1, False
    with on_stop(agent.hear):
        fault = agent.run()
    if fault:
        print(visible(f"penstock agent: {fault}"), file=sys.stderr)
    return 1 if fault else 0, agent.again and not fault


def make_own_folder(own: Path) -> str:
    """Make this host's own run folder, and its folder of logs; both may exist. Returns "", or why that cannot be."""
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_folder(own / "logs")
    except (OSError, RecordError) as error:
        why = getattr(error, "strerror", None) or error
        return f"given --folder {own}: {why}; needed a folder that can be made and written to"
    return ""


class _Ended(SystemExit):
    """A signal asks this process to end: `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def main() -> None:
    die_with_parent()
    atexit.register(gc.freeze)  # a search for garbage at the exit would be a fifth of what the agent does
    if sys.argv[1:2] == [EARLY]:
        early = ForkServer.begin((*WORKER, *sys.argv[1:]), os.environ[RUN], None, asks=int(sys.argv[2]))
        sys.exit(serve(Path(awaited()), early=early))
    if len(sys.argv) != 2:
        sys.exit("usage: python -m penstock.runtime.control.agent JOIN_FILE (started by `penstock`)")
    sys.exit(serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
