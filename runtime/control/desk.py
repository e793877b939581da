"""The enrolment desk: gives agents that are not known beforehand a slot of a run. Part of the launcher.

It listens beside the controller, with a key of its own (`DeskKeys`), and accepts clients with any key. Its messages are
in `enrolment`; it serves only clients that send the run's token. A `Desk` answers in a thread of its own. The launcher

- waits for as many agents as the run is to have (`wait`). Each becomes a slot of `cluster()`, ordered by the numbers
  that a cluster manager has given them, then by name; all must reach each other;
- adds slots for agents that come later (`reserve`);
- sets each slot's `Join` once the controller listens (`admit`); the desk hands it to the slot's agent;
- asks which agents never reached the controller (`losses`);
- reports that a slot's agent has ended (`vacate`, or `ended` if its cluster manager said so): the next agent that
  enrols gets the slot and its `Join`. One end may be reported several times, and late; a late report must not be taken
  for the end of the next agent;
- reports that the controller has ended (`rest`): agents that enrol after that wait for `close`, which tells them how
  the run goes on.

`applicant` is the agent's side.
"""

import json
import os
import select
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep, time
from typing import Any

import zmq
from msgspec.structs import replace as replaced

from penstock import __version__
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.endpoints import tcp_endpoint
from penstock.runtime.cluster.gpus import GPUS, Gpu, gpu_like, kind_of
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
    mismatch,
    pack_for_agent,
    plain_name,
    read_at_desk,
)
from penstock.runtime.control.listener import Listener, Options
from penstock.runtime.control.messages import MessageError, shortened
from penstock.runtime.control.security import DeskKeys, Join
from penstock.runtime.record.folder import create_file

# The ticket, and the file by which a host finds out whether it has the launcher's folder, in the run folder.
TICKET, SHARED = "ticket.json", "shared.token"
# Seconds without a sign of life after which a waiting agent is given up.
SILENCE_S = 15.0
# Seconds that an agent without a slot may wait for one: its host's former agent may be found dead by then.
NO_SLOT_S = 30.0
# Seconds for the agents to test whether they reach each other.
PROBE_S = 30.0
# Number of other hosts that an agent tries to reach: all of few. Of many, those at this number of distances in the ring
# of slots, so that each host is tried equally often.
MAX_TRIED = 32
# Agents that may wait at once, beyond those that the run is to have.
MAX_EXTRA = 64
# Largest frame in bytes: the desk's messages hold facts and paths only.
_MAX_FRAME = 64 << 10
# Seconds within which a cluster manager reports the end of an agent that the desk has noticed before.
TOLD_S = 60.0
# The same for an agent that was given up, and may only have been stopped.
STOPPED_S = 3600.0
# The share of the startup deadline after which a run that resumes by itself begins with fewer agents, if it can.
FEWER = 0.25
# Seconds for the last answers to be sent.
LINGER_S = 1.0
_TICK_S = 0.05
OPTIONS: Options = {zmq.MAXMSGSIZE: _MAX_FRAME, zmq.SNDHWM: 1000, zmq.RCVHWM: 64, zmq.TCP_KEEPALIVE: 1}


class EnrolmentError(RuntimeError):
    """Fewer agents came than were needed. The text says which came and which did not."""


@dataclass
class Applicant:
    """An agent at the desk. `ready` is the time at which it had a folder for the run; 0 before. `unreached` says which
    others it cannot reach, None while unknown. `admitted`: it has its `Join`, and is connecting to the controller."""

    identity: bytes
    key: str
    enrol: Enrol
    seen: float
    ready: float = 0.0
    slot: str = ""
    unreached: str | None = None
    admitted: bool = False

    def __str__(self) -> str:
        has = f"{self.enrol.gpus} × {self.enrol.gpu or 'GPU'}" if self.enrol.gpus else f"{self.enrol.cores} cores"
        number = f", number {self.enrol.order}" if self.enrol.order >= 0 else ""
        return f"{self.enrol.hostname} ({has}, {self.enrol.address}, pid {self.enrol.pid}{number})"


@dataclass
class _Slot:
    """`needs` is how many cores and GPUs an agent must have; `facts` describe the last agent. `given` is the number of
    agents that have been handed its `Join`. `missed` has, for each end of an agent that was noticed before its
    cluster manager has reported it, the time until which that report is awaited."""

    needs: tuple[int, int]
    facts: Enrol
    agent: Applicant | None
    join: Join | None = None
    given: int = 0
    missed: list[float] = field(default_factory=list)

    @property
    def life(self) -> int:
        """The number of agents that had the slot before the latest one."""
        return max(0, self.given - 1)

    def fits(self, agent: Enrol) -> bool:
        """True if the agent's host has what the slot needs."""
        return agent.cores >= self.needs[0] and agent.gpus >= self.needs[1]


class Desk:
    """Listens from its creation to `close`. `ticket` says where; `news` are lines for the user. Raises WireError."""

    def __init__(self, keys: DeskKeys, bind: str, folder: Path, address: str = "", expected: int = 0) -> None:
        """`bind` is "address:port" of this machine; agents reach it at `address`, if that is another name. `expected`
        agents may come at once."""
        self.counts: Counter[str] = Counter()
        self._token, self._folder = keys.token.encode(), folder
        self._content = token_hex(16)
        self._lock = threading.RLock()
        self._news: deque[str] = deque(maxlen=200)
        self._told: set[str] = set()
        self._refused: dict[str, None] = {}
        self._applicants: dict[bytes, Applicant] = {}
        self._slots: dict[str, _Slot] = {}
        self._out: list[tuple[bytes, FromDesk]] = []
        self._losses: list[tuple[str, int, str]] = []
        self._ended: Refused | None = None
        self._failed = ""  # the text of an error that has ended the thread
        self._resting = False
        self._most = expected + MAX_EXTRA
        self._listener = Listener(tcp_endpoint(bind), OPTIONS, (keys.secret, None), self._drop, expected)
        host, _, port = self._listener.endpoint.removeprefix("tcp://").rpartition(":")
        self.endpoint = self._listener.endpoint
        self.ticket = keys.ticket(f"{address or host}:{port}")
        for file in (folder / TICKET, folder / SHARED):
            file.unlink(missing_ok=True)  # left by a launcher that was killed
        create_file(folder / SHARED, self._content.encode())
        self.ticket.write(folder / TICKET)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="desk", daemon=True)
        self._thread.start()

    # For the launcher -----------------------------------------------------------------------------------------

    def news(self) -> list[str]:
        """Lines for the user since the last call: which agents came, which were refused and why."""
        with self._lock:
            found = list(self._news)
            self._news.clear()
        return found

    def wait(self, count: int, seconds: float, poll: Callable[[], list[tuple[str, str]]], tell: Callable[[str], None],
             fewest: int = 0) -> int:  # fmt: skip
        """Wait until `count` agents are ready, make a slot of each, and return their number. After a share of
        `seconds`, `fewest` agents are enough, if given. `poll` returns agents that have died; with `fewest`, `tell` is
        called for them. Raises EnrolmentError after `seconds`, when a needed agent has died, and when the desk itself
        has failed. For a run that resumes it is called again, and makes new slots.
        """
        with self._lock:
            self._most, self._resting = count + MAX_EXTRA, False
            self._slots.clear()
            self._losses.clear()
            for one in self._applicants.values():
                one.slot, one.unreached = "", None
        began = monotonic()
        until, patience = began + seconds, began + FEWER * seconds
        died: list[str] = []
        while True:
            for host, why in poll():
                died.append(f"the agent {f'of {host} ' * bool(host)}ended: {why}")
                if fewest:
                    tell(died[-1])
            for text in self.news():
                tell(text)
            with self._lock:
                if self._failed:
                    raise EnrolmentError(self._failed)
                ready = [each for each in self._applicants.values() if each.ready and not each.admitted]
                if not self._slots and fewest and len(ready) >= fewest and monotonic() > patience:
                    came = f"{len(ready)} of {count} agents joined within {FEWER * seconds:g} of {seconds:g} s"
                    tell(f"{came} (--startup-deadline): the run goes on with them, and takes others when they come")
                    count = len(ready)
                if not self._slots and len(ready) >= count:
                    self._seat(sorted(ready, key=_arrival)[:count])
                    # Report a firewall now, before ranks wait for each other in vain.
                    until = max(until, monotonic() + PROBE_S)
                agents = [slot.agent for slot in self._slots.values()]
                unreached = [one.unreached for one in agents if one is not None]
                if self._slots and None not in unreached and None not in agents:
                    if lacks := list(filter(None, unreached)):
                        needed = "needed hosts that reach each other at any port of net.ipv4.ip_local_port_range"
                        raise EnrolmentError("\n".join([f"hosts do not reach each other; {needed}", *map(str, lacks)]))
                    return count
            self._wake()
            if died and not fewest:
                raise EnrolmentError(f"{'; '.join(died)}\n{self._lacking(count)}")
            if monotonic() > until:
                lacking = f"within {seconds:g} s (--startup-deadline) {self._lacking(count)}"
                raise EnrolmentError("\n".join([lacking, *(f"  {each}" for each in died)]))
            sleep(_TICK_S)

    def reserve(self, count: int) -> None:
        """Add `count` slots for agents that come later. They need what the host of the last slot has. After `wait`."""
        with self._lock:
            like = replaced(list(self._slots.values())[-1].facts, hostname="", order=-1)
            first = len(self._slots)
            for number in range(first, first + count):
                name = next(n for each in range(1, 100) if (n := _numbered(f"agent-{number}", each)) not in self._slots)
                self._slots[name] = _Slot((like.cores, like.gpus), like, None)
            # A surplus agent may be waiting already.
            self._fill()
        self._wake()

    def cluster(self, bind: str) -> Cluster:
        """The slots as hosts of a cluster whose controller listens at `bind`."""
        with self._lock:
            slots = {name: slot.facts for name, slot in self._slots.items()}
        kinds: dict[str, Gpu] = {}
        hosts = []
        for name, facts in slots.items():
            kind = ""
            if facts.gpus and facts.gpu:
                kind = kind_of(facts.gpu, facts.gpu_gib)
                if kind not in GPUS:
                    kinds[kind] = gpu_like(facts.gpu, facts.gpu_gib)
            hosts.append(
                Host(
                    name=name,
                    cores=facts.cores,
                    devices=tuple(f"cuda:{index}" for index in range(facts.gpus)),
                    gpu=kind,
                    memory_gib=facts.memory_gib,
                    agent="external",
                    address=facts.address,
                )
            )
        return Cluster(hosts=tuple(hosts), bind=bind, gpus=kinds)

    def losses(self) -> list[tuple[str, int, str]]:
        """The losses since the last call: slots whose agents have their `Join` but do not reach the controller. For
        each, the slot, the agent's `life` in it, and why."""
        with self._lock:
            found = list(self._losses)
            self._losses.clear()
        return found

    def require(self, slot: str, cores: int, gpus: int) -> None:
        """The run is planned: the slot's agent and its successors need so many cores and GPUs."""
        with self._lock:
            own = self._slots[slot]
            # Ranks that take turns share cores, so the plan's threads may exceed the host's cores.
            own.needs = min(cores, own.facts.cores), gpus

    def admit(self, slot: str, join: Join) -> None:
        """The run begins: give the slot's agent its `Join`."""
        with self._lock:
            own = self._slots[slot]
            own.join = join
            if own.agent is not None:
                self._hand_over(slot, own, own.agent)
        self._wake()

    def vacate(self, slot: str, life: int) -> None:
        """The slot's agent with this `life` in its `Join` has ended: free the slot for another one, if not done yet."""
        with self._lock:
            own = self._slots[slot]
            if own.agent is not None and own.life == life:
                own.missed.append(monotonic() + STOPPED_S)  # it may only have been stopped, and end much later
                self._leave(own)
                self._fill()
        self._wake()

    def ended(self, slot: str) -> int | None:
        """A cluster manager reports that an agent of the slot has ended: vacate the slot, and return the agent's life.
        None if that end has been noticed already."""
        with self._lock:
            own = self._slots[slot]
            own.missed = [until for until in own.missed if monotonic() < until]
            if own.missed:
                del own.missed[0]
                return None
            life = own.life
            self._leave(own)
            self._fill()
        self._wake()
        return life

    def given(self, slot: str) -> int:
        """The number of agents that have been given the slot."""
        with self._lock:
            return self._slots[slot].given if slot in self._slots else 0

    def vacant(self) -> list[str]:
        """The slots without an agent."""
        with self._lock:
            return [name for name, slot in self._slots.items() if slot.agent is None]

    def rest(self) -> None:
        """The controller has ended: until `close`, give no slot, and refuse no agent for lack of one."""
        with self._lock:
            self._resting = True
            for slot in self._slots.values():
                slot.join = None

    def close(self, reason: str = "the run has ended", *, over: bool = False, again: bool = False) -> None:
        """Refuse all waiting agents for this reason, and remove the ticket. `over`: the run has ended well; `again`:
        it is about to resume, with another desk."""
        with self._lock:
            self._ended = Refused(shortened(reason, 4000), over, again)
            self._out += [(each.identity, self._ended) for each in self._applicants.values()]
        self._wake()
        self._thread.join()
        self._listener.close(LINGER_S)
        os.close(self._waker)
        for name in (TICKET, SHARED):
            with suppress(OSError):
                (self._folder / name).unlink()

    # The thread -----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    def _serve(self) -> None:
        try:
            self._answer_until_closed()
        # Otherwise agents would wait in vain from now on, and the run would blame them.
        except Exception:
            with self._lock:
                self._failed = f"the desk failed, and assigns no more slots:\n{traceback.format_exc()}"
                self._news.append(self._failed)

    def _answer_until_closed(self) -> None:
        poller = zmq.Poller()
        for one in (self._listener.socket, self._waker):
            poller.register(one, select.POLLIN)
        while True:
            ready = dict(poller.poll(int(1000 * SILENCE_S / 10)))
            if self._waker in ready:
                os.eventfd_read(self._waker)
            frames = list(self._listener.drain()) if self._listener.socket in ready else []
            now = monotonic()
            with self._lock:
                for parts, key, descriptor in frames:
                    self._take(parts, key, descriptor, now)
                self._expire(now)
                out, self._out = self._out, []
                ended = self._ended is not None
            for identity, message in out:
                # An agent that is gone is found by its silence.
                with suppress(zmq.ZMQError):
                    self._listener.socket.send_multipart([identity, pack_for_agent(message)], zmq.NOBLOCK)
            if ended:
                return

    def _take(self, frames: list[bytes], key: str, descriptor: int, now: float) -> None:
        identity, one = frames[0], self._applicants.get(frames[0])
        try:
            if len(frames) != 2:
                raise MessageError(f"{len(frames)} frames")
            message = read_at_desk(frames[1])
        except VersionError as error:
            # The client has the desk's key, so it may be told which version is needed.
            text = f"given Penstock {error.args[0]:.40}, needed {__version__}, as the launcher has"
            where = self._listener.peer(descriptor)
            self._refuse(identity, f"an agent of another version{f' at {where}' * bool(where)}: {text}", text)
            return
        except MessageError as error:
            self._drop(str(error))
            return
        if isinstance(message, Enrol):
            # In constant time, so that timing reveals nothing of the token.
            if not compare_digest(message.token.encode(), self._token):
                text = "given a token that is not this run's; needed the ticket of this start of the run"
                self._refuse(identity, f"an agent on {message.hostname:.64}: {text}", text)
                return
            self._listener.know(descriptor)
            self._enrol(identity, key, message, now)
        # Clients choose their identities: a client with another key could claim that of an agent.
        elif one is None or one.key != key:
            self._drop(f"{type(message).__name__} before Enrol")
        else:
            one.seen = now
            self._answer(one, message, now)

    def _enrol(self, identity: bytes, key: str, message: Enrol, now: float) -> None:
        one = Applicant(identity, key, message, now)
        if self._ended is not None:
            self._out.append((identity, self._ended))
        elif fault := mismatch(message, time()):
            self._refuse(identity, f"the agent of {one}: {fault}", fault)
        elif len(self._applicants) >= self._most:
            self._refuse(identity, f"the agent of {one}: too many wait", f"given agent {self._most + 1} that waits")
        else:
            # An agent that has reconnected has the same key, and keeps its slot.
            for old in [each for each in self._applicants.values() if each.key == key]:
                del self._applicants[old.identity]
                if old.slot:
                    one.slot, one.unreached, self._slots[old.slot].agent = old.slot, old.unreached, one
                    one.admitted = old.admitted
            self._applicants[identity] = one
            self._out.append((identity, Welcome(str(self._folder), SHARED, self._content)))

    def _answer(self, one: Applicant, message: FromAgent, now: float) -> None:
        match message:
            case Present():
                self._out.append((one.identity, Present()))
            case Found(shared=True) | Found(lack=""):
                if not one.ready:
                    one.ready = now
                    own = "" if message.shared else f", with a folder of its own ({message.folder})"
                    self._news.append(f"the agent of {one} has come{own}")
                    if one.slot:
                        self._hand_over(one.slot, self._slots[one.slot], one)
                    self._fill()
            case Found():
                del self._applicants[one.identity]
                self._refuse(one.identity, f"the agent of {one}: {message.lack}", message.lack)
            case Reached():
                one.unreached = message.lack
            case Joined():
                # From here on the agent talks to the controller.
                del self._applicants[one.identity]
                if message.lack and one.slot:
                    self._losses.append((one.slot, self._slots[one.slot].life, message.lack))
            case Withdrawn():
                self._go(one, message.reason)

    def _expire(self, now: float) -> None:
        for one in list(self._applicants.values()):
            if now - one.seen > SILENCE_S:
                self._go(one, f"no heartbeat for {SILENCE_S:g} s")
            elif self._slots and one.ready and not (one.slot or self._resting) and now - one.ready > NO_SLOT_S:
                del self._applicants[one.identity]
                free = [(name, slot.needs) for name, slot in self._slots.items() if slot.agent is None]
                text = f"all {len(self._slots)} slots are taken ({', '.join(self._slots)})"
                needed = "needed a run with more --agents"
                if free:
                    text = f"given {one.enrol.cores} cores and {one.enrol.gpus} GPUs"
                    needed = f"needed {free[0][1][0]} and {free[0][1][1]} for the free slot {free[0][0]}"
                self._refuse(one.identity, f"the agent of {one}: {text}; {needed}", f"{text}; {needed}")

    def _go(self, one: Applicant, reason: str) -> None:
        """Remove a waiting agent that has gone."""
        del self._applicants[one.identity]
        self._news.append(f"the agent of {one} has left: {reason}")
        if one.slot:
            if one.admitted:
                self._losses.append((one.slot, self._slots[one.slot].life, reason))
                self._slots[one.slot].missed.append(monotonic() + TOLD_S)
            self._leave(self._slots[one.slot])
            self._fill()

    def _leave(self, slot: _Slot) -> None:
        if slot.agent is not None:
            self._applicants.pop(slot.agent.identity, None)
            slot.agent = None

    def _refuse(self, identity: bytes, told: str, reason: str) -> None:
        """Refuse an agent. Tell the user once per reason: agents may be restarted again and again."""
        self.counts["refused"] += 1
        self._out.append((identity, Refused(shortened(reason, 4000))))
        self._refused[told] = None
        if told not in self._told and len(self._told) < 100:
            self._told.add(told)
            self._news.append(f"refused {told}")

    def _drop(self, text: str) -> None:
        """Count a frame that is no message of an agent. The listener's thread calls it, too."""
        with self._lock:
            self.counts["dropped"] += 1

    # Slots ----------------------------------------------------------------------------------------------------

    def _seat(self, agents: list[Applicant]) -> None:
        """Make slots of these agents."""
        for one in agents:
            plain = plain_name(one.enrol.hostname)
            number = next(n for n in range(1, len(agents) + 1) if _numbered(plain, n) not in self._slots)
            one.slot = _numbered(plain, number)
            self._slots[one.slot] = _Slot((one.enrol.cores, one.enrol.gpus), one.enrol, one)
        hosts = Counter((one.enrol.hostname, one.enrol.address) for one in agents)
        for (name, address), count in hosts.items():
            if count > 1:  # perhaps started twice, while another host's agent is missing
                text = f"{count} agents are on {name} ({address}): each counts all cores and GPUs there as its own"
                self._news.append(text)
        ports = [f"tcp://{one.enrol.address}:{one.enrol.port}" * bool(one.enrol.port) for one in agents]
        away = distances(len(agents))
        for place, one in enumerate(agents):
            others = (ports[(place + distance) % len(ports)] for distance in away)
            self._out.append((one.identity, Probe(tuple(filter(None, others)))))

    def _fill(self) -> None:
        """Give free slots to agents without a slot; an agent prefers a slot that its host had."""
        if self._resting or all(slot.agent is not None for slot in self._slots.values()):
            return
        waiting = sorted((a for a in self._applicants.values() if a.ready and not a.slot), key=_arrival)
        for one in waiting:
            vacant = {name: slot for name, slot in self._slots.items() if slot.agent is None}
            fits = [name for name, slot in vacant.items() if slot.fits(one.enrol)]
            own = [n for n in fits if vacant[n].facts.hostname == one.enrol.hostname]
            for name in (own or fits)[:1]:
                one.slot, slot = name, vacant[name]
                slot.agent, slot.facts, one.unreached = one, one.enrol, ""
                if name != plain_name(one.enrol.hostname):
                    # From now on messages name this host so.
                    self._news.append(f"the agent of {one} is host {name} of the run")
                self._hand_over(name, slot, one)

    def _hand_over(self, name: str, slot: _Slot, one: Applicant) -> None:
        if slot.join is not None:
            slot.given += not one.admitted
            join = replace(slot.join, address=one.enrol.address, life=slot.life)
            self._out.append((one.identity, Admitted(name, json.dumps({"format": 1, **asdict(join)}))))
            one.admitted = True

    def _lacking(self, count: int) -> str:
        """Which agents came and which did not."""
        with self._lock:
            ready = sorted((each for each in self._applicants.values() if each.ready), key=_arrival)
            looking = [each for each in self._applicants.values() if not each.ready]
            asked = [each for each in ready if each.slot and each.unreached is None]
            refused, dropped = list(self._refused), self.counts["dropped"]
        fewer = f", or a start with --agents {len(ready)}" * (0 < len(ready) < count)
        lines = [f"{len(ready)} of {count} agents joined; needed all of them (--agents {count}){fewer}"]
        lines += [f"  joined: {one}" for one in ready]
        lines += [f"  joined, but has not found the run folder {self._folder}: {one}" for one in looking]
        orders = {one.enrol.order for one in ready}
        # If two agents have the same number, each host's manager has numbered its own: it says nothing of the job's.
        if -1 not in orders and len(orders) == len(ready) > 0:
            missing = [str(number) for number in range(count) if number not in orders]
            lines += [f"  missing: number {', '.join(missing)}"] * bool(missing)
        lines += [f"  has not said whether it reaches the others: {one}" for one in asked]
        lines += [f"  refused: {text}" for text in refused]
        lines += [f"  {dropped} connections came from no agent with this ticket"] * bool(dropped)
        if not ready and not refused:
            lines.append(f"  nobody reached the desk at {self.ticket.endpoint} with {self._folder / TICKET}")
        return "\n".join(lines)


def distances(count: int) -> list[int]:
    """The distances, in a ring of `count` hosts, at which each host tries to reach others."""
    tried = min(count - 1, MAX_TRIED)
    return [1 + step * (count - 1) // tried for step in range(tried)]


def _arrival(one: Applicant) -> tuple[Any, ...]:
    return one.enrol.order if one.enrol.order >= 0 else 1 << 30, one.enrol.hostname, one.enrol.address, one.ready


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
