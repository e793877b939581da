"""What a run reads and needs, tried before any process of it starts: data, models, meshes, what nodes require.

Needs torch, so the command line asks a child: the one that traces the program, or, to go on with one that is traced,
`python -m penstock.runtime.cli.try_inputs`, which reads {"graphs", "flags"} as JSON and writes what is wrong, if
anything is.

Whether the models of a program fit on the meshes that its pools were given, before any rank is there.

Needs torch, so the command line asks a child (see `try_inputs`).

The traceback that a user reads: of their own lines.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from penstock.graph import check, load
from penstock.graph.errors import Fault
from penstock.graph.imports import reach, resolve
from penstock.graph.ir import Argument, Graph, Node
from penstock.graph.protocols import Source, num_ranks
from penstock.graph.requires import Check, opened, requirements
from penstock.graph.types import Context
from penstock.runtime.cli.tracing import DEADLINE, CommandError, faults_text
from penstock.runtime.cluster.cluster import ClusterError
from penstock.runtime.cluster.placement import read_meshes, spelled
from penstock.runtime.control.run_config import RunOptions, choose_device, context_of
from penstock.runtime.record.errors import visible


def check_meshes(graphs: Sequence[Graph], flags: RunOptions) -> None:
    """Raises ClusterError for a pool's mesh on which a model of that pool does not fit, with given and needed.

    A model is known where its maker says which it opens (`opens`), by a spec that knows meshes. Of others, their ranks
    say what they lack.
    """
    meshes = {pool: axes for pool, axes in read_meshes(flags.mesh).items() if num_ranks(axes) > 1}
    for pool, spec, decodes in _models(graphs, flags, meshes):
        try:
            if hasattr(spec, "check_mesh"):
                spec.check_mesh(meshes[pool], decodes=decodes)
        except ValueError as error:
            raise ClusterError(f"--mesh {pool}={spelled(meshes[pool])}: {error}") from error


def _models(graphs: Sequence[Graph], flags: RunOptions, pools: Collection[str]) -> Iterator[tuple[str, Any, bool]]:
    """The pool, of those given, and the spec of each model that is known, and whether it decodes there: the carried
    values, and what streams compute with the weights of."""
    for graph in graphs:
        for argument in graph.carried:
            if argument.pool in pools and (found := opened(argument.maker)):
                yield argument.pool, found.spec(context_of(argument.name, graphs, flags, Context())), False
        for node in graph.nodes:
            if not node.stream or node.pool not in pools:
                continue
            for origin in context_of(node.name, graphs, flags, Context()).weights.values():
                if found := opened(origin.maker):
                    yield node.pool, found.spec(origin.context), True


OURS = ("penstock.", "importlib", "__main__")
"""What the names of our modules begin with; the last is the one that a child was started with."""


def own_frames() -> str:
    """The traceback of the exception under way, from the first frame that is the user's; none for a file that cannot be
    parsed, whose place the error says itself."""
    kind, error, whole = sys.exc_info()
    tb = whole
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith(OURS):
        tb = tb.tb_next
    if tb is None and not isinstance(error, SyntaxError):
        tb = whole
    return "".join(traceback.format_exception(kind, error, tb)).rstrip()


def try_inputs(graphs: Sequence[Graph], flags: RunOptions) -> tuple[str, list[Fault]]:
    """(the device chosen, what nodes lack in view of the run). Looks at what makers require, and reads a little of what
    the program reads. Raises ValueError for what is wrong with them."""
    sources: dict[str, Source] = {}
    for graph in graphs:
        reach(graph.op)
    for graph in graphs:
        for argument in graph.arguments:
            load(argument.maker)
        for node in graph.nodes:
            _import(node)
    device = choose_device(flags.device)  # not before what may bring a torch is imported
    for _, _, error in unmet(graphs, flags):
        raise error
    for graph in graphs:
        for argument in graph.sources:  # not before its requirements are met: it may open what they look for
            sources[argument.name] = load(argument.maker)(context_of(argument.name, graphs, flags, Context()))
            sources[argument.name].read(0)
    check_meshes(graphs, flags)
    faults: list[Fault] = []
    for graph in graphs:
        names = [thing.name for things in (graph.arguments, graph.nodes) for thing in things]
        contexts = {name: context_of(name, graphs, flags, Context()) for name in names}
        faults += check(graph, sources=sources, contexts=contexts)
    return device, list(dict.fromkeys(faults))


def unmet(graphs: Sequence[Graph], flags: RunOptions) -> Iterator[tuple[Argument, Check[Context], ValueError]]:
    """What makers require (`requires`) and a run of these graphs does not have, in program order. Nothing is made.

    What several values lack is told of the first of them.
    """
    named: set[str] = set()
    told: set[tuple[Check[Context], str]] = set()
    for graph in graphs:
        for argument in graph.arguments:
            if argument.name in named:  # the program's own value, which is made as the program says
                continue
            named.add(argument.name)
            context = context_of(argument.name, graphs, flags, Context())
            for required in requirements(load(argument.maker)):
                try:
                    required(context)
                except ValueError as error:
                    if (required, str(error)) not in told:
                        yield argument, required, error
                    told.add((required, str(error)))


def require_inputs_of(graphs: Sequence[Graph], flags: RunOptions) -> None:
    """The same in a child, for a parent without torch. Raises CommandError."""
    asked = json.dumps({"graphs": [graph.to_json() for graph in graphs], "flags": asdict(flags)})
    command = [sys.executable, "-m", "penstock.runtime.cli.try_inputs"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise CommandError(done.stdout.strip() or done.stderr.strip())


def _import(node: Node) -> None:
    """What the workers of a node import: `check` knows what that requires once it is here."""
    if node.construct == "call":
        load(node.op)
    for _, option in node.options:
        resolve(option)


def wrong(graphs: Sequence[Graph], flags: RunOptions) -> str:
    """What is wrong with a run's inputs; "" if nothing is."""
    try:
        faults = try_inputs(graphs, flags)[1]
    except ValueError as error:
        return str(error)
    except Exception:
        return own_frames()
    return faults_text(faults) if faults else ""


def main() -> int:
    asked = json.load(sys.stdin)
    flags = RunOptions.from_json(asked["flags"])
    said = wrong([Graph.from_json(graph) for graph in asked["graphs"]], flags)
    print(visible(said))
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
