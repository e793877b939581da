"""The four processes of `ddma.py`: `python ddma_ranks.py SIDE RANK FOLDER`, with one order and one answer per line."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from llama import parameter_shapes
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from weights import Weights

from penstock.graph.protocols import Sharding, rule_of
from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.tensor_parallel import tensor_parallel
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import SharedMemory
from penstock.runtime.tensor.process_group import AllReduce, Connection, Transport
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver

MODEL = ModelConfig(9216, 2048, 8192, 3, 32, 8, 64, tie_word_embeddings=True)
RANKS = 2
REPLICA = (("tp", RANKS),)
RULES = tensor_parallel(MODEL)
SHAPES = parameter_shapes(MODEL)
TIMEOUT = 60.0


class Policy(Weights):
    """The weights of one FSDP rank, in bf16: rows, as `torch.chunk` divides them."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        super().__init__(
            {
                name: torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator).chunk(RANKS)[rank].clone()
                for name, shape in SHAPES.items()
            }
        )

    def sharding(self) -> Sharding:
        return Sharding((("fsdp", RANKS),), SHAPES, {}, RULES)


class Base:
    """Gathers on rank 0 and broadcasts: ranks 0 and 1 are the trainer's, the others the generator's."""

    def __init__(self, folder: Path, place: int) -> None:
        self.place = place
        self.pair: Any = self._group(folder / "gather", place) if place < RANKS else None
        members = [0, *range(RANKS, 2 * RANKS)]
        size = len(members)
        self.all: Any = self._group(folder / "broadcast", members.index(place), size) if place in members else None
        self.kept = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}

    @staticmethod
    def _group(path: Path, rank: int, size: int = RANKS) -> Any:
        names = [f"rank {k}" for k in range(size)]
        return Connection("base", names, FileStore(str(path)), rank, timeout=TIMEOUT)._group

    def send(self, shards: Mapping[str, Tensor], keep: bool) -> None:
        batches = [list(shards)] if keep else [[name] for name in shards]
        for names in batches:
            wholes = [self._whole(name, keep) for name in names]
            works = []
            for tag, (name, whole) in enumerate(zip(names, wholes, strict=True)):
                own = whole.chunk(RANKS)
                if self.place:
                    works.append(self.pair.send([shards[name]], 0, tag))
                else:
                    own[0].copy_(shards[name])
                    works.append(self.pair.recv([own[1]], 1, tag))
            for work in works:
                work.wait()
            for whole in wholes if self.place == 0 else ():
                self.all.broadcast([whole]).wait()

    def receive(self, live: Mapping[str, Tensor], keep: bool) -> None:
        for name, part in live.items():
            whole = self._whole(name, keep)
            self.all.broadcast([whole]).wait()
            rule = rule_of(name, RULES)
            part.copy_(whole if rule is None else whole.chunk(RANKS, rule[0])[self.place - RANKS])

    def _whole(self, name: str, keep: bool) -> Tensor:
        return self.kept[name] if keep else torch.empty(SHAPES[name], dtype=torch.bfloat16)


class Source:
    """A trainer's rank. Answers have the times at which an order started and ended."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.folder, self.policy = rank, folder, Policy(rank)
        self.base = Base(folder, rank)
        self.publishers: dict[str, WeightPublisher] = {}
        self.transports: dict[str, Transport] = {}

    def publish(self, phase: str, version: int) -> dict[str, Any]:
        if phase not in self.publishers:
            adder = AllReduce(
                "trainer",
                FileStore(f"{self.folder}/add-{phase}"),
                self.rank,
                [f"rank {number}" for number in range(RANKS)],
                TIMEOUT,
            )
            proof: Any = phase.split()[1]
            self.publishers[phase] = WeightPublisher(
                phase, self.policy, rank=self.rank, ranks=RANKS, add=adder, proof=proof, keep=1
            )
        started = perf_counter()
        digests = self.publishers[phase].publish(version)
        end = perf_counter()
        facts = {"digests": digests, "description": self.publishers[phase].description}
        return {"facts": facts, "start": started, "end": end}

    def move(self, phase: str, version: int) -> dict[str, Any]:
        started = perf_counter()
        if phase.startswith("base"):
            self.base.send(self.policy.tensors, keep=phase.endswith("kept"))
        else:
            if phase not in self.transports:
                self.transports[phase] = _bridge(self.folder, phase).open("source", self.rank)
            self.publishers[phase].send(version, self.transports[phase], mesh=REPLICA)
        return {"start": started, "end": perf_counter()}

    def rebuild(self, phase: str, epoch: int) -> dict[str, Any]:
        """Close the link and open a new one."""
        started = perf_counter()
        self.transports[phase].close()
        self.transports[phase] = _bridge(self.folder, phase, epoch).open("source", self.rank)
        return {"start": started, "end": perf_counter()}

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


class _Opened:
    """A link that is opened at its first use, when the arena exists."""

    def __init__(self, bridge: ReplicaLink, rank: int, memory: SharedMemory | None) -> None:
        self.rank, self.memory = rank, memory
        self.bridge = bridge
        self.transport: Transport | None = None

    def receive(self, *facts: Any) -> int:
        transport = self.transport or self.reopen(self.bridge)
        return transport.receive(*facts)

    def reopen(self, bridge: ReplicaLink) -> Transport:
        if self.transport is not None:
            self.transport.close()
        self.transport = bridge.open("destination", self.rank, self.memory)
        return self.transport


class Destination:
    """A generator's rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.folder = rank, folder
        self.base = Base(folder, RANKS + rank)
        self.receivers: dict[str, tuple[WeightReceiver, Any]] = {}
        self.memories: list[SharedMemory] = []
        self.live = {name: self._part(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in SHAPES.items()}

    def _part(self, name: str, whole: Tensor) -> Tensor:
        rule = rule_of(name, RULES)
        return whole if rule is None else whole.chunk(RANKS, rule[0])[self.rank].clone()

    def move(self, phase: str, version: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        if phase.startswith("base"):
            started = perf_counter()
            self.base.receive(self.live, keep=phase.endswith("kept"))
            return {"start": started, "end": perf_counter()}
        receiver, transport = self._receiver(phase)
        receiver.describe(facts["description"])
        started = perf_counter()
        moved = receiver.receive(version, facts["digests"], transport)
        end = perf_counter()
        receiver.swap(version)
        swapped = perf_counter() - end
        return {"start": started, "end": end, "wire": moved.wire_s, "prove": moved.prove_s, "swap": swapped}

    def rebuild(self, phase: str, epoch: int) -> dict[str, Any]:
        started = perf_counter()
        self.receivers[phase][1].reopen(_bridge(self.folder, phase, epoch))
        return {"start": started, "end": perf_counter()}

    def _receiver(self, phase: str) -> tuple[WeightReceiver, Any]:
        if phase not in self.receivers:
            memory = (
                SharedMemory(f"ddma{self.folder.stat().st_ino}", f"{phase}-{self.rank}")
                if phase.startswith("shm")
                else None
            )
            self.memories += [memory] if memory else []
            adder = AllReduce(
                "generator",
                FileStore(f"{self.folder}/sum-{phase}"),
                self.rank,
                [f"rank {number}" for number in range(RANKS)],
                TIMEOUT,
            )
            receiver = WeightReceiver(phase, rank=self.rank, mesh=REPLICA, add=adder, allocate=memory)
            self.receivers[phase] = receiver, _Opened(_bridge(self.folder, phase), self.rank, memory)
        return self.receivers[phase]

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


def _bridge(folder: Path, phase: str, epoch: int = 0) -> ReplicaLink:
    return ReplicaLink(phase, FileStore(f"{folder}/{phase}-{epoch}"), RANKS, RANKS, timeout=TIMEOUT)


def rank_main(side: str, rank: int, folder: Path) -> None:
    """Run one process until its input ends."""
    torch.set_num_threads(1)
    role: Any = (Source if side == "source" else Destination)(folder, rank)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(role, order.pop("do"))(**order)), flush=True)
    role.close()


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
