"""How long a cluster's schedule takes to simulate: 200 updates of 256 groups with 8 samples on 1,024 GPUs.

    python benchmarks/simulate.py [--repeats N] [--keep]

`aipo` at lag 1 on 128x8xH100, responses lognormal with a mean of 1,000 tokens, σ 0.7, cut at 4,096, each of the 409,600
drawn with its own key. The plan is made by hand, so that a better planner does not change the figures: a quarter of the
GPUs trains, the others generate, with 96 replicas of 8 (llama-70b) or 768 of one (llama-8b). Seconds are processor time
of one thread, from the plan to the finished schedule; wall-clock seconds are reported next to them.
"""

import argparse
import time
from typing import Any

from report import Keep, publish, spread

from penstock.graph import load, trace
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.simulate import Costed, Scene, Simulated
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import Lognormal, Workload

UPDATES, PROMPTS, SAMPLES, GPUS_IN_ALL, TRAINING = 200, 256, 8, 1024, 256
TARGET_S = 20.0
CASES = {"llama-70b": Parallel(tp=8), "llama-8b": Parallel()}
"""The mesh of a generator's replica."""


def scene(model: str) -> Scene:
    shape, gpu, mesh = SHAPES[model], GPUS["H100"], CASES[model]
    work = Workload(shape, PROMPTS, SAMPLES, Lognormal(1000, 0.7, 4096))
    trainer = Trainer(shape, gpu, Parallel(fsdp=TRAINING // 8, tp=8))
    replicas = (GPUS_IN_ALL - TRAINING) // mesh.ranks
    generator = Generator(shape, gpu, mesh, 64)
    plan = Costed(
        "aipo", work, 1, GPUS_IN_ALL, trainer, generator, replicas, (), False, 1.0, 0.0, 0.0, 1.0, "by hand",
    )  # fmt: skip
    return Scene(trace(load("aipo"), {"lag": 1}), plan)


def measured(model: str, repeats: int) -> dict[str, Any]:
    cpu, wall, found = [], [], None
    for _ in range(repeats):
        began, busy = time.monotonic(), time.process_time()
        found = scene(model).run(UPDATES)
        cpu.append(round(time.process_time() - busy, 2))
        wall.append(round(time.monotonic() - began, 2))
    assert isinstance(found, Simulated)
    result, plan = found.result, found.scene.plan
    rows = len(result.spans["generate"].ends)
    return {
        "model": model,
        "GPUs": plan.gpus,
        "replicas": plan.replicas,
        "updates": len(result.ends),
        "groups": sum(result.lags.values()),
        "responses": rows,
        "CPU s": spread(cpu),
        "wall s": spread(wall),
        "target s": TARGET_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/simulate.json")
    args = parser.parse_args()
    rows = []
    for model in CASES:
        rows.append(measured(model, args.repeats))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    publish("simulate", {"rows": rows}, args.keep)


if __name__ == "__main__":
    main()
