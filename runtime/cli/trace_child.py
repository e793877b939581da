"""A short-lived child that imports a program, reads its flags and traces it, so that its parent needs no torch.

`python -m penstock.runtime.cli.trace_child FD VERB PROGRAM [WORDS …]` writes one JSON object to the file descriptor
FD. Help and usage errors go to the terminal with exit status 0 and 2, and nothing to FD.
"""

import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from penstock.graph import GraphError, Program, check, load, trace
from penstock.graph.faults import Fault
from penstock.graph.ir import Argument, Graph
from penstock.graph.requirement import Check, requirement
from penstock.graph.types import Context
from penstock.runtime.cli.flags import NEW, RunFlags
from penstock.runtime.cli.mesh_check import check_meshes
from penstock.runtime.cli.parse import UsageError, parse
from penstock.runtime.control.config import EVALUATION


def answer(verb: str, name: str, argv: Sequence[str]) -> dict[str, Any]:
    """All that the parent wants to know of a program called with these words."""
    try:
        program = load(name)
        if not isinstance(program, Program):
            given = f"{name}: given a value of type {type(program).__name__}"
            return _error(f"{given}, needed a function with @program", usage=True)
        options, flags = parse(program, verb, name, argv)
    except (GraphError, UsageError) as error:
        return _error(str(error), usage=True)
    except ImportError:
        return _error(_own_frames())
    found: dict[str, Any] = {"name": program.name, "path": program.path, "flags": dataclasses.asdict(flags)}
    graphs: dict[str, Graph] = {}
    faults: list[Fault] = []
    try:
        graphs["graph"] = trace(program, options)
        unmeasured = isinstance(flags, RunFlags) and not flags.eval_groups
        if program.evaluation is not None and not unmeasured:
            graphs["evaluation"] = trace(program.evaluation, prefix=EVALUATION)
    except GraphError as error:
        faults += error.faults
    except Exception:
        return _error(_own_frames())
    sizes = {"graph": getattr(flags, "batch", None), "evaluation": getattr(flags, "eval_groups", None) or None}
    faults += [fault for key, graph in graphs.items() for fault in check(graph, batch=sizes[key])]
    found["faults"] = [dataclasses.asdict(fault) for fault in dict.fromkeys(faults)]
    found |= {key: graph.to_json() for key, graph in graphs.items()}
    if not faults and isinstance(flags, RunFlags):
        tried = try_inputs(list(graphs.values()), flags)
        return tried if "error" in tried else found | tried
    return found


def try_inputs(graphs: Sequence[Graph], flags: RunFlags) -> dict[str, Any]:
    """Make what the program reads, and read a little, and look at what the makers of the other values require, so that
    bad data and missing models are told before any process starts.

    The flags with the device chosen, or an error.
    """
    try:
        device = _device(flags.device)
        checks: dict[Check, Context] = {}
        for graph in graphs:
            for argument in graph.arguments:
                maker, context = load(argument.maker), _context(argument, graph, flags)
                if argument.kind == "source":
                    maker(context).read(0)
                elif (check := requirement(maker)) is not None:
                    checks.setdefault(check, context)
        for check, context in checks.items():
            check(context)
        check_meshes(graphs, flags.control(flags.model))
    except ValueError as error:
        return _error(str(error))
    except Exception:
        return _error(_own_frames())
    return {"flags": dataclasses.asdict(dataclasses.replace(flags, device=device))}


def _context(argument: Argument, graph: Graph, flags: RunFlags) -> Context:
    held_out = argument.name.startswith(EVALUATION)
    return Context(
        node=argument.name,
        seed=flags.seed,
        model="" if flags.model == NEW else flags.model,
        data=flags.eval_data or flags.data if held_out else flags.data,
        dtype=flags.dtype,
        max_tokens=flags.max_tokens,
        batch=flags.batch,
        updates=flags.updates,
        slots=flags.slots,
        split="evaluate" if held_out else "train",
        options=dict(graph.options),
    )


def _device(name: str) -> str:
    """The device that a flag names; "auto" is the GPU where the program's modules brought a torch that sees one."""
    torch = sys.modules.get("torch")
    num_gpus = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if num_gpus else "cpu"
    kind, _, index = name.partition(":")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device: given {name!r}, needed auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= num_gpus:
        raise ValueError(f"--device: given {name!r}, and PyTorch sees {num_gpus} GPUs here (see `penstock doctor`)")
    return name


def _error(text: str, *, usage: bool = False) -> dict[str, Any]:
    return {"error": text, "usage": usage}


def _own_frames() -> str:
    """The traceback of the exception under way, from the first frame that is the user's."""
    kind, error, whole = sys.exc_info()
    tb, own = whole, ("penstock.", "importlib", "__main__")  # the last is this file's name in the child
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith(own):
        tb = tb.tb_next
    return "".join(traceback.format_exception(kind, error, tb or whole)).rstrip()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    fd, verb, name, *argv = sys.argv[1:]
    data = json.dumps(answer(verb, name, argv)).encode()
    with os.fdopen(int(fd), "wb") as pipe:
        pipe.write(data)


if __name__ == "__main__":
    main()
