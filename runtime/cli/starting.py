"""The start of `penstock run`: slow processes are started before the command imports its own modules.

The controller, the agent of this machine and the process that forks its ranks import their modules (`control.early`).
The last of them then has torch, and forks the child that traces the program, so that torch is imported only once. They
do nothing else until all checks of the command line have passed, and end if one fails.
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

# With one of these words, a command line needs no early processes on this machine, or prints help.
ELSEWHERE = ("-h", "--help", "--in-process", "--cluster", "--on")


def run(argv: Sequence[str]) -> int:
    """Trace the program, create a run folder and run in it; returns the exit status."""
    began = monotonic()
    if argv and not argv[0].startswith("-") and sys.stderr.isatty() and not {"-h", "--help"} & set(argv):
        # The child takes seconds to import torch, and prints nothing meanwhile.
        print(visible(f"penstock: importing torch, reading {argv[0]} …"), file=sys.stderr, flush=True)
    argv, behind = behind_dashes(argv)
    with ExitStack() as stack:
        early: list[Early] = []

        def begin() -> "Early":
            from penstock.runtime.control.early import Early

            early.append(Early())
            stack.callback(early[0].close)
            # The ranks need the imports of a built-in program, too. A user's file must run only where asked, and once.
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
