"""`penstock check PROGRAM`: all faults at once, each with what was given, what is needed, and the line."""

import dataclasses
import json
from collections.abc import Sequence

from penstock.runtime.cli.tracing import Traced, faults_text, require_program, trace_program
from penstock.runtime.record.errors import visible


def main(argv: Sequence[str]) -> int:
    require_program("check", argv)
    traced = trace_program("check", argv)
    if traced.flags.json:
        faults = [dataclasses.asdict(fault) for fault in traced.faults]
        print(json.dumps({"program": traced.path, "ok": not faults, "faults": faults}))
    elif traced.faults:
        print(visible(faults_text(traced.faults)))
    else:
        print(visible(_praise(traced)))
    return 1 if traced.faults else 0


def _praise(traced: Traced) -> str:
    graph = traced.sound()
    beside = f", evaluation {traced.evaluation.name}" if traced.evaluation is not None else ""
    pools = ", ".join(dict.fromkeys(n.pool for n in graph.nodes))
    return f"{traced.name}: no faults in {len(graph.nodes)} nodes on pools {pools}{beside}"
