"""Predictions of published rows: seconds by component, and how calibrated components make a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from published import Row, mesh_of, nemo_layouts

from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.plan.collectives import Cost, gather_s
from penstock.runtime.plan.decode_cost import Generator, generator_memory
from penstock.runtime.plan.model_shape import Parallel
from penstock.runtime.plan.sync_cost import switch_cost, sync_cost, traffic
from penstock.runtime.plan.train_cost import Memory, PackedBatch, Trainer
from penstock.runtime.plan.workload import IntArray, Lognormal

PROMPT, SIGMA, SLOTS = 128, 0.7, 256
"""NeMo-RL: tokens of a prompt, spread of lengths, and vLLM's default of rows at once."""
SHARES = {"On": 0.6, "1off": 0.8, "8off": 0.8}
"""Of the memory, that the recipes give to vLLM."""
COMPUTING = ("products", "reading weights", "attention", "elementwise", "logits", "launches", "optimizer", "bubble")
SCALARS = ("computing", "communicating", "generating", "engine", "once")
"""What calibration multiplies. `engine` is seconds of the host per decoding step, `once` seconds per step; both are 0
without calibration."""


ASYNC_TP = 0.5
"""Share of tensor parallelism's collectives that is not hidden when they are cut up and run beside the products
(torchtitan, section 2.2.2: "async TP")."""


@dataclass(frozen=True)
class Recipe(Trainer):
    """A trainer with what other systems have and plans do not: sequences cut over `cp` ranks, experts dealt out over
    `ep` neighbouring ranks of a stage, collectives of tensor parallelism beside the products (`async_tp`), `chunks` of
    the model per pipeline stage (a bubble of (p - 1) / chunks, Narayanan et al., 2021, section 2.2), and activations
    that are kept on the host (`offload`). Weights are sharded over `mesh.fsdp`, of which `cp` is a part."""

    cp: int = 1
    ep: int = 1
    async_tp: bool = False
    chunks: int = 1
    offload: bool = False

    @property
    def local(self) -> float:  # type: ignore[override]
        """Dense weights are cut by tp; experts by the same, or over `ep` where that is more."""
        return self._weights(1)

    @property
    def shard(self) -> float:  # type: ignore[override]
        return self._weights(self.mesh.fsdp)

    def _weights(self, shards: int) -> float:
        spread = self.mesh.tp * shards
        return (
            self.shape.dense_parameters / spread + self.shape.expert_parameters / max(self.ep, spread)
        ) / self.mesh.pp

    def _shared_out(self, part: PackedBatch) -> tuple[int, float, float]:
        """Ranks that share a sequence have the same micro-batches, and of each their share."""
        data = replace(self.mesh, fsdp=self.mesh.fsdp // self.cp)
        micro, tokens, squares = Trainer._shared_out(replace(self, mesh=data, cp=1), part)
        return micro, tokens / self.cp, squares / self.cp

    def _tensor_s(self, tokens: float, backward: bool) -> float:
        return super()._tensor_s(tokens, backward) * (ASYNC_TP if self.async_tp else 1.0)

    def _micro_batch(self, tokens: float, squares: float, *, backward: bool) -> Cost:
        cost, shape, mesh, gpu = (
            super()._micro_batch(tokens, squares, backward=backward),
            self.shape,
            self.mesh,
            self.gpu,
        )
        times = 2 + (2 + 2 * self.recompute if backward else 0)
        # Tokens go to their experts and back, in each layer that has experts.
        sent = tokens / mesh.tp * shape.active * shape.hidden * 2
        experts = times * shape.moe_layers / mesh.pp * exchange_s(gpu, sent, self.ep)
        # Keys and values go around the ring (Liu et al., 2023: ring attention), beside attention.
        keys = tokens * self.cp * shape.cache_width * 2 / min(mesh.tp, shape.kv_heads)
        ring = times / 2 * self.layers * gather_s(gpu, keys, self.cp, mesh.tp)
        parts = {**cost.parts, "ep": experts, "cp": max(0.0, ring - cost.parts["attention"])}
        if self.offload and backward:
            # Each layer's input goes to the host and back, beside all else.
            moved = 2 * tokens / mesh.tp * shape.hidden * 2 * self.layers / gpu.pcie
            parts["offload"] = max(0.0, moved - sum(parts.values()))
        return Cost(parts)

    def _pipeline(self, alone: Cost, micro: int, *, backward: bool) -> Cost:
        parts = dict(super()._pipeline(alone, micro, backward=backward).parts)
        return Cost({**parts, "bubble": parts["bubble"] / self.chunks})


def exchange_s(gpu: Gpu, nbytes: float, ranks: int) -> float:
    """Seconds of an all-to-all between neighbours in which each sends `nbytes`, its own part included, evenly to all.
    What leaves the domain leaves over the rank's own NIC, beside what stays."""
    if ranks == 1:
        return 0.0
    inside = min(ranks, gpu.nvlink_gpus)
    stays = nbytes * (inside - 1) / ranks / gpu.nvlink
    leaves = nbytes * (ranks - inside) / ranks / gpu.nic
    return max(stays, leaves) + gpu.latency_s * (1 + (inside < ranks))


def slots_that_fit(generator: Generator, context: float, copies: int, beside: Memory | None = None) -> int:
    """How many rows of `context` tokens each fit beside copies of the weights and what else is there; 0 if these do
    not fit."""
    empty, one = (generator_memory(replace(generator, slots=n), context, copies).bytes for n in (0, 1))
    room = generator.gpu.memory_bytes - empty - (beside.used if beside else 0.0)
    return max(0, int(room // (one - empty)))


@dataclass(frozen=True)
class Prediction:
    """Seconds of each scalar's component, of the side that generates and of the one that trains. `overlaps`: the two
    run beside each other."""

    generates: Mapping[str, float]
    trains: Mapping[str, float]
    overlaps: bool = False

    def seconds(self, scalars: Mapping[str, float]) -> float:
        sides = [sum(scalars[name] * size for name, size in side.items()) for side in (self.generates, self.trains)]
        return (max(sides) if self.overlaps else sum(sides)) + scalars["once"]

    def active(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Each scalar's coefficient on the side, or sides, that the step takes as long as."""
        sides = [self.generates, self.trains]
        if self.overlaps:
            sides = [max(sides, key=lambda side: sum(scalars[name] * size for name, size in side.items()))]
        found = dict.fromkeys(SCALARS, 0.0) | {"once": 1.0}
        for side in sides:
            for name, size in side.items():
                found[name] += size
        return found


def predict(row: Row) -> Prediction:
    return _reinforced(row) if row.system == "NeMo-RL" else Prediction({}, _sides(_pretrained(row)))


def _sides(cost: Cost) -> dict[str, float]:
    computing = sum(seconds for part, seconds in cost.parts.items() if part in COMPUTING)
    return {"computing": computing, "communicating": cost.seconds - computing}


def _pretrained(row: Row) -> Cost:
    """One step of one micro-batch per data-parallel rank, or with stages, of one per sequence."""
    titan = row.system == "torchtitan"
    mesh, cp = mesh_of(row.layout) if titan else (Parallel(fsdp=row.gpus), 1)
    batch = int(row.work.removeprefix("local bs ")) if titan else 1
    small = row.shape.name == "llama-8b"  # whose configuration recomputes selectively
    trainer = Recipe(
        row.shape,
        row.gpu,
        mesh,
        precision="fp8" if "fp8" in row.mode else "bf16",
        micro_tokens=row.longest if mesh.pp > 1 else batch * row.longest,
        recompute=0.5 if titan and small and "full AC" not in row.mode else 1.0,
        frozen="LoRA" in row.mode,
        zero3=mesh.pp == 1,
        cp=cp,
        async_tp="asyncTP" in row.mode + row.layout,
        chunks=2 if "I1F1B" in row.layout else 1,
        offload="Offload" in row.mode,
    )
    return trainer.update(np.full(batch * mesh.data // cp, row.longest))


def _reinforced(row: Row) -> Prediction:
    (mesh, cp, ep), width, replicas = nemo_layouts(row)
    share = SHARES[row.mode.split()[1]]
    room = row.gpu.model_copy(update={"memory_gib": row.gpu.memory_gib * share})
    generator = Generator(row.shape, room, width, SLOTS, "fp8" if row.mode.endswith("FP8") else "bf16")
    slots = slots_that_fit(generator, PROMPT + row.mean, copies=1)
    generator = replace(generator, slots=max(1, min(SLOTS, slots)))
    sampled, batch = (int(word) for word in row.work.replace("G-GBS ", "").replace("T-GBS ", "").split(" / "))
    lengths = Lognormal(row.mean, SIGMA, row.longest - PROMPT).take(sampled)
    samples = 32 if sampled == 2048 else 16
    ends = generator.rollout(lengths, PROMPT, samples, replicas)
    rollout_s = seconds = float(ends.max())
    if row.staleness:
        stream = stream_s(generator, lengths, PROMPT, samples, replicas)
        seconds = max(stream, seconds / (1 + row.staleness))
    # What waits takes the slots that fall free in the order of the ends.
    waited = np.sort(ends)[: max(0, sampled - replicas * generator.slots)]
    rows = float(ends.sum() - waited.sum()) / rollout_s / replicas
    steps = float(lengths.sum()) / replicas / max(1.0, rows)
    trainer = Recipe(row.shape, row.gpu, mesh, micro_tokens=row.longest, zero3=False, cp=cp, ep=ep)
    trained = trainer.logprobs(lengths + PROMPT) * 2
    for part in np.array_split(lengths + PROMPT, sampled // batch):
        trained = trained + trainer.update(part)
    moved = traffic(row.shape, mesh, width, "bf16")
    trained = trained + sync_cost(moved, replicas, row.gpu, row.gpu, together=not row.staleness)
    if not row.staleness:
        moments = 12 * trainer.shard
        trained = trained + switch_cost(row.gpu, moments, moments)
    return Prediction({"generating": seconds, "engine": steps}, _sides(trained), overlaps=bool(row.staleness))


def stream_s(generator: Generator, responses: IntArray, prompt_tokens: int, samples: int, replicas: int) -> float:
    """Seconds of one batch among others that follow without a pause: of three in a row, the last one's share."""
    two, three = (generator.rollout(np.tile(responses, n), prompt_tokens, samples, replicas).max() for n in (2, 3))
    return float(three - two)
