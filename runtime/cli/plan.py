"""`penstock plan PROGRAM`: which GPUs do what on a cluster, what fits, and what bounds an update."""

import json
from collections.abc import Sequence

from penstock.runtime.cli.programs import require_program
from penstock.runtime.cli.traced import trace_program
from penstock.runtime.record.faults import visible


def main(argv: Sequence[str]) -> int:
    require_program("plan", argv)
    traced = trace_program("plan", argv, ("penstock.runtime.cli.planning", "penstock.runtime.cli.plan_text"))
    from penstock.runtime.cli.plan_text import text  # the planner is imported while a child traces
    from penstock.runtime.cli.planning import search

    flags = traced.flags
    found = search(traced.sound(), flags, flags.batch)
    print(json.dumps(found.to_json()) if flags.json else visible(text(found, flags.cluster)))
    return 0
