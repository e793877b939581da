"""`penstock show PROGRAM`: the graph, as text, Mermaid, SVG or JSON."""

from collections.abc import Sequence
from pathlib import Path

from penstock.graph.show import dumps, mermaid, text
from penstock.graph.svg import svg
from penstock.runtime.cli.tracing import CommandError, require_program, trace_program
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import write_atomic

FORMATS = {"text": text, "mermaid": mermaid, "svg": svg, "json": dumps}


def main(argv: Sequence[str]) -> int:
    require_program("show", argv)
    traced = trace_program("show", argv)
    flags, graph = traced.flags, traced.sound()
    if flags.evaluation:
        if traced.evaluation is None:
            raise CommandError(f"{traced.name} has no evaluation; give it one with @program(evaluation=…)")
        graph = traced.evaluation
    shown = FORMATS["json" if flags.json else flags.format](graph)
    if flags.out:
        write_atomic(Path(flags.out), shown.encode(errors="backslashreplace"), "--out FILE")
    else:
        print(visible(shown.rstrip("\n")))
    return 0
