"""Predictions of published rows: seconds by component, and how calibrated components make a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from published import Row, mesh_of, nemo_layouts

from penstock.runtime.plan.collectives import Cost
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.memory import slots_that_fit
from penstock.runtime.plan.model_shape import Parallel
from penstock.runtime.plan.sync_cost import switch_cost, sync_cost, traffic
from penstock.runtime.plan.train_cost import Trainer, weights_per_rank
from penstock.runtime.plan.workload import IntArray, Lognormal

PROMPT, SIGMA, SLOTS = 128, 0.7, 256
"""NeMo-RL: tokens of a prompt, spread of lengths, and vLLM's default of rows at once."""
SHARES = {"On": 0.6, "1off": 0.8, "8off": 0.8}
"""Of the memory, that the recipes give to vLLM."""
COMPUTING = ("products", "reading weights", "attention", "elementwise", "logits", "launches", "optimizer", "bubble")
SCALARS = ("computing", "communicating", "generating", "engine", "once")
"""What calibration multiplies. `engine` is seconds of the host per decoding step, `once` seconds per step; both are 0
without calibration."""


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
    mesh = mesh_of(row.layout) if titan else Parallel(fsdp=row.gpus)
    batch = int(row.work.removeprefix("local bs ")) if titan else 1
    small = row.shape.name == "llama-8b"  # whose configuration recomputes selectively
    trainer = Trainer(
        row.shape,
        row.gpu,
        mesh,
        precision="fp8" if "fp8" in row.mode else "bf16",
        micro_tokens=row.longest if mesh.pp > 1 else batch * row.longest,
        recompute=0.5 if titan and small and "full AC" not in row.mode else 1.0,
        frozen="LoRA" in row.mode,
        zero3=mesh.pp == 1,
        async_tp="asyncTP" in row.mode + row.layout,
        chunks=2 if "I1F1B" in row.layout else 1,
        offload="Offload" in row.mode,
    )
    return trainer.step(np.full(batch * mesh.data, row.longest))


def _reinforced(row: Row) -> Prediction:
    mesh, width, replicas = nemo_layouts(row)
    share = SHARES[row.mode.split()[1]]
    room = row.gpu.model_copy(update={"memory_gib": row.gpu.memory_gib * share})
    generator = Generator(row.shape, room, width, SLOTS, "fp8" if row.mode.endswith("FP8") else "bf16")
    slots = slots_that_fit(generator, PROMPT + row.mean, arenas=1)
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
    trainer = Trainer(row.shape, row.gpu, mesh, micro_tokens=row.longest, zero3=False)
    trained = trainer.logprobs(lengths + PROMPT) * 2
    for part in np.array_split(lengths + PROMPT, sampled // batch):
        trained = trained + trainer.step(part)
    moved = traffic(row.shape, replace(mesh, ep=1), width, "bf16")
    trained = trained + sync_cost(moved, replicas, row.gpu, row.gpu, together=not row.staleness)
    if not row.staleness:
        moments = 12 * weights_per_rank(row.shape, mesh.tp, mesh.pp, mesh.ep, mesh.fsdp * mesh.cp)
        trained = trained + switch_cost(row.gpu, moments, moments)
    return Prediction({"generating": seconds, "engine": steps}, _sides(trained), overlaps=bool(row.staleness))


def stream_s(generator: Generator, responses: IntArray, prompt_tokens: int, samples: int, replicas: int) -> float:
    """Seconds of one batch among others that follow without a pause: of three in a row, the last one's share."""
    two, three = (generator.rollout(np.tile(responses, n), prompt_tokens, samples, replicas).max() for n in (2, 3))
    return float(three - two)
