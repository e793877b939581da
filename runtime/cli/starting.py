"""How `penstock run` begins: what takes seconds is started before what the command itself needs is imported.

The controller, the agent of this machine and the process that forks its ranks import what they need (`control.early`).
The last of them has torch then, and forks a child that traces the program, so that torch is imported once. They have
nothing else to do before all that is asked of the run is found to be right, and end if it is not.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from penstock import __path__ as roots
from penstock.runtime.cli.tracing import trace_program
from penstock.runtime.record.errors import visible

if TYPE_CHECKING:
    from penstock.runtime.control.early import Early

# Words of a command line that has no use for processes here, or prints help.
ELSEWHERE = ("-h", "--help", "--in-process", "--cluster", "--on")


def run(argv: Sequence[str]) -> int:
    """Trace the program, create a run folder and run in it; the exit status."""
    began = monotonic()
    if argv and not argv[0].startswith("-") and sys.stderr.isatty() and not {"-h", "--help"} & set(argv):
        # The child takes seconds to import torch, in which nothing else would be said.
        print(visible(f"penstock: importing torch, reading {argv[0]} …"), file=sys.stderr, flush=True)
    argv, behind = behind_dashes(argv)
    with ExitStack() as stack:
        early: list[Early] = []

        def begin() -> "Early":
            from penstock.runtime.control.early import Early

            early.append(Early())
            stack.callback(early[0].close)
            # What a built-in program imports its ranks need, too. A user's file runs where it is asked for, and once.
            built_in = (Path(roots[0]) / "programs" / f"{argv[0]}.py").is_file() and argv[0].isidentifier()
            early[0].begin([f"penstock.programs.{argv[0]}"] if built_in else [])
            return early[0]

        local = not any(word.partition("=")[0] in ELSEWHERE for word in argv)
        traced = trace_program("run", argv, ["penstock.runtime.cli.run"], begin if local else None)
        from penstock.runtime.cli.run import run_traced

        return run_traced(traced, argv, behind, began, early[0] if early else None)


def behind_dashes(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before the first "--", and those after it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], tuple(words[at + 1 :])
