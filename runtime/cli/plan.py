"""`penstock plan PROGRAM`: which GPUs do what on a cluster, what fits, and what bounds an update."""

import json
from collections.abc import Sequence

from penstock.runtime.cli.programs import require_program
from penstock.runtime.cli.traced import trace_program
from penstock.runtime.record.faults import visible


def main(argv: Sequence[str]) -> int:
    require_program("plan", argv)
    traced = trace_program("plan", argv, ("penstock.runtime.cli.planning", "penstock.runtime.cli.plan_text"))
    from penstock.runtime.cli.local_text import local_text  # the planner is imported while a child traces
    from penstock.runtime.cli.plan_text import text
    from penstock.runtime.cli.planning import local, search

    flags, graph = traced.flags, traced.sound()
    cores = local(graph, flags, flags.batch)
    if cores is not None:
        print(json.dumps(cores.to_json()) if flags.json else visible(local_text(cores, flags.cluster)))
        return 0
    found = search(graph, flags, flags.batch)
    print(json.dumps(found.to_json()) if flags.json else visible(text(found, flags.cluster)))
    return 0
