"""What the names of hosts decide: which way weights go, and where gloo listens."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Event

import psutil
import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from penstock.runtime.cluster.placement import Rank, Replica
from penstock.runtime.control.routes import Routes
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.control.weight_channels import Bridges, Ground, Span
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.delta import DeltaTransport
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.one_sided import OneSidedTransport, SharedMemory
from penstock.runtime.tensor.process_group import Side, Transport, TransportError
from penstock.runtime.tensor.send_recv import Bucket, MessageTransport
from penstock.runtime.tensor.shm import sweep
from penstock.runtime.tensor.weight_sync import Moved, WeightPublisher, WeightReceiver
from tests.runtime.tensor.peer import Policy

from .sockets import until

pytestmark = pytest.mark.timeout(300)
SIDES: tuple[Side, ...] = ("source", "destination")
RUN = f"testbridges{os.getpid()}"
CHANNEL, TRAINER, GENERATOR = "policy>generator", "trainer/0", "generator/0"
ADDRESS = "127.0.0.2"
"""Of a host: this machine's loopback interface has all of 127.0.0.0/8."""


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    found = SharedMemory(RUN, "destination")
    found(4096)
    yield found
    sweep(RUN)


def both_sides(
    host: str,
    memory: SharedMemory,
    timeout: float = 20.0,
    delta: int = 0,
    trainers_address: str = ADDRESS,
    store: HashStore | None = None,
) -> dict[Side, Bridges]:
    """A trainer on host a and a generator on this one, both on this machine with one /dev/shm. They meet at `store`."""
    channel = Channel(
        CHANNEL,
        "policy",
        Replica(TRAINER, (Rank("a"),)),
        "broadcast",
        "generator",
        (Replica(GENERATOR, (Rank(host),)),),
    )
    meet = partial(PrefixStore, store=store or HashStore())
    routes, memories = {CHANNEL: Routes(channel, "auto", delta)}, {CHANNEL: memory}

    def side(address: str) -> Bridges:
        ground = Ground(RUN, meet, address, timeout, RunOptions(delta=delta), lambda: None, print)
        return Bridges({CHANNEL: channel}, 0, "cpu", ground, routes, memories)

    return {"source": side(trainers_address), "destination": side(ADDRESS)}


def opened(sides: dict[Side, Bridges]) -> list[Transport]:
    spans = {side: Span(CHANNEL, TRAINER, GENERATOR, side) for side in sides}
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda side: sides[side].open(spans[side]), sides))


def listening() -> set[str]:
    found = psutil.Process().net_connections("inet")
    return {str(c.laddr.ip) for c in found if c.laddr and c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("host", "kind", "address"), [("a", OneSidedTransport, "127.0.0.1"), ("b", MessageTransport, ADDRESS)]
)
def test_hosts_of_other_names_get_messages_at_their_address_whatever_they_share(
    memory: SharedMemory, host: str, kind: type, address: str
) -> None:
    before, sides = listening(), both_sides(host, memory)
    assert {type(transport) for transport in opened(sides)} == {kind}
    assert listening() - before == {address} - before
    for side in sides.values():
        side.close()


def test_the_error_of_a_bridge_between_hosts_names_both(memory: SharedMemory) -> None:
    source = both_sides("b", memory, timeout=0.2)["source"]
    where = "policy>generator from trainer/0 on host a to generator/0 on host b: source rank 0"
    with pytest.raises(TransportError, match=rf"{where}: .* not there: destination rank 0"):
        source.open(Span(CHANNEL, TRAINER, GENERATOR, "source"))


def test_later_links_of_a_chain_wait_a_little_longer_so_that_the_first_one_names_who_stands_still() -> None:
    names = tuple(f"generator/{index}" for index in range(3))
    replicas = tuple(Replica(name, (Rank(host),)) for name, host in zip(names, "bcd", strict=True))
    channel = Channel(CHANNEL, "policy", Replica(TRAINER, (Rank("a"),)), "broadcast", "generator", replicas)
    routes = Routes(channel, "auto", 0)
    routes.settle(WeightPublisher(CHANNEL, Policy(4), proof="off").description)
    meet = partial(PrefixStore, store=HashStore())
    ground = Ground(RUN, meet, ADDRESS, 0.2, RunOptions(), lambda: None, print)
    bridges = Bridges({CHANNEL: channel}, 0, "cpu", ground, {CHANNEL: routes}, {})
    for source, target, seconds in zip((TRAINER, *names), names, ("0.2", "0.225", "0.25"), strict=False):
        with pytest.raises(TransportError, match=rf"to {target} on host \w: .* of {seconds} s"):
            bridges.open(Span(CHANNEL, source, target, "source"))


def test_an_address_that_the_machine_lacks_is_told_with_where_it_is_written(memory: SharedMemory) -> None:
    """And the other side learns that whoever has it had come."""
    store = HashStore()
    trainer = both_sides("b", memory, trainers_address="192.0.2.1", store=store)["source"]
    generator = both_sides("b", memory, timeout=1.0, store=store)["destination"]
    with ThreadPoolExecutor(2) as threads:
        there = threads.submit(trainer.open, Span(CHANNEL, TRAINER, GENERATOR, "source"))
        until(store.num_keys)  # it has come, however late
        here = threads.submit(generator.open, Span(CHANNEL, TRAINER, GENERATOR, "destination"))
    source, destination = str(there.exception()), str(here.exception())
    assert "cannot listen on 192.0.2.1, needed an address of this machine (`address` of its host in the" in source
    assert f"all have come, but do not reach each other; this one listens on {ADDRESS}" in destination


def test_a_version_goes_out_when_its_sender_is_through_with_the_one_before(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver has version 0, and asks for the next one, while the sender still takes down what it has sent."""
    began, taken_down, send, keep = Event(), Event(), DeltaTransport.send, DeltaTransport._keep

    def send_and_say(transport: DeltaTransport, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        if version:
            began.set()
        return send(transport, version, copies, parts)

    def keep_later(transport: DeltaTransport, version: int, peer: int, own: Sequence[Bucket]) -> None:
        assert version or taken_down.wait(20)
        keep(transport, version, peer, own)

    monkeypatch.setattr(DeltaTransport, "send", send_and_say)
    monkeypatch.setattr(DeltaTransport, "_keep", keep_later)
    sides, sent, policy = both_sides("b", memory, delta=9), SimpleQueue[Moved | Exception](), Policy(1000)
    ways = {side: sides[side].lazy(Span(CHANNEL, TRAINER, GENERATOR, side)) for side in SIDES}
    publisher, receiver = WeightPublisher(CHANNEL, policy), WeightReceiver(CHANNEL)
    receiver.describe(publisher.description)
    for version in range(2):
        policy.advance(version)
        digests = publisher.publish(version)
        publisher.start(version, ways["source"], 1, sent.put)
        if version:
            assert not began.wait(0.2)
            taken_down.set()
        receiver.receive(version, digests, ways["destination"])
        receiver.swap(version)
    assert [getattr(sent.get(timeout=20), "version", None) for _ in range(2)] == [0, 1]
    assert (sides["source"].counts()["full"], sides["source"].counts()["delta"]) == (1, 1)
    for side in sides.values():
        side.close()
