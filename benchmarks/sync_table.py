"""How long a weight sync of 8B, 70B and 405B would take on H100 clusters: a calculation from the real resharding plan.

    python benchmarks/sync_table.py [--keep]

Nothing is measured here. The seconds are those of `penstock plan` (`runtime/plan/sync_cost.py`), with a NIC's full 50
GB/s in both directions at once: trainers and generators are on separate hosts, each peer adds 10 µs, and nothing else
takes time: neither packing nor proof nor swap. So they are a lower bound that the links set for any implementation. A
row is bound by the busiest sender or the busiest receiver. If few trainers feed many replicas, they send to some of
them, and each forwards to the next by rounds: the chain. The last column is what LlamaRL reports (arXiv 2505.24034);
since the splits of its clusters are not known, compare only orders of magnitude.
"""

import argparse
from typing import Any

from report import Keep, publish

from penstock.runtime.cluster.gpus import GPUS, Efficiency, Precision
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.sync_cost import sync_cost, traffic

GPU = GPUS["H100"].model_copy(update={"efficiency": Efficiency(link=1.0)})
WIRES: dict[str, Precision] = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}
CLUSTERS = (
    ("8B", Parallel(fsdp=128), 128, 1, 0.04),
    ("8B", Parallel(fsdp=128), 32, 4, 0.04),
    ("70B", Parallel(fsdp=16, tp=8), 16, 8, 1.15),
    ("70B", Parallel(fsdp=4, tp=8), 28, 8, 1.15),
    ("405B", Parallel(fsdp=64, tp=8), 64, 8, 2.0),
)
"""Model, trainers, generator replicas, GPUs of each, LlamaRL's seconds."""


def row(name: str, trainers: Parallel, replicas: int, width: int, published: float, wire: str) -> dict[str, Any]:
    moved = traffic(SHAPES[f"llama-{name.lower()}"], trainers, Parallel(tp=width), WIRES[wire])
    costs = [sync_cost(moved, replicas, GPU, GPU, chained=chained).parts for chained in (False, True)]
    direct, by_chain = (sum(seconds for part, seconds in cost.items() if part != "swap") for cost in costs)
    out, into = moved.sent * replicas, moved.received
    bound = "both" if abs(out / into - 1) < 0.01 else "a trainer's NIC" if out > into else "a generator's NIC"
    return {
        "model": name,
        "wire": wire,
        "trainers": str(trainers),
        "generators": f"{replicas} × tp {width}",
        "GB from the busiest trainer": round(out / 1e9, 2),
        "GB into the busiest generator": round(into / 1e9, 2),
        "bound by": bound,
        "seconds": round(direct, 3),
        "seconds by chains": round(by_chain, 3),
        "GB/s into one receiver": round(into / 1e9 / min(direct, by_chain), 1),
        "LlamaRL, seconds": published,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/sync_table.json")
    args = parser.parse_args()
    rows = [row(*cluster, wire) for cluster in CLUSTERS for wire in WIRES]
    for found in rows:
        print(", ".join(f"{name} {value}" for name, value in found.items()))
    setup = {"GPU": "H100", "NIC bytes/s": GPU.nic, "latency s": round(GPU.latency_s, 9), "measured": False}
    publish("sync_table", {"setup": setup, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
