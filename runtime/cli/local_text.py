"""A plan of this machine's cores, for people: what an update takes, by what, and what else there would be."""

import shutil

from penstock.runtime.cli.figures import seconds
from penstock.runtime.cli.labelled import assumed, labelled
from penstock.runtime.plan.assumptions import assumptions
from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.local_plan import LocalPlan


def local_text(found: LocalPlan, cluster: str) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    work = found.work
    responses = f"{work.responses} responses of {work.lengths.mean:.0f} tokens on average"
    lines = [
        f"{found.roles.graph} with {work.shape.name} on {cluster}: {responses}, lag {found.roles.lag}",
        "",
        *labelled(
            "period", f"{seconds(found.period_s)} per update, placed as `penstock run` does, not searched", width
        ),
        *labelled("bound", f"by {found.bounds[0].cause}", width),
        *labelled("generation", _parts(found.generation), width),
        *labelled("training", _parts(found.training), width),
        *labelled("sync", _parts(found.sync), width),
        *assumed(assumptions(found.roles, work), width),
        "",
    ]
    for pool in found.plan.pools:
        threads = pool.replicas[0].ranks[0].threads
        held = ", ".join(f"{n} {size / 1e9:.2f}" for n, size in found.memory.get(pool.name, {}).items() if size)
        memory = f"; GB: {held}" if held else ""
        nodes = ", ".join(found.roles.nodes_of(pool.name))
        lines += labelled(pool.name, f"{threads} threads, {nodes}{memory}", width)
    for other in found.alternatives:
        lines += labelled("instead", f"in {other.precision}: {seconds(other.period_s)}", width)
    return "\n".join(lines)


def _parts(cost: Cost) -> str:
    parts = sorted(cost.parts.items(), key=lambda part: -part[1])
    return f"{seconds(cost.seconds)}: " + ", ".join(f"{name} {seconds(value)}" for name, value in parts if value > 0)
