"""The order of what is sent over NCCL: in order and unbuffered, it finishes and arrives whole."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from penstock.graph.protocols import Axes
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.sync_cost import layout
from penstock.runtime.tensor import nccl
from penstock.runtime.tensor.buffers import Shard, Shards, in_background
from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import Copy, Layout, Region
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.nccl import NcclCarrier
from penstock.runtime.tensor.process_group import TransportError
from penstock.runtime.tensor.reshard import nccl_round, reshard
from penstock.runtime.tensor.send_recv import BucketSizes, MessageTransport, divide

from .layouts import layouts_of
from .peer import hurry
from .replicas import Both, Several, sound, together
from .unbuffered_links import UnbufferedGroup, with_gpus

pytestmark = pytest.mark.timeout(300)
FSDP2, TP2 = (("fsdp", 2),), (("tp", 2),)
# Small sizes give many rounds of several messages, some sent directly and some packed.
SMALL = BucketSizes(1 << 13, 1 << 14, slots=2)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((("fsdp", 4),), (("dp", 2), ("tp", 2))),
        ((("pp", 2), ("fsdp", 2)), TP2),
        ((("fsdp", 3),), (("tp", 1),)),
        ((("fsdp", 1),), TP2),
    ],
)
def test_a_sync_ends_and_every_rank_has_its_part(tmp_path: Path, monkeypatch: Any, source: Axes, target: Axes) -> None:
    worlds = with_gpus(monkeypatch, SMALL)
    both = Both(tmp_path, source, target, shared=False, transport="nccl")
    for version in (0, 1, 4):
        sound(both.move(version, both.publish(version)))
        both.check(version)
    assert all(isinstance(d.opened._carrier, NcclCarrier) for d in both.destinations)  # type: ignore[union-attr]
    (world,) = worlds.values()
    assert len(world.trace) > 3 * len(both.sources)


def test_a_chain_over_several_links_ends_and_every_rank_has_its_part(tmp_path: Path, monkeypatch: Any) -> None:
    worlds = with_gpus(monkeypatch, SMALL)
    several = Several(tmp_path, FSDP2, TP2, 3, transport="nccl")
    for version in (0, 1, 3):
        sound(several.move(version))
        several.check(version)
    assert len(worlds) == 3  # from the trainer, and from each replica to the next
    assert all(world.trace for world in worlds.values())


LISTED = [("a", (7, 6), "float32"), ("b", (5,), "int8"), ("c", (3, 4, 5), "bfloat16"), ("d", (), "int64")]


def held(layout: Layout, rank: int, wholes: Mapping[str, Tensor], *, filled: bool) -> Shards:
    """Return a rank's shards of the whole tensors, or zeros of the same shapes."""
    found = {}
    for t in layout.tensors:
        for region in t.held_by(rank):
            part = wholes[t.name][region.slices(Region.whole(t.shape))]
            found[t.name] = Shard(region, part.clone() if filled else torch.zeros_like(part))
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_drawn_plan_ends_in_order_and_unbuffered(data: Any) -> None:
    source = data.draw(layouts_of(LISTED, covering=True, listed=False))
    target = data.draw(layouts_of(LISTED, covering=False, listed=False))
    assume(source.ranks <= 6 and target.ranks <= 6)
    try:
        plan = reshard(source, target)
    except ValueError:  # a random stage may lack tensors
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        with_gpus(patch, BucketSizes(16, 48, slots=2))
        wholes = {
            name: (torch.arange(torch.Size(shape).numel()) % 127).to(DTYPES[dtype]).view(shape)
            for name, shape, dtype in LISTED
        }
        joint = ReplicaLink("policy", HashStore(), source.ranks, target.ranks, 30, transport="nccl")

        def send(rank: int) -> None:
            transport = joint.open("source", rank)
            for version in range(2):
                transport.send(version, plan.sends(rank), held(source, rank, wholes, filled=True))

        def receive(rank: int) -> Shards:
            transport, parts = joint.open("destination", rank), held(target, rank, wholes, filled=False)
            for version in range(2):
                transport.receive(version, plan.receives(rank), parts)
            return parts

        with ThreadPoolExecutor(source.ranks + target.ranks) as threads:
            sides = [threads.submit(send, rank) for rank in range(source.ranks)]
            received = [threads.submit(receive, rank) for rank in range(target.ranks)]
            for side in sides:
                side.result()
            for rank, found in enumerate(received):
                expected = held(target, rank, wholes, filled=True)
                assert {
                    n: torch.equal(s.tensor, expected[n].tensor) for n, s in found.result().items()
                } == dict.fromkeys(expected, True)


# Failures -----------------------------------------------------------------------------------------------------


def pair(monkeypatch: Any) -> tuple[MessageTransport, MessageTransport]:
    with_gpus(monkeypatch, SMALL)
    joint = ReplicaLink("policy", HashStore(), timeout=30, transport="nccl")
    ends = sound(together(lambda: joint.open("source"), lambda: joint.open("destination")))
    assert all(isinstance(end, MessageTransport) for end in ends)
    return ends[0], ends[1]


def weights(value: float) -> tuple[Any, Shards]:
    layout = Layout.whole([("t", (100, 300), "float32")])
    plan = reshard(layout, layout)
    return plan, {"t": Shard(Region.whole((100, 300)), torch.full((100, 300), value))}


def comes(receiver: MessageTransport) -> None:
    """Let the receiver report itself at the version, and do nothing more."""
    connection = receiver._connection
    connection.send(torch.tensor([0, SMALL.full]), 0, 0).wait()
    connection.receive(torch.empty(4, dtype=torch.int64), 0, 0).wait()


def hurry_at_its_calls(monkeypatch: Any, sender: MessageTransport) -> None:
    """Limit the sender's calls to half a second, but not its wait for the receiver to reach the version."""
    send = NcclCarrier.send

    def hurried(self: NcclCarrier, *given: Any) -> Any:
        hurry(sender, 0.5)
        return send(self, *given)

    monkeypatch.setattr(NcclCarrier, "send", hurried)


def stand_still(monkeypatch: Any) -> None:
    """Make calls begin, but end only when they are aborted."""
    monkeypatch.setattr(UnbufferedGroup, "call", lambda self, verb, messages: self.ended.wait)


def test_a_receiver_that_gives_the_link_up_is_named_at_once_by_the_one_that_waits_for_it(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    stand_still(monkeypatch)

    def receive() -> None:
        comes(receiver)
        receiver.close()

    sent, _ = together(lambda: sender.send(0, plan.sends(0), parts), receive)
    assert isinstance(sent, TransportError)
    assert "version 0: t " in str(sent)
    assert "to destination rank 0 failed after" in str(sent)
    assert "destination rank 0 has given up the link" in str(sent)
    group: Any = sender._carrier
    assert isinstance(group._group, UnbufferedGroup)
    assert group._group.ended.is_set()
    with pytest.raises(TransportError, match="the link is broken"):
        sender.send(1, plan.sends(0), parts)


def test_no_bucket_leaves_before_its_receiver_is_at_the_version(monkeypatch: Any) -> None:
    sender, _ = pair(monkeypatch)
    plan, parts = weights(1.0)
    hurry(sender, 0.5)
    called: list[Any] = []
    monkeypatch.setattr(UnbufferedGroup, "call", lambda self, verb, messages: called.append(messages))
    with pytest.raises(TransportError, match="version 0: the header to destination rank 0 failed after"):
        sender.send(0, plan.sends(0), parts)
    assert called == []


def test_a_staging_buffer_is_packed_again_when_its_message_has_left(monkeypatch: Any) -> None:
    """The receiver takes nothing until the sender has begun a round for each of its buffers, and for a moment after."""
    sender, receiver = pair(monkeypatch)
    shape = (64, 512)
    layout = Layout.whole([(f"t{k}", shape, "float32") for k in range(6)])
    copies = reshard(layout, layout).sends(0)
    # Every other row of a larger tensor, so that all must be packed.
    wide = {t.name: torch.randn(128, 512) for t in layout.tensors}
    parts = {name: Shard(Region.whole(shape), t[::2]) for name, t in wide.items()}
    into = {name: Shard(Region.whole(shape), torch.zeros(shape)) for name in wide}
    begun, enough, late = [], threading.Event(), UnbufferedGroup.call

    def call(group: Any, verb: Any, messages: Any) -> Any:
        if verb == "send":
            begun.append(messages)
            if len(begun) == SMALL.slots:
                enough.set()
        elif not into["t0"].tensor.any():
            assert enough.wait(30)
            time.sleep(0.2)
        return late(group, verb, messages)

    monkeypatch.setattr(UnbufferedGroup, "call", call)
    sound(together(lambda: sender.send(0, copies, parts), lambda: receiver.receive(0, copies, into)))
    assert len(begun) > SMALL.slots
    assert all(torch.equal(into[name].tensor, wide[name][::2]) for name in wide)


def test_a_peer_that_stands_still_is_named_past_the_deadline(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    hurry_at_its_calls(monkeypatch, sender)
    stand_still(monkeypatch)
    sent, _ = together(lambda: sender.send(0, plan.sends(0), parts), lambda: comes(receiver))
    assert "to destination rank 0 failed after" in str(sent)
    assert "timed out after 0.5 s" in str(sent)


def test_a_call_that_ended_because_its_link_was_given_up_here_is_no_success(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    begun, call = threading.Event(), UnbufferedGroup.call

    def called(group: Any, verb: Any, messages: Any) -> Any:
        begun.set()
        return group.ended.wait if verb == "receive" else call(group, verb, messages)

    monkeypatch.setattr(UnbufferedGroup, "call", called)
    carrier: Any = receiver._carrier

    def give_up() -> None:
        assert begun.wait(30)
        carrier.close()

    in_background("send", lambda: sender.send(0, plan.sends(0), parts), lambda result: None)
    received, _ = together(lambda: receiver.receive(0, plan.receives(0), weights(0.0)[1]), give_up)
    assert isinstance(received, TransportError)
    assert "from source rank 0 failed after" in str(received)
    assert "the link was given up here" in str(received)
    sender.close()


def test_an_error_that_nccl_has_told_ends_the_wait_for_a_call(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    stand_still(monkeypatch)
    monkeypatch.setattr(UnbufferedGroup, "fault", lambda self: "NCCL: a remote error")
    sent, _ = together(lambda: sender.send(0, plan.sends(0), parts), lambda: comes(receiver))
    assert isinstance(sent, TransportError)
    assert "to destination rank 0 failed after" in str(sent)
    assert str(sent).endswith("NCCL: a remote error")


def test_a_call_into_nccl_that_does_not_return_has_a_deadline_too(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    hurry_at_its_calls(monkeypatch, sender)
    over = threading.Event()
    monkeypatch.setattr(UnbufferedGroup, "call", lambda self, verb, messages: over.wait(60))
    sent, _ = together(lambda: sender.send(0, plan.sends(0), parts), lambda: comes(receiver))
    over.set()
    assert isinstance(sent, TransportError)
    assert "timed out after 0.5 s" in str(sent)


def test_an_abort_that_does_not_return_holds_up_no_error(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    hurry_at_its_calls(monkeypatch, sender)
    over = threading.Event()
    monkeypatch.setattr(nccl, "_ABORT_S", 0.1)
    monkeypatch.setattr(UnbufferedGroup, "abort", lambda self: over.wait())
    stand_still(monkeypatch)
    sent, _ = together(lambda: sender.send(0, plan.sends(0), parts), lambda: comes(receiver))
    assert "to destination rank 0 failed after" in str(sent)
    over.set()


def test_another_version_than_is_awaited_is_refused_before_any_bucket_is_begun(monkeypatch: Any) -> None:
    sender, receiver = pair(monkeypatch)
    plan, parts = weights(1.0)
    into = weights(0.0)[1]
    stand_still(monkeypatch)
    told, refused = together(
        lambda: sender.send(0, plan.sends(0), parts), lambda: receiver.receive(1, plan.receives(0), into)
    )
    assert isinstance(refused, ChecksumError)
    assert "source rank 0 sent {'version': 0" in str(refused)
    assert isinstance(told, ChecksumError)
    assert "destination rank 0 sent {'version': 1}, needed {'version': 0}" in str(told)
    assert into["t"].tensor.eq(0).all()


# Sizes of messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "trainer", "generator", "mean"),
    [
        ("llama-8b", Parallel(fsdp=8), Parallel(tp=2), 28 << 20),
        ("llama-70b", Parallel(fsdp=8, tp=8), Parallel(tp=8), 60 << 20),
        ("llama-8b", Parallel(fsdp=2), Parallel(), 200 << 20),
        ("llama-8b", Parallel(), Parallel(tp=2), 200 << 20),
        ("qwen3-0.6b", Parallel(fsdp=64), Parallel(tp=4), 2 << 20),
    ],
)
def test_a_sync_by_nccl_is_a_few_tens_of_calls_and_stages_no_more_with_more_peers(
    model: str, trainer: Parallel, generator: Parallel, mean: int
) -> None:
    source, target = (layout(SHAPES[model], mesh, "bfloat16") for mesh in (trainer, generator))
    plan = reshard(source, target)
    pairs: defaultdict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        pairs[copy.source, copy.destination].append(copy)
    itemsizes = {t.name: 2 for t in target.tensors}
    group: Any = UnbufferedGroup
    carrier = NcclCarrier(None, group, HashStore())  # type: ignore[arg-type]
    # Each rank computes its room from what it knows of the plan: its own part.
    loads: dict[tuple[int, int], defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for pair, copies in pairs.items():
        for side, peer in ((0, 1), (1, 0)):
            loads[side, pair[side]][pair[peer]] = sum(2 * copy.region.size for copy in copies)
    room = {rank: carrier.room(own) for rank, own in loads.items()}
    sizes, staged = [], Counter[tuple[int, int, int]]()
    for (a, b), copies in pairs.items():
        full = min(room[0, a][b], room[1, b][a])
        for number, messages in enumerate(divide(copies, itemsizes, carrier.sizes._replace(full=full))):
            sizes.append(sum(2 * copy.region.size for message in messages for copy in message))
            staged.update({(0, a, number): sizes[-1], (1, b, number): sizes[-1]})
    assert sum(sizes) == plan.nbytes
    assert max(number for _, _, number in staged) < 35
    assert sum(sizes) >= mean * len(sizes)
    for (side, rank, _), nbytes in staged.items():
        own = loads[side, rank]
        # Parts of a round are rounded up.
        assert nbytes <= nccl_round(sum(own.values()), len(own)) + len(own) <= (512 << 20) + len(own)
