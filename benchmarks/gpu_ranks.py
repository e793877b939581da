"""The two processes of a sync on one card: `python gpu_ranks.py SIDE FOLDER DEVICE`.

Each input line is an order, each output line an answer. A method names the transport ("cuda_ipc", "shm", "messages",
"nccl"), the proof, and the wire format if it differs from the weights' own. During a sync the sender can train and the
receiver decode, as in a run.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from llama import parameter_shapes
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from weights import Weights

from penstock.graph import types
from penstock.graph.context import Context, Origin
from penstock.graph.types import Prompts
from penstock.nodes.generate import make_engine
from penstock.nodes.model import CausalLM
from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.hf import point_at
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.cluster.endpoints import LOOPBACK
from penstock.runtime.tensor.buffers import held_bytes, shards_of, touched
from penstock.runtime.tensor.cuda_ipc import DeviceMemory
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import SharedMemory, WritableMemory
from penstock.runtime.tensor.process_group import Transport, prepare_nccl
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver

ONE_B = ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, max_position_embeddings=8192, tie_word_embeddings=True)
"""Llama 3.2 1B."""
TIMEOUT = 60.0
CHANNEL = "policy>generator"


def small(config: ModelConfig) -> ModelConfig:
    """Return a small model for a CPU."""
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return replace(config, **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


class Policy(Weights):
    """Random weights in bf16 on one device."""

    def __init__(self, device: str, config: ModelConfig) -> None:
        generator = torch.Generator(device).manual_seed(1)
        super().__init__(
            {
                name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
                for name, shape in parameter_shapes(config).items()
            }
        )


class Generator:
    """The engine of a run, all of whose slots get a prompt of about `context` tokens and decode from there. Raises
    ValueError if its cache does not fit on the device."""

    def __init__(
        self, folder: Path, config: ModelConfig, device: str, slots: int, context: int, precision: str = ""
    ) -> None:
        facts = {"architectures": ["LlamaForCausalLM"], **config.to_json("bfloat16")}
        (folder / "config.json").write_text(json.dumps(facts))
        byte_tokenizer().save(folder)
        self.device, self.slots, self.context = device, slots, context
        made = Context(node="generate", model=str(folder), dtype="bfloat16", device=device, slots=slots)
        if precision:
            made = replace(made, weights={"behaviour": Origin(types.Policy.maker, made, precision)})
        # Longer than any measurement, so that rows end only if they sample the end, at a rate of 1 in 128,256.
        self.engine = make_engine(replace(made, max_tokens=512, max_prompt=context), samples=16)
        self.behaviour = types.Weights(0, {})
        self.groups = 0

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Start all slots, with weights laid out as a sync does for this engine."""
        fused = self.engine.fused()
        layout = Layout.whole([(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()])
        parts = shards_of(layout, 0, touched(held_bytes(layout, 0, fused), self.device), fused)
        for name, part in parts.items():
            part.tensor.copy_(tensors[name])
        self.behaviour.version += 1
        self.behaviour.tensors = {name: part.tensor for name, part in parts.items()}
        self.engine.reset()
        for _ in range(max(1, self.slots // 16)):
            self.groups += 1
            prompt = Prompts((self.groups,), ("a" * (self.context - 4),), ("",))
            self.engine.submit(self.groups, {"prompts": prompt, "behaviour": self.behaviour})
        # All rows begin in the same step, since their prompts have the same length; one may also end in that step.
        while not self.engine.slots.sampling.any():
            self.engine.step()

    def step(self) -> float:
        """Return the seconds of a step. The engine waits for the tokens, and so for the device."""
        began = perf_counter()
        self.engine.step()
        return perf_counter() - began


class Rank:
    """What both sides share: a sync runs in its own thread, as in a run, while the main thread works."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.config = small(ONE_B) if device == "cpu" else ONE_B
        self.thread = ThreadPoolExecutor(1)

    def step(self) -> float:
        """Do one step of work; return its seconds."""
        raise NotImplementedError

    def transfer(self, *args: Any, **order: Any) -> dict[str, Any]:
        raise NotImplementedError

    def work(self, steps: int) -> dict[str, Any]:
        self.step()
        return {"ms": round(1e3 * statistics.median(self.step() for _ in range(steps)), 3)}

    def move(self, beside: bool, **order: Any) -> dict[str, Any]:
        if not beside:
            return self.transfer(**order)
        self.step()  # so that the other side is also working when the transfer begins
        under_way: Future[dict[str, Any]] = self.thread.submit(self.transfer, **order)
        seconds = [self.step()]
        while not under_way.done():
            seconds.append(self.step())
        return {**under_way.result(), "step_ms": 1e3 * statistics.median(seconds), "steps": len(seconds)}


class Source(Rank):
    """The trainer: publishes and sends."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder, device)
        self.policy = Policy(device, self.config)
        self.method, self.publisher = "", WeightPublisher(CHANNEL, self.policy)
        self.transport: Transport | None = None
        self.model: CausalLM | None = None

    def publish(self, method: str, version: int) -> dict[str, Any]:
        if method != self.method:
            proof: Any
            _, proof, *wire = method.split()
            self.method, self.transport = method, None
            self.publisher = WeightPublisher(
                CHANNEL, self.policy, device=self.device, keep=1, proof=proof, wire="".join(wire)
            )
        for tensor in self.policy.tensors.values():
            tensor.data.view(-1)[version] += 1  # every version changes every tensor
        started = perf_counter()
        digests = self.publisher.publish(version)
        seconds = perf_counter() - started
        return {"facts": {"digests": digests, "description": self.publisher.description}, "seconds": seconds}

    def transfer(self, version: int, method: str, **_: Any) -> dict[str, Any]:
        if self.transport is None:
            self.transport = link_of(self.folder, method).open("source", device=self.device)
        started = perf_counter()
        moved = self.publisher.send(version, self.transport)
        return {"start": started, "end": perf_counter(), "bytes": moved.nbytes, "by": type(self.transport).__name__}

    def step(self) -> float:
        """Run forward and backward on 4,096 tokens, or 64 on a CPU; return the seconds."""
        if self.model is None:
            self.model = CausalLM(self.config, torch.bfloat16, self.device)
            copies = {name: tensor.clone() for name, tensor in self.policy.tensors.items()}
            point_at(self.model, copies, "benchmark")
        tokens_BS = torch.zeros(1, 64, dtype=torch.long) if self.device == "cpu" else torch.zeros(4, 1024).long()
        began = perf_counter()
        hidden_BSD = self.model(tokens_BS.to(self.device))
        hidden_BSD.float().square().mean().backward()
        self.model.zero_grad()
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()
        return perf_counter() - began


class _Opening:
    """A link that is opened at its first use, when the arena exists."""

    def __init__(self, folder: Path, method: str, memory: WritableMemory | None, device: str) -> None:
        self.folder, self.method, self.memory, self.device = folder, method, memory, device
        self.transport: Transport | None = None

    def receive(self, *facts: Any) -> int:
        if self.transport is None:
            self.transport = link_of(self.folder, self.method).open("destination", 0, self.memory, self.device)
        return self.transport.receive(*facts)


class Destination(Rank):
    """The generator: receives, verifies and swaps."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder, device)
        self.method, self.receiver = "", WeightReceiver(CHANNEL)
        self.opening: _Opening
        self.memories: list[WritableMemory] = []
        self.generator: Generator | None = None

    def transfer(self, version: int, method: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        if method != self.method:
            self._begin(method)
        self.receiver.describe(facts["description"])
        started = perf_counter()
        moved = self.receiver.receive(version, facts["digests"], self.opening)
        end = perf_counter()
        self.receiver.swap(version)
        return {"start": started, "end": end, "wire": moved.wire_s, "prove": moved.prove_s}

    def step(self) -> float:
        """Decode a token of 64 rows, or 16 on a CPU; return the seconds."""
        if self.generator is None:
            slots, context = (16, 32) if self.device == "cpu" else (64, 1024)
            with tempfile.TemporaryDirectory() as name:
                self.generator = Generator(Path(name), self.config, self.device, slots, context)
            self.generator.fill(Policy(self.device, self.config).tensors)
        return self.generator.step()

    def _begin(self, method: str) -> None:
        memory: WritableMemory | None = None
        transport = method.split()[0]
        if transport == "shm":
            memory = SharedMemory(f"gpu{self.folder.stat().st_ino}", method)
        elif transport == "cuda_ipc":
            memory = DeviceMemory(self.device, method, TIMEOUT)
        self.memories += [memory] if memory else []
        self.receiver = WeightReceiver(CHANNEL, device=self.device, allocate=memory)
        self.method, self.opening = method, _Opening(self.folder, method, memory, self.device)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


def link_of(folder: Path, method: str) -> ReplicaLink:
    """Return the link between the two, which uses only the transport that the method names."""
    transport: Any = method.split()[0]
    store = FileStore(str(folder / method.replace(" ", "-")))
    return ReplicaLink(CHANNEL, store, timeout=TIMEOUT, transport=transport)


def rank_main(side: str, folder: Path, device: str) -> None:
    """Run one process until its input ends. Errors are sent as answers."""
    # NCCL refuses two ranks on one card of one host. Here it sees two hosts, which connect over the loopback interface.
    os.environ.update(NCCL_HOSTID=f"penstock-{side}", NCCL_IB_DISABLE="1")
    prepare_nccl(LOOPBACK, beside=True)
    torch.set_num_threads(1)
    rank = (Source if side == "source" else Destination)(folder, device)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(rank, order.pop("do"))(**order)
        except (RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if isinstance(rank, Destination):
        rank.close()
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads must not delay the exit


if __name__ == "__main__":
    rank_main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
