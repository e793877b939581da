"""The two processes of `gpu.py` on one card: `python gpu_ranks.py SIDE FOLDER DEVICE LAYERS`.

An order a line, an answer a line. A phase is a word for the way ("cuda_ipc", "shm", "messages", "nccl"), the proof, and
a wire format if it is not the weights' own.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from llama import parameter_shapes
from torch._C._distributed_c10d import FileStore
from weights import Weights

from penstock.nodes.model.config import ModelConfig
from penstock.runtime.tensor.cuda_ipc import DeviceMemory
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import SharedMemory, WritableMemory
from penstock.runtime.tensor.process_group import Transport
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver

MODEL = ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True)
"""Llama 3.2 1B."""
TIMEOUT = 60.0
CHANNEL = "policy>generator"


def shapes(layers: int) -> Mapping[str, tuple[int, ...]]:
    """Of so many layers of the model, with its vocabulary if they are all there."""
    vocabulary = MODEL.vocab_size if layers == MODEL.num_hidden_layers else 8192
    return parameter_shapes(replace(MODEL, num_hidden_layers=layers, vocab_size=vocabulary))


class Policy(Weights):
    """Weights in bf16 on one device."""

    def __init__(self, device: str, layers: int) -> None:
        generator = torch.Generator(device).manual_seed(1)
        super().__init__(
            {
                name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
                for name, shape in shapes(layers).items()
            }
        )


class Source:
    """The trainer: publishes and sends."""

    def __init__(self, folder: Path, device: str, layers: int) -> None:
        self.folder, self.device, self.policy = folder, device, Policy(device, layers)
        self.phase, self.publisher, self.way = "", WeightPublisher(CHANNEL, self.policy), None

    def publish(self, phase: str, version: int) -> dict[str, Any]:
        if phase != self.phase:
            _, proof, *wire = phase.split()
            self.phase, self.way = phase, None
            self.publisher = WeightPublisher(
                CHANNEL, self.policy, device=self.device, keep=1, proof=proof, wire="".join(wire)
            )
        for tensor in self.policy.tensors.values():
            tensor.view(-1)[version] += 1  # every tensor of every version is another
        started = perf_counter()
        digests = self.publisher.publish(version)
        seconds = perf_counter() - started
        return {"facts": {"digests": digests, "description": self.publisher.description}, "seconds": seconds}

    def move(self, phase: str, version: int) -> dict[str, Any]:
        if self.way is None:
            self.way = bridge(self.folder, phase).open("source", device=self.device)
        started = perf_counter()
        moved = self.publisher.send(version, self.way)
        return {"start": started, "end": perf_counter(), "bytes": moved.nbytes, "way": type(self.way).__name__}


class _Opening:
    """A bridge that is opened at its first use: the arena must be there."""

    def __init__(self, folder: Path, phase: str, memory: WritableMemory | None) -> None:
        self.folder, self.phase, self.memory = folder, phase, memory
        self.way: Transport | None = None

    def receive(self, *facts: Any) -> int:
        if self.way is None:
            self.way = bridge(self.folder, self.phase).open("destination", 0, self.memory)
        return self.way.receive(*facts)


class Destination:
    """The generator: receives, proves, swaps."""

    def __init__(self, folder: Path, device: str, layers: int) -> None:
        self.folder, self.device, self.phase = folder, device, ""
        self.receiver = WeightReceiver(CHANNEL)
        self.opening = _Opening(folder, "", None)
        self.memories: list[WritableMemory] = []

    def move(self, phase: str, version: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        if phase != self.phase:
            self._begin(phase)
        self.receiver.describe(facts["description"])
        started = perf_counter()
        moved = self.receiver.receive(version, facts["digests"], self.opening)
        end = perf_counter()
        self.receiver.swap(version)
        return {"start": started, "end": end, "wire": moved.wire_s, "prove": moved.prove_s}

    def _begin(self, phase: str) -> None:
        memory, way = None, phase.split()[0]
        if way == "shm":
            memory = SharedMemory(f"gpu{self.folder.stat().st_ino}", phase)
        elif way == "cuda_ipc":
            memory = DeviceMemory(self.device, phase, TIMEOUT)
        self.memories += [memory] if memory else []
        self.receiver = WeightReceiver(CHANNEL, device=self.device, allocate=memory)
        self.phase, self.opening = phase, _Opening(self.folder, phase, memory)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


def bridge(folder: Path, phase: str) -> ReplicaLink:
    """Where the two meet in a phase, over the way that its name says or not at all."""
    way, store = phase.split()[0], FileStore(str(folder / phase.replace(" ", "-")))
    if way == "nccl":
        return ReplicaLink(CHANNEL, store, timeout=TIMEOUT, backend="nccl")
    return ReplicaLink(CHANNEL, store, timeout=TIMEOUT, transport=way)


def rank_main(side: str, folder: Path, device: str, layers: int) -> None:
    """One process, until its input ends. Errors are answers, too."""
    # NCCL refuses two ranks on one card of one host. To it these are two hosts, that meet on the loopback interface.
    os.environ.update(NCCL_HOSTID=f"penstock-{side}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.set_num_threads(1)
    role: Any = (Source if side == "source" else Destination)(folder, device, layers)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(role, order.pop("do"))(**order)
        except (RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if side == "destination":
        role.close()
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads must not hold up the end


if __name__ == "__main__":
    rank_main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
