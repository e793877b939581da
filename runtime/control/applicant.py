"""An agent's part of the enrolment: from a ticket to the `Join` of its slot.

`serve_ticket` is `penstock agent --ticket FILE`. `enrol` waits for the ticket's file, connects to the desk, says what
this host has, looks for the run folder, and waits until the run begins. Each step has its own deadline; its error says
what it waited for. A ticket file that is replaced is read again.
"""

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep, time

import msgspec
import zmq

from penstock import __version__
from penstock.runtime.cluster.endpoints import (
    AddressError,
    is_ipv6,
    own_address,
    resolved,
    resolved_endpoint,
    why_unreachable,
    why_unreachable_all,
)
from penstock.runtime.control.agent import make_own_folder, serve_once
from penstock.runtime.control.desk import LINGER_S, OPTIONS
from penstock.runtime.control.enrolment import (
    Admitted,
    Enrol,
    Found,
    FromAgent,
    FromDesk,
    Joined,
    Present,
    Probe,
    Reached,
    Refused,
    VersionError,
    Welcome,
    Withdrawn,
    facts,
    pack_for_desk,
    read_at_agent,
    require_gpus,
    require_one_per_host,
)
from penstock.runtime.control.listener import CONNECTION_EVENTS, HANDSHAKE_FAILED, Options, dial, drain
from penstock.runtime.control.messages import MAX_BYTES
from penstock.runtime.control.security import Join, KeyFileError, KeyPair, Ticket
from penstock.runtime.control.signals import FAILED, PREEMPTED
from penstock.runtime.control.sockets import JOIN_S
from penstock.runtime.record.errors import disk_fault, visible

# Seconds until a file that another host has made must be visible here.
SHARED_S = 5.0
# Seconds from the first refusal by a desk with another key until giving up, if the ticket stays the same.
OTHER_KEY_S = 10.0
# Seconds for an unreadable ticket to become complete: it may be in the middle of a copy or replacement.
WHOLE_S = 2.0
# Seconds between two signs of life; seconds without one after which the desk counts as gone.
PRESENT_S, GONE_S = 2.0, 15.0
# Seconds after which an agent that reaches no desk says why for the first time.
EARLY_S = 3.0
# A `Join` has a key of each host of the run.
_OPTIONS: Options = {**OPTIONS, zmq.MAXMSGSIZE: MAX_BYTES}
# Connections of other hosts that may queue here.
MAX_PROBES = 128


class NoSlot(Exception):
    """An agent gets no slot: why, and the exit status of the command."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class NoDesk(NoSlot):
    """No launcher answers, or it is gone."""


# Identifies the file behind a ticket's name: its inode and modification time in ns; None if there is no file.
_Mark = tuple[int, int] | None


def enrol(
    file: Path,
    folder: Path | None,
    address: str,
    tell: Callable[[str], None],
    left: str = "",
    wait: float = JOIN_S,
) -> Join:
    """Get a slot from the desk of the ticket in `file`, and return its `Join`. `folder` is the run folder here, None if
    it has the launcher's path. `address` is where this host's ranks listen, "" for the address that leads to the desk.
    `left` is a run that this agent has left: it takes no slot of that run. The ticket and then its desk may each be
    `wait` seconds late. Raises NoSlot, and KeyFileError for a file that is no ticket."""
    return _Enrolment(file, folder.absolute() if folder else None, address, tell, left, wait).slot()


def serve_ticket(
    file: Path,
    folder: Path | None,
    address: str,
    grace: float | None = None,
    wait: float = JOIN_S,
    *,
    requeue: bool = False,
) -> int:
    """Be an agent of this ticket's run until the run is over, and return the exit status. If the run resumes by itself
    after a loss, enrol again. `grace` is this host's, if it is not the run's; `wait` as for `enrol`. `requeue`: if
    there is no launcher, or no controller any more, the status is PREEMPTED."""

    def tell(text: str) -> None:
        print(visible(f"penstock agent: {text}"), file=sys.stderr, flush=True)

    try:
        if fault := require_one_per_host() or require_gpus():
            raise NoSlot(fault, 2)
        left = ""
        while True:
            join = enrol(file, folder, address, tell, left, wait)
            path = Path(join.folder) / "keys" / f"agent-{join.host}.json"
            try:
                path.unlink(missing_ok=True)  # left by an agent that was killed
                join.write(path)
                own = _mark(path)
            except OSError as error:
                raise NoSlot(str(disk_fault(path, error))) from None
            try:
                status, again = serve_once(path, grace=grace)
            finally:
                if _mark(path) == own:  # an agent that was given up may end after its successor has come
                    path.unlink(missing_ok=True)
            if not again:
                return PREEMPTED if requeue and status == FAILED else status
            tell("the run has lost a process and goes on by itself; enrolling again")
            left = join.run
    except NoSlot as error:
        tell(str(error))
        return PREEMPTED if requeue and isinstance(error, NoDesk) else error.status


def _mark(file: Path) -> _Mark:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def _ticket(file: Path, until: float, tell: Callable[[str], None]) -> tuple[Ticket, _Mark]:
    """Read the ticket, which the launcher may not have written yet. Also return the mark of its file."""
    if _mark(file) is None:
        tell(f"waiting for {file}, which `penstock run … --on` writes, for {until - monotonic():.0f} s (--wait)")
    bad: tuple[_Mark, float] = None, 0.0
    while True:
        while (mark := _mark(file)) is None and monotonic() < until:
            sleep(0.2)
        try:
            # If the file is replaced meanwhile, the new one has another mark, and is read next.
            return Ticket.read(file), mark
        except KeyFileError as error:
            if bad[0] != mark:
                bad = mark, monotonic()
            if mark is None and isinstance(error.__cause__, FileNotFoundError):
                raise NoDesk(str(error), 2) from None
            # Waiting does not help if other users may read it, nor if it stayed unreadable or malformed for `WHOLE_S`.
            if error.__cause__ is None or mark is None or monotonic() - bad[1] > WHOLE_S:
                raise
            sleep(0.1)


class _OtherKey(Exception):
    """The process that listens at the endpoint is not the ticket's desk."""


class _Again(Exception):
    """The run is about to open another desk, or has another ticket."""


@dataclass(frozen=True)
class _Enrolment:
    """The arguments of `enrol`; `own` is its folder, as an absolute path."""

    file: Path
    own: Path | None
    address: str
    tell: Callable[[str], None]
    left: str
    wait: float

    def slot(self) -> Join:
        waited = monotonic()
        refused: tuple[_Mark, float] = None, 0.0  # the file whose key the desk refused, and when first
        while True:
            ticket, mark = _ticket(self.file, waited + self.wait, self.tell)
            try:
                with ExitStack() as opened:
                    endpoint, here = self._addresses(ticket, mark)
                    # Connections stay in the system's queue; nothing accepts them.
                    probed = opened.enter_context(_probed(here))
                    client = DeskClient(ticket, endpoint)
                    opened.callback(client.close)
                    return self._at_desk(client, ticket, mark, facts(ticket.token, here, probed.getsockname()[1]))
            except _Again:
                waited = monotonic()
            except _OtherKey:
                # The ticket may be of a run that has ended; the next run is about to replace the file.
                if refused[0] != mark:
                    refused = mark, monotonic()
                if monotonic() - refused[1] > OTHER_KEY_S:
                    given = f"the ticket {self.file}, whose key is not that of what listens at {ticket.endpoint}"
                    raise NoSlot(
                        f"given {given}: an old ticket, or another run's; needed the ticket of this start"
                    ) from None
            sleep(0.5)

    def _addresses(self, ticket: Ticket, mark: _Mark) -> tuple[str, str]:
        """The resolved endpoint of the desk, and the address of this host's ranks. A name may resolve late: a cluster
        creates it with the launcher's Pod, and a name server caches its absence for some seconds."""
        began, tried = monotonic(), False
        while True:
            try:
                endpoint = resolved_endpoint(ticket.endpoint)
                if not self.address:
                    return endpoint, own_address(endpoint)
                break
            except AddressError as error:
                lack = str(error)
            except OSError as error:
                lack = f"there is no route to it: {error.strerror or error}"
            if not tried and monotonic() - began > EARLY_S:
                tried = True
                self._not_yet(ticket, lack)
            if _mark(self.file) != mark:
                raise _Again
            if monotonic() - began > self.wait:
                raise self._no_desk(ticket, lack)
            sleep(0.5)
        try:
            return endpoint, resolved(self.address)
        except AddressError as error:
            raise NoSlot(f"--address: {error}") from None

    def _not_yet(self, ticket: Ticket, lack: str) -> None:
        """Tell the user early, so that a wrong name or a firewall is known before the deadline."""
        self.tell(f"no desk at {ticket.endpoint} yet: {lack}; trying for {self.wait:g} s")

    def _no_desk(self, ticket: Ticket, why: str) -> NoDesk:
        return NoDesk(f"no desk at {ticket.endpoint} within {self.wait:g} s (--wait): {why}")

    def _at_desk(self, client: "DeskClient", ticket: Ticket, mark: _Mark, enrolling: Enrol) -> Join:
        """Send `enrolling`, and wait until a run begins that is not `left`. `mark` is that of the file from which
        `ticket` was read."""
        began = heard = monotonic()
        said, connected, welcome, tried = 0.0, False, None, False
        try:
            while True:
                try:
                    answers = list(client.receive(0.2))
                except VersionError as error:
                    given = f"given Penstock {__version__} here, needed {error.args[0]:.40}, as the launcher has"
                    raise NoSlot(given) from None
                now = monotonic()
                if client.connected and not connected:
                    # Read the clock now: the wait for the desk may have been long.
                    client.send(msgspec.structs.replace(enrolling, clock=time()))
                    heard = said = now
                connected = client.connected
                for answer in answers:
                    heard = now
                    match answer:
                        case Refused(again=True):
                            raise _Again
                        case Refused(reason=reason, over=over):
                            said_no = f"the desk at {ticket.endpoint} refused this agent: {reason}"
                            raise NoSlot(said_no, 0 if over else 1)
                        case Admitted(slot=slot, join=join):
                            made = msgspec.json.decode(join, type=Join)
                            if made.run == self.left:
                                # Its controller is about to end, and the desk does not know yet. Without `Joined` the
                                # desk would report a loss.
                                client.send(Joined())
                                raise _Again
                            client.send(Joined(lack := why_unreachable(made.endpoint)))
                            if lack:
                                raise NoSlot(f"cannot reach the controller: {lack}")
                            self.tell(f"this is host {slot} of the run")
                            return replace(made, folder=str(self.own)) if self.own else made
                        case Welcome():
                            if welcome is None:
                                self.tell(f"enrolled at {ticket.endpoint}; waiting for the run to begin")
                            welcome = answer
                            client.send(_look(answer, self.own))
                        case Probe(endpoints=endpoints):
                            client.send(Reached("\n".join(filter(None, why_unreachable_all(endpoints)))[:4000]))
                if connected and now - said > PRESENT_S:
                    said = now
                    client.send(Present())
                if client.refused and not connected:
                    raise _OtherKey
                if not connected and welcome is None:
                    if not tried and now - began > EARLY_S:
                        tried = True
                        if lack := why_unreachable(client.endpoint):
                            self._not_yet(ticket, lack)
                    if _mark(self.file) != mark:
                        raise _Again  # its desk was closed after it was read, or its launcher had been killed before
                    if now - began > self.wait:
                        why = why_unreachable(client.endpoint)
                        raise self._no_desk(ticket, why or f"what listens at {ticket.endpoint} does not answer")
                elif now - heard > GONE_S:
                    gone = f"has not answered for {GONE_S:.0f} s: its launcher is gone"
                    raise NoDesk(f"the desk at {ticket.endpoint} {gone}")
        except BaseException as error:
            if not isinstance(error, _OtherKey | _Again | NoSlot):
                client.send(Withdrawn(f"it was ended ({type(error).__name__})"))
            raise


def _probed(here: str) -> socket.socket:
    """A socket that listens at this address of this machine, so that others can test whether they reach it. Raises
    NoSlot."""
    family = socket.AF_INET6 if is_ipv6(here) else socket.AF_INET
    try:
        return socket.create_server((here.strip("[]"), 0), family=family, backlog=MAX_PROBES)
    except OSError as error:
        given = f"given the address {here}, which this machine does not have ({os.strerror(error.errno or 0)})"
        raise NoSlot(f"{given}; needed one at which the other hosts reach it (--address)") from None


def _look(welcome: Welcome, own: Path | None) -> Found:
    """Find the run folder, or create this host's own."""
    folder = own or Path(welcome.folder)
    until = monotonic() + SHARED_S
    needed = "needed a file system that the hosts share, or a folder of this host's own (penstock agent --folder)"
    # A network file system may show a new file late.
    while True:
        with suppress(OSError):
            if (folder / welcome.file).read_text() == welcome.content:
                if os.access(folder, os.W_OK | os.X_OK):
                    return Found(shared=True)
                given = f"given {folder}, where user {os.geteuid()} may not write from here"
                return Found(shared=False, lack=f"{given}; {needed}")
        if own or monotonic() > until:
            break
        sleep(0.2)
    if own is None:
        given = f"given {folder}, which is another folder here" if folder.is_dir() else f"given no {folder} here"
        return Found(shared=False, lack=f"{given}; {needed}")
    lack = make_own_folder(own)
    return Found(shared=False, lack=lack) if lack else Found(shared=False, folder=str(own))


class DeskClient:
    """An agent's connection to the desk of a ticket, at its resolved `endpoint`. Raises ZMQError for a bad endpoint.

    `connected`: there is a connection now. `refused`: the process that listens there has another key.
    """

    def __init__(self, ticket: Ticket, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = dial(self._context, endpoint, ticket.server, KeyPair.make(), _OPTIONS, CONNECTION_EVENTS)
        self._monitor = self._socket.get_monitor_socket(CONNECTION_EVENTS)
        self._poller = zmq.Poller()
        for one in (self._socket, self._monitor):
            self._poller.register(one, zmq.POLLIN)
        self.endpoint = endpoint
        self.connected = self.refused = False

    def send(self, message: FromAgent) -> None:
        with suppress(zmq.Again):
            self._socket.send(pack_for_desk(message), zmq.NOBLOCK)

    def receive(self, timeout: float) -> Iterator[FromDesk]:
        """Yield the messages that have come, after at most `timeout` seconds. Raises VersionError for a desk of another
        version."""
        ready = dict(self._poller.poll(int(1000 * timeout)))
        while self._monitor in ready and self._monitor.poll(0):
            event, _ = struct.unpack("=hi", self._monitor.recv_multipart()[0])
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = self.refused or bool(event & HANDSHAKE_FAILED)
        for frames, _, _ in drain(self._socket) if self._socket in ready else ():
            yield read_at_agent(frames[0] if len(frames) == 1 else b"")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=int(1000 * LINGER_S))
