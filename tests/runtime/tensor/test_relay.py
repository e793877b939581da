"""Weights along a chain of real processes: equal at each replica, and whoever fails is named on both sides of it."""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore

from penstock.runtime.tensor.broadcast_chain import Arrivals, ChainForwarder, ChainHop, Open
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.digest import ChecksumError, digest
from penstock.runtime.tensor.layout import Copy, Region
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import Side, TransportError
from penstock.runtime.tensor.send_recv import MessageTransport, Tell
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver
from tests.forks import Forked

from .peer import CHANNEL, Policy, hurry, published, receive
from .relay_peer import link
from .replicas import DestinationRank, SourceRank, size, sound, together, wholes

pytestmark = pytest.mark.timeout(300)
LARGE = 10_000_000
"""Elements of 2 bytes: five messages."""
BEYOND_BUFFERS = 50_000_000
"""What Linux takes for a peer that reads nothing counts as sent, up to net.ipv4.tcp_rmem: 32 MB and more."""


class Chain:
    """A trainer here, and replicas in processes of their own."""

    def __init__(self, folder: Path, replicas: int, large: int) -> None:
        peer = "tests.runtime.tensor.relay_peer:main"
        self.replicas = [Forked(peer, str(folder), str(index), str(replicas)) for index in range(replicas)]
        assert [self.read(index) for index in range(replicas)] == [{"started": True}] * replicas
        self.policy = Policy(large)
        self.publisher = WeightPublisher(CHANNEL, self.policy)
        self.bridge = link(folder, -1)
        self.opened: MessageTransport | None = None
        self.events: dict[int, Callable[[], object]] = {}

    def read(self, index: int) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.replicas[index].stdout.readline())
        return answer

    def publish(self, version: int) -> dict[str, Any]:
        """The facts, told to all replicas."""
        self.policy.advance(version)
        facts = published(self.publisher, version)
        for index in range(len(self.replicas)):
            self.tell(index, **facts)
        return facts

    def tell(self, index: int, **line: Any) -> None:
        stdin = self.replicas[index].stdin
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """As the publisher's transport."""
        if self.opened is None:
            opened = self.bridge.open("source")
            assert isinstance(opened, MessageTransport)
            self.opened = opened
        numbers = count()

        def ready(copies: Sequence[Copy]) -> None:
            self.events.get(next(numbers), lambda: None)()

        return self.opened.send(version, copies, parts, ready)

    def at(self, message: int, event: Callable[[], object]) -> None:
        """What happens before the trainer sends this message, from now on."""
        self.events[message] = event

    def sync(self, version: int) -> Any:
        self.publish(version)
        return self.publisher.send(version, self)  # type: ignore[arg-type]

    def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        if self.opened is not None:
            self.opened.close()


@pytest.fixture
def chain_of(tmp_path: Path) -> Iterator[Any]:
    chains: list[Chain] = []

    def make(replicas: int, large: int = LARGE) -> Chain:
        chains.append(Chain(tmp_path, replicas, large))
        return chains[-1]

    yield make
    for chain in chains:
        chain.end()


@pytest.mark.slow
def test_each_version_is_equal_at_each_replica_and_the_trainer_sends_it_once(chain_of: Any) -> None:
    chain = chain_of(3)
    for version in (0, 1, 4):
        moved = chain.sync(version)
        live = {"version": version, "digest": digest(chain.policy.tensors), "bytes": moved.nbytes}
        assert [chain.read(index) for index in range(3)] == [live] * 3
        assert moved.nbytes == sum(tensor.nbytes for tensor in chain.policy.tensors.values())


@pytest.mark.slow
def test_a_replica_that_dies_half_way_is_named_by_those_before_and_after_it(chain_of: Any) -> None:
    chain = chain_of(3)
    chain.sync(0)
    assert [chain.read(index)["version"] for index in range(3)] == [0, 0, 0]
    chain.at(2, chain.replicas[1].kill)
    chain.sync(1)
    answers = [chain.read(0), chain.read(0)]
    (live,) = [answer for answer in answers if "version" in answer]
    (failed,) = [answer["failed"] for answer in answers if "failed" in answer]
    assert (live["version"], live["digest"]) == (1, digest(chain.policy.tensors))
    assert f"{CHANNEL} from generator/0 to generator/1: version 1: " in failed
    assert "to destination rank 0 failed" in failed
    after = chain.read(2)
    assert (after["error"], after["live"]) == ("TransportError", 0)
    assert f"{CHANNEL} from generator/1 to generator/2: version 1: " in after["text"]
    assert "from source rank 0 failed" in after["text"]


@pytest.mark.slow
def test_a_first_replica_that_dies_half_way_is_named_by_the_trainer_and_the_second(chain_of: Any) -> None:
    chain = chain_of(2)
    chain.sync(0)
    assert [chain.read(index)["version"] for index in range(2)] == [0, 0]
    chain.at(2, chain.replicas[0].kill)
    with pytest.raises(TransportError, match=r"trainer to generator/0: version 1: .* destination rank 0 failed"):
        chain.sync(1)
    after = chain.read(1)
    assert f"{CHANNEL} from generator/0 to generator/1: version 1: " in after["text"]
    assert "from source rank 0 failed" in after["text"]
    assert after["live"] == 0


@pytest.mark.slow
def test_a_replica_that_stands_still_is_named_within_the_deadline_by_the_one_before_it(chain_of: Any) -> None:
    chain = chain_of(2, large=BEYOND_BUFFERS)
    chain.sync(0)
    assert [chain.read(index)["version"] for index in range(2)] == [0, 0]
    chain.tell(0, hurry=0, seconds=3)
    chain.at(2, chain.replicas[1].halt)
    chain.sync(1)
    answers = [chain.read(0), chain.read(0)]
    assert [answer["version"] for answer in answers if "version" in answer] == [1]
    (failed,) = [answer["failed"] for answer in answers if "failed" in answer]
    assert "from generator/0 to generator/1: version 1: " in failed
    assert "to destination rank 0 failed after" in failed


@pytest.mark.slow
def test_a_trainer_that_stands_still_is_named_by_the_first_replica_and_the_second_learns_it_at_once(
    chain_of: Any,
) -> None:
    chain = chain_of(2)
    chain.sync(0)
    assert [chain.read(index)["version"] for index in range(2)] == [0, 0]
    chain.tell(0, hurry=-1, seconds=3)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def until_both_have_failed() -> None:
        answers.put(chain.read(0))
        answers.put(chain.read(1))
        hurry(chain.opened, 1)

    chain.at(2, until_both_have_failed)
    with pytest.raises(TransportError):
        chain.sync(1)
    first, second = answers.get(timeout=1), answers.get(timeout=1)
    assert "from trainer to generator/0: version 1: " in first["text"]
    assert "from source rank 0 failed after" in first["text"]
    assert "from generator/0 to generator/1: version 1: " in second["text"]
    assert "Connection closed by peer" in second["text"]
    assert (first["live"], second["live"]) == (0, 0)


# Several ranks: each a thread here --------------------------------------------------------------------------


class Linked(DestinationRank):
    """A rank of a replica in a chain: the first receives from the trainer, as without one."""

    def __init__(self, folder: Path, source: Any, mesh: Any, rank: int, index: int, replicas: int) -> None:
        own = folder / f"replica-{index}"
        own.mkdir(exist_ok=True)
        super().__init__(own, source, mesh, rank, shared=False)
        ranks = size(source) if index == 0 else size(mesh)
        before = ReplicaLink(
            CHANNEL, FileStore(f"{folder}/link-{index - 1}"), ranks, size(mesh), 30, transport="messages"
        )
        after = ReplicaLink(
            CHANNEL, FileStore(f"{folder}/link-{index}"), size(mesh), size(mesh), 30, transport="messages"
        )
        self.before, self.after = (partial(self.end, before, "destination"), partial(self.end, after, "source"))
        self.ends: dict[str, Any] = {}
        self.failures: list[Exception] = []
        self.relay = ChainForwarder(CHANNEL, rank, self.failures.append)
        self.index, self.last = index, index == replicas - 1

    def end(self, bridge: ReplicaLink, side: Any) -> MessageTransport:
        if side not in self.ends:
            self.ends[side] = bridge.open(side, self.rank)
        end: MessageTransport = self.ends[side]
        return end

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        leg = ChainHop(self.relay, self.before, None if self.last else self.after, linked=self.index > 0)
        self.nbytes = leg.receive(version, copies, parts)
        self.damage(parts)
        return self.nbytes


class Several:
    """A trainer of several ranks, and a chain of replicas of several ranks."""

    def __init__(self, folder: Path, source: Any, mesh: Any, replicas: int) -> None:
        makers = [partial(SourceRank, folder, source, mesh, rank) for rank in range(size(source))]
        self.sources: list[SourceRank] = sound(together(*makers))
        for rank in self.sources:
            rank.bridge = ReplicaLink(
                CHANNEL, FileStore(f"{folder}/link--1"), size(source), size(mesh), 30, transport="messages"
            )
        self.mesh = mesh
        self.chain = [
            [Linked(folder, source, mesh, rank, index, replicas) for rank in range(size(mesh))]
            for index in range(replicas)
        ]

    def move(self, version: int) -> list[Any]:
        facts = sound(together(*(partial(s.publish, version) for s in self.sources)))[0]
        ranks = [rank for replica in self.chain for rank in replica]
        sends = [partial(s.send, version) for s in self.sources]
        return together(*sends, *(partial(rank.sync, version, facts) for rank in ranks))


FSDP, TP = (("fsdp", 2),), (("tp", 2),)


@pytest.mark.parametrize("bucket", [4 << 20, 1 << 14], ids=["large messages", "more messages than staging buffers"])
def test_replicas_of_several_ranks_have_the_parts_that_direct_ones_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.BUCKET", bucket)
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.LARGE", min(bucket, 1 << 13))
    several = Several(tmp_path, FSDP, TP, 3)
    for version in (0, 1, 3):
        sound(several.move(version))
        expected = wholes(version)
        for replica in several.chain:
            for rank in replica:
                weights = rank.receiver.weights
                regions = {c.tensor: c.region for c in rank.relay._own}
                assert weights.version == version
                assert weights.tensors.keys() == expected.keys() == regions.keys()
                for name, tensor in weights.tensors.items():
                    whole = expected[name]
                    assert tensor.equal(whole[regions[name].slices(Region.whole(whole.shape))])
        assert not any(rank.failures for replica in several.chain for rank in replica)


def test_a_replica_passes_messages_on_before_the_last_one_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer holds its last message back until half of the others are at the end of the chain."""
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.LARGE", 1 << 13)
    several = Several(tmp_path, (("fsdp", 1),), (("tp", 1),), 3)
    sound(several.move(0))
    two_at_the_end = threading.Event()
    trainer, last = several.sources[0].transport, several.chain[-1][0].ends["destination"]
    assert isinstance(trainer, MessageTransport)
    send, receive, sent, came = trainer.send, last.receive, count(1), count(1)

    def watched(version: int, copies: Sequence[Copy], parts: Shards, arrived: Tell) -> int:
        def told(message: Sequence[Copy]) -> None:
            arrived(message)
            if next(came) == 2:
                two_at_the_end.set()

        return int(receive(version, copies, parts, told))

    def held_back(version: int, copies: Sequence[Copy], parts: Shards) -> int:
        def ready(message: Sequence[Copy]) -> None:
            if next(sent) == 5:
                assert two_at_the_end.wait(30)

        return send(version, copies, parts, ready)

    monkeypatch.setattr(last, "receive", watched)
    monkeypatch.setattr(trainer, "send", held_back)
    sound(several.move(1))
    assert (next(sent), two_at_the_end.is_set()) == (6, True)


def test_what_is_damaged_on_the_way_is_caught_by_each_replica_that_has_it(tmp_path: Path) -> None:
    """A bit that flips in the first replica's memory after it was passed on is caught there and nowhere else."""
    several = Several(tmp_path, FSDP, TP, 2)
    sound(several.move(0))

    def flip(parts: Shards) -> None:
        several.chain[0][0].relay._over.wait(30)
        parts["q.weight"].tensor.view(-1)[5] += 1

    several.chain[0][0].damage = flip
    results = several.move(1)
    assert [type(result) for result in results[2:4]] == [ChecksumError, ChecksumError]
    assert all("q.weight" in str(result) for result in results[2:4])
    assert [rank.receiver.weights.version for rank in several.chain[1]] == [1, 1]
    assert [rank.receiver.weights.version for rank in several.chain[0]] == [0, 0]


# What has arrived ---------------------------------------------------------------------------------------------


def row(start: int, stop: int, tensor: str = "t") -> Copy:
    return Copy(tensor, 0, 0, Region((start,), (stop,)))


def test_a_message_is_awaited_until_all_its_boxes_have_come_in_whatever_pieces() -> None:
    arrivals, passed = Arrivals(), queue.Queue[Sequence[Copy]]()
    awaited = [(row(0, 4), row(0, 2, "u")), (row(4, 10),)]

    def pass_on() -> None:
        for message in awaited:
            arrivals.wait(message)
            passed.put(message)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    arrivals.add([row(6, 10), row(0, 3)])
    arrivals.add([row(0, 2, "u")])
    with pytest.raises(queue.Empty):
        passed.get(timeout=0.05)
    arrivals.add([row(3, 6)])
    assert [passed.get(timeout=30), passed.get(timeout=30)] == awaited
    thread.join(30)


@pytest.mark.parametrize("failed", [False, True])
def test_what_will_not_come_is_not_awaited_and_what_has_come_is_passed_on(failed: bool) -> None:
    arrivals = Arrivals()
    arrivals.add([row(4, 6)])
    arrivals.end(failed=failed)
    arrivals.wait([row(4, 6)])
    with pytest.raises(TransportError, match=r"t \[0:4\] has not arrived"):
        arrivals.wait([row(0, 4)])


def test_a_replica_that_does_not_get_a_version_itself_blames_nobody_after_it() -> None:
    blamed, store, policy = list[Exception](), HashStore(), Policy(1000)
    relay, receiver = ChainForwarder(CHANNEL, 0, blamed.append), WeightReceiver(CHANNEL)
    with ThreadPoolExecutor(2) as threads:
        sides: tuple[Side, Side] = ("source", "destination")
        onward, after = threads.map(
            lambda side: ReplicaLink(CHANNEL, store, timeout=30, transport="messages").open(side), sides
        )
    assert isinstance(onward, MessageTransport)

    def gone() -> MessageTransport:
        raise TransportError("the trainer is gone")

    facts = published(WeightPublisher(CHANNEL, policy), 0)
    downstreams: tuple[Open | None, ...] = (lambda: onward, None)
    for downstream in downstreams:  # the second one begins when the first one is over, on both sides
        with pytest.raises(TransportError, match="the trainer is gone"):
            receive(receiver, facts, ChainHop(relay, gone, downstream, linked=False))
    assert blamed == []
    after.close()
