"""Replicas of several ranks for the tests: each rank is a thread here, with all that a rank's process has."""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from penstock.graph.protocols import Axes, Rule, Sharding
from penstock.runtime.tensor.broadcast_chain import ChainForwarder, ChainHop
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy, Mesh, Region, sharded
from penstock.runtime.tensor.link import ReplicaLink, TransportChoice
from penstock.runtime.tensor.one_sided import SharedMemory
from penstock.runtime.tensor.process_group import AllReduce, Transport
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver

from .peer import published, receive

CHANNEL = "policy>generator"
RUN = f"replicas{os.getpid()}"
"""Unique to this process, since each test run sweeps its segments."""
SHAPES = {
    "embed.weight": (1031, 96),
    "q.weight": (640, 1024),
    "k.weight": (64, 96),
    "o.weight": (96, 1100),
    "norm.weight": (96,),
    "scale": (3,),
    "step": (),
    **{f"mlp.experts.{expert}.up.weight": (37, 33) for expert in range(4)},
}
EXPERTS = 4
RULES: dict[str, Rule] = {
    "embed.weight": (0, 0), "q.weight": (0, 4), "k.weight": (0, 2), "o.weight": (1, 4),
    "norm.weight": None, "scale": None, "step": None, "up.weight": (0, 0),
}  # fmt: skip
STAGES = {name: (0,) if name in ("embed.weight", "q.weight") else (1,) for name in SHAPES}
TRAINER: dict[str, Rule] = {**RULES, "embed.weight": None}


def wholes(version: int) -> dict[str, Tensor]:
    """Return the logical tensors of a version."""
    generator = torch.Generator().manual_seed(version)
    made = {name: torch.empty(shape).normal_(generator=generator).bfloat16() for name, shape in SHAPES.items()}
    return {**made, "step": torch.tensor(version)}


class ShardedPolicy:
    """One rank's shards of the logical tensors on a mesh, without empty ones."""

    def __init__(self, mesh: Axes, rank: int, stages: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.mesh = mesh
        self.stages = stages or {}
        named = [(name, shape, "bfloat16") for name, shape in SHAPES.items()]
        layout = sharded(named, Mesh(mesh), TRAINER, self.stages, experts=EXPERTS)
        self.regions = {t.name: t.held_by(rank)[0] for t in layout.tensors if t.held_by(rank)}
        self.tensors: dict[str, Tensor] = {}
        self.advance(0)

    def advance(self, version: int) -> None:
        made = wholes(version)
        self.tensors = {n: made[n][tuple(map(slice, b.start, b.stop))].clone() for n, b in self.regions.items()}

    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    def sharding(self) -> Sharding:
        return Sharding(self.mesh, SHAPES, TRAINER, RULES, self.stages, EXPERTS)

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return self.tensors, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)

    def export(self, folder: str) -> None:
        """Export nothing."""


def size(mesh: Axes) -> int:
    return Mesh(mesh).size


def adder(folder: Path, name: str, mesh: Axes, rank: int, timeout: float = 60.0) -> AllReduce | None:
    names = [f"rank {number}" for number in range(size(mesh))]
    return AllReduce(name, FileStore(str(folder / name)), rank, names, timeout) if size(mesh) > 1 else None


class SourceRank:
    """A trainer's rank in a weight sync."""

    def __init__(self, folder: Path, mesh: Axes, target: Axes, rank: int, **options: Any) -> None:
        stages, delta = options.pop("stages", None), options.pop("delta", 0)
        transport = options.pop("transport", "auto")
        self.policy = ShardedPolicy(mesh, rank, stages)
        store = FileStore(str(folder / "bridge"))
        self.bridge = ReplicaLink(
            CHANNEL, store, size(mesh), size(target), timeout=30, delta=delta, transport=transport
        )
        self.target, self.rank = target, rank
        self.transport: Transport | None = None
        add = adder(folder, "trainer", mesh, rank)
        self.publisher = WeightPublisher(CHANNEL, self.policy, rank=rank, ranks=size(mesh), add=add, **options)

    def publish(self, version: int) -> dict[str, Any]:
        self.policy.advance(version)
        return published(self.publisher, version)

    def send(self, version: int) -> None:
        if self.transport is None:
            self.transport = self.bridge.open("source", self.rank)
        self.publisher.send(version, self.transport, mesh=self.target)


class DestinationRank:
    """A generator's rank in a weight sync. `damage` is applied to what arrived."""

    def __init__(
        self,
        folder: Path,
        source: Axes,
        mesh: Axes,
        rank: int,
        shared: bool,
        delta: int = 0,
        transport: Any = "auto",
        restores: bool = True,
    ) -> None:
        store = FileStore(str(folder / "bridge"))
        self.bridge = ReplicaLink(
            CHANNEL, store, size(source), size(mesh), timeout=30, delta=delta, transport=transport
        )
        self.rank, self.nbytes = rank, 0
        self.opened: Transport | None = None
        self.memory = SharedMemory(RUN, f"{folder.name}-{rank}") if shared else None
        add = adder(folder, "generator", mesh, rank)
        self.receiver = WeightReceiver(CHANNEL, rank=rank, mesh=mesh, add=add, allocate=self.memory, restores=restores)
        self.damage: Callable[[Any], None] = lambda parts: None

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        if self.opened is None:
            self.opened = self.bridge.open("destination", self.rank, self.memory)
        moved = self.opened.receive(version, copies, parts)
        self.damage(parts)
        self.nbytes = moved
        return moved

    def sync(self, version: int, facts: Mapping[str, Any]) -> None:
        receive(self.receiver, facts, self)
        self.receiver.swap(version)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run all at once; return their results, or the exceptions that they raised."""
    results: list[Any] = [TimeoutError("still running")] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def sound(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Both:
    """All ranks of a trainer and of a generator replica."""

    def __init__(self, folder: Path, source: Axes, target: Axes, shared: bool, **options: Any) -> None:
        if "pp" in dict(source):
            options["stages"] = STAGES
        same = {key: options[key] for key in ("delta", "transport", "restores") if key in options}
        options.pop("restores", None)
        makers = [partial(SourceRank, folder, source, target, rank, **options) for rank in range(size(source))]
        self.sources: list[SourceRank] = sound(together(*makers))
        ranks = range(size(target))
        self.destinations = [DestinationRank(folder, source, target, rank, shared, **same) for rank in ranks]
        self.target = target

    def publish(self, version: int) -> dict[str, Any]:
        facts = sound(together(*(partial(s.publish, version) for s in self.sources)))
        assert len({json.dumps(f["digests"]) for f in facts}) == 1
        found: dict[str, Any] = facts[0]
        return found

    def move(self, version: int, facts: dict[str, Any]) -> list[Any]:
        sends = [partial(s.send, version) for s in self.sources]
        return together(*sends, *(partial(d.sync, version, facts) for d in self.destinations))

    def parts(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the expected shards of each destination rank."""
        named = [(n, tuple(t.shape), "bfloat16") for n, t in tensors.items()]
        mesh = Mesh(tuple((name if name in ("tp", "ep") else "copies", n) for name, n in self.target))
        layout = sharded(named, mesh, RULES, experts=EXPERTS, sharding_axes=())
        return [
            {
                t.name: tensors[t.name][held[0].slices(Region.whole(t.shape))]
                for t in layout.tensors
                if (held := t.held_by(rank))
            }
            for rank in range(mesh.size)
        ]

    def check(self, version: int) -> None:
        for destination, expected in zip(self.destinations, self.parts(wholes(version)), strict=True):
            weights = destination.receiver.weights
            assert weights.version == version
            assert weights.tensors.keys() == expected.keys()
            assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in expected.items())


def link_of(folder: Path, index: int, sources: int, mesh: Any, transport: TransportChoice) -> ReplicaLink:
    """The link from replica `index` of a chain to the next one; -1 is the trainer."""
    return ReplicaLink(CHANNEL, FileStore(f"{folder}/link-{index}"), sources, size(mesh), 30, transport=transport)


class Linked(DestinationRank):
    """A rank of a replica in a chain; the first replica receives from the trainer as usual."""

    def __init__(
        self, folder: Path, source: Any, mesh: Any, rank: int, index: int, replicas: int, transport: TransportChoice
    ) -> None:
        own = folder / f"replica-{index}"
        own.mkdir(exist_ok=True)
        super().__init__(own, source, mesh, rank, shared=False)
        ranks = size(source) if index == 0 else size(mesh)
        before = link_of(folder, index - 1, ranks, mesh, transport)
        after = link_of(folder, index, size(mesh), mesh, transport)
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
    """A trainer and a chain of replicas, each of several ranks."""

    def __init__(
        self, folder: Path, source: Any, mesh: Any, replicas: int, transport: TransportChoice = "messages"
    ) -> None:
        makers = [partial(SourceRank, folder, source, mesh, rank) for rank in range(size(source))]
        self.sources: list[SourceRank] = sound(together(*makers))
        for rank in self.sources:
            rank.bridge = link_of(folder, -1, size(source), mesh, transport)
        self.mesh = mesh
        self.chain = [
            [Linked(folder, source, mesh, rank, index, replicas, transport) for rank in range(size(mesh))]
            for index in range(replicas)
        ]

    def move(self, version: int) -> list[Any]:
        facts = sound(together(*(partial(s.publish, version) for s in self.sources)))[0]
        ranks = [rank for replica in self.chain for rank in replica]
        sends = [partial(s.send, version) for s in self.sources]
        return together(*sends, *(partial(rank.sync, version, facts) for rank in ranks))

    def check(self, version: int) -> None:
        """Check that each rank of each replica has its shard of the version."""
        expected = wholes(version)
        for replica in self.chain:
            for rank in replica:
                weights = rank.receiver.weights
                regions = {c.tensor: c.region for c in rank.relay._own}
                assert weights.version == version
                assert weights.tensors.keys() == expected.keys() == regions.keys()
                for name, tensor in weights.tensors.items():
                    whole = expected[name]
                    assert tensor.equal(whole[regions[name].slices(Region.whole(whole.shape))])
        assert not any(rank.failures for replica in self.chain for rank in replica)
