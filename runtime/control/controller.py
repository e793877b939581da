"""The single controller: `python -m penstock.runtime.control.controller RUN_FOLDER`, started by the launcher, or early.

It owns the only clock and the only server socket. It starts ranks through agents, drives the run's stages through the
scheduler, and knows of every wait who is waited for and until when. It never imports torch. See `launcher` for what it
says on standard output and hears on standard input.
"""

import json
import os
import queue
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any

from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.control.early import EARLY, awaited
from penstock.runtime.control.failure import MENDABLE, Failure, FailureCode
from penstock.runtime.control.listener import WireError, raise_descriptors
from penstock.runtime.control.messages import (
    EXIT_EXPLAINED,
    AgentReady,
    End,
    Exited,
    Goodbye,
    Hello,
    Launch,
    Leaving,
    Message,
    Note,
    Question,
    Ready,
    Results,
    SendFailed,
    Setup,
    agent_peer,
    rank_peer,
)
from penstock.runtime.control.process import die_with_parent
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.rendezvous import Board
from penstock.runtime.control.run import Session
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.security import Door
from penstock.runtime.control.signals import DONE, FAILED, INTERRUPTED, PREEMPTED, leave_end_to_parent
from penstock.runtime.control.sockets import Server, connections
from penstock.runtime.record.checkpoints import SavedCheckpoint, latest_checkpoint
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.schedule.events import Abort
from penstock.runtime.schedule.state import UnawaitedError
from penstock.runtime.tensor.shm import ObjectRef

# Seconds between two looks at deadlines, when nothing is heard.
TICK = 0.25
# Seconds for ranks and agents to end after a goodbye.
DISMISS_S = 2.0
# Seconds between two lists of the run's processes, while ranks come.
LIST_S = 1.0
# How often a lost replica is started that ends before it is ready.
STARTS = 3


class Controller:
    """The processes of a run: started, heard, watched and dismissed here; `session` decides what they do."""

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
        self.agents: dict[str, int] = {}  # of each host whose agent has come, how many have had its place before
        self.elastic = config.elastic
        # Replicas that were lost, with how often each has ended since without having been ready.
        self.lost: dict[str, int] = {}
        self._ended: set[str] = set()  # those of them whose process has ended, and which no agent has started again
        self._config = json.dumps(config.to_json())
        self._unlisted, self._listed_at = False, -inf  # has a rank come since processes.json was written, and when
        self._told = (0, 0.0)  # frames dropped by the last note of them, and when that was

    def run(self) -> str:
        """The run's status: "done", "stopped" or "failed"."""
        try:
            self._assemble()
            if self.session.running:  # nobody has stopped it meanwhile
                late = {name for name, index in self.ranks if (name, index) not in self.pids}
                self.lost, self._ended = dict.fromkeys(late, 0), set(late)
                self.session.begin(monotonic(), self.restored, late)
                self._send()
            while self.session.running:
                self._turn()
        finally:
            self._dismiss()
        return self.session.status

    # Starting ---------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Agents, then ranks: all have `startup_deadline` seconds, counted together."""
        seconds = self.config.flags.startup_deadline
        until = monotonic() + seconds
        while not self._enough() and self.session.running:
            self._turn()
            now = monotonic()
            # A time in which this process itself was stopped is nobody's delay.
            if now > until + self.server.tracker.held_up(now):
                names = ", ".join(self.config.plan.spelled(r, i) for r, i in self.ranks if (r, i) not in self.pids)
                text = f"{names} did not get ready within {seconds:.0f} s; see {self.folder.logs}"
                hosts = {rank.host for rank in self.ranks.values()}
                if missing := sorted(host for host in hosts if agent_peer(host) not in self.alive):
                    where = f"joined within {seconds:.0f} s at {self.server.endpoint}"
                    text = f"no agent of host {', '.join(missing)} {where}"
                self._fail(FailureCode.NOT_READY, text)

    def _enough(self) -> bool:
        """Are all ranks ready, or all that the run cannot begin without, and all whose agents are there?"""
        waiting = {name: rank.host for (name, index), rank in self.ranks.items() if (name, index) not in self.pids}
        # A checkpoint that the run goes on from may have values that they alone have.
        held = {holder for _, made, *_ in self.cut.cut["groups"] for holder in made.values()} if self.cut else set()
        late = self.config.may_be_late - held
        there = sum(name in self.config.may_be_late for name, _ in self.pids)
        if waiting.keys() - late or any(agent_peer(host) in self.alive for host in waiting.values()):
            return False
        return not waiting or there >= self.config.flags.first_generators

    # Running ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Hear what there is, or wait a moment for it; then look for those who do not answer, and whether the run goes
        on.
        """
        heard = self.server.receive(TICK)
        # The launcher comes first: a stop does not wait behind what ranks say.
        while not self.launcher.empty():
            self._hear_launcher(self.launcher.get())
        for peer, message in heard:
            self._hear(peer, message)
        now = monotonic()
        late = [peer for peer in self.server.late(now) if not self._do_without(peer, "it gives no sign of life")]
        if late:
            names = ", ".join(map(self._spelled, late))
            self._fail(FailureCode.SILENT, f"no sign of life from {names}: hung, stopped or gone", *late)
        # The same moment for both: a stop of this process between them would be taken for a rank's delay.
        self.session.watch(now, self.server.tracker.held_up(now))
        self.session.decide(now, self.server.tracker.last)
        self._send()
        # Once for many that come together: it is a file that is synced.
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
        """A note of the frames that were dropped, at most one a second however many they are."""
        before, told = self._told
        if self.server.counts.total() > before and now - told >= 1.0:
            self._told = (self.server.counts.total(), now)
            so_far = ", ".join(f"{count} {kind}" for kind, count in sorted(self.server.counts.items()))
            text = f"dropped ({so_far}); the last: {self.server.dropped[-1]}"
            say({"kind": "note", "level": "warning", "text": text})

    def _hear(self, peer: str, message: Message) -> None:
        match message:
            case SendFailed(replica, life, error):
                # To one that has been lost since it follows from that.
                # Perhaps its host is gone, which is missed only later.
                known = life != self.session.life(replica) or replica in self.lost
                if not known and not self._do_without(rank_peer(replica, 0), f"it cannot be sent weights: {error}"):
                    self._fail(FailureCode.TRANSFER, error, replica=replica)
            case Results(results):
                for result in results:
                    if isinstance(result.event, Abort):
                        self._fail(FailureCode.TRANSFER, result.event.error)
                    elif self.session.running:
                        if result.unread and result.unread[1] == self.session.life(result.unread[0]):
                            # It has not been missed yet.
                            self._do_without(rank_peer(result.unread[0], 0), f"{peer} cannot read what it has made")
                        try:
                            self.session.answer(result, monotonic())
                        except UnawaitedError as error:  # it changes nothing
                            self.server.drop("unawaited", peer, str(error))
            case _ if isinstance(message, Question):
                for asker, found in self.board.hear(peer, message):
                    if found.error:
                        self.server.drop("excessive", self._spelled(asker), found.error)
                    self.server.send(asker, structs.replace(found, held_up=self.server.tracker.held_up(monotonic())))
            case Hello(role=role):
                self.alive.add(peer)
                if role == "rank":
                    again = peer.rpartition(":")[0] in self.lost
                    restore = (self.cut.written, self.cut.folder.name) if self.cut and not again else ()
                    self.server.send(peer, Setup(self._config, restore))
            case AgentReady(host=host, life=life):
                self.agents[host] = life
                for (name, index), place in self.ranks.items():
                    if place.host == host and (not self.lost or name in self._ended):
                        self._launch(name, index)
            case Leaving(host, grace):
                if not self._let_go(host, f"host {host} is taken away within {grace:g} s"):
                    self.session.leave(host, grace, monotonic())
            # Of a host whose agent has left meanwhile: it ends with that, and is not there.
            case Ready(replica, rank) if replica in self.lost and not self._has_agent(replica):
                self.server.forget(peer)
                self.alive.discard(peer)
            # A rank is set up once: a second answer could put others in the place of restored values.
            case Ready(replica, rank) if (replica, rank) in self.pids:
                self.server.drop("unexpected", peer, "a second Ready")
            case Ready(replica, rank, pid, restored):
                self.pids[replica, rank] = pid
                self.restored.update(((firing, output), handle) for firing, output, handle in restored)
                if replica in self.lost:
                    del self.lost[replica]
                    self.session.join(replica, monotonic())
                    came = "is there again" if self.session.life(replica) else "is there"
                    self.session.recorder.note(f"{self.config.plan.spelled(replica, rank)} {came}", "info")
                self._unlisted = True
            case Note(level, text):
                if level == "error" and self._do_without(peer, text):
                    return
                if level == "error":
                    if peer.startswith("agent:"):
                        self._fail(FailureCode.AGENT_DIED, text, peer)
                    else:
                        ranks = self.config.plan.replica(peer.rpartition(":")[0]).ranks
                        self._fail(FailureCode.RANK_RAISED, text, doubtful=len(ranks) > 1)
                    return
                self.session.recorder.note(text, level)
            case Exited(replica=replica, rank=rank, reason=reason, signal=signal, status=status, tail=tail):
                self.alive.discard(rank_peer(replica, rank))
                if self._do_without(rank_peer(replica, rank), message.reason, ended=True):
                    return
                moving, name = self.session.moving(replica), self.config.plan.spelled(replica, rank)
                fault = f"{name} died: {reason}" + (f"\nit was {moving}" if moving else "")
                if signal or (tail and status != EXIT_EXPLAINED):
                    self.server.forget(rank_peer(replica, rank))
                    self._fail(FailureCode.RANK_DIED, fault, rank_peer(replica, rank))
                else:  # it has said why itself, on a connection of its own: that may be heard later
                    self._fail(FailureCode.RANK_ENDED, fault)
            case _:
                self.server.drop("unexpected", peer, type(message).__name__)

    def _hear_launcher(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "stop":
            self.session.stop(monotonic(), rest)
        elif word == "preempt":
            self.session.preempt(monotonic(), f"preempted ({rest})", self.config.flags.grace)
        elif word == "agent":
            host, life, reason = rest.split(" ", 2)
            # Another one may have its place by now.
            if int(life) < self.agents.get(host, 0) or self._do_without(
                agent_peer(host), f"the agent of host {host} died: {reason}", known=True
            ):
                say({"kind": "without", "host": host})
                return
            text = f"the agent of host {host} died, and with it {self._ranks_of(host)}: {reason}"
            self._fail(FailureCode.AGENT_DIED, text, agent_peer(host))

    # Replicas that come and go ----------------------------------------------------------------------------

    def _do_without(self, peer: str, reason: str, *, ended: bool = False, known: bool = False) -> bool:
        """A rank or an agent is gone: if the run goes on without it, the replicas that it had are lost. `ended`: an
        agent has told of the end of a rank's process, so that it can be started again. `known`: the launcher has told
        of the end of an agent, and need not be told."""
        if self.session.stage is None or not self.session.running:
            return False
        host = peer.removeprefix("agent:") if peer.startswith("agent:") else ""
        gone = {name for (name, _), rank in self.ranks.items() if rank.host == host} or {peer.rpartition(":")[0]}
        if not gone <= self.elastic:
            return False
        if host:
            if agent_peer(host) in self.alive and not known:
                say({"kind": "gone", "host": host, "life": self.agents.get(host, 0)})
            self.server.forget(peer)
            self.alive.discard(peer)
        for name in sorted(gone):
            rank = rank_peer(name, 0)
            if name not in self.lost:
                self.lost[name] = 0 if ended else -1  # the end of this life is still to be told of
                where = self.config.plan.spelled(name, 0)
                self.session.recorder.note(f"{where} is lost, and its groups begin again: {reason}", "warning")
                self.pids.pop((name, 0), None)
                self.session.lose(name, reason, monotonic())
                if not ended:
                    self.server.send(agent_peer(self.ranks[name, 0].host), End(name, 0))
            elif ended:
                self.lost[name] += name not in self._ended
            self.server.forget(rank)
            self.alive.discard(rank)
            if ended or host:
                self._ended.add(name)
            if ended:
                self._start_again(name, reason)
        return True

    def _let_go(self, host: str, reason: str) -> bool:
        """A host is leaving: if the run goes on without it, its ranks and its agent may end."""
        gone = {name for (name, _), rank in self.ranks.items() if rank.host == host}
        if not gone <= self.elastic or self.session.stage is None or not self.session.running:
            return False
        for peer in (*(rank_peer(name, 0) for name in gone), agent_peer(host)):
            self.server.send(peer, Goodbye(reason))
        return self._do_without(agent_peer(host), reason)

    def _start_again(self, name: str, reason: str) -> None:
        """Start a lost replica again, if its agent is there and it has not ended too often before it was ready."""
        if not self._has_agent(name):
            return
        if self.lost[name] < STARTS:
            self._launch(name, 0)
        else:
            text = f"{self.config.plan.spelled(name, 0)} ended {STARTS} times before it was ready: {reason}"
            self.session.recorder.note(f"{text}\nit is not started again", "warning")
        pool = next(pool for pool in self.config.plan.pools if pool.name == pool_of(name))
        if all(self.lost.get(replica.name, 0) >= STARTS for replica in pool.replicas):
            self._fail(FailureCode.RANK_DIED, f"no replica of pool {pool.name} is left; the last was {name}: {reason}")

    def _has_agent(self, name: str) -> bool:
        """Is the agent of a replica's host there?"""
        return agent_peer(self.ranks[name, 0].host) in self.alive

    def _launch(self, name: str, index: int) -> None:
        place = self.ranks[name, index]
        python = next(p.python for p in self.config.plan.pools if p.name == pool_of(name))
        self._ended.discard(name)
        life = self.session.life(name)
        self.server.send(agent_peer(place.host), Launch(name, index, place.threads, python, life))

    def _ranks_of(self, host: str) -> str:
        return ", ".join(f"{r} rank {i}" for (r, i), rank in self.ranks.items() if rank.host == host) or "no rank"

    def _host(self, peer: str) -> str:
        replica, _, name = peer.rpartition(":")
        return name if replica == "agent" else self.ranks[replica, int(name)].host

    def _spelled(self, peer: str) -> str:
        """A peer in words: which rank, or whose agent."""
        if peer.startswith("agent:"):
            host = peer.removeprefix("agent:")
            return f"the agent of host {host} (with {self._ranks_of(host)})"
        replica, _, index = peer.rpartition(":")
        moving = self.session.moving(replica)
        return self.config.plan.spelled(replica, int(index)) + (f" ({moving})" if moving else "")

    def _send(self) -> None:
        """Send what follows from all that was heard, in one message for each rank."""
        for replica, order in self.session.take().items():
            for peer in self.server.send_all(self.peers[replica], order):
                text = f"{self.config.plan.spelled(replica, int(peer.rpartition(':')[2]))} cannot be reached"
                self._fail(FailureCode.UNREACHABLE, text, peer, replica=replica if replica in self.elastic else "")

    def _fail(self, code: FailureCode, text: str, *gone: str, doubtful: bool = False, replica: str = "") -> None:
        """Report a failure. `gone` are the peers that are lost by it."""
        hosts = {self._host(peer) for peer in gone}
        # An agent may know of the death that is behind a failure, but for one that it has just told of.
        agents = tuple(peer for peer in self.server.peers if peer.startswith("agent:"))
        agents = () if code == FailureCode.RANK_ENDED else agents
        self.session.fail(
            Failure(code, text, agents, doubtful, replica, hosts.pop() if len(hosts) == 1 else ""), monotonic()
        )

    # Ending -----------------------------------------------------------------------------------------------

    def _dismiss(self) -> None:
        """Say goodbye to all, and wait a little for the ranks to have gone."""
        left = {rank_peer(replica, index) for replica, index in self.ranks} & self.alive
        for peer in left:
            self.server.send(peer, Goodbye(self.session.status))
        until = monotonic() + DISMISS_S
        while left and monotonic() < until:
            for _, message in self.server.receive(TICK):
                if isinstance(message, Exited):
                    left.discard(rank_peer(message.replica, message.rank))
        # Agents come last: they end what has not left by itself.
        lost = self.session.failure is not None and self.session.failure.code in MENDABLE
        for peer in self.server.peers:
            if peer.startswith("agent:"):
                self.server.send(peer, Goodbye(self.session.status, lost))
        (self.folder.held / "processes.json").unlink(missing_ok=True)


def say(line: Mapping[str, Any]) -> None:
    """One line for the launcher."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _listen(lines: "queue.SimpleQueue[str]", wake: Callable[[], None]) -> None:
    for line in sys.stdin:
        lines.put(line.rstrip("\n"))
        wake()


def _control(folder: RunFolder, config: RunConfig, server: Server) -> int:
    """The run's exit status, its reason said if it failed. Raises RecordError where the folder takes no more."""
    cut = latest_checkpoint(folder)
    recorder = RunRecorder(folder, config, say, monotonic(), cut)
    session = Session(config, recorder, cut.cut if cut else None)
    recorder.dropped_frames, session.doing = server.counts, server.doing
    controller = Controller(folder, config, server, session, cut)
    # Lines are read by a thread, since stdin cannot be polled together with what it has buffered.
    threading.Thread(target=_listen, args=[controller.launcher, server.wake], daemon=True).start()
    try:
        status = controller.run()
    finally:
        if session.failure is not None:  # said even if the folder could not take it
            say(session.failure.line())
    stopped = PREEMPTED if session.preempted else INTERRUPTED
    return {"done": DONE, "stopped": stopped}.get(status, FAILED)


def main() -> None:
    die_with_parent()
    leave_end_to_parent()
    files = raise_descriptors()
    folder = RunFolder.open(awaited() if sys.argv[1] == EARLY else sys.argv[1])
    config = RunConfig.load(folder)
    ranks = {rank_peer(r.name, i): rank.host for r in config.plan.replicas for i, rank in enumerate(r.ranks)}
    door = Door.read(folder.path / "keys" / "controller.json")
    if 0 < files < (needed := 3 * connections(ranks, door.endpoint)):  # a listener lets so many in at once
        text = (
            f"the controller may open {files} files on {os.uname().nodename}, needed {needed} for {len(ranks)} ranks: "
            f"a hard limit (ulimit -Hn) that its administrator sets, by LimitNOFILE of slurmd or of another service, "
            f"--ulimit nofile={needed} of a container, or nofile in /etc/security/limits.conf for a login"
        )
        say(Failure(FailureCode.CONTROLLER, text).line())
        sys.exit(FAILED)
    try:
        server = Server(door, ranks)
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
    # The thread that reads stdin would hold up an ordinary exit.
    os._exit(status)


if __name__ == "__main__":
    main()
