"""Which replica sends weights to which, over which transport, and what a channel remembers."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Literal

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from penstock.graph import trace
from penstock.programs.toy import toy
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import Rank, Replica, place
from penstock.runtime.control.messages import Manifest, Result, SendFailed
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.routes import GRACE, Routes
from penstock.runtime.control.run import Outbox, Stage
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.weight_channels import Span, SyncSettings, WeightChannels
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.schedule.events import Abort, Arrived, Begin, Done, Published, Send
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.delta import DeltaTransport
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.one_sided import OneSidedTransport, SharedMemory
from penstock.runtime.tensor.process_group import Side, Transport, TransportError
from penstock.runtime.tensor.send_recv import Bucket, MessageTransport
from penstock.runtime.tensor.shm import sweep
from penstock.runtime.tensor.weight_sync import Description, Moved, WeightPublisher, WeightReceiver
from tests.runtime.tensor.peer import Policy

from .sockets import until

# Which replica passes weights on to which: a chain for messages, and directly from the trainers otherwise.


def channel_of(trainers: int, *hosts: str, ranks: int = 1) -> Channel:
    """Return a channel from a trainer on host a to replicas on these hosts."""
    source = Replica("trainer/0", (Rank("a"),) * trainers)
    replicas = tuple(Replica(f"generator/{k}", (Rank(host),) * ranks) for k, host in enumerate(hosts))
    return Channel("policy>generator", "policy", source, "broadcast", "generator", replicas)


def description(ranks: int = 1) -> Description:
    """The description of six equal tensors that each rank holds, so that each sends an equal share."""
    policy = Policy(1)
    policy.tensors = {f"t{k}": torch.zeros(100) for k in range(6)}
    return WeightPublisher("policy>generator", policy, ranks=ranks, proof="off").description


def settled(way: Channel, transport: str = "auto", delta: int = 0) -> Routes:
    routes = Routes(way, transport, delta)
    routes.settle(description(len(way.source.ranks)))
    return routes


def sources(routes: Routes, way: Channel, together: tuple[str, ...] | None = None) -> list[str]:
    names = tuple(replica.name for replica in way.replicas)
    return [routes.source(name, names if together is None else together) for name in names]


def test_one_trainer_feeds_the_first_of_the_replicas_on_other_hosts_and_each_the_next() -> None:
    way = channel_of(1, "b", "c", "d")
    routes = settled(way)
    names = tuple(replica.name for replica in way.replicas)
    assert sources(routes, way) == ["", "generator/0", "generator/1"]
    assert [routes.next(name, names) for name in names] == ["generator/1", "generator/2", ""]
    assert all(routes.chained(name) for name in names)
    assert [routes.patience(name) for name in names] == [1, 1 + GRACE / 2, 1 + GRACE]


def test_replicas_on_the_trainers_host_are_in_no_chain() -> None:
    way = channel_of(1, "a", "b", "a", "c")
    routes = settled(way)
    assert sources(routes, way) == ["", "", "", "generator/1"]
    assert [routes.chained(replica.name) for replica in way.replicas] == [False, True, False, True]
    assert routes.next("generator/0", ("generator/0", "generator/2")) == ""


@pytest.mark.parametrize(
    ("hosts", "transport", "delta"),
    [("aaa", "auto", 0), ("aaab", "auto", 0), ("bcd", "auto", 4), ("aaa", "shm", 0), ("bcd", "cuda_ipc", 0)],
    ids=["one host", "one replica elsewhere", "deltas", "shared memory", "a GPU's memory"],
)
def test_without_a_use_for_a_chain_all_are_fed_by_the_trainers(hosts: str, transport: str, delta: int) -> None:
    way = channel_of(1, *hosts)
    routes = settled(way, transport, delta)
    assert sources(routes, way) == [""] * len(hosts)
    assert not any(routes.chained(replica.name) for replica in way.replicas)
    assert {routes.patience(replica.name) for replica in way.replicas} == {1}


@pytest.mark.parametrize("transport", ["messages", "nccl"])
def test_where_messages_are_asked_for_one_host_has_chains_too(transport: str) -> None:
    way = channel_of(1, "a", "a")
    assert sources(settled(way, transport), way) == ["", "generator/0"]


def test_as_many_trainers_as_replicas_feed_them_all() -> None:
    way = channel_of(3, "b", "c", "d")
    routes = settled(way)
    assert sources(routes, way) == ["", "", ""]
    assert not routes.chained("generator/0")


def test_a_replica_whose_predecessor_is_not_sent_the_version_gets_it_from_the_trainers() -> None:
    way = channel_of(1, "b", "c", "d")
    routes = settled(way)
    assert sources(routes, way, ("generator/0", "generator/2")) == ["", "generator/0", ""]
    assert routes.next("generator/0", ("generator/0", "generator/2")) == ""
    assert sources(routes, way, ()) == ["", "", ""]


# What host names determine: the transport of weights, and the address where gloo listens.


pytestmark = pytest.mark.timeout(300)
SIDES: tuple[Side, ...] = ("source", "destination")
RUN = f"testbridges{os.getpid()}"
CHANNEL, TRAINER, GENERATOR = "policy>generator", "trainer/0", "generator/0"
ADDRESS = "127.0.0.2"
"""A host's address: this machine's loopback interface has all of 127.0.0.0/8."""


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
) -> dict[Side, WeightChannels]:
    """A trainer on host a and a generator on `host`, in fact both on this machine (one /dev/shm), with one `store`."""
    channel = Channel(
        CHANNEL,
        "policy",
        Replica(TRAINER, (Rank("a"),)),
        "broadcast",
        "generator",
        (Replica(GENERATOR, (Rank(host),)),),
    )
    meet = partial(PrefixStore, store=store or HashStore())

    def side(replica: str, address: str) -> WeightChannels:
        settings = SyncSettings(RUN, meet, address, timeout, RunOptions(delta=delta), lambda: None, print)
        channels = WeightChannels({CHANNEL: channel}, replica, 0, "cpu", settings)
        channels.memories[CHANNEL] = memory
        return channels

    return {"source": side(TRAINER, trainers_address), "destination": side(GENERATOR, ADDRESS)}


def opened(sides: dict[Side, WeightChannels]) -> list[Transport]:
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


@pytest.mark.parametrize(("life", "own"), [(0, 1), (2, 1), (1, 0)])
def test_weights_for_another_life_of_a_replica_are_refused_and_said_by_it(
    memory: SharedMemory, life: int, own: int
) -> None:
    generator, said = both_sides("b", memory)["destination"], list[str]()
    generator.settings = replace(generator.settings, life=own, warn=said.append)
    command = Send(CHANNEL, 3, TRAINER, GENERATOR)
    generator.send(command, Manifest(CHANNEL, 3, {}, json.dumps(description())), life)
    assert (len(said), generator.arrived(), generator.weights(CHANNEL).version) == (1, [], -1)
    assert all(word in said[0] for word in (CHANNEL, f"life {life}", f"life {own}"))


def test_weights_for_a_life_that_has_ended_are_refused_and_said_by_their_sender(memory: SharedMemory) -> None:
    trainer, said = both_sides("b", memory, timeout=0.2)["source"], list[str]()
    trainer.settings = replace(trainer.settings, warn=said.append, elastic=True)
    policy = Policy(4)
    trainer.publish(CHANNEL, 0, {"policy": policy})
    command, failed = Send(CHANNEL, 0, TRAINER, GENERATOR), list[SendFailed]()
    for life in (1, 0, 1):  # nobody is there to receive
        trainer.send(command, None, life)

    def both_failed() -> bool:
        failed.extend(trainer.unsent())
        return len(failed) == 2

    until(both_failed)
    assert ([one.life for one in failed], len(said), "life 0" in said[0]) == ([1, 1], 1, True)


def test_a_link_that_has_failed_keeps_nothing_of_its_receivers_memory(memory: SharedMemory) -> None:
    sides = both_sides("a", memory)
    trainer, generator = sides["source"], sides["destination"]
    trainer.settings = replace(trainer.settings, elastic=True)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"penstock-{RUN}-{GENERATOR.replace('/', '.')}")

    policy, command = {"policy": Policy(4)}, Send(CHANNEL, 0, TRAINER, GENERATOR)
    generator.send(command, trainer.publish(CHANNEL, 0, policy))
    trainer.send(command, None)
    until(generator.arrived)
    assert mapped() == 2  # the receiver's own mapping, and its sender's
    generator.close()
    trainer.publish(CHANNEL, 1, policy)
    trainer.send(Send(CHANNEL, 1, TRAINER, GENERATOR), None)
    until(trainer.unsent)
    assert mapped() == 1
    trainer.close()


def test_the_error_of_a_bridge_between_hosts_names_both(memory: SharedMemory) -> None:
    source = both_sides("b", memory, timeout=0.2)["source"]
    where = "policy>generator from trainer/0 on host a to generator/0 on host b: source rank 0"
    with pytest.raises(TransportError, match=rf"{where}: .* not there: destination rank 0"):
        source.open(Span(CHANNEL, TRAINER, GENERATOR, "source"))


def test_later_links_of_a_chain_wait_a_little_longer_so_that_the_first_one_names_who_stands_still() -> None:
    names = tuple(f"generator/{index}" for index in range(3))
    replicas = tuple(Replica(name, (Rank(host),)) for name, host in zip(names, "bcd", strict=True))
    channel = Channel(CHANNEL, "policy", Replica(TRAINER, (Rank("a"),)), "broadcast", "generator", replicas)
    meet = partial(PrefixStore, store=HashStore())
    settings = SyncSettings(RUN, meet, ADDRESS, 0.2, RunOptions(), lambda: None, print)
    channels = WeightChannels({CHANNEL: channel}, TRAINER, 0, "cpu", settings)
    channels.routes[CHANNEL].settle(WeightPublisher(CHANNEL, Policy(4), proof="off").description)
    for source, target, seconds in zip((TRAINER, *names), names, ("0.2", "0.225", "0.25"), strict=False):
        with pytest.raises(TransportError, match=rf"to {target} on host \w: .* of {seconds} s"):
            channels.open(Span(CHANNEL, source, target, "source"))


def test_an_address_that_the_machine_lacks_is_told_with_where_it_is_written(memory: SharedMemory) -> None:
    """The generator's error says that all sides have come, so that their connection is at fault."""
    store = HashStore()
    trainer = both_sides("b", memory, trainers_address="192.0.2.1", store=store)["source"]
    generator = both_sides("b", memory, timeout=1.0, store=store)["destination"]
    with ThreadPoolExecutor(2) as threads:
        there = threads.submit(trainer.open, Span(CHANNEL, TRAINER, GENERATOR, "source"))
        until(store.num_keys)  # the trainer has come, however late
        here = threads.submit(generator.open, Span(CHANNEL, TRAINER, GENERATOR, "destination"))
    source, destination = str(there.exception()), str(here.exception())
    assert "cannot listen on 192.0.2.1, needed an address of this machine (`address` of its host in the" in source
    assert f"all have come, but do not reach each other; this one listens on {ADDRESS}" in destination


def test_a_version_goes_out_when_its_sender_is_through_with_the_one_before(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver has version 0 and asks for the next one while the sender still stores what it has sent."""
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


# The channels of a trainer and of replicas in a chain; `Send` commands come as a scheduler gives them.


CHANNEL, TRAINER = "policy>generator", "trainer/0"
NAMES = tuple(f"generator/{index}" for index in range(3))


class Chain:
    """All ranks of a chain in this process: a trainer on one host and three generators on others."""

    def __init__(self) -> None:
        source = Replica(TRAINER, (Rank("a"),))
        replicas = tuple(Replica(name, (Rank(host),)) for name, host in zip(NAMES, "bcd", strict=True))
        channels = {CHANNEL: Channel(CHANNEL, "policy", source, "broadcast", "generator", replicas)}
        meet = partial(PrefixStore, store=HashStore())
        settings = SyncSettings(f"testchain{os.getpid()}", meet, "127.0.0.1", 30.0, RunOptions(), lambda: None, print)
        self.policy, self.layout = Policy(1_000_000), ""
        self.ways = {name: WeightChannels(channels, name, 0, "cpu", settings) for name in (TRAINER, *NAMES)}

    def sync(self, version: int, *groups: Sequence[str]) -> None:
        """Send a version to each group of replicas and swap it in; a group's replicas are sent it together."""
        self.policy.advance(version)
        manifest = self.ways[TRAINER].publish(CHANNEL, version, {"policy": self.policy})
        assert manifest is not None
        self.layout = manifest.layout or self.layout
        assert bool(manifest.layout) == (version == 0)
        for group in groups:
            together = tuple(group) if len(group) > 1 else ()
            for name in group:
                command = Send(CHANNEL, version, TRAINER, name, together)
                self.ways[TRAINER].send(command, None)
                self.ways[name].send(command, Manifest(CHANNEL, version, manifest.digests, self.layout))
            for name in group:
                assert self.told(name) == [Arrived(CHANNEL, version, name)]
                self.ways[name].swap(CHANNEL, version)
                weights = self.ways[name].weights(CHANNEL)
                assert weights.version == version
                assert all(torch.equal(weights.tensors[key], t) for key, t in self.policy.tensors.items())

    def told(self, name: str) -> list[Arrived | Abort]:
        """Return the next reports of a replica."""
        found: list[Arrived | Abort] = []

        def look() -> bool:
            found.extend(self.ways[name].arrived())
            return bool(found)

        until(look)
        return found

    def until_passed_on(self, *counts: int) -> None:
        """Wait for the numbers of versions that generators have passed on, counted after the next replica has them."""
        until(lambda: [self.ways[name].counts()["passed on"] for name in NAMES] == list(counts))


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    yield made
    for ways in made.ways.values():
        ways.close()


def test_who_is_sent_a_version_at_once_passes_it_on_and_who_comes_later_has_it_from_the_trainer(chain: Chain) -> None:
    chain.sync(0, NAMES)
    chain.until_passed_on(1, 1, 0)
    chain.sync(1, NAMES[:2], NAMES[2:])
    chain.until_passed_on(2, 1, 0)
    chain.sync(2, NAMES[2:], NAMES[1:2], NAMES[:1])
    chain.until_passed_on(2, 1, 0)
    chain.sync(4, NAMES[1:], NAMES[:1])
    chain.until_passed_on(2, 2, 0)
    chain.sync(5, (NAMES[0], NAMES[2]))
    chain.sync(7, NAMES)
    chain.until_passed_on(3, 3, 0)
    assert [ways.arrived() for ways in chain.ways.values()] == [[]] * 4


# What a stage reports of weights in transit: who sends them, and who is waited for.


CHANNEL = "policy>generator"
HOSTS = tuple(Host(name=name, cores=1) for name in "abcd")
GENERATORS = tuple(f"generator/{index}" for index in range(3))


@pytest.fixture(params=["auto", "shm"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """A stage that is sending version 0 from a trainer on host a to generators on b, c and d."""
    transport: Literal["auto", "shm"] = request.param
    graph, flags = trace(toy, {}), RunOptions(updates=4, batch=2, transport=transport)
    plan = place([graph], Cluster(hosts=HOSTS, pools={"generator": ("b", "c", "d")}), generators=len(GENERATORS))
    config, folder = RunConfig(graph, None, plan, flags, "stage"), RunFolder.create(tmp_path / "run")
    folder.unlock()
    origin = SegmentOrigin("train", graph, plan, config.rules(0))
    made = Stage(origin, RunRecorder(folder, config, lambda line: None, 0.0), flags, Outbox())
    made.recorder.open_stage(origin, 0.0)
    made.feed(Begin(), 0.0)
    while prompts := [one for one in made.scheduler.answers if isinstance(one, Done) and one.firing.node == "prompts"]:
        made.feed(prompts[0], 1.0)
    layout = json.dumps(WeightPublisher(CHANNEL, Policy(4), proof="off").description)
    published = Result(Published(CHANNEL, 0, "trainer/0"), manifest=Manifest(CHANNEL, 0, {}, layout))
    made.outbox.take()
    made.feed(published.event, 1.0, published)
    sends = [one for order in made.outbox.take().values() for one in order.commands if isinstance(one, Send)]
    assert {send.replica for send in sends} == {*GENERATORS}
    return made


def test_a_replica_is_told_the_layout_with_its_first_version_alone() -> None:
    manifests, first, second = Outbox(), Manifest(CHANNEL, 0, {"w": 5}, "the layout"), Manifest(CHANNEL, 1, {"w": 6})
    manifests.note(first)
    assert manifests.tell(CHANNEL, 0, "generator/0") == first
    manifests.note(second)
    assert manifests.tell(CHANNEL, 1, "generator/0") == second
    assert manifests.tell(CHANNEL, 1, "generator/1") == Manifest(CHANNEL, 1, {"w": 6}, "the layout")
    assert manifests.tell(CHANNEL, 1, "generator/1") == second


def test_a_replica_that_comes_again_is_told_the_layout_again_and_older_versions_are_kept() -> None:
    outbox = Outbox(kept_versions=3)
    for version in range(4):
        outbox.note(Manifest(CHANNEL, version, {"w": version}, "" if version else "the layout"))
    assert outbox.tell(CHANNEL, 3, "generator/0").layout == "the layout"
    outbox.forget("generator/0")
    assert outbox.tell(CHANNEL, 1, "generator/0") == Manifest(CHANNEL, 1, {"w": 1}, "the layout")


def test_an_order_names_those_that_are_sent_weights_together_once() -> None:
    outbox = Outbox()
    outbox.note(Manifest(CHANNEL, 0, {"w": 0}, "the layout"))
    batches = [tuple(f"generator/{n}" for n in range(first, first + 32)) for first in (0, 32)]
    alone = Send(CHANNEL, 0, TRAINER, "generator/64")
    sends = [Send(CHANNEL, 0, TRAINER, name, names) for names in batches for name in names] + [alone]
    for send in sends:
        outbox.add(TRAINER, send)
        outbox.add(send.replica, send)
    orders = outbox.take()
    assert [orders[TRAINER].whole(send) for send in orders[TRAINER].commands if isinstance(send, Send)] == sends
    for send in sends:
        (command,) = orders[send.replica].commands
        assert isinstance(command, Send)
        assert orders[send.replica].whole(command) == send
    written = [name for send in orders[TRAINER].commands for name in getattr(send, "together", ())]
    assert not written
    assert orders[TRAINER].together == {CHANNEL: tuple(batches)}


def test_what_was_to_go_to_a_replica_that_is_lost_is_sent_to_none_that_comes_in_its_place() -> None:
    """It is lost after a publication, before the orders are sent: its order is dropped, and so is its sender's."""
    outbox, lives = Outbox(kept_versions=2), dict.fromkeys(GENERATORS, 0)
    outbox.lives = lives
    for version in range(2):
        outbox.note(Manifest(CHANNEL, version, {"w": version}, "" if version else "the layout"))
    first, other, second = (
        Send(CHANNEL, v, TRAINER, name) for v, name in [(0, GENERATORS[0]), (0, GENERATORS[1]), (1, GENERATORS[0])]
    )
    for send in (first, other):
        outbox.add(TRAINER, send)
        outbox.add(send.replica, send)
    lives[GENERATORS[0]] += 1
    outbox.forget(GENERATORS[0])
    orders = outbox.take()
    assert {replica: (order.commands, order.lives) for replica, order in orders.items()} == {
        TRAINER: ((other,), {}),
        GENERATORS[1]: ((other,), {}),
    }
    outbox.add(TRAINER, second)
    outbox.add(second.replica, second)
    lives[GENERATORS[1]] += 1
    outbox.forget(GENERATORS[1])
    assert {replica: order.lives for replica, order in outbox.take().items()} == {
        TRAINER: {GENERATORS[0]: 1},
        GENERATORS[0]: {GENERATORS[0]: 1},
    }


def senders(stage: Stage) -> list[str]:
    """The sender of each generator's weights."""
    return ["trainer/0", *GENERATORS[:2]] if stage.flags.transport == "auto" else ["trainer/0"] * 3


def test_an_overdue_version_is_of_the_replica_that_sends_it(stage: Stage) -> None:
    for index, (sender, name) in enumerate(zip(senders(stage), GENERATORS, strict=True)):
        assert stage.overdue(60.0, 60.0, {}) is None
        said = stage.overdue(62.0, 60.0, {})
        assert said is not None
        assert f"no answer from {name} rank 0 on host {'bcd'[index]} for 61 s" in said
        assert said.endswith(f"send {CHANNEL} 0 from {sender}")
        stage.feed(Arrived(CHANNEL, 0, name), 2.0)


def test_nothing_is_overdue_because_the_controller_was_stopped(stage: Stage) -> None:
    assert stage.overdue(2.0, 60.0, {}) is None
    assert stage.overdue(702.0, 60.0, {}, suspended_s=699.0) is None
    assert stage.overdue(760.0, 60.0, {}, suspended_s=699.0) is None
    assert "for 62 s" in str(stage.overdue(762.0, 60.0, {}, suspended_s=699.0))


def test_who_dies_was_moving_what_it_had_to_send_and_to_get(stage: Stage) -> None:
    links = [
        f"version 0 of {CHANNEL} from {s} to {d}, which has -1" for s, d in zip(senders(stage), GENERATORS, strict=True)
    ]
    for name in ("trainer/0", *GENERATORS, "scorer/0"):
        own = [link for link in links if f"from {name} " in link or f"to {name}," in link]
        assert stage.moving(name) == (f"moving {' and '.join(own)}" if own else "")
