"""Fake agents and fake ranks of several hosts in one process, for the controller's benchmark.

    python benchmarks/fake_ranks.py PACE TENSORS JOIN_FILE …

They use the real protocol: an agent over TCP and CURVE, its ranks and their heartbeats through the relay of real
agents, with the messages and intervals of real ones. Only the work is fake. An update takes PACE seconds, a group a
share of that, and no weights move; a version has a manifest of TENSORS names. The ranks of a group meet on the
controller's board as with torch's gloo, with addresses of the same size.
"""

import heapq
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic, time
from typing import Any
from zlib import crc32

import zmq

from penstock.graph.ir import Firing
from penstock.runtime.control.listener import Options, dial, drain, raise_descriptors
from penstock.runtime.control.messages import (
    AgentReady,
    BoardValues,
    Delivery,
    Goodbye,
    Heartbeat,
    Hello,
    Launch,
    Look,
    Manifest,
    Message,
    Order,
    Post,
    Ready,
    Result,
    Results,
    Setup,
    pack,
    rank_peer,
    unpack,
)
from penstock.runtime.control.process import die_with_parent
from penstock.runtime.control.relay import Relay
from penstock.runtime.control.rendezvous import INTERVAL, agent_interval, beat_interval
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.security import Join
from penstock.runtime.schedule.events import (
    Arrived,
    Command,
    Done,
    Fire,
    Publish,
    Published,
    Save,
    Saved,
    Send,
    Swap,
    Swapped,
)
from penstock.runtime.tensor.shm import ObjectRef, owner_of

# Bytes that gloo posts for each rank; in hexadecimal they are twice as many.
ADDRESS_BYTES = 200
# Seconds between the fastest and the slowest clock of the hosts.
SKEW = 0.02
# Work ends at a multiple of this many seconds, so that ranks that compute together end together.
TOGETHER = 0.05
# The durations of a group's responses and of a transfer of weights, as shares of PACE.
GROUP, TRANSFER = 0.6, 0.1
OPTIONS: Options = {zmq.SNDHWM: 1000, zmq.RCVHWM: 1000}


class Peers:
    """The connections of one process, and its actions by the time at which they are due."""

    def __init__(self, pace: float, tensors: int) -> None:
        self.pace = pace
        self.digests = {f"model.layers.{i // 9}.part_{i % 9}.weight": i << 32 for i in range(tensors)}
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 1 << 14)
        self.poller = zmq.Poller()
        self.hears: dict[zmq.Socket[bytes], Callable[[Message], None]] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.left: set[FakeAgent] = set()
        self.config: RunConfig | None = None
        self.interval = INTERVAL

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (monotonic() + seconds, next(self.order), act))

    def connect(self, join: Join, hello: Hello, hear: Callable[[Message], None]) -> Callable[[Message], None]:
        """Open a connection; return a function that sends a message on it."""
        socket, numbers = dial(self.context, join.endpoint, join.server, join, OPTIONS), count(1)
        self.hears[socket] = hear
        self.poller.register(socket, zmq.POLLIN)

        def say(message: Message) -> None:
            with suppress(zmq.Again):
                socket.send(pack(message, next(numbers)), zmq.NOBLOCK)

        say(hello)
        return say

    def beat(self, say: Callable[[Message], None], host: str, doing: Callable[[], str]) -> None:
        """Send heartbeats like a `HeartbeatThread`: those of one host at the same time, those of other hosts at other
        times."""
        phase = crc32(host.encode()) % 1009 / 1009

        def again() -> None:
            say(Heartbeat(doing()))
            wait()

        def wait() -> None:
            interval, now = self.interval, monotonic()
            self.after(((now / interval - phase) // 1 + 1 + phase) * interval - now, again)

        wait()

    def run(self) -> None:
        """Run until all agents have received Goodbye."""
        while self.left:
            now = monotonic()
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            wait = min(1.0, max(0.0, self.due[0][0] - monotonic())) if self.due else 1.0
            wait = min([wait, *(agent.relay.wait(now) for agent in self.left)])
            ready = dict(self.poller.poll(int(1000 * wait) + 1))
            for socket in ready.keys() & self.hears.keys():
                for frames, _, _ in drain(socket):
                    self.hears[socket](unpack(frames[0])[1])
            now = monotonic()
            for agent in self.left:
                if agent.relay.socket in ready or not agent.relay.wait(now):
                    agent.carry(now)
        self.context.destroy(linger=500)


class FakeAgent:
    """Announces itself, starts a rank for each Launch, and relays messages for its ranks as a real one does."""

    def __init__(self, peers: Peers, join: Join) -> None:
        self.peers, self.join = peers, join
        # Clocks of hosts differ by some milliseconds.
        skew = SKEW * (crc32(join.host.encode()) % 1009 / 1009 - 0.5)
        self.relay = Relay(join, agent_interval(len(join.hosts)), clock=lambda: time() + skew)
        peers.left.add(self)
        peers.poller.register(self.relay.socket, zmq.POLLIN)
        self.say = peers.connect(join, Hello("agent", join.host, 0, 1, join.host, join.token), self.hear)
        self.say(AgentReady(join.host, 1))

    def hear(self, message: Message) -> None:
        if isinstance(message, Launch):
            self.relay.begin(rank_peer(message.replica, message.rank))
            FakeRank(self.peers, replace(self.join, endpoint=self.relay.endpoint), message.replica, message.rank)
        elif isinstance(message, Delivery):
            self.relay.deliver(message)
        elif isinstance(message, Goodbye):
            self.peers.left = self.peers.left - {self}

    def carry(self, now: float) -> None:
        for said in self.relay.take(now):
            self.say(said)


class FakeRank:
    """Meets its replica's other ranks, and then answers each command after the time of the real work."""

    def __init__(self, peers: Peers, join: Join, replica: str, rank: int) -> None:
        self.peers, self.join, self.replica, self.rank = peers, join, replica, rank
        self.doing, self.group, self.asked = "", list[str](), 0
        self.found: list[Result] = []
        self.beats = peers.connect(join, self.hello("heartbeat"), self.answered)
        self.say = peers.connect(join, self.hello("rank"), self.hear)
        peers.beat(self.beats, join.host, lambda: self.doing)

    def hello(self, role: Any) -> Hello:
        return Hello(role, self.replica, self.rank, 1, self.join.host, self.join.token)

    def hear(self, message: Message) -> None:
        match message:
            case Setup(config):
                # What a real rank reads from it; here it is parsed once per process.
                peers = self.peers
                if peers.config is None:
                    peers.config = RunConfig.from_json(json.loads(config))
                    peers.interval = beat_interval(sum(len(one.ranks) for one in peers.config.plan.replicas))
                ranks = len(peers.config.plan.replica(self.replica).ranks)
                if ranks == 1:
                    self.say(Ready(self.replica, self.rank, 1))
                    return
                self.group = [f"{self.replica}/{number}" for number in range(ranks)]
                self.beats(Post(f"here/{self.group[self.rank]}", "31"))
                self.look("here")
            case Order():
                for command in message.commands:
                    self.obey(command)
                self.flush()
            case _:
                pass

    def look(self, stage: str) -> None:
        self.asked += 1
        self.beats(Look(self.asked, tuple(f"{stage}/{name}" for name in self.group)))

    def answered(self, message: Message) -> None:
        if not isinstance(message, BoardValues):
            return
        if message.error:
            raise RuntimeError(message.error)
        if self.asked == 1:  # all are present; next come their addresses
            self.beats(Post(f"gloo/{self.group[self.rank]}", "ab" * ADDRESS_BYTES))
            self.look("gloo")
        else:
            self.say(Ready(self.replica, self.rank, 1))

    def obey(self, command: Command) -> None:
        pace, replica, rank = self.peers.pace, self.replica, self.rank
        match command:
            case Fire(firing):
                updates = firing.node.endswith("update")
                seconds = pace if updates else GROUP * pace if firing.node == "generate" else 0.0
                self.doing = str(firing)
                self.later(seconds, lambda: self.done(firing))
            case Publish(channel, version):
                layout = '{"of": "a fake"}' if version == 0 else ""
                manifest = Manifest(channel, version, self.peers.digests, layout) if rank == 0 else None
                event = Published(channel, version, replica, rank)
                self.later(0.0, lambda: Result(event, {}, {}, monotonic(), monotonic(), manifest))
            case Send(channel, version, _, to) if to == replica:
                self.later(TRANSFER * pace, lambda: Result(Arrived(channel, version, replica, rank)))
            case Swap(channel, version, _):
                self.later(0.0, lambda: Result(Swapped(channel, version, replica, rank)))
            case Save(update):
                self.later(0.0, lambda: Result(Saved(update, replica, rank)))
            case _:
                pass

    def done(self, firing: Firing) -> Result:
        owner, host = owner_of(self.replica, self.rank), self.join.host
        segment = f"penstock-{self.join.run}-{owner}-0"
        handle = ObjectRef(segment, 4096 * firing.index, 65536, firing.index, owner, host, "tcp://127.0.0.1:45678")
        outputs, metrics = {"out": handle}, dict[str, float]()
        if firing.node == "score":
            metrics = {"reward_mean": 0.5}
        if firing.node.endswith("update"):
            outputs, metrics = {}, {f"figure_{i}": float(i) for i in range(12)}
        if self.rank:  # the first rank reports for all
            outputs, metrics = {}, {}
        return Result(Done(firing, self.replica, self.rank), outputs, metrics, monotonic(), monotonic())

    def later(self, seconds: float, made: Callable[[], Result]) -> None:
        if not seconds:
            self.found.append(made())
            return

        def then() -> None:
            self.found.append(made())
            self.doing = ""
            self.flush()

        until = monotonic() + seconds
        self.peers.after(seconds - until % -TOGETHER, then)

    def flush(self) -> None:
        if self.found:
            self.say(Results(tuple(self.found)))
            self.found = []


def main() -> None:
    die_with_parent()
    raise_descriptors()
    peers = Peers(float(sys.argv[1]), int(sys.argv[2]))
    for file in sys.argv[3:]:
        FakeAgent(peers, Join.read(Path(file)))
    peers.run()


if __name__ == "__main__":
    main()
