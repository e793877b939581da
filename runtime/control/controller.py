"""The single controller: `python -m penstock.runtime.control.controller RUN_FOLDER`, started by the launcher, or early.

It owns the only clock and the only server socket. It starts ranks through agents, drives the run's stages through the
scheduler, and knows for every wait which process is awaited and until when. It never imports torch. See `launcher` for
what it writes to standard output and reads from standard input.
"""

import json
import os
import queue
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from time import monotonic
from typing import Any

from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.control.early import EARLY, awaited
from penstock.runtime.control.failure import DOUBT_S, HELD_S, MENDABLE, Failure, FailureCode, too_large
from penstock.runtime.control.listener import WireError, raise_descriptors
from penstock.runtime.control.messages import (
    EXIT_EXPLAINED,
    AgentReady,
    End,
    Exited,
    GivenUp,
    Goodbye,
    Hello,
    Launch,
    Leaving,
    Message,
    Note,
    Question,
    Ready,
    Result,
    Results,
    SendFailed,
    Setup,
    TooLargeError,
    Untrusted,
    agent_peer,
    rank_peer,
)
from penstock.runtime.control.process import die_with_parent
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.rendezvous import Board
from penstock.runtime.control.run import Session
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.security import ServerKeys
from penstock.runtime.control.signals import DONE, FAILED, INTERRUPTED, PREEMPTED, ignore_stop_signals
from penstock.runtime.control.sockets import Server, connections
from penstock.runtime.record.checkpoints import SavedCheckpoint, latest_checkpoint
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.schedule.events import Abort, Failed
from penstock.runtime.schedule.state import UnawaitedError
from penstock.runtime.tensor.shm import ObjectRef

# Seconds between two checks of deadlines, and of the run folder, when no message comes.
TICK = 0.5
# Seconds for ranks and agents to end after a goodbye.
DISMISS_S = 2.0
# Seconds between two lists of the run's processes, while ranks come.
LIST_S = 1.0
# A lost replica that has ended so often before it was ready is not started again.
STARTS = 3


class Controller:
    """Starts, hears, watches and dismisses the processes of a run; `session` decides what they do."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, server: Server, session: Session, cut: SavedCheckpoint | None
    ) -> None:
        self.folder, self.config, self.server, self.session, self.cut = folder, config, server, session, cut
        folder.hold()
        self.board = Board()
        self.launcher: queue.SimpleQueue[str] = queue.SimpleQueue()
        replicas = config.plan.replicas
        self.ranks = {(r.name, index): rank for r in replicas for index, rank in enumerate(r.ranks)}
        self.peers = {r.name: tuple(rank_peer(r.name, index) for index in range(len(r.ranks))) for r in replicas}
        self.pids: dict[tuple[str, int], int] = {}
        self.restored: dict[tuple[Firing, str], ObjectRef] = {}
        self.alive: set[str] = set()
        self.agents: dict[str, int] = {}  # by host whose agent has come: how many agents it had before
        self._able: set[str] = set()  # the hosts whose agents can start ranks
        self.elastic = config.elastic
        self._holding = config.holding(cut.cut if cut else None)
        # Lost replicas, and how often each has ended since without having been ready.
        self.lost: dict[str, int] = {}
        self._coming: set[str] = set()  # lost replicas that were started again and are not ready yet
        self._begun: set[tuple[str, int]] = set()  # ranks that an agent was told to start and has not reported as ended
        self._starts: Counter[str] = Counter()  # of each replica
        # Failures that a lost rank may have caused: when each was reported, `suspended_s` at that time, peer and
        # result.
        self._held_failures: list[tuple[float, float, str, Result]] = []
        self._config = json.dumps(config.to_json())
        self._unlisted, self._listed_at = False, -inf  # has a rank come since processes.json was written, and when
        self._told = (0, 0.0)  # frames dropped up to the last note about them, and its time

    def run(self) -> str:
        """Run it, and return its status: "done", "stopped" or "failed"."""
        try:
            self._assemble()
            if self.session.running:  # it was not stopped meanwhile
                self._begin()
            while self.session.running:
                self._turn()
        except TooLargeError as error:
            self.session.fail(too_large(error, self.config.graphs), monotonic())
            self.session.decide(monotonic())
        finally:
            self._dismiss()
        return self.session.status

    # Starting ---------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Wait for agents, then ranks: `startup_deadline` seconds for all of it."""
        seconds = self.config.flags.startup_deadline
        until = monotonic() + seconds
        while not self._enough() and self.session.running:
            self._turn()
            now = monotonic()
            # Time in which this process itself was suspended does not count as a rank's delay.
            if now > until + self.server.tracker.suspended_s(now):
                names = ", ".join(self.config.plan.spelled(r, i) for r, i in self.ranks if (r, i) not in self.pids)
                within = f"within {seconds:g} s (--startup-deadline)"
                text = f"{names} did not get ready {within}; see {self.folder.logs}"
                hosts = {rank.host for rank in self.ranks.values()}
                if missing := sorted(host for host in hosts if agent_peer(host) not in self.alive):
                    text = f"no agent of host {', '.join(missing)} joined {within} at {self.server.endpoint}"
                self._fail(FailureCode.NOT_READY, text)

    def _enough(self) -> bool:
        """True when all required ranks are ready, all optional ranks whose agents have joined, and at least
        `first_generators` optional replicas."""
        waiting = {name for name, index in self.ranks if (name, index) not in self.pids}
        late = self.config.may_be_late - self._holding
        there = len(self.config.may_be_late - waiting)
        if waiting - late or any(map(self._has_agents, waiting)):
            return False
        return not waiting or there >= self.config.flags.first_generators

    def _begin(self) -> None:
        """Begin the first stage. Replicas that are not ready count as lost; some of them are starting already."""
        late = {name for name, index in self.ranks if (name, index) not in self.pids}
        self.lost = dict.fromkeys(late, 0)
        self._coming = late & {name for name, _ in self._begun}
        self.session.begin(monotonic(), self.restored, late)
        self._send()

    # Running ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Handle the messages that have come, or wait a moment for one. Then look for silent peers and missed
        deadlines, decide whether the run goes on, and send commands.
        """
        heard = self.server.receive(TICK)
        # Update this before the messages are handled: a failure that is reported now notes it, and only later
        # suspensions of this process may extend its wait for a better cause.
        self.session.suspended_s = self.server.tracker.suspended_s(monotonic())
        # The launcher comes first: a stop does not wait behind ranks' messages.
        while not self.launcher.empty():
            self._hear_launcher(self.launcher.get())
        for peer, message in heard:
            self._hear(peer, message)
        now = monotonic()
        self._handle_held_failures(now)
        late = [peer for peer in self.server.late(now) if not self._do_without(peer, "it sends no heartbeat")]
        if late:
            names = ", ".join(map(self._spelled, late))
            self._fail(FailureCode.SILENT, f"no heartbeat from {names}: hung, stopped or dead", *late)
        # One moment for both: if this process were suspended between two, that would count as a rank's delay.
        self.session.watch(now, self.server.tracker.suspended_s(now))
        self.session.decide(now, self.server.tracker.last)
        self._send()
        # Once for many ranks that come together: each write is synced to disk.
        if self._unlisted and (len(self.pids) == len(self.ranks) or now - self._listed_at >= LIST_S):
            self._list(now)
        self._tell_dropped(now)

    def _list(self, now: float) -> None:
        """Write `processes.json`."""
        self._unlisted, self._listed_at = False, now
        pools: dict[str, list[int]] = defaultdict(list)
        for (name, _), own in sorted(self.pids.items()):
            pools[pool_of(name)].append(own)
        self.folder.write_json("processes.json", {"controller": os.getpid(), "pools": pools})

    def _tell_dropped(self, now: float) -> None:
        """Note how many frames were dropped, at most once a second."""
        before, told = self._told
        if self.server.counts.total() > before and now - told >= 1.0:
            self._told = (self.server.counts.total(), now)
            so_far = ", ".join(f"{count} {kind}" for kind, count in sorted(self.server.counts.items()))
            text = f"dropped ({so_far}); the last: {self.server.dropped[-1]}"
            say({"kind": "note", "level": "warning", "text": text})

    def _hear(self, peer: str, message: Message) -> None:
        match message:
            case Results(results):  # first: most messages are of this kind
                for result in results:
                    if isinstance(result.event, (Failed, Abort)) and self._must_hold(peer):
                        self._held_failures.append((monotonic(), self.session.suspended_s, peer, result))
                    else:
                        self._answer(peer, result)
            case SendFailed(replica, life, error):
                # Sending to a replica that is known to be lost fails for that reason.
                known = life != self.session.life(replica) or replica in self.lost
                # Otherwise its host may be gone, which is noticed only later.
                if not known and not self._do_without(rank_peer(replica, 0), f"it cannot be sent weights: {error}"):
                    self._fail(FailureCode.TRANSFER, error, replica=replica)
            case Untrusted(error):
                # From now on no answer is heard, so no update learns. Not even a replica that may be lost is done
                # without: what its successor computes could not be trusted either.
                self._fail(FailureCode.UNTRUSTED, error)
            case _ if isinstance(message, Question):
                for asker, found in self.board.hear(peer, message):
                    if found.error:
                        self.server.drop("excessive", self._spelled(asker), found.error)
                    self.server.send(
                        asker, structs.replace(found, suspended_s=self.server.tracker.suspended_s(monotonic()))
                    )
            case Hello(role=role):
                self.alive.add(peer)
                if role == "rank":
                    restore = self._restored_by(peer.rpartition(":")[0])
                    self.server.send(peer, Setup(self._config, restore))
            case AgentReady(host=host, life=life):
                self._agent_came(host, life)
            case Leaving(host, grace):
                if not self._let_go(host, f"host {host} is preempted within {grace:g} s"):
                    self.session.leave(host, grace, monotonic())
            case Ready():
                self._rank_ready(peer, message)
            case Note(level="error"):
                if not self._do_without(peer, message.text):
                    self._fail_as_said(peer, message)
            case Note(text=text):
                self.session.recorder.warn(text)
            case Exited():
                self._rank_ended(message)
            case _:
                self.server.drop("unexpected", peer, type(message).__name__)

    def _agent_came(self, host: str, life: int) -> None:
        """The agent of a host has come: start the ranks there that are due."""
        self.agents[host] = life
        self._able.add(host)
        here = [key for key, place in self.ranks.items() if place.host == host]
        self._begun.difference_update(here)
        for name in dict.fromkeys(name for name, _ in here):
            if self.session.stage is not None and name not in self.lost and name in self.elastic:
                self._lose(name, f"the agent of host {host} has ended, and a new one has joined")
            # Start a replica that may be late only when all its ranks can come: they wait for each other.
            if name in self.lost or (self.session.stage is None and name in self.config.may_be_late):
                self._launch_all(name)
                if lacking := [each for each in self.config.plan.replica(name).hosts if each not in self._able]:
                    text = f"{self._named(name)} waits for the agent of host {', '.join(lacking)}"
                    self.session.recorder.note(text, "warning")
            elif self.session.stage is None:
                self._launch(name, [index for own, index in here if own == name], 0)

    def _rank_ready(self, peer: str, ready: Ready) -> None:
        """A rank is set up. When the last rank of a lost replica is ready, the replica is there again."""
        replica = ready.replica
        if replica in self.lost and not self._has_agents(replica):
            # The agent of a host has left meanwhile, and its ranks end with it.
            self.server.forget(peer)
            self.alive.discard(peer)
        elif replica in self.lost and peer not in self.alive:
            # The rank was given up after it had sent this.
            self.server.drop("unexpected", peer, "Ready of a rank that is lost")
        elif (replica, ready.rank) in self.pids:
            # A rank is set up once: a second Ready could overwrite the references of restored values.
            self.server.drop("unexpected", peer, "a second Ready")
        else:
            self.pids[replica, ready.rank] = ready.pid
            self.restored.update(((firing, output), handle) for firing, output, handle in ready.restored)
            if replica in self.lost and all((replica, index) in self.pids for index in self._indices(replica)):
                del self.lost[replica]
                self._coming.discard(replica)
                self.session.join(replica, monotonic())
                came = "has rejoined" if self.session.life(replica) else "has joined"
                self.session.recorder.note(f"{self._named(replica)} {came}", "info")
            self._unlisted = True

    def _fail_as_said(self, peer: str, note: Note) -> None:
        """Fail for the reason that a rank or an agent gives for its end. The run cannot go on without it."""
        if peer.startswith("agent:"):
            self._fail(FailureCode.AGENT_DIED, note.text, peer)
        elif note.unreadable:
            # The rank read its checkpoint shard alone: this failure does not follow from another rank's end.
            self._fail(FailureCode.CHECKPOINT, note.text)
        else:
            several = len(self.peers[peer.rpartition(":")[0]]) > 1
            self._fail(FailureCode.RANK_RAISED, note.text, doubtful=several)

    def _rank_ended(self, exited: Exited) -> None:
        """An agent reports that a rank's process has ended."""
        replica, rank = exited.replica, exited.rank
        peer = rank_peer(replica, rank)
        self.alive.discard(peer)
        self._begun.discard((replica, rank))
        if self._do_without(peer, exited.reason, ended=True):
            return
        moving, name = self.session.moving(replica), self.config.plan.spelled(replica, rank)
        fault = f"{name} died: {exited.reason}" + (f"\nit was {moving}" if moving else "")
        if exited.signal or (exited.tail and exited.status != EXIT_EXPLAINED):
            self.server.forget(peer)
            self._fail(FailureCode.RANK_DIED, fault, peer)
        else:  # the rank reports the reason itself, on its own connection: that message may come later
            self._fail(FailureCode.RANK_ENDED, fault)

    def _hear_launcher(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "stop":
            self.session.stop(monotonic(), rest)
        elif word == "preempt":
            self.session.preempt(monotonic(), f"preempted ({rest})", self.config.flags.grace)
        elif word == "refused":
            self.session.recorder.note(line, "warning")
        elif word == "agent":
            host, life, reason = rest.split(" ", 2)
            # Another agent may have this host by now.
            if int(life) < self.agents.get(host, 0) or self._do_without(
                agent_peer(host), f"the agent of host {host} died: {reason}", known=True
            ):
                say({"kind": "without", "host": host})
                return
            text = f"the agent of host {host} died, and with it {self._ranks_of(host)}: {reason}"
            self._fail(FailureCode.AGENT_DIED, text, agent_peer(host))

    # Replicas that come and go ----------------------------------------------------------------------------

    def _do_without(self, peer: str, reason: str, *, ended: bool = False, known: bool = False) -> bool:
        """Go on without a rank or an agent that is gone, if the run can: its replicas are lost. Return whether it can.
        `ended`: an agent reported the end of a rank's process. `known`: the launcher reported the end of an agent, and
        need not be told."""
        if self.session.stage is None or not self.session.running:
            return False
        host = peer.removeprefix("agent:") if peer.startswith("agent:") else ""
        gone = {name for (name, _), rank in self.ranks.items() if rank.host == host} or {peer.rpartition(":")[0]}
        if not gone <= self.elastic:
            return False
        if host:
            if agent_peer(host) in self.alive and not known:
                say({"kind": "gone", "host": host, "life": self.agents.get(host, 0)})
            # It may only have been stopped. Then it ends its ranks when it goes on.
            self.server.send(peer, GivenUp(reason))
            self.server.forget(peer)
            self.alive.discard(peer)
            self._able.discard(host)
            self._begun -= {key for key, rank in self.ranks.items() if rank.host == host}
        for name in sorted(gone):
            # A late message from a rank that was given up says nothing about the ranks that replaced it.
            if name not in self.lost or host or ended or peer in self.alive:
                self._lose(name, reason)
            self._start_again(name, reason)
        return True

    def _lose(self, name: str, reason: str) -> None:
        """A rank of a replica is gone: the replica is lost, and its other ranks, which cannot go on, are ended."""
        if name not in self.lost:
            self.lost[name] = 0
            self.session.recorder.note(f"{self._named(name)} is lost; its groups start again: {reason}", "warning")
            self.session.lose(name, reason, monotonic())
        elif name in self._coming:
            self._coming.discard(name)
            self.lost[name] += 1
        else:
            return
        for index, peer in enumerate(self.peers[name]):
            self.pids.pop((name, index), None)
            if (name, index) in self._begun:
                self.server.send(agent_peer(self.ranks[name, index].host), End(name, index))
            self.server.forget(peer)
            self.board.forget(peer)
            self.alive.discard(peer)

    def _let_go(self, host: str, reason: str) -> bool:
        """A host is leaving: if the run can go on without it, dismiss its ranks and agent. Return whether it can."""
        keys = [key for key, rank in self.ranks.items() if rank.host == host]
        if not {name for name, _ in keys} <= self.elastic or self.session.stage is None or not self.session.running:
            return False
        for peer in (*(rank_peer(*key) for key in keys), agent_peer(host)):
            self.server.send(peer, Goodbye(reason))
        return self._do_without(agent_peer(host), reason)

    def _start_again(self, name: str, reason: str) -> None:
        """Start a lost replica again if its agents are there, all its processes have ended, and it has ended fewer than
        `STARTS` times before it was ready. Fail if the pool has no replica left."""
        if name in self._coming or not self._may_launch(name):
            return
        if self.lost[name] < STARTS:
            self._launch_all(name)
        else:
            text = f"{self._named(name)} ended {STARTS} times before it was ready: {reason}"
            self.session.recorder.note(f"{text}\nit is not started again", "warning")
        pool = next(pool for pool in self.config.plan.pools if pool.name == pool_of(name))
        if all(self.lost.get(replica.name, 0) >= STARTS for replica in pool.replicas):
            self._fail(FailureCode.RANK_DIED, f"no replica of pool {pool.name} is left; the last was {name}: {reason}")

    def _indices(self, name: str) -> range:
        return range(len(self.peers[name]))

    def _named(self, name: str) -> str:
        """A replica, for messages."""
        return self.config.plan.replica(name).located if self.peers[name][1:] else self.config.plan.spelled(name, 0)

    def _has_agents(self, name: str) -> bool:
        """True if the agents of all of a replica's hosts can start ranks."""
        return self._able.issuperset(self.config.plan.replica(name).hosts)

    def _may_launch(self, name: str) -> bool:
        """True if all ranks of a replica can be started, and none from an earlier start is left."""
        return self._has_agents(name) and not any((name, index) in self._begun for index in self._indices(name))

    def _launch_all(self, name: str) -> None:
        """Start a replica, if possible now."""
        if self._may_launch(name):
            if name in self.lost:
                self._coming.add(name)
            self._launch(name, self._indices(name), self._starts[name])

    def _launch(self, name: str, indices: Iterable[int], start: int) -> None:
        """Start ranks of a replica, which has been started `start` times before."""
        self._starts[name] = start + 1
        python = next(p.python for p in self.config.plan.pools if p.name == pool_of(name))
        for index in indices:
            place, life = self.ranks[name, index], self.session.life(name)
            self._begun.add((name, index))
            self.server.send(agent_peer(place.host), Launch(name, index, place.threads, python, life, start))

    # Failures that may be another's -----------------------------------------------------------------------

    def _must_hold(self, peer: str) -> bool:
        """True if a failure of this rank may follow from the loss of another rank of its replica."""
        replica = peer.rpartition(":")[0]
        return replica in self.elastic and len(self.peers[replica]) > 1

    def _answer(self, peer: str, result: Result) -> None:
        """Handle a rank's answer, or its `Abort`."""
        if isinstance(result.event, Abort):
            self._fail(FailureCode.TRANSFER, result.event.error, replica=peer.rpartition(":")[0])
        elif self.session.running:
            if result.unread and result.unread[1] == self.session.life(result.unread[0]):
                # The replica that holds the value is gone, which has not been noticed yet.
                self._do_without(rank_peer(result.unread[0], 0), f"{self._spelled(peer)} cannot read what it has made")
            try:
                self.session.answer(result, monotonic())
            except UnawaitedError as error:  # the answer changes nothing
                self.server.drop("unawaited", peer, str(error))

    def _handle_held_failures(self, now: float) -> None:
        """Handle each doubted failure once it is clear that no other rank of its replica is gone. Discard the failures
        of lost replicas."""
        waiting, self._held_failures = self._held_failures, []
        suspended_s = self.server.tracker.suspended_s(now)
        for since, before, peer, result in waiting:
            replica = peer.rpartition(":")[0]
            agents = map(agent_peer, self.config.plan.replica(replica).hosts)
            heard = all(self.server.tracker.last(agent) > since for agent in agents)
            if replica in self.lost:
                continue
            waited = now - since - (suspended_s - before)
            if waited > DOUBT_S or (waited > HELD_S and heard):
                self._answer(peer, result)
            else:
                self._held_failures.append((since, before, peer, result))

    def _ranks_of(self, host: str) -> str:
        return ", ".join(f"{r} rank {i}" for (r, i), rank in self.ranks.items() if rank.host == host) or "no rank"

    def _host(self, peer: str) -> str:
        replica, _, name = peer.rpartition(":")
        return name if replica == "agent" else self.ranks[replica, int(name)].host

    def _restored_by(self, replica: str) -> tuple[str, ...]:
        """The names of the checkpoint that a replica restores its shard of. () if it has none: it was lost since, or it
        may have been absent when the checkpoint was made, and no group still had to read a value from it."""
        if self.cut is None or replica in self.lost:
            return ()
        if replica in self.elastic and not any(
            holder == replica and readers[name]
            for _, made, readers in self.cut.cut["groups"]
            for name, holder in made.items()
        ):
            return ()
        return self.cut.written, self.cut.folder.name

    def _spelled(self, peer: str) -> str:
        """A peer, for messages: which rank, or whose agent."""
        if peer.startswith("agent:"):
            host = peer.removeprefix("agent:")
            return f"the agent of host {host} (with {self._ranks_of(host)})"
        replica, _, index = peer.rpartition(":")
        moving = self.session.moving(replica)
        return self.config.plan.spelled(replica, int(index)) + (f" ({moving})" if moving else "")

    def _send(self) -> None:
        """Send the commands of this turn, in one message for each rank."""
        for replica, order in self.session.take().items():
            for peer in self.server.send_all(self.peers[replica], order):
                text = f"{self.config.plan.spelled(replica, int(peer.rpartition(':')[2]))} cannot be reached"
                # The rank has missed this order, even if it reconnects.
                if not self._do_without(peer, text):
                    self._fail(FailureCode.UNREACHABLE, text, peer, replica=replica)

    def _fail(self, code: FailureCode, text: str, *gone: str, doubtful: bool = False, replica: str = "") -> None:
        """Report a failure. `gone` are the peers that are lost by it."""
        hosts = {self._host(peer) for peer in gone}
        # An agent may know of the death that caused a failure. For RANK_ENDED, it has just reported that death.
        agents = tuple(peer for peer in self.server.peers if peer.startswith("agent:"))
        agents = () if code == FailureCode.RANK_ENDED else agents
        self.session.fail(
            Failure(code, text, agents, doubtful, replica, hosts.pop() if len(hosts) == 1 else ""), monotonic()
        )

    # Ending -----------------------------------------------------------------------------------------------

    def _dismiss(self) -> None:
        """Say goodbye to all peers, and wait a little for the ranks to end."""
        left = {rank_peer(replica, index) for replica, index in self.ranks} & self.alive
        for peer in left:
            self.server.send(peer, Goodbye(self.session.status))
        # Time in which the whole machine was suspended does not count.
        counted = self.server.tracker.counted
        until = counted(monotonic()) + DISMISS_S
        while left and counted(monotonic()) < until:
            for _, message in self.server.receive(TICK):
                if isinstance(message, Exited):
                    left.discard(rank_peer(message.replica, message.rank))
        # Agents come last: they kill the ranks that have not ended.
        lost = self.session.failure is not None and self.session.failure.code in MENDABLE
        for peer in self.server.peers:
            if peer.startswith("agent:"):
                self.server.send(peer, Goodbye(self.session.status, lost))
        (self.folder.held / "processes.json").unlink(missing_ok=True)


def say(line: Mapping[str, Any]) -> None:
    """Write one line for the launcher."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _listen(lines: "queue.SimpleQueue[str]", wake: Callable[[], None]) -> None:
    for line in sys.stdin:
        lines.put(line.rstrip("\n"))
        wake()


def _control(folder: RunFolder, config: RunConfig, server: Server) -> int:
    """Run it, and return the exit status; if it failed, the launcher has the reason. Raises RecordError if the folder
    cannot be written."""
    cut = latest_checkpoint(folder)
    recorder = RunRecorder(folder, config, say, monotonic(), cut)
    session = Session(config, recorder, cut.cut if cut else None)
    recorder.dropped_frames, session.doing = server.counts, server.doing
    controller = Controller(folder, config, server, session, cut)
    # A thread reads the lines: polling stdin does not see lines that are buffered already.
    threading.Thread(target=_listen, args=[controller.launcher, server.wake], daemon=True).start()
    try:
        status = controller.run()
    finally:
        if session.failure is not None:  # reported even if the folder could not be written
            say(session.failure.line())
    stopped = PREEMPTED if session.preempted else INTERRUPTED
    return {"done": DONE, "stopped": stopped}.get(status, FAILED)


def main() -> None:
    die_with_parent()
    ignore_stop_signals()
    files = raise_descriptors()
    folder = RunFolder.open(awaited() if sys.argv[1] == EARLY else sys.argv[1])
    config = RunConfig.load(folder)
    ranks = {rank_peer(r.name, i): rank.host for r in config.plan.replicas for i, rank in enumerate(r.ranks)}
    server_keys = ServerKeys.read(folder.path / "keys" / "controller.json")
    if 0 < files < (needed := 3 * connections(ranks, server_keys.endpoint)):  # a listener lets so many in at once
        text = (
            f"the controller may open {files} files on {os.uname().nodename}, needed {needed} for {len(ranks)} ranks: "
            f"a hard limit (ulimit -Hn) that its administrator sets, by LimitNOFILE of slurmd or of another service, "
            f"--ulimit nofile={needed} of a container, or nofile in /etc/security/limits.conf for a login"
        )
        say(Failure(FailureCode.CONTROLLER, text).line())
        sys.exit(FAILED)
    try:
        server = Server(server_keys, ranks)
    except WireError as error:
        say(Failure(FailureCode.CONTROLLER, str(error.strerror)).line())
        sys.exit(FAILED)
    say({"kind": "listening", "endpoint": server.endpoint})
    status = FAILED
    try:
        status = _control(folder, config, server)
    except RecordError as error:
        say(Failure(FailureCode.RUN_FOLDER, folder.follow() or str(error)).line())
    except Exception:
        moved = folder.follow()
        raised = Failure(FailureCode.CONTROLLER, f"the controller failed:\n{traceback.format_exc()}")
        say((Failure(FailureCode.RUN_FOLDER, moved) if moved else raised).line())
    finally:
        server.close()
    sys.stdout.flush()
    # An ordinary exit would wait for the thread that reads stdin.
    os._exit(status)


if __name__ == "__main__":
    main()
