"""Weights along a chain: who sends to whom, equal weights at each replica, and failures named on both sides."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from penstock.runtime.tensor.broadcast_chain import Arrivals, ChainForwarder, ChainHop, Open
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.digest import ChecksumError, digest
from penstock.runtime.tensor.layout import Copy, Mesh, Region, sharded
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import Side, TransportError
from penstock.runtime.tensor.reshard import SLACK, ReshardPlan, chain, forwards, reshard
from penstock.runtime.tensor.send_recv import BucketSizes, MessageTransport, Tell
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver

from .peer import CHANNEL, Peer, Policy, chain_link, hurry, published, receive
from .replicas import Several, sound

pytestmark = pytest.mark.timeout(300)
LARGE = 10_000_000  # elements of 2 bytes: five messages
# More than Linux may buffer for a peer that reads nothing: up to net.ipv4.tcp_rmem, which is 32 MB or more.
BEYOND_BUFFERS = 50_000_000


def plan_of(trainers: int, generators: int) -> ReshardPlan:
    tensors = [(f"t{i}", (240, 64), "bfloat16") for i in range(4)]
    rules = {f"t{i}": (0, 0) for i in range(4)}
    return reshard(sharded(tensors, Mesh((("fsdp", trainers),))), sharded(tensors, Mesh((("tp", generators),)), rules))


@pytest.mark.parametrize(
    ("trainers", "generators", "replicas", "heads"),
    [(1, 1, 1, 1), (1, 1, 5, 1), (4, 1, 3, 3), (4, 1, 4, 4), (4, 1, 9, 4), (2, 4, 6, 1), (8, 2, 16, 4), (8, 2, 3, 3)],
)
def test_trainers_feed_as_many_replicas_as_keep_them_no_busier_than_a_receiver(
    trainers: int, generators: int, replicas: int, heads: int
) -> None:
    plan = plan_of(trainers, generators)
    assert chain(plan, replicas).count(None) == heads
    assert heads == 1 or heads * max(plan.bytes_out) <= SLACK * max(plan.bytes_in)
    assert heads == replicas or (heads + 1) * max(plan.bytes_out) > SLACK * max(plan.bytes_in)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_a_replica_forwards_to_one_at_most_and_all_are_reached(trainers: int, generators: int, replicas: int) -> None:
    sources = chain(plan_of(trainers, generators), replicas)
    assert len(sources) == replicas
    depth: list[int] = []
    for destination, source in enumerate(sources):
        assert source is None or (source < destination and sources.count(source) == 1)
        depth.append(1 if source is None else depth[source] + 1)
    assert max(depth) - min(depth[k] for k in range(replicas) if k not in sources) <= 1


def test_replicas_of_nothing_are_fed_directly_and_no_replica_is_refused() -> None:
    assert chain(ReshardPlan((), 1, 1), 3) == (None, None, None)
    with pytest.raises(ValueError, match="given 0 replicas"):
        chain(plan_of(1, 1), 0)


def test_a_rank_forwards_all_that_it_holds_to_the_same_rank() -> None:
    held = {"b": Region((2, 0), (4, 2)), "a": Region((0,), (3,)), "nothing": Region((4,), (4,))}
    assert forwards(held, 1) == (Copy("b", 1, 1, held["b"]), Copy("a", 1, 1, held["a"]))


# Processes: each is a replica of one rank -------------------------------------------------------------------


class Chain:
    """A trainer here, and replicas in their own processes."""

    def __init__(self, folder: Path, replicas: int, large: int) -> None:
        self.replicas = [Peer("chained", folder, index, replicas) for index in range(replicas)]
        self.policy = Policy(large)
        self.publisher = WeightPublisher(CHANNEL, self.policy)
        self.link = chain_link(folder, -1)
        self.opened: MessageTransport | None = None
        self.events: dict[int, Callable[[], object]] = {}

    def read(self, *indices: int) -> list[dict[str, Any]]:
        return [self.replicas[index].read() for index in indices]

    def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """Send as the publisher's transport."""
        if self.opened is None:
            opened = self.link.open("source")
            assert isinstance(opened, MessageTransport)
            self.opened = opened
        numbers = count()

        def ready(copies: Sequence[Copy]) -> None:
            self.events.get(next(numbers), lambda: None)()

        return self.opened.send(version, copies, parts, ready)

    def sync(self, version: int, before: dict[int, Callable[[], object]] | None = None) -> Any:
        """Publish, tell all replicas, and send; `before` maps a message's number to an action before it is sent."""
        self.events = before or {}
        self.policy.advance(version)
        facts = published(self.publisher, version)
        for replica in self.replicas:
            replica.tell(**facts)
        return self.publisher.send(version, self)

    def end(self) -> None:
        for replica in self.replicas:
            replica.process.end()
        if self.opened is not None:
            self.opened.close()


@pytest.fixture
def chain_of(tmp_path: Path) -> Iterator[Any]:
    chains: list[Chain] = []

    def make(replicas: int, large: int = LARGE) -> Chain:
        chains.append(Chain(tmp_path, replicas, large))
        return chains[-1]

    yield make
    for made in chains:
        made.end()


@pytest.mark.slow
def test_each_version_is_equal_at_each_replica_and_the_trainer_sends_it_once(chain_of: Any) -> None:
    chain = chain_of(3)
    for version in (0, 1, 4):
        moved = chain.sync(version)
        live = {"version": version, "digest": digest(chain.policy.tensors), "bytes": moved.nbytes}
        assert chain.read(0, 1, 2) == [live] * 3
        assert moved.nbytes == sum(tensor.nbytes for tensor in chain.policy.tensors.values())


@pytest.mark.slow
def test_a_replica_that_dies_half_way_is_named_by_those_before_and_after_it(chain_of: Any) -> None:
    chain = chain_of(3)
    chain.sync(0)
    assert [answer["version"] for answer in chain.read(0, 1, 2)] == [0, 0, 0]
    chain.sync(1, {2: chain.replicas[1].process.kill})
    live, failed = sorted(chain.read(0, 0), key=lambda answer: "failed" in answer)
    assert (live["version"], live["digest"]) == (1, digest(chain.policy.tensors))
    assert f"{CHANNEL} from generator/0 to generator/1: version 1: " in failed["failed"]
    assert "to destination rank 0 failed" in failed["failed"]
    (after,) = chain.read(2)
    assert (after["error"], after["live"]) == ("TransportError", 0)
    assert f"{CHANNEL} from generator/1 to generator/2: version 1: " in after["text"]
    assert "from source rank 0 failed" in after["text"]


@pytest.mark.slow
def test_a_replica_that_stands_still_is_named_within_the_deadline_by_the_one_before_it(chain_of: Any) -> None:
    chain = chain_of(2, large=BEYOND_BUFFERS)
    chain.sync(0)
    assert [answer["version"] for answer in chain.read(0, 1)] == [0, 0]
    chain.replicas[0].tell(hurry=0, seconds=3)
    chain.sync(1, {2: chain.replicas[1].process.halt})
    live, failed = sorted(chain.read(0, 0), key=lambda answer: "failed" in answer)
    assert live["version"] == 1
    assert "from generator/0 to generator/1: version 1: " in failed["failed"]
    assert "to destination rank 0 failed after" in failed["failed"]


@pytest.mark.slow
def test_a_trainer_that_stands_still_is_named_by_the_first_replica_and_the_second_learns_it_at_once(
    chain_of: Any,
) -> None:
    chain, answers = chain_of(2), list[dict[str, Any]]()
    chain.sync(0)
    assert [answer["version"] for answer in chain.read(0, 1)] == [0, 0]
    chain.replicas[0].tell(hurry=-1, seconds=3)

    def until_both_have_failed() -> None:
        answers.extend(chain.read(0, 1))
        hurry(chain.opened, 1)

    with pytest.raises(TransportError):
        chain.sync(1, {2: until_both_have_failed})
    first, second = answers
    assert "from trainer to generator/0: version 1: " in first["text"]
    assert "from source rank 0 failed after" in first["text"]
    assert "from generator/0 to generator/1: version 1: " in second["text"]
    assert "Connection closed by peer" in second["text"]
    assert (first["live"], second["live"]) == (0, 0)


# Several ranks: each is a thread here -----------------------------------------------------------------------


FSDP, TP = (("fsdp", 2),), (("tp", 2),)


@pytest.mark.parametrize("bucket", [4 << 20, 1 << 14], ids=["large messages", "more messages than staging buffers"])
def test_replicas_of_several_ranks_have_the_parts_that_direct_ones_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    sizes = BucketSizes(min(bucket, 1 << 13), bucket, slots=3)
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.GLOO_SIZES", sizes)
    several = Several(tmp_path, FSDP, TP, 3)
    for version in (0, 1, 3):
        sound(several.move(version))
        several.check(version)


def test_a_replica_passes_messages_on_before_the_last_one_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer holds back its last message until two others have reached the end of the chain."""
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.GLOO_SIZES", BucketSizes(1 << 13, 1 << 18, slots=3))
    several = Several(tmp_path, (("fsdp", 1),), (("tp", 1),), 3)
    sound(several.move(0))
    two_at_the_end = threading.Event()
    trainer, last = several.sources[0].transport, several.chain[-1][0].ends["destination"]
    assert isinstance(trainer, MessageTransport)
    send, receive, sent, came = trainer.send, last.receive, Counter[int](), count(1)

    def watched(version: int, copies: Sequence[Copy], parts: Shards, arrived: Tell) -> int:
        def told(message: Sequence[Copy]) -> None:
            arrived(message)
            if version == 2 and next(came) == 2:
                two_at_the_end.set()

        return int(receive(version, copies, parts, told))

    def held_back(version: int, copies: Sequence[Copy], parts: Shards) -> int:
        def ready(message: Sequence[Copy]) -> None:
            sent[version] += 1
            if version == 2 and sent[2] == sent[1]:
                assert two_at_the_end.wait(30)

        return send(version, copies, parts, ready)

    monkeypatch.setattr(last, "receive", watched)
    monkeypatch.setattr(trainer, "send", held_back)
    sound(several.move(1))
    sound(several.move(2))
    assert sent[2] == sent[1] > 5
    assert two_at_the_end.is_set()


def test_what_is_damaged_on_the_way_is_caught_by_each_replica_that_has_it(tmp_path: Path) -> None:
    """A bit that flips in the first replica's memory after forwarding is caught there and nowhere else."""
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
    assert isinstance(after, MessageTransport)

    def gone() -> MessageTransport:
        raise TransportError("the trainer is gone")

    facts = published(WeightPublisher(CHANNEL, policy), 0)
    downstreams: tuple[Open | None, ...] = (lambda: onward, None)
    following = ChainHop(ChainForwarder(CHANNEL, 0, blamed.append), lambda: after, None, linked=True)
    with ThreadPoolExecutor(1) as threads:
        # The next replica asks for the version: its link closes at once, rather than at the link's deadline.
        starved = threads.submit(receive, WeightReceiver(CHANNEL), facts, following)
        for downstream in downstreams:  # the second receive begins when the first is over on both sides
            with pytest.raises(TransportError, match="the trainer is gone"):
                receive(receiver, facts, ChainHop(relay, gone, downstream, linked=False))
        with pytest.raises(TransportError):
            starved.result()
    assert blamed == []
    after.close()
