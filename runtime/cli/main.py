"""`penstock VERB …`: one program, many verbs. This process never imports torch.

Exit status: 0 well, 1 a fault or a failed run, 2 a command line that cannot be understood, 130 stopped by Ctrl-C, by
SIGTERM or since its terminal closed, 141 if nobody read the output to its end.
"""

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from penstock import __version__
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.control.signals import interrupt, nobody_reads, on_stop
from penstock.runtime.record.errors import visible

UNREAD = 128 + signal.SIGPIPE
"""What a shell says of a command that ended because nobody read its output."""


class Verb(NamedTuple):
    argument: str
    help: str


VERBS = {
    "run": Verb("PROGRAM", "train: a live display, then what was learnt and the run folder"),
    "resume": Verb("DIR", "go on with a run where its last checkpoint is"),
    "show": Verb("PROGRAM", "the program's graph: text, mermaid, svg, json"),
    "check": Verb("PROGRAM", "all faults of a program; nothing is started"),
    "plan": Verb("PROGRAM", "which GPUs do what, what fits, and what bounds an update"),
    "simulate": Verb("PROGRAM", "its schedule on a virtual clock, as text, SVG and trace"),
    "report": Verb("DIR", "a run as one HTML page: predicted against real, idle time by cause"),
    "watch": Verb("DIR", "a run in progress: its report as a live page, or in the terminal"),
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
  penstock simulate --from RUN --lag 2  what another lag would make of a run that has ended
  penstock plan aipo --cluster 32x8xH100 --model llama-70b   which GPUs do what, and why
  penstock VERB --help                  more about a verb
"""


def overview() -> str:
    rows = [f"  {f'{name} {verb.argument}':<18}{verb.help}" for name, verb in VERBS.items()]
    return OVERVIEW.format(verbs="\n".join(rows))


def unknown(verb: str) -> str:
    kind, known = ("flag", ["--help", "--version"]) if verb.startswith("-") else ("verb", list(VERBS))
    close = difflib.get_close_matches(verb, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"needed one of: {', '.join(known)}"
    return f"penstock: there is no {kind} {verb!r}; {hint}"


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    _require_streams()
    try:
        with on_stop(interrupt, (signal.SIGTERM, signal.SIGHUP)):
            status = _answer(words)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except KeyboardInterrupt:
        status = 130
    except OSError:
        if not any(map(nobody_reads, (1, 2))):
            raise
        status = UNREAD
    sys.exit(_flushed(status))


def _require_streams() -> None:
    """Where the caller has closed a standard stream (`>&-`), /dev/null stands in, for children too: else a pipe of ours
    would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _flushed(status: int) -> int:
    """The exit status once all output is out. What cannot be written is dropped, or the interpreter would complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            status = status or UNREAD
    return status


def _answer(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"penstock {__version__}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        print(visible(unknown(verb)), file=sys.stderr)
        return 2
    return _call(verb, rest)


def _call(verb: str, argv: Sequence[str]) -> int:
    """The verb's exit status. What the user can mend is said without a traceback."""
    try:
        status: int = importlib.import_module(f"penstock.runtime.cli.{verb}").main(argv)
    except CommandError as error:
        print(visible(f"penstock {verb}: {error}"), file=sys.stderr)
        return error.status
    except ValueError as error:
        if type(error) is ValueError or not type(error).__module__.startswith("penstock."):
            raise
        print(visible(f"penstock {verb}: {error}"), file=sys.stderr)
        return getattr(error, "status", 1)
    return status


if __name__ == "__main__":
    main()
