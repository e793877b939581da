"""How an agent forwards its ranks' messages if the controller is reached over a network: one connection per host.

The ranks connect to a Unix socket of their agent instead; nothing else changes for them. Their messages go to the
controller as `RankMessages`, messages to them come as a `Delivery`. The ranks of a replica do the same at the same
time, so their equal answers are held until all its ranks on this host have given them, or for HOLD seconds, and go as
one. Nothing is delayed by that, since a command is done only when all ranks have answered. So the controller gets each
answer once per host, and not once per rank. This file watches the ranks' heartbeats; the controller gets only their
news (`SignsOfLife`). What a rank may say is checked here for the rank, and by the controller again for the host.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import time
from typing import Any

from msgspec import structs

from penstock.runtime.cluster.endpoints import relay_endpoint
from penstock.runtime.control.listener import WireError
from penstock.runtime.control.messages import (
    Delivery,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    Note,
    OfRank,
    RankMessages,
    Result,
    Results,
    SignsOfLife,
    pack,
    rank_peer,
)
from penstock.runtime.control.rendezvous import INTERVAL
from penstock.runtime.control.security import Join, ServerKeys
from penstock.runtime.control.sockets import SILENCE, Server
from penstock.runtime.schedule.events import Abort, Copied, Done, Event, Failed, Saved, first_answer

# Longest time in seconds that an answer waits for those of the host's other ranks. It may seem late by as much.
HOLD = 0.2

# A sequence number beyond all real ones: a message that fits with it fits with any number.
_LATE = 1 << 62


@dataclass(slots=True)
class _Held:
    """Equal answers of several ranks, by rank, and the time of the first one."""

    since: float
    results: dict[int, Result] = field(default_factory=dict)


class Relay:
    """`endpoint` is where ranks connect; `socket` is readable when they have sent something. Every `interval` seconds
    it reports that the host is alive, and the news of its ranks' heartbeats. That is when `clock`, the time of day, is
    a multiple of `interval`, so that the controller wakes once for all hosts."""

    def __init__(
        self, join: Join, interval: float = INTERVAL, silence: float = SILENCE, clock: Callable[[], float] = time
    ) -> None:
        self._host, self._interval, self._clock = join.host, interval, clock
        self._ranks: dict[str, str] = {}  # the ranks that were started, with their host, for the server
        self._alive: defaultdict[str, set[str]] = defaultdict(set)  # ranks that have not ended, by replica
        try:
            self._server = self._listening(join, silence)
        except WireError:  # a shared file system may not support sockets
            self._server = self._listening(join, silence, aside=True)
        self.endpoint, self.socket = self._server.endpoint, self._server.socket
        self._said: list[tuple[str, OfRank]] = []
        self._held: defaultdict[str, dict[Event, _Held]] = defaultdict(dict)
        # By replica and command that some ranks have answered and others have not: the ranks whose answers were sent.
        self._gone: defaultdict[str, dict[Event, set[int]]] = defaultdict(dict)
        self._due = -inf
        self._doing: dict[str, str] = {}
        self._silent: tuple[str, ...] = ()
        self._dropped: Counter[str] = Counter()

    def _listening(self, join: Join, silence: float, *, aside: bool = False) -> Server:
        endpoint = relay_endpoint(Path(join.folder), join.host, join.run, join.life, aside=aside)
        return Server(ServerKeys(join.run, endpoint, join.token), self._ranks, silence)

    def begin(self, peer: str) -> None:
        """A rank with this peer name is about to be started."""
        self._server.forget(peer)
        self._ranks[peer] = self._host
        self._alive[_replica(peer)].add(peer)
        self._gone.pop(_replica(peer), None)

    def end(self, peer: str) -> None:
        """A rank has ended: nothing waits for it any more. Its earlier messages may still come."""
        self._alive[_replica(peer)].discard(peer)

    def deliver(self, delivery: Delivery) -> None:
        """Forward a message of the controller to ranks."""
        self._server.deliver(delivery)

    def wait(self, now: float) -> float:
        """Seconds until something is due."""
        due = min((held.since + HOLD for of in self._held.values() for held in of.values()), default=inf)
        return max(0.0, min(due, self._due) - now)

    def take(self, now: float) -> Iterator[Message]:
        """Yield the messages to send to the controller now."""
        for peer, message in self._server.receive(0.0):
            self._hear(peer, message, now)
        for replica, held in self._held.items():
            self._release(replica, [done for done, one in held.items() if one.since + HOLD <= now])
        said, self._said = self._said, []
        yield from _reports(said)
        yield from self._tell(now)

    def close(self) -> None:
        self._server.close()

    def _hear(self, peer: str, message: Any, now: float) -> None:
        """Handle a rank's message. An answer may be held for those of others; any other message releases it first, so
        that the order stays."""
        replica = _replica(peer)
        for one in message.results if isinstance(message, Results) else (message,):
            if isinstance(one, Result) and not isinstance(one.event, Failed | Abort) and len(self._alive[replica]) > 1:
                self._gather(replica, one, now)
                continue
            self._release(replica)
            if isinstance(one, Result) and isinstance(one.event, Failed):
                self._note_gone(replica, one.event)
            if isinstance(one, Hello):
                one = structs.replace(one, token="")
            self._say(peer, one)

    def _say(self, peer: str, message: Any) -> None:
        """Queue a rank's message. Consecutive answers of one rank become one message."""
        if isinstance(message, Result):
            message = Results((message,))
            sayer, before = self._said[-1] if self._said else ("", None)
            if sayer == peer and isinstance(before, Results):
                self._said.pop()
                message = Results((*before.results, *message.results))
        self._said.append((peer, message))

    def _gather(self, replica: str, result: Result, now: float) -> None:
        """Hold an answer. Release it, with those of the other ranks, when all have come."""
        event: Any = result.event
        held, done = self._held[replica], structs.replace(event, rank=0)
        # `Saved` must not overtake `Copied`, nor a rank's second equal answer its first; the order of others is free.
        ends = [one for one in held if isinstance(one, Copied)] if isinstance(event, Saved) else []
        if done in held and event.rank in held[done].results:
            ends.append(done)
        self._release(replica, ends)
        one = held.setdefault(done, _Held(now))
        one.results[event.rank] = result
        gone = self._gone[replica].get(_command(event), ())
        if len(one.results.keys() | gone) >= len(self._alive[replica]):
            self._release(replica, [done])

    def _release(self, replica: str, ends: list[Any] | None = None) -> None:
        """Queue the held answers `ends` of a replica, or all."""
        held = self._held[replica]
        for done in [*held] if ends is None else ends:
            results = held.pop(done).results
            for result in merged(results):
                first: Any = result.event
                self._say(rank_peer(replica, first.rank), result)
            for result in results.values():
                self._note_gone(replica, result.event)

    def _note_gone(self, replica: str, event: Any) -> None:
        """A rank's answer was queued: other ranks' answers to the same command do not wait for it."""
        command = _command(event)
        gone = self._gone[replica].setdefault(command, set())
        gone.add(event.rank)
        if len(gone) >= len(self._alive[replica]):
            del self._gone[replica][command]

    def _tell(self, now: float) -> Iterator[Message]:
        """Yield the news of the ranks' heartbeats, every interval, or at once if a rank has fallen silent."""
        alive = set().union(*self._alive.values())
        silent = tuple(peer for peer in self._server.tracker.late(now) if peer in alive)
        if now < self._due and silent == self._silent:
            return
        self._due = now + self._interval - self._clock() % self._interval
        doing = {peer: at for peer, at in self._server.doing.items() if self._doing.get(peer, "") != at}
        dropped = self._server.counts - self._dropped
        if doing or dropped or silent != self._silent:
            last = self._server.dropped[-1] if dropped else ""
            yield SignsOfLife(doing, silent, dict(dropped), last)
        else:
            yield Heartbeat()
        self._doing, self._silent, self._dropped = dict(self._server.doing), silent, self._server.counts.copy()


def merged(results: Mapping[int, Result]) -> Iterator[Result]:
    """Merge the answers of ranks, by rank, to one command. Each answer that is yielded covers the following ranks whose
    answers add nothing (`others`). Of `Done`, only the metrics of rank 0 are kept."""
    run: Any = None
    for rank in sorted(results):
        one: Any = results[rank]
        if rank and isinstance(one.event, Done):
            one = structs.replace(one, metrics={}, counts={})
        adds = one.outputs or one.metrics or one.manifest is not None or one.unread is not None
        if run is not None and not adds and rank == run.event.rank + run.event.others + 1:
            run = structs.replace(run, event=structs.replace(run.event, others=run.event.others + 1))
            continue
        if run is not None:
            yield run
        run = one
    if run is not None:
        yield run


def _reports(said: list[tuple[str, OfRank]]) -> Iterator[RankMessages]:
    """As few reports as can hold these messages."""
    if not said:
        return
    whole = RankMessages(tuple(said))
    try:
        pack(whole, _LATE)
        yield whole
    except MessageError as error:
        peer, message = said[0]
        if len(said) == 1 and isinstance(message, Results) and message.results[1:]:
            said = [(peer, Results((result,))) for result in message.results]
        if half := len(said) // 2:
            yield from _reports(said[:half])
            yield from _reports(said[half:])
        else:
            yield RankMessages(((peer, Note("error", f"{peer}: what it says is too long to be handed on: {error}")),))


def _command(event: Any) -> Event:
    """A key that is equal for all answers to a command. A checkpoint has two, since a shard is copied, then written."""
    return structs.replace(event, rank=0) if isinstance(event, Copied) else first_answer(event)


def _replica(peer: str) -> str:
    return peer.rpartition(":")[0]
