"""`penstock VERB …`: one program, many verbs. This process never imports torch.

Exit status: 0 success, 1 a fault or a failed run, 2 what cannot work as it was given, 75 stopped by SIGTERM or SIGUSR1
(as a cluster manager does before it takes the machine away), 130 stopped by Ctrl-C or because its terminal closed, 141
if the reader of its output closed the pipe.
"""

import atexit
import codecs
import difflib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from shutil import get_terminal_size
from typing import NamedTuple, TextIO

from penstock import __version__
from penstock.runtime.cli.tracing import CommandError, faults_text, trace_program
from penstock.runtime.control.signals import (
    DONE,
    INTERRUPTED,
    PREEMPTED,
    PREEMPTIONS,
    STOPS,
    Preempted,
    heard,
    interrupt,
    on_stop,
    output_closed,
)
from penstock.runtime.record.errors import visible

# The exit status that a shell reports for a command that was ended by SIGPIPE.
UNREAD = 128 + signal.SIGPIPE


class Verb(NamedTuple):
    """`function` is "module:function" of this package, (argv) -> exit status. It is imported only when the verb is
    called, so that `penstock --help` takes a tenth of a second."""

    function: str
    argument: str
    help: str


VERBS = {
    "run": Verb("starting:run", "PROGRAM", "train, with a live display"),
    "resume": Verb("resume:resume", "DIR", "continue a run from its last checkpoint"),
    "show": Verb("main:show", "PROGRAM", "print its graph: text, mermaid, svg, json"),
    "check": Verb("main:check", "PROGRAM", "list all its faults; start nothing"),
    "plan": Verb("plan:main", "PROGRAM", "search the best placement and parallelism on GPUs"),
    "simulate": Verb("simulate:main", "PROGRAM", "draw its schedule on a virtual clock"),
    "report": Verb("report:main", "DIR", "write the HTML page of a finished run"),
    "watch": Verb("watch:main", "DIR", "show a run in progress, as a page or in the terminal"),
    "replay": Verb("report:replay", "DIR", "feed a run's recorded events to the scheduler again"),
    "export": Verb("export:main", "DIR", "convert a checkpoint to torch.distributed.checkpoint"),
    "agent": Verb("main:agent", "", "start this host's part of a run"),
    "doctor": Verb("doctor:main", "", "say what this machine has and lacks"),
}

OVERVIEW = """usage: penstock VERB [ARGUMENT] [FLAGS]

Reinforcement learning for language models: an algorithm is one Python
function; its trace is a dataflow graph, which runs asynchronously.

{verbs}

PROGRAM is a built-in name, package.module:function or path/to/file.py[:function];
its keyword arguments are flags. Try:

  penstock run aipo                     train a small model on this machine
  penstock show aipo                    print the graph of that program
  penstock simulate toy --lag 2         see what asynchrony does to a schedule
  penstock simulate --from RUN --lag 2  see what another lag does to a past run
  penstock plan aipo --cluster 32x8xH100 --model llama-70b
  penstock VERB --help                  read more about a verb
"""


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # Nearly all objects of a command are imported modules, which stay: look for garbage among them rarely, and not
        # at the exit, where it would take a tenth of a second.
        gc.set_threshold(100_000)
        atexit.register(gc.freeze)
    _require_streams()
    try:
        # A shell lets processes that it starts in the background ignore Ctrl-C.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with on_stop(interrupt, [number for number in STOPS if number != signal.SIGINT or not ignored]):
            status = _answer(words)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except Preempted:
        status = PREEMPTED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError:
        # Any other OSError is a bug of ours, which needs its traceback.
        if not any(map(output_closed, (1, 2))):
            raise
        status = UNREAD
    sys.exit(_flushed(status))


def _require_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed (`>&-`), and make all streams accept any text,
    also in child processes."""
    # Else a pipe or socket of ours would get the stream's number, and be written to.
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # open() returns the lowest free number, which may be another than the missing one.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    # A run must not fail because the terminal's encoding, such as Latin-1, lacks a character: "?" is shown.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")
            os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:replace"


def _flushed(status: int) -> int:
    """Flush all output; returns the exit status. Output that cannot be written is dropped, or the interpreter would
    complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            status = status or UNREAD
    return status


def _answer(words: Sequence[str]) -> int:
    """Run the command; returns the exit status. Errors that the user can fix are shown without a traceback."""
    if not words or words[0] in ("-h", "--help", "help"):
        rows = [f"  {f'{name} {verb.argument}':<18}{verb.help}" for name, verb in VERBS.items()]
        print(OVERVIEW.format(verbs="\n".join(rows)), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"penstock {__version__}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        kind, known = ("flag", ["--help", "--version"]) if verb.startswith("-") else ("verb", list(VERBS))
        # A lower cutoff than for flags: there are few verbs, and they differ a lot.
        close = difflib.get_close_matches(verb, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"needed one of: {', '.join(known)}"
        print(visible(f"penstock: there is no {kind} {verb!r}; {hint}"), file=sys.stderr)
        return 2
    module, _, function = VERBS[verb].function.partition(":")
    try:
        status: int = getattr(importlib.import_module(f"penstock.runtime.cli.{module}"), function)(rest)
        return status
    except (CommandError, ValueError) as error:
        # A ValueError of Python or of a library is a bug of ours, and needs its traceback.
        if type(error).__module__.partition(".")[0] != "penstock":
            raise
        print(visible(_fitted(f"penstock {verb}: {error}", sys.stderr)), file=sys.stderr)
        return getattr(error, "status", 2)


def _fitted(text: str, stream: TextIO) -> str:
    """The text as a terminal shows it whole, and as it is where a program reads it. A traceback keeps its lines."""
    from penstock.runtime.cli.flags import fitting

    return fitting(text) if stream.isatty() and "Traceback (" not in text else text


def show(argv: Sequence[str]) -> int:
    """`penstock show PROGRAM`: the graph, as text, Mermaid, SVG or JSON."""
    # The modules that draw the graph are imported while the child traces.
    traced = trace_program("show", argv, ("penstock.graph.show", "penstock.graph.svg"))
    from penstock.graph.ir import Graph
    from penstock.graph.show import dumps, mermaid, text
    from penstock.graph.svg import svg
    from penstock.runtime.record.folder import write_atomic

    flags, graph = traced.flags, traced.sound()
    if flags.evaluation:
        if traced.evaluation is None:
            raise CommandError(f"{traced.name} has no evaluation; give it one with @program(evaluation=…)")
        graph = traced.evaluation
    # Files and pipes have lines of any length.
    columns = get_terminal_size().columns if sys.stdout.isatty() and not flags.out else None
    formats: dict[str, Callable[[Graph], str]] = {
        "text": partial(text, columns=columns),
        "mermaid": mermaid,
        "svg": svg,
        "json": dumps,
    }
    shown = formats["json" if flags.json else flags.format](graph)
    if flags.out:
        write_atomic(Path(flags.out), shown.encode(errors="backslashreplace"), "--out FILE")
    else:
        print(visible(shown.rstrip("\n")))
    return 0


def check(argv: Sequence[str]) -> int:
    """`penstock check PROGRAM`: all faults at once, each with what was given, what is needed, and the line."""
    try:
        return _check(argv)
    except (CommandError, ValueError) as refusal:
        # A refusal before the graph is looked at has no faults; a reader of JSON must learn of it, too.
        if "--json" in argv:
            print(json.dumps({"program": argv[0], "ok": False, "faults": [], "error": str(refusal)}))
        raise


def _check(argv: Sequence[str]) -> int:
    from penstock.runtime.cli.flags import CheckFlags

    traced = trace_program("check", argv, ["penstock.runtime.cli.run"])
    from penstock.runtime.cli.launching import require_processes
    from penstock.runtime.cli.planned import chosen, machines
    from penstock.runtime.cli.run import absolute_paths, all_lacks, require_consistent, sound_run
    from penstock.runtime.record.folder import RunFolder

    flags, planned = traced.flags, traced.plan is not None
    require_consistent(flags, ())
    faults = all_lacks(traced)
    if traced.graph is not None and not flags.on and not faults:
        cluster = machines(flags, traced.gpus)
        config = sound_run(chosen(replace(traced, flags=absolute_paths(flags)), cluster), cluster)
        if flags.in_process:
            require_processes(config, cluster, flags)
        if flags.out and flags.resume == "never":
            RunFolder.create(flags.out).discard()
    elastic = flags.lost_replica != CheckFlags.lost_replica
    if flags.json:
        print(json.dumps({"program": traced.path, "ok": not faults, "faults": list(map(asdict, faults))}))
    elif faults:
        print(visible(_fitted(faults_text(faults), sys.stdout)))
    else:
        graph = traced.sound()
        beside = f", evaluation {traced.evaluation.name}" if traced.evaluation is not None else ""
        pools = ", ".join(dict.fromkeys(node.pool for node in graph.nodes))
        beside += f", as {flags.plan} says" if planned else ""
        count = f"{flags.first_generators} to {flags.generators}" if flags.first_generators else f"{flags.generators}"
        beside += f"; {count} generator{'s' * (flags.generators > 1)}, and replicas may come and go" if elastic else ""
        told = f"{traced.name}: no faults in {len(graph.nodes)} nodes on pools {pools}{beside}"
        print(visible(_fitted(told, sys.stdout)))
    return 1 if faults else 0


def agent(argv: Sequence[str]) -> int:
    """`penstock agent JOIN_FILE | --ticket FILE`: start this machine's part of a run that another machine controls."""
    from penstock.runtime.cli.flags import AgentFlags, read_flags
    from penstock.runtime.control.agent import serve
    from penstock.runtime.control.applicant import serve_ticket

    flags = read_flags(AgentFlags, "agent", argv)
    if bool(flags.join) == bool(flags.ticket):
        given = "a JOIN_FILE and --ticket" if flags.join else "neither a JOIN_FILE nor --ticket"
        raise CommandError(f"given {given}, needed one of them")
    folder = Path(flags.folder) if flags.folder else None
    with heard() as signals:
        if flags.ticket:
            status = serve_ticket(
                Path(flags.ticket), folder, flags.address, flags.grace, flags.wait, requeue=flags.requeue
            )
        else:
            status = serve(Path(flags.join), folder, flags.grace)
    return PREEMPTED if flags.requeue and status == DONE and signals & {*PREEMPTIONS} else status


if __name__ == "__main__":
    main()
