"""LlamaRL's three speed-ups from the cost model, with one set of assumptions for all three models.

Batch, lengths and splits are not published. These are assumed for all:

- 256 prompts of 128 tokens with 8 samples each; responses lognormal with a mean of 1,000 tokens, σ 0.7, cut at 4,096.
- Both systems shard the model only by tensor parallelism within a machine and pipeline stages across machines; copies
  of that mesh share the samples (the memory model of the paper's section on theory).
- Synchronous: one mesh for both stages on all GPUs, whose memory holds the optimizer's state and the cache at once;
  bfloat16; no time for switching or syncing.
- LlamaRL: GPUs are split between the two stages, each with its own mesh; the generator in fp8 with two arenas, lag 1,
  each sync by the resharding plan.
- Generators replay CUDA graphs. Activations are recomputed; micro-batches have 4,096 tokens; each replica has up to 256
  rows at once.
- Each side is the best that a search over the meshes, and for LlamaRL the splits, finds.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from predicted import VLLM_STEP, slots_that_fit, stream_s

from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.model_shape import SHAPES, Parallel, Shape
from penstock.runtime.plan.sync_cost import sync_cost, traffic
from penstock.runtime.plan.train_cost import Memory, Trainer, trainer_memory
from penstock.runtime.plan.workload import Lognormal

PUBLISHED = (("llama-8b", 256, 2.52), ("llama-70b", 256, 3.98), ("llama-405b", 1024, 10.7))
PROMPTS, SAMPLES, PROMPT, MICRO, SLOTS, LAG = 256, 8, 128, 4096, 256, 1
LENGTHS = Lognormal(1000, 0.7, 4096)
RESPONSES = LENGTHS.take(PROMPTS * SAMPLES)
GPU = GPUS["H100"].model_copy(update={"engine": GPUS["H100"].engine.model_copy(update=VLLM_STEP)})


def meshes(shape: Shape, gpus: int) -> Iterator[Parallel]:
    """Yield meshes for replicas with a power of two of GPUs: tp up to 8, and then pipeline stages."""
    for power in range(11):
        size = 2**power
        mesh = Parallel(tp=min(8, size), pp=max(1, size // 8))
        if size <= gpus and mesh.divides(shape):
            yield mesh


@cache
def trained(shape: Shape, mesh: Parallel, copies: int) -> float:
    trainer = Trainer(shape, GPU, replace(mesh, dp=copies), micro_tokens=MICRO, zero3=False)
    return trainer.update(RESPONSES + PROMPT).seconds


@cache
def generated(generator: Generator, copies: int, stream: bool) -> float:
    seconds = float(generator.rollout(RESPONSES, PROMPT, SAMPLES, copies).max())
    if not stream:
        return seconds
    return max(stream_s(generator, RESPONSES, PROMPT, SAMPLES, copies), seconds / (1 + LAG))


def slots(generator: Generator, copies: int, beside: Memory | None = None) -> int:
    """Return the number of rows that fit with `beside` on the same GPUs; 0 if none does."""
    return min(SLOTS, slots_that_fit(generator, PROMPT + LENGTHS.mean, copies, beside))


def synchronous(shape: Shape, gpus: int) -> tuple[float, str]:
    found = []
    for mesh in meshes(shape, gpus):
        state = trainer_memory(Trainer(shape, GPU, mesh, micro_tokens=MICRO, zero3=False))
        generator = Generator(shape, GPU, mesh, SLOTS)
        if rows := slots(generator, 1, state):
            copies = gpus // mesh.ranks
            both = generated(replace(generator, slots=rows), copies, False) + trained(shape, mesh, copies)
            found.append((both, f"{copies} × ({mesh}), {rows} rows"))
    return min(found)


def asynchronous(shape: Shape, gpus: int) -> tuple[float, str]:
    found = []
    for mesh in meshes(shape, gpus):
        if trainer_memory(Trainer(shape, GPU, mesh, micro_tokens=MICRO, zero3=False)).bytes > GPU.memory_bytes:
            continue
        for width in meshes(shape, gpus):
            generator = Generator(shape, GPU, width, SLOTS, "fp8")
            rows = slots(generator, 2)
            for eighths in range(1, 8) if rows else ():
                trains, decodes = gpus * eighths // 8 // mesh.ranks, gpus * (8 - eighths) // 8 // width.ranks
                if trains and decodes:
                    sides = trained(shape, mesh, trains), generated(replace(generator, slots=rows), decodes, True)
                    words = f"{trains} × ({mesh}) train, {decodes} × ({width}) decode, {rows} rows"
                    found.append((max(sides), words, trains, mesh, width, decodes))
    # A sync is short compared with a step, so it is added to the best few only.
    best = [(f[0] + synced(shape, *f[2:]), f[1]) for f in sorted(found, key=lambda f: f[:2])[:4]]
    return min(best)


def synced(shape: Shape, trains: int, mesh: Parallel, width: Parallel, decodes: int) -> float:
    return sync_cost(traffic(shape, replace(mesh, dp=trains), width, "fp8"), decodes, GPU, GPU).seconds


def ratios() -> list[dict[str, Any]]:
    rows = []
    for name, gpus, published in PUBLISHED:
        (sync, one), (other, two) = synchronous(SHAPES[name], gpus), asynchronous(SHAPES[name], gpus)
        rows.append(
            {
                "model": name,
                "GPUs": gpus,
                "published speed-up": published,
                "predicted speed-up": round(sync / other, 2),
                "synchronous": f"{sync:.1f} s: {one}",
                "LlamaRL": f"{other:.1f} s: {two}",
            }
        )
    return rows
