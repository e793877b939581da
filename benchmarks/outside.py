"""The cost model against public figures of single parts of a step, the sources of its defaults.

    python benchmarks/outside.py [--rows] [--keep]

None of these rows is in the table that `planner.py` predicts. Each is for one part alone, as given by its source:

- training: tokens per second and GPU of MosaicML's llm-foundry (scripts/train/benchmarking/README.md, H100, bfloat16,
  FSDP) and of NVIDIA's Megatron-Bridge (docs/performance-summary.md, container 25.11, H100, B200 and GB200);
- decoding under full load, where the host's work is hidden: TensorRT-LLM's docs/source/performance/perf-overview.md
  (v1.0, fp8; prompt and response lengths are fixed, all requests are there from the start);
- decoding steps of DeepSeek-R1: SGLang on 8 H200 (SemiAnalysisAI/InferenceX, issue 870) and on 2 × 8 H100 over
  InfiniBand (tenstorrent/tt-inference-server, issue 356).
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
from predicted import PASSES, Recipe, slots_that_fit
from report import Keep, publish

from penstock.runtime.cluster.gpus import GPUS, Efficiency, HostTime
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.model_shape import SHAPES, Parallel, Shape

Mesh = Parallel


def mpt(name: str, hidden: int, layers: int, heads: int) -> Shape:
    """Return the shape of an MPT. Its MLP of two matrices with four times the width is counted as three matrices with
    the same number of weights; the head is tied."""
    return Shape(name, 50368, hidden, layers, heads, heads, hidden // heads, hidden * 8 // 3, tied=True)


MPT = {
    "mpt-1b": mpt("mpt-1b", 2048, 24, 16),
    "mpt-3b": mpt("mpt-3b", 2560, 32, 20),
    "mpt-7b": mpt("mpt-7b", 4096, 32, 32),
    "mpt-13b": mpt("mpt-13b", 5120, 40, 40),
    "mpt-30b": mpt("mpt-30b", 7168, 48, 56),
    "mpt-70b": mpt("mpt-70b", 8192, 80, 64),
}


class Trained(NamedTuple):
    model: str
    kind: str
    precision: str
    mesh: Parallel
    length: int
    micro: int
    accumulated: int
    rate: float
    recompute: float = 0.0
    ep: int = 1
    cp: int = 1
    chunks: int = 1
    zero3: bool = True


TRAINED = (
    Trained("mpt-70b", "H100", "bf16", Mesh(fsdp=64), 2048, 8, 4, 1039, 1.0),
    Trained("mpt-30b", "H100", "bf16", Mesh(fsdp=32), 2048, 14, 3, 2308, 1.0),
    Trained("mpt-30b", "H100", "bf16", Mesh(fsdp=8), 4096, 1, 21, 1802, 1.0),
    Trained("mpt-13b", "H100", "bf16", Mesh(fsdp=8), 4096, 10, 3, 4717, 1.0),
    Trained("mpt-13b", "H100", "bf16", Mesh(fsdp=64), 2048, 2, 1, 4800),
    Trained("mpt-13b", "H100", "bf16", Mesh(fsdp=8), 16384, 3, 3, 2985, 1.0),
    Trained("mpt-7b", "H100", "bf16", Mesh(fsdp=8), 2048, 6, 1, 10643),
    Trained("mpt-7b", "H100", "bf16", Mesh(fsdp=8), 8192, 8, 2, 6935, 1.0),
    Trained("mpt-7b", "H100", "bf16", Mesh(fsdp=8), 32768, 2, 2, 3318, 1.0),
    Trained("mpt-3b", "H100", "bf16", Mesh(fsdp=8), 8192, 3, 6, 16578),
    Trained("mpt-3b", "H100", "bf16", Mesh(fsdp=64), 2048, 6, 3, 22525),
    Trained("mpt-1b", "H100", "bf16", Mesh(fsdp=8), 2048, 14, 1, 45455),
    Trained("llama-8b", "H100", "fp8", Mesh(fsdp=8), 8192, 1, 16, 14451),
    Trained("llama-70b", "H100", "fp8", Mesh(fsdp=2, tp=4, pp=8), 8192, 1, 64, 1602, chunks=5, zero3=False),
    Trained("llama-405b", "H100", "fp8", Mesh(fsdp=16, tp=8, pp=8), 8192, 1, 64, 292, cp=2, chunks=8, zero3=False),
    Trained("llama-8b", "B200", "fp8", Mesh(fsdp=8), 8192, 2, 8, 30624, zero3=False),
    Trained("llama-8b", "GB200", "fp8", Mesh(fsdp=8), 8192, 2, 8, 31508, zero3=False),
    Trained("llama-70b", "GB200", "fp8", Mesh(fsdp=64), 8192, 2, 2, 4312),
    Trained("qwen3-30b-a3b", "H100", "fp8", Mesh(fsdp=8, pp=2), 4096, 2, 32, 5275, ep=8, chunks=24, zero3=False),
    Trained(
        "qwen3-235b-a22b", "H100", "fp8", Mesh(fsdp=16, tp=2, pp=8), 4096, 1, 64, 1575, ep=32, chunks=4, zero3=False
    ),
    Trained("qwen3-30b-a3b", "B200", "fp8", Mesh(fsdp=8), 4096, 1, 64, 9299, ep=8, zero3=False),
    Trained("qwen3-30b-a3b", "GB200", "fp8", Mesh(fsdp=8), 4096, 4, 16, 23766, ep=8, zero3=False),
    Trained("qwen3-235b-a22b", "GB200", "bf16", Mesh(fsdp=32, pp=8), 4096, 1, 256, 4916, ep=32, chunks=3, zero3=False),
    Trained("deepseek-v3", "GB200", "bf16", Mesh(fsdp=64, pp=4), 4096, 1, 64, 3139, ep=64, chunks=4, zero3=False),
    Trained("deepseek-v3", "B200", "fp8", Mesh(fsdp=16, pp=16), 4096, 1, 128, 2139, ep=8, zero3=False),
)
FULL = (
    # model, kind, tp, (prompt, response, tokens per second of all GPUs)
    ("llama-8b", "H100", 1, ((128, 2048, 22714), (500, 2000, 17660), (1000, 1000, 15220), (2048, 2048, 9305))),
    ("llama-8b", "H200", 1, ((128, 2048, 26221), (500, 2000, 20770), (1000, 1000, 17744), (2048, 2048, 12194))),
    ("llama-70b", "H100", 2, ((128, 2048, 6651), (500, 2000, 5222), (1000, 2000, 4146), (2048, 2048, 3082))),
    ("llama-70b", "H200", 1, ((128, 2048, 4336), (500, 2000, 3666), (1000, 2000, 2994), (2048, 2048, 2003))),
    ("llama-405b", "H100", 8, ((128, 2048, 4340), (1000, 2000, 2895), (2048, 2048, 2296))),
    ("qwen3-235b-a22b", "H100", 8, ((128, 2048, 19658), (1000, 2000, 15136), (2048, 2048, 9924))),
)
STEPS = (
    # model, kind, tp, rows, tokens in the cache of each, seconds of a step
    ("deepseek-v3", "H200", 8, 8, 1536, 0.0128),
    ("deepseek-v3", "H200", 8, 16, 1536, 0.0172),
    ("deepseek-v3", "H200", 8, 32, 1536, 0.0256),
    ("deepseek-v3", "H200", 8, 64, 1536, 0.0346),
    ("deepseek-v3", "H100", 16, 1, 640, 0.0232),
)
CUDNN = Efficiency(attention=0.6)
# The schedulers of both engines overlap with the GPU's work, and a step is one CUDA graph.
HIDDEN = {
    kind: gpu.model_copy(update={"engine": HostTime(eager=False, step_ms=0, row_us=0)}) for kind, gpu in GPUS.items()
}
# A step of pretraining has no stages. Megatron-Bridge uses cuDNN's attention, llm-foundry FlashAttention-2.
NO_STAGES = HostTime(stage_s=0, eager=False)
TRAINERS = {
    (mosaic, kind): gpu.model_copy(update={"engine": NO_STAGES} | ({} if mosaic else {"efficiency": CUDNN}))
    for mosaic in (True, False)
    for kind, gpu in GPUS.items()
}
# There are many more requests than slots; by default TensorRT-LLM runs up to 2,048 at once.
MOST_SLOTS = 2048


def trained() -> Iterator[tuple[str, str, float, float]]:
    for row in TRAINED:
        shape = MPT.get(row.model) or SHAPES[row.model]
        recipe = Recipe(
            shape, TRAINERS[row.model in MPT, row.kind], replace(row.mesh, ep=max(1, row.ep // row.mesh.tp)),
            precision=row.precision,  # type: ignore[arg-type]
            micro_tokens=row.micro * row.length, recompute=row.recompute, zero3=row.zero3, cp=row.cp,
            chunks=row.chunks, fused=PASSES["eager" if row.model in MPT else "compile"],
        )  # fmt: skip
        sequences = np.full(row.micro * row.accumulated * row.mesh.data // row.cp, row.length)
        found = recipe.update(sequences)
        tokens = row.length * len(sequences) / row.mesh.ranks
        yield (f"{row.model}, {row.mesh.ranks} × {row.kind}, {row.precision}, {row.length}",
               "experts" if shape.experts else f"dense {row.precision}", tokens / row.rate, found.seconds)  # fmt: skip


def full() -> Iterator[tuple[str, str, float, float]]:
    for model, kind, tp, cells in FULL:
        for prompt, response, rate in cells:
            generator = Generator(SHAPES[model], HIDDEN[kind], Parallel(tp=tp), MOST_SLOTS, "fp8")
            # The measured checkpoints keep the cache in fp8, which halves its bytes.
            context = (prompt + response / 2) / 2
            slots = min(MOST_SLOTS, slots_that_fit(generator, context, copies=1))
            generator = replace(generator, slots=slots)
            seconds = generator.step(slots, slots * context).seconds / slots + generator.prefill_s(prompt) / response
            yield f"{model}, {tp} × {kind}, {prompt}/{response}, {slots} rows", "decoding, full", 1 / rate, seconds


def steps() -> Iterator[tuple[str, str, float, float]]:
    for model, kind, tp, rows, context, seconds in STEPS:
        generator = Generator(SHAPES[model], HIDDEN[kind], Parallel(tp=tp), rows, "fp8")
        found = generator.step(rows, rows * context)
        yield f"{model}, {tp} × {kind}, {rows} rows", "decoding steps", seconds, found.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print each row, too")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/outside.json")
    args = parser.parse_args()
    by_part: dict[str, list[float]] = {}
    for name, part, published, predicted in (*trained(), *full(), *steps()):
        by_part.setdefault(part, []).append(predicted / published)
        if args.rows:
            print(
                f"{part}: {name}: published {published:.4g} s, predicted {predicted:.4g} s, {predicted / published:.2f}"
            )
    parts = [
        {
            "part": part,
            "rows": len(ratios),
            "median of predicted / published": round(median(ratios), 2),
            "least": round(min(ratios), 2),
            "most": round(max(ratios), 2),
            "median error": round(median(abs(ratio - 1) for ratio in ratios), 3),
        }
        for part, ratios in by_part.items()
    ]
    publish("outside", {"parts": parts}, args.keep)


if __name__ == "__main__":
    main()
