"""The cost of a resharding plan at 405B from 512 to 512 ranks, in one process: seconds, balance, bytes.

    python benchmarks/reshard.py [--keep]

The meshes of trainers differ; generators are always 64 replicas × TP8. `plan_s` is `reshard` on layouts as read from
JSON; `part_s` is that and the routes of one rank, the slower of one sender and one receiver; `routes_s` expands the
routes of all 1024 ranks at once. `copies_s` lists one sender's copies, tensor by tensor, as a transport needs them.
The first two are the best of `--repeats`, to exclude other load on the machine, the others of one. Balance is the
busiest rank over the mean.
"""

import argparse
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

from llama import layout
from report import Keep, publish

from penstock.runtime.tensor.layout import Layout, Mesh
from penstock.runtime.tensor.reshard import ReshardPlan, chain, reshard

T = TypeVar("T")

MODEL = "405B"
REPLICA = Mesh((("tp", 8),))
GENERATORS = Mesh((("replica", 64), ("tp", 8)))
TRAINERS = {
    "fsdp 64 × tp 8": Mesh((("fsdp", 64), ("tp", 8))),
    "dp_replicate 8 × fsdp 8 × tp 8": Mesh((("dp_replicate", 8), ("fsdp", 8), ("tp", 8))),
    "fsdp 128 × tp 4": Mesh((("fsdp", 128), ("tp", 4))),
    "pp 16 × fsdp 4 × tp 8": Mesh((("pp", 16), ("fsdp", 4), ("tp", 8))),
}
TARGETS = {"plan_s": 1.0, "part_s": 0.05}
RANK = 77


def measured(mesh: Mesh, repeats: int) -> dict[str, Any]:
    """Return the figures for one mesh of trainers."""
    sides = [json.dumps(layout(MODEL, side).to_json()) for side in (mesh, GENERATORS)]

    def fresh() -> tuple[Layout, Layout]:
        src, dst = (Layout.from_json(json.loads(side)) for side in sides)
        return src, dst

    made, plan_s = best(repeats, fresh, reshard)
    sender_s = best(repeats, fresh, lambda src, dst: reshard(src, dst).routes(source=RANK))[1]
    receiver_s = best(repeats, fresh, lambda src, dst: reshard(src, dst).routes(destination=RANK))[1]
    routes, routes_s = best(1, lambda: (made,), ReshardPlan.routes)
    copies, copies_s = best(1, lambda: (made, RANK), ReshardPlan.sends)
    links = chain(reshard(layout(MODEL, mesh), layout(MODEL, REPLICA)), 64)
    return {
        "trainers": str(mesh),
        "plan_s": plan_s,
        "part_s": max(sender_s, receiver_s),
        "routes_s": routes_s,
        "copies_s": copies_s,
        "signatures": len(made.groups),
        "lanes": sum(len(group.lanes) for group in made.groups),
        "copies": sum(len(group.names) * len(lane.destinations) for group in made.groups for lane in group.lanes),
        "routes": len(routes),
        "copies_of_a_sender": len(copies),
        "layout_bytes": len(sides[0]),
        "gb_in": max(made.bytes_in) / 1e9,
        "balance_out": max(made.bytes_out) * len(made.bytes_out) / sum(made.bytes_out),
        "balance_in": max(made.bytes_in) * len(made.bytes_in) / sum(made.bytes_in),
        "heads_of_64": links.count(None),
    }


def best(repeats: int, given: Callable[[], tuple[Any, ...]], work: Callable[..., T]) -> tuple[T, float]:
    """Return the last result of `work` on `given()`, and the fastest seconds of `repeats`. `given` is not timed."""
    seconds = []
    for _ in range(repeats):
        inputs = given()
        start = perf_counter()
        result = work(*inputs)
        seconds.append(perf_counter() - start)
    return result, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/reshard.json")
    args = parser.parse_args()
    rows = []
    for name, mesh in TRAINERS.items():
        rows.append(measured(mesh, args.repeats))
        row = rows[-1]
        times = f"plan {row['plan_s'] * 1e3:.0f} ms, one rank's part {row['part_s'] * 1e3:.0f} ms"
        print(f"{name}: {times}, {row['copies'] / 1e6:.1f} M copies, busiest / mean {row['balance_out']:.4f}")
    publish("reshard", {"generators": str(GENERATORS), "targets": TARGETS, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
