"""What a program is, without importing it: a child with torch traces it and says.

The child takes seconds to import torch. So it is started by as little as can be, and what its answer takes to
understand is imported beside it.

The built-in programs and what each is for, read from their files without importing them.
"""

import ast
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from penstock import __path__ as roots

if TYPE_CHECKING:
    from penstock.graph.errors import Fault
    from penstock.graph.ir import Graph


UNDERSTANDS = ("penstock.graph.errors", "penstock.graph.ir", "penstock.runtime.cli.flags")
"""Modules that `understand` takes."""
DEADLINE = 300.0
"""Seconds for a child to import the program and what it needs, to trace it, and to look at its data."""


class CommandError(Exception):
    """Ends the command with a message for the user, and an exit status: 2 for what was typed, 1 for the rest."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Traced:
    """A program as the child found it; `graph` is missing only where `faults` say why. `base`: a maker of its values
    says that a run without `--model` begins with the base model (`opens`)."""

    name: str
    path: str
    flags: Any
    graph: "Graph | None"
    evaluation: "Graph | None"
    faults: "tuple[Fault, ...]"
    base: bool = False

    def sound(self) -> "Graph":
        """The graph. Raises CommandError with all faults if there are any."""
        if self.faults or self.graph is None:
            raise CommandError(faults_text(self.faults))
        return self.graph


def trace_program(verb: str, argv: Sequence[str], meanwhile: Sequence[str] = ()) -> Traced:
    """Trace the program that `argv` begins with, and import the modules `meanwhile`. Leaves the command for help and
    usage errors."""
    name, *words = argv
    read, write = os.pipe()
    command = [sys.executable, "-m", "penstock.runtime.cli.trace_child", str(write), verb, name, *words]
    child = subprocess.Popen(command, pass_fds=[write])
    os.close(write)
    try:
        for module in (*UNDERSTANDS, *meanwhile):
            importlib.import_module(module)
        if not (data := _said(name, read)):
            _leave(name, child.wait(DEADLINE))
    finally:
        child.kill()  # torch takes a while to leave, and it has said all that it will
        child.wait()
        os.close(read)
    return understand(verb, json.loads(data))


def _said(name: str, pipe: int) -> bytes:
    """All that the child says. Raises CommandError past the deadline."""
    answer, until = b"", monotonic() + DEADLINE
    watch = select.poll()
    watch.register(pipe, select.POLLIN)
    while watch.poll(1000 * max(0.0, until - monotonic())):
        if not (part := os.read(pipe, 1 << 16)):
            return answer
        answer += part
    raise CommandError(f"{name}: the process that imports and traces it has not answered within {DEADLINE:g} s")


def understand(verb: str, found: Mapping[str, Any]) -> Traced:
    """What the child said. Raises CommandError for an error that it found."""
    from penstock.graph.errors import Fault
    from penstock.runtime.cli.flags import VERBS

    if "error" in found:
        raise CommandError(found["error"], 2 if found["usage"] else 1)
    return Traced(
        name=found["name"],
        path=found["path"],
        flags=VERBS[verb](**_tuples(found["flags"])),
        graph=_graph(found, "graph"),
        evaluation=_graph(found, "evaluation"),
        faults=tuple(Fault(**fault) for fault in found["faults"]),
        base=found.get("base", False),
    )


def faults_text(faults: "Sequence[Fault]") -> str:
    count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"
    return "\n".join([*map(str, faults), count])


def _leave(name: str, status: int) -> NoReturn:
    if status in (0, 2):  # help, or a usage error that has been printed
        raise SystemExit(status)
    if status == -signal.SIGPIPE:  # help that nobody read to its end
        raise SystemExit(128 + signal.SIGPIPE)
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    raise CommandError(f"{name}: the process that imported it ended with {how}")


def _graph(found: Mapping[str, Any], key: str) -> "Graph | None":
    from penstock.graph.ir import Graph

    return Graph.from_json(found[key]) if key in found else None


def _tuples(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}


def built_in() -> dict[str, str]:
    """Name and first line of the documentation of each."""
    found = {}
    for path in sorted((Path(roots[0]) / "programs").glob("*.py")):
        for item in ast.parse(path.read_text()).body:
            if isinstance(item, ast.FunctionDef) and item.name == path.stem:
                found[item.name] = (ast.get_docstring(item) or "").partition("\n")[0]
    return found


def require_program(verb: str, argv: Sequence[str]) -> None:
    """Leave with help, or with an error, unless the words begin with a PROGRAM."""
    if argv and argv[0] in ("-h", "--help"):
        from penstock.runtime.cli.parse import verb_help  # imports what only help needs

        verb_help(verb, built_in())
    if argv and argv[0].startswith("-"):
        from penstock.runtime.cli.flags import VERBS, unknown_flags

        said = unknown_flags(argv[:1], [field.name for field in fields(VERBS[verb])], f"penstock {verb} PROGRAM")
        if said:
            raise CommandError(said, 2)
    if not argv or argv[0].startswith("-"):
        given = f"the flag {argv[0]!r} first" if argv else "nothing"
        raise CommandError(
            f"given {given}, needed a PROGRAM: {', '.join(built_in())}, package.module:function or file.py:function "
            f"(`penstock {verb} --help`)",
            2,
        )
