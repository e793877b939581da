"""A short-lived child that imports a program, reads its flags and traces it, so that its parent needs no torch.

`python -m penstock.runtime.cli.trace_child FD VERB PROGRAM [WORDS …]` writes one JSON object to the file descriptor
FD. Help and usage errors go to the terminal with exit status 0 and 2, and nothing to FD.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from penstock.graph import GraphError, Program, check, load, trace
from penstock.graph.check import by_place
from penstock.graph.errors import Fault, defined
from penstock.graph.ir import Graph
from penstock.graph.program import trace_evaluation
from penstock.graph.requires import opened
from penstock.runtime.cli.flags import CheckFlags, RunFlags
from penstock.runtime.cli.parse import UsageError, clashes, parse
from penstock.runtime.cli.try_inputs import own_frames, try_inputs, unmet
from penstock.runtime.control.run_config import EVALUATION

RAISED = (Exception, SystemExit)
"""What a user's module or function may raise. One that leaves the process would have nothing said of it."""


def answer(verb: str, name: str, argv: Sequence[str]) -> dict[str, Any]:
    """All that the parent wants to know of a program called with these words."""
    try:
        program = load(name)
    except GraphError as error:
        return _error(str(error), usage=True)
    except RAISED:
        return _error(own_frames())
    if not isinstance(program, Program):
        given = f"{name}: given a value of type {type(program).__name__}"
        return _error(f"{given}, needed a function with @program", usage=True)
    try:
        options, flags = parse(program, verb, name, argv)
    except (GraphError, UsageError) as error:
        return _error(str(error), usage=True)
    except Exception:
        return _error(own_frames())
    found: dict[str, Any] = {"name": program.name, "path": program.path, "flags": dataclasses.asdict(flags)}
    try:
        graphs, faults = _trace(program, options, flags)
        if verb == "check":
            faults += [*clashes(program, "run").values(), *_lacks(program, list(graphs.values()), flags)]
            faults.sort(key=by_place)
    except RAISED:
        return _error(own_frames())
    found["faults"] = [dataclasses.asdict(fault) for fault in dict.fromkeys(faults)]
    found |= {key: graph.to_json() for key, graph in graphs.items()}
    if not faults and isinstance(flags, RunFlags):
        return _tried(found, list(graphs.values()), flags)
    return found


def _trace(program: Program[..., Any], options: dict[str, Any], flags: Any) -> tuple[dict[str, Graph], list[Fault]]:
    """The graphs of a program and of its evaluation, and all that is wrong with them; a graph that cannot be made is
    left out."""
    graphs: dict[str, Graph] = {}
    faults: list[Fault] = []
    batch, groups = getattr(flags, "batch", None), getattr(flags, "eval_groups", None) or None
    unmeasured = isinstance(flags, RunFlags) and not flags.eval_groups
    try:
        graphs["graph"] = trace(program, options, batch=batch)
        faults += check(graphs["graph"], batch=batch)
    except GraphError as error:
        faults += error.faults
    if program.evaluation is None or unmeasured:
        return graphs, faults
    try:
        if "graph" in graphs:
            graphs["evaluation"] = trace_evaluation(program, graphs["graph"], EVALUATION, batch=groups)
        else:  # which values it measures cannot be said, but what is wrong with itself can
            graphs["evaluation"] = trace(program.evaluation, {}, EVALUATION, batch=groups)
        faults += check(graphs["evaluation"], batch=groups)
    except GraphError as error:
        faults += error.faults
    return graphs, faults


def _lacks(program: Program[..., Any], graphs: Sequence[Graph], flags: CheckFlags) -> list[Fault]:
    """What makers require and a run with these flags would not have."""
    fields = {field.name for field in dataclasses.fields(RunFlags)}
    own = {name: value for name, value in program.defaults.items() if name in fields}
    asked = RunFlags(**(own | {name: value for name, value in vars(flags).items() if name in fields - {"config"}}))
    faults: list[Fault] = []
    made: list[Graph] = []
    for graph in graphs:
        arguments = []
        for argument in graph.arguments:
            try:
                load(argument.maker)
                arguments.append(argument)
            except GraphError as error:
                what = f"{argument.kind} {argument.name!r}: maker"
                known = [fault for fault in error.faults if argument.maker]  # `check` has told of one that is missing
                faults += (dataclasses.replace(fault, what=what, where=argument.where) for fault in known)
        made.append(graph.replace(arguments=tuple(arguments)))
    for argument, required, lack in unmet(made, asked.options(asked.model)):
        needed = f"what {getattr(required, '__name__', 'its check')} requires ({defined(required)})"
        faults.append(
            Fault("unmet-requirement", f"{argument.kind} {argument.name!r}", str(lack), needed, argument.where)
        )
    return faults


def _tried(found: dict[str, Any], graphs: Sequence[Graph], flags: RunFlags) -> dict[str, Any]:
    """What was found, the device that is chosen and what the data shows included, or an error."""
    try:
        device, faults = try_inputs(graphs, flags.options(flags.model))
    except ValueError as error:
        return _error(str(error))
    except RAISED:
        return _error(own_frames())
    flags_found = dataclasses.asdict(dataclasses.replace(flags, device=device))
    makers = (opened(argument.maker) for graph in graphs for argument in graph.carried)
    base = any(maker is not None and maker.base for maker in makers)
    return found | {"flags": flags_found, "base": base, "faults": [dataclasses.asdict(fault) for fault in faults]}


def _error(text: str, *, usage: bool = False) -> dict[str, Any]:
    return {"error": text, "usage": usage}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE):  # Ctrl-C, or help that nobody reads on, ends it without a traceback
        signal.signal(number, signal.SIG_DFL)
    fd, verb, name, *argv = sys.argv[1:]
    data = json.dumps(answer(verb, name, argv)).encode()
    sys.stdout.flush()  # what the program printed: nobody waits for this process once it has answered
    with os.fdopen(int(fd), "wb") as pipe:
        pipe.write(data)


if __name__ == "__main__":
    main()
