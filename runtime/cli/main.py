"""`penstock VERB …`: one program, many verbs. This process never imports torch.

Exit status: 0 well, 1 a fault or a failed run, 2 a command line that cannot be understood, 130 stopped by Ctrl-C.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from penstock import __version__
from penstock.runtime.cli.traced import CommandError


class Verb(NamedTuple):
    argument: str
    help: str


VERBS = {
    "run": Verb("PROGRAM", "train: a live display, then what was learnt and the run folder"),
    "resume": Verb("DIR", "go on with a run where its last checkpoint is"),
    "show": Verb("PROGRAM", "the program's graph: text, mermaid, svg, json"),
    "check": Verb("PROGRAM", "all faults of a program; nothing is started"),
    "simulate": Verb("PROGRAM", "its schedule on a virtual clock, as text, SVG and trace"),
    "replay": Verb("DIR", "a run's recorded events through the scheduler again"),
    "agent": Verb("", "join the controller of a run on another machine"),
    "doctor": Verb("", "what this machine has and lacks"),
}
"""Each is a module of this package with `main(argv) -> int`."""

OVERVIEW = """usage: penstock VERB [ARGUMENT] [FLAGS]

Reinforcement learning for language models: an algorithm is one Python function, its
trace is a graph, and the graph is run asynchronously.

{verbs}

PROGRAM is a built-in name, package.module:function or path/to/file.py:function; its
keyword arguments are flags. Try:

  penstock run aipo                     train a small model on arithmetic, on this machine
  penstock show aipo                    what that program is, as a graph
  penstock simulate toy --lag 2         what asynchrony does to a schedule
  penstock VERB --help                  more about a verb
"""


def overview() -> str:
    rows = [f"  {f'{name} {verb.argument}':<18}{verb.help}" for name, verb in VERBS.items()]
    return OVERVIEW.format(verbs="\n".join(rows))


def unknown(verb: str) -> str:
    close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"needed one of: {', '.join(VERBS)}"
    return f"penstock: there is no verb {verb!r}; {hint}"


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        sys.exit(0 if words else 2)
    if words[0] in ("-V", "--version"):
        print(f"penstock {__version__}")
        sys.exit(0)
    verb, *rest = words
    if verb not in VERBS:
        print(unknown(verb), file=sys.stderr)
        sys.exit(2)
    sys.exit(_call(verb, rest))


def _call(verb: str, argv: Sequence[str]) -> int:
    """The verb's exit status. What the user can mend is said without a traceback."""
    try:
        status: int = importlib.import_module(f"penstock.runtime.cli.{verb}").main(argv)
    except CommandError as error:
        print(f"penstock {verb}: {error}", file=sys.stderr)
        return error.status
    except ValueError as error:
        if type(error) is ValueError or not type(error).__module__.startswith("penstock."):
            raise
        print(f"penstock {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `penstock show aipo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it ends
        return 0
    return status


if __name__ == "__main__":
    main()
