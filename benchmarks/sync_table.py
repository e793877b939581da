"""How long a weight sync of 8B, 70B and 405B would take on H100 clusters: a simulation from the real resharding plan.

    python benchmarks/sync_table.py [--keep]

Nothing is measured here. Each rank's bytes come from the plan; a GPU sends and receives at its NIC's 50 GB/s at once
(trainers and generators are on hosts of their own), with 10 µs for each message, and nothing else takes time: neither
packing nor proof nor waiting. So the seconds are what the links allow, a bound that no implementation beats. What
bounds a row is the busiest sender or the busiest receiver. Where few trainers feed many replicas, they send to some of
them, and each forwards to the next by buckets: the chain. Beside it stands what LlamaRL reports (arXiv 2505.24034),
whose clusters' splits are not known: compare orders of magnitude.
"""

import argparse
from math import ceil
from typing import Any

from llama import layout
from report import publish

from penstock.runtime.tensor.chain import chain
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.mesh import Mesh
from penstock.runtime.tensor.plan import BUCKET, Plan
from penstock.runtime.tensor.reshard import reshard

NIC_BYTES_PER_S, LATENCY_S = 50e9, 1e-5
CLUSTERS = (
    ("8B", "fsdp 128", (("fsdp", 128),), 128, 1, 0.04),
    ("8B", "fsdp 128", (("fsdp", 128),), 32, 4, 0.04),
    ("70B", "fsdp 16 × tp 8", (("fsdp", 16), ("tp", 8)), 16, 8, 1.15),
    ("70B", "fsdp 4 × tp 8", (("fsdp", 4), ("tp", 8)), 28, 8, 1.15),
    ("405B", "fsdp 64 × tp 8", (("fsdp", 64), ("tp", 8)), 64, 8, 2.0),
)
"""Model, trainers in words and as a mesh, generator replicas, GPUs of each, LlamaRL's seconds."""


def messages(plan: Plan) -> int:
    """The most that one rank sends or receives: one for each peer and pair of boxes, at least."""
    sent = max(len(plan.routes(source=rank)) for rank in (0, plan.sources - 1))
    received = max(len(plan.routes(destination=rank)) for rank in (0, plan.destinations - 1))
    return max(sent, received)


def seconds(out: int, into: int, count: int) -> float:
    return max(out, into) / NIC_BYTES_PER_S + count * LATENCY_S


def chained(src: Layout, one: Layout, replicas: int) -> float:
    """Seconds until the last replica of the longest chain is complete."""
    plan = reshard(src, one)
    heads = sum(link.source is None for link in chain(plan, replicas))
    behind = (ceil(replicas / heads) - 1) * BUCKET / NIC_BYTES_PER_S
    return seconds(heads * max(plan.bytes_out), max(plan.bytes_in), messages(plan)) + behind


def row(
    name: str, trainers: str, mesh: tuple[tuple[str, int], ...], replicas: int, width: int, published: float, wire: str
) -> dict[str, Any]:
    one = Mesh((("tp", width),))
    src = layout(name, Mesh(mesh), wire)
    plan = reshard(src, layout(name, Mesh((("replica", replicas), *one.axes)), wire))
    out, into = max(plan.bytes_out), max(plan.bytes_in)
    direct, by_chain = seconds(out, into, messages(plan)), chained(src, layout(name, one, wire), replicas)
    bound = "both" if abs(out / into - 1) < 0.01 else "a trainer's NIC" if out > into else "a generator's NIC"
    return {
        "model": name,
        "wire": wire,
        "trainers": trainers,
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
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/sync_table.json")
    args = parser.parse_args()
    rows = [row(*cluster, wire) for cluster in CLUSTERS for wire in ("bfloat16", "float8_e4m3fn")]
    for found in rows:
        print(", ".join(f"{name} {value}" for name, value in found.items()))
    setup = {"GPU": "H100", "NIC bytes/s": NIC_BYTES_PER_S, "latency s": LATENCY_S, "measured": False}
    publish("sync_table", {"setup": setup, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
