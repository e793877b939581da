"""Get a program's facts without importing it: a child process with torch traces it and answers in JSON (`children`).

- `trace_program` asks the child for the graphs, the flags and the faults of a program.
- `require_inputs` has a child check the inputs of a run that was traced before, for a resume.
- `ask_child` calls a function in a child process; all others use it.
- `built_in` lists the built-in programs; their files are parsed, not imported.
- `CommandError` ends a command with a message and an exit status.
"""

import ast
import importlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __path__ as roots
from penstock.host import module_command
from penstock.runtime.control.signals import held_back

if TYPE_CHECKING:
    from penstock.graph.errors import Fault
    from penstock.graph.ir import Graph
    from penstock.runtime.cluster.cluster import SeenGpu
    from penstock.runtime.control.early import Early
    from penstock.runtime.control.run_config import RunOptions
    from penstock.runtime.plan.run_plan import RunPlan


Begin = Callable[[], "Early"]
CHILDREN = "penstock.runtime.cli.children"
# Seconds for a child to import the program and its imports, to trace it, and to look at its data.
DEADLINE = 300.0


class CommandError(Exception):
    """Ends the command with a message for the user, and an exit status: 2 for what cannot work as it was given, 1 for
    what has failed while it was at work."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert a plain ValueError into a CommandError. Its subclasses of ours go on to `main` as they are."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise CommandError(str(error)) from None


@dataclass(frozen=True)
class Traced:
    """The facts of a program that the child found.

    name, path: the program's name, and its import path.
    flags: the verb's flags (a dataclass of `flags.VERBS`), with the program's own defaults.
    graph, evaluation: None if there is none; `graph` is None only if `faults` say why.
    base: a run without `--model` begins with the base model (a maker says so, see `opens`).
    typed: the words of each flag that the user gives, by name.
    plan: the plan of --plan, which is read once.
    refused: for `plan`, why no run can have the model.
    gpus: the GPUs that the child's torch sees on this machine.
    code: the user's own files that were imported for the program.
    """

    name: str
    path: str
    flags: Any
    graph: "Graph | None"
    evaluation: "Graph | None"
    faults: "tuple[Fault, ...]"
    base: bool = False
    typed: "Mapping[str, Sequence[str]]" = field(default_factory=dict)
    plan: "RunPlan | None" = None
    refused: "Fault | None" = None
    gpus: "tuple[SeenGpu, ...]" = ()
    code: "tuple[str, ...]" = ()

    def sound(self) -> "Graph":
        """The graph. Raises CommandError with all faults if there are any."""
        if self.faults or self.graph is None:
            raise CommandError(faults_text(self.faults))
        return self.graph


def trace_program(
    verb: str, argv: Sequence[str], meanwhile: Sequence[str] = (), early: "Begin | None" = None
) -> Traced:
    """Trace the program that `argv` begins with, for `verb`, and import the modules `meanwhile`.

    Raises CommandError if `argv` does not begin with a PROGRAM, and for a failure of the child; SystemExit for help and
    usage errors, which are printed.
    """
    given = f"the flag {argv[0]!r} first" if argv else "nothing"
    if argv and argv[0].startswith("-"):
        # Only help and usage errors need these imports.
        from penstock.runtime.cli.flags import VERBS, unknown_flags
        from penstock.runtime.cli.parse import verb_help

        if argv[0] in ("-h", "--help"):
            verb_help(verb, built_in())
        if said := unknown_flags(argv[:1], [field.name for field in fields(VERBS[verb])], f"penstock {verb} PROGRAM"):
            raise CommandError(said)
    if not argv or argv[0].startswith("-"):
        known = f"{', '.join(built_in())}, package.module:function or file.py:function"
        raise CommandError(f"given {given}, needed a PROGRAM: {known} (`penstock {verb} --help`)")
    # The child needs seconds to import torch. Meanwhile import the modules that are needed for its answer.
    taken = (*meanwhile, "penstock.graph.errors", "penstock.graph.ir", "penstock.runtime.cli.flags")
    what = f"{argv[0]}: the process that imports and traces it"
    found = ask_child(f"{CHILDREN}:traced", verb, argv[0], argv[1:], what=what, meanwhile=taken, early=early)
    from penstock.graph.errors import Fault
    from penstock.graph.ir import Graph
    from penstock.runtime.cli.flags import VERBS
    from penstock.runtime.cluster.cluster import SeenGpu

    # JSON has only lists; flags are hashed and compared as tuples.
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in found.pop("flags").items()}
    graphs = {key: Graph.from_json(found[key]) if key in found else None for key in ("graph", "evaluation")}
    faults = tuple(Fault(**fault) for fault in found.pop("faults"))
    gpus, code = tuple(SeenGpu(*gpu) for gpu in found.pop("gpus")), tuple(found.pop("code"))
    if found["refused"] is not None:
        found["refused"] = Fault(**found["refused"])
    if found["plan"] is not None:
        from penstock.runtime.plan.run_plan import RunPlan  # with numpy and the cost model

        found["plan"] = RunPlan.from_json(found["plan"])
    return Traced(**{**found, **graphs}, flags=VERBS[verb](**flags), faults=faults, gpus=gpus, code=code)


def require_inputs(
    graphs: "Sequence[Graph]", flags: "RunOptions", early: "Begin | None" = None
) -> "tuple[SeenGpu, ...]":
    """Have a child try the inputs and requirements of a run of these graphs. Returns the GPUs that its torch sees.
    Raises CommandError with all that is wrong."""
    from penstock.runtime.cluster.cluster import SeenGpu

    asked = [graph.to_json() for graph in graphs], asdict(flags)
    what = "the process that tries what the run reads"
    found = ask_child(f"{CHILDREN}:inputs", *asked, what=what, early=early)
    return tuple(SeenGpu(*gpu) for gpu in found)


def ask_child(
    function: str,
    *arguments: Any,
    what: str,
    deadline: float = DEADLINE,
    meanwhile: Sequence[str] = (),
    early: "Begin | None" = None,
) -> Any:
    """Call `function`, an import path, in a child process and return its answer; arguments and answer are JSON.

    `what` names the process in errors. The modules `meanwhile` are imported while it works. `early` starts the
    processes of a run, one of which then forks the child. Raises CommandError for what the function raises, for a child
    that dies, and after `deadline` seconds; SystemExit for a child that has printed help or a usage error.
    """
    with os.fdopen(os.memfd_create("penstock"), "r+") as memfd:

        def write_question() -> None:
            memfd.seek(0)
            memfd.truncate()
            json.dump(arguments, memfd)
            memfd.seek(0)

        write_question()
        status = None
        try:
            if early is not None:
                answer = early().ask(f"{CHILDREN}:main", [function], memfd.fileno())
                _import(meanwhile)
                status = answer(deadline)
            if status is None:
                # If the child died with the process that forked it, it may have overwritten the question.
                write_question()
                status = _started(function, memfd.fileno(), meanwhile, deadline)
        except TimeoutError:
            raise CommandError(f"{what} has not answered within {deadline:g} s", 1) from None
        memfd.seek(0)
        text = memfd.read()
    if status == -signal.SIGPIPE:  # the reader of its help closed the pipe
        raise SystemExit(128 + signal.SIGPIPE)
    if status in (0, 2) and text == "null":
        raise SystemExit(status)
    if status or not text:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise CommandError(f"{what} ended with {how}, without an answer", 1)
    found = json.loads(text)
    if isinstance(found, dict) and "error" in found:
        raise CommandError(found["error"], found["status"])
    return found


def _started(function: str, memfd: int, meanwhile: Sequence[str], deadline: float) -> int:
    """Start a child for the question; returns its exit status. Raises TimeoutError."""
    command = module_command(CHILDREN, function, str(memfd))
    with ExitStack() as stack:
        with held_back():
            child = subprocess.Popen(command, pass_fds=[memfd])
            # After Ctrl-C, or a passed deadline, its answer is not needed any more.
            stack.callback(child.wait)
            stack.callback(child.kill)
        _import(meanwhile)
        with os.fdopen(os.pidfd_open(child.pid)) as ended:
            if not select.select([ended], [], [], deadline)[0]:
                raise TimeoutError
        return child.wait()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def faults_text(faults: "Sequence[Fault]") -> str:
    count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"
    return "\n".join([*map(str, faults), count])


def built_in() -> dict[str, str]:
    """The built-in programs: name and first line of the docstring of each."""
    found = {}
    for path in sorted((Path(roots[0]) / "programs").glob("*.py")):
        for item in ast.parse(path.read_text()).body:
            if isinstance(item, ast.FunctionDef) and item.name == path.stem:
                found[item.name] = (ast.get_docstring(item) or "").partition("\n")[0]
    return found
