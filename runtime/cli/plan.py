"""`penstock plan PROGRAM`: which GPUs do what on a cluster, what fits, and what bounds an update."""

import json
from collections.abc import Sequence

from penstock.runtime.cli.tracing import require_program, trace_program
from penstock.runtime.record.errors import visible


def main(argv: Sequence[str]) -> int:
    require_program("plan", argv)
    traced = trace_program("plan", argv, ("penstock.runtime.cli.planning", "penstock.runtime.cli.planning"))
    from penstock.runtime.cli.planning import (
        search,
        text,  # the planner is imported while a child traces
    )

    flags = traced.flags
    found = search(traced.sound(), flags, flags.batch)
    print(json.dumps(found.to_json()) if flags.json else visible(text(found, flags.cluster)))
    return 0
