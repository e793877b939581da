"""The child processes of a command, for work that needs torch or the user's modules.

- `python -m penstock.runtime.cli.children MODULE:FUNCTION FD` calls a function for `tracing.ask_child`: it reads the
  arguments from the file descriptor FD as a JSON list, and overwrites them with the answer. `traced` and `inputs` are
  such functions. Help and usage errors go to the terminal, with exit status 0 and 2 and the answer null: without one,
  a user's module has ended the process. If the processes of a run are started early, the one that forks ranks also
  forks this one, and imports torch once for both.
- `… run RUN_FOLDER` is a whole run in this process, which has the terminal: plain lines, and a debugger can stop
  anywhere. The exit status is that of `penstock run`.
"""

import atexit
import dataclasses
import gc
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from penstock.graph import GraphError, Program, check, load, trace
from penstock.graph.check import by_place
from penstock.graph.context import Context, problems_made
from penstock.graph.engines import OURS as OUR_ENGINE
from penstock.graph.errors import Fault, defined, fault, nearest
from penstock.graph.imports import imported, public_in, reach, resolve
from penstock.graph.ir import Argument, Graph
from penstock.graph.node import NodeDef
from penstock.graph.program import trace_evaluation
from penstock.graph.protocols import Finite, Pinned, Source, num_ranks
from penstock.graph.requires import Check, opened, requirements
from penstock.graph.types import NodeWarning
from penstock.runtime.cli.flags import ELSEWHERE, NEW, as_typed
from penstock.runtime.cli.parse import clashes, parse
from penstock.runtime.cli.sources import own_files
from penstock.runtime.cli.tracing import CommandError, faults_text
from penstock.runtime.cluster.capabilities import axis_lack
from penstock.runtime.cluster.cluster import Cluster, ClusterError, SeenGpu
from penstock.runtime.cluster.placement import read_meshes, spelled
from penstock.runtime.control.run_config import EVALUATION, RunConfig, RunOptions, choose_device, context_of
from penstock.runtime.control.signals import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    Preempted,
    interrupt,
    on_stop,
    stop_if_output_closes,
)
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.folder import RunFolder

# The form of makers' errors about missing requirements.
LACK = re.compile(r"(?P<place>.*?: )??given (?P<given>.+?)[,;] needed (?P<needed>.+)", re.DOTALL)
# The flags of evaluation, with what a program without one reads instead.
INSTEAD = {
    "eval_data": "--data, which it reads",
    "eval_split": "--data-split, of which it reads --data",
    "eval_groups": "--updates and --batch, by which it reads --data",
}
# The flags of what is read.
OF_DATA = "data", "data_split", "eval_data", "eval_split", "held_out", "prompt_field", "answer_field", "row", "system"
# Prefixes of the names of our modules; the last is the module with which a child was started.
OURS = ("penstock.", "importlib", "__main__")


def answered(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Returns its result, or {"error", "status"} if it raises: the message of a CommandError, the
    traceback of anything else."""
    try:
        return function(*arguments)
    except CommandError as error:
        return {"error": str(error), "status": error.status}
    except Exception:
        return {"error": own_frames(), "status": 1}


def answer(verb: str, name: str, argv: Sequence[str]) -> Any:
    """`traced`, with errors as data for the parent."""
    return answered(traced, verb, name, argv)


@contextmanager
def kept_here() -> Iterator[None]:
    """Turn SystemExit into a CommandError: a user's module or function must not end the process silently."""
    try:
        yield
    except SystemExit:
        raise CommandError(own_frames(), 1) from None


@contextmanager
def told_once(verb: str) -> Iterator[None]:
    """Print a maker's `NodeWarning` as a line for `check`; drop it for other verbs, since in a run the ranks print
    it."""
    show = warnings.showwarning

    def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, NodeWarning):
            show(message, category, *where, **more)
        elif verb == "check":
            print(f"note: {visible(str(message))}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield


def _named(name: str) -> Any:
    """What the user's PROGRAM names; of a file alone, its only program. Raises GraphError."""
    if not name.rpartition(":")[2].endswith(".py"):
        return load(name)
    found = public_in(name, Program)
    own = {program.path: program for program in found.values() if program.path.startswith(f"{os.path.abspath(name)}:")}
    if len(own) == 1:
        return own.popitem()[1]
    known = [program.name for program in own.values()] or found
    needed = 'a name after ":"' + nearest("", known) if known else "a function with @program in it"
    raise fault("nothing-to-load", "nothing to load", repr(name), needed, "")


def traced(verb: str, name: str, argv: Sequence[str]) -> dict[str, Any]:
    """All facts about a program called with these words that the parent needs (see `tracing.Traced`). Raises
    CommandError if the program cannot be loaded or the words are wrong, SystemExit after help or a usage error."""
    before = set(sys.modules)
    try:
        with kept_here():
            program = _named(name)
        if not isinstance(program, Program):
            given = f"{name}: given a value of type {type(program).__name__}"
            raise CommandError(f"{given}, needed a function with @program")
        options, flags, typed, plan = parse(program, verb, name, argv)
    except GraphError as error:
        raise CommandError(str(error)) from None
    base, refused = False, None
    with kept_here(), told_once(verb):
        graphs, faults = _trace(program, options, flags)
        made = list(graphs.values())
        if verb in ("check", "run"):
            faults += unread_flags(program, made, flags, typed)
            # Rows that are kept from a program for no measurement would be lost to it.
            if flags.held_out is None and not problems_made(flags.data) and not measures(made):
                flags = dataclasses.replace(flags, held_out=0)
        faults += adapter_lacks(made, flags)
        faults += precision_unused(made, flags)
        if verb == "check":
            faults += clashes(program, "run").values()
        here = verb in ("check", "run") and flags.on not in ELSEWHERE
        wanted = flags.options(flags.model) if here else None
        if wanted is not None and not flags.on:
            # The parent reports errors of a cluster file or a device.
            with suppress(ValueError):
                cluster = Cluster.read(Path(flags.cluster)) if flags.cluster else Cluster.local(len(gpus()))
                wanted = dataclasses.replace(wanted, device=choose_device(wanted.device, made, cluster))
        if wanted is not None and plan is not None:
            # The meshes of a plan fit its model; the parent checks that this model has the same shape. The small one of
            # a run without --model never has: what the plan's options ask of it (a longer context) is no fault.
            unlike = flags.model in ("", NEW) and not flags.on
            wanted = None if unlike else dataclasses.replace(wanted, mesh=())
        if wanted is not None:
            faults += [fault for fault, _ in unmet(made, wanted)]
        if wanted is not None and not faults:
            faults, pins = _tried(made, wanted)
            flags = dataclasses.replace(flags, **pins)
        if here and not faults:
            makers = (opened(argument.maker) for graph in made for argument in graph.carried)
            base = any(maker is not None and maker.base for maker in makers)
        if verb == "plan" and not faults:
            refused = model_refusal(made, flags.model)
    return {
        "name": program.name,
        "path": program.path,
        "flags": dataclasses.asdict(flags),
        "typed": typed,
        "plan": None if plan is None else plan.to_json(),
        "faults": [dataclasses.asdict(fault) for fault in sorted(dict.fromkeys(faults), key=by_place)],
        "base": base,
        "refused": dataclasses.asdict(refused) if refused else None,
        "gpus": gpus(),
        "code": own_files({name: module for name, module in [*sys.modules.items()] if name not in before}),
        **{key: graph.to_json() for key, graph in graphs.items() if not faults or _is_read(graph)},
    }


def model_refusal(graphs: Sequence[Graph], model: str) -> Fault | None:
    """Why no run of these graphs can have a model, by its `config.json`. None for a shape, and for a file that cannot
    be read or had, which the parent reports."""
    from penstock.runtime.plan.model_shape import SHAPES, ShapeError, model_config

    makers = [opened(argument.maker) for graph in graphs for argument in graph.carried]
    readers = [maker.config for maker in makers if maker is not None and maker.base and maker.config is not None]
    if not model or model in SHAPES or not readers:
        return None
    try:
        _, data, _ = model_config(model)
    except ShapeError:
        return None
    if not isinstance(data, dict):
        return None
    try:
        for reader in readers:
            reader(data)
    except ValueError as error:
        lack = LACK.fullmatch(str(error))
        given, needed = lack.group("given", "needed") if lack else (str(error), "a model that a run can have")
        return Fault("model-kind", "the model", given, needed)
    return None


def _is_read(graph: Graph) -> bool:
    """True if the parent can read the graph. False for an invalid number such as `every=2.0`, which a fault reports."""
    try:
        Graph.from_json(graph.to_json())
    except ValueError:
        return False
    return True


def inputs(graphs: Sequence[Any], flags: Any) -> list[SeenGpu]:
    """Try the inputs and requirements of a run, given as JSON. Raises CommandError with all that is wrong. Returns this
    machine's GPUs."""
    with kept_here():
        faults, _ = _tried([Graph.from_json(graph) for graph in graphs], RunOptions.from_json(flags))
    if faults:
        raise CommandError(faults_text(faults))
    return gpus()


def gpus() -> list[SeenGpu]:
    """The GPUs that torch sees, if the program's modules have imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [SeenGpu(gpu.name, gpu.total_memory / 2**30, gpu.major, gpu.minor) for gpu in found]


def _tried(graphs: Sequence[Graph], flags: RunOptions) -> tuple[list[Fault], dict[str, Any]]:
    """The faults, and the options that the opened sources change (`Pinned`, `Finite`)."""
    sources: dict[str, Source] = {}
    try:
        faults = try_inputs(graphs, flags, sources)
    except ValueError as error:
        raise CommandError(str(error)) from None
    pins: dict[str, Any] = {}
    for name, source in sources.items():
        if isinstance(source, Pinned) and source.data:
            pins["eval_data" if name.startswith(EVALUATION) and flags.eval_data else "data"] = source.data
    # Where something is measured, no more groups than problems: else some problems would count more than others.
    for graph in graphs[1:] or [graph for graph in graphs if not graph.takers()]:
        option = "eval_groups" if graphs[1:] else "batch"
        read = [sources.get(argument.name) for argument in graph.sources]
        sizes = [source.size if isinstance(source, Finite) else 0 for source in read]
        if sizes and all(sizes):
            pins[option] = min(getattr(flags, option), max(sizes))
    return faults, pins


def own_frames() -> str:
    """The traceback of the current exception, from the user's first frame on; without frames for a file that cannot be
    parsed, since the error itself has the place."""
    kind, error, whole = sys.exc_info()
    tb = whole
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith(OURS):
        tb = tb.tb_next
    if tb is None and not isinstance(error, SyntaxError):
        tb = whole
    return "".join(traceback.format_exception(kind, error, tb)).rstrip()


def _trace(program: Program[..., Any], options: dict[str, Any], flags: Any) -> tuple[dict[str, Graph], list[Fault]]:
    """The graphs of a program and of its evaluation, and all their faults; a graph that cannot be made is left out."""
    graphs: dict[str, Graph] = {}
    faults: list[Fault] = []
    batch, groups = getattr(flags, "batch", None), getattr(flags, "eval_groups", None) or None
    unmeasured = getattr(flags, "eval_groups", None) == 0
    try:
        precision = getattr(flags, "generator_precision", "")
        graphs["graph"] = in_precision(trace(program, options, batch=batch), precision)
        faults += check(graphs["graph"], batch=batch)
    except GraphError as error:
        faults += error.faults
    if program.evaluation is None or unmeasured:
        return graphs, faults
    try:
        if "graph" in graphs:
            measured = trace_evaluation(program, graphs["graph"], EVALUATION, batch=groups)
            graphs["evaluation"] = in_precision(measured, precision, graphs["graph"])
        else:  # the values that it measures are unknown, but its own faults can be found
            graphs["evaluation"] = trace(program.evaluation, {}, EVALUATION, batch=groups)
        faults += check(graphs["evaluation"], batch=groups)
    except GraphError as error:
        faults += error.faults
    return graphs, faults


def unread_flags(
    program: Program[..., Any], graphs: Sequence[Graph], flags: Any, typed: Collection[str]
) -> list[Fault]:
    """Faults for the flags that the user has typed and that nothing in a run reads: those of evaluation where none is
    made and no node or maker may read held-out problems by itself, those of data where all sources make theirs, and the
    limit of another engine without one."""
    unread: dict[str, tuple[str, str]] = {}
    if program.evaluation is None:
        why, needed = f"for {program.name}, which has no evaluation", "or a program with @program(evaluation=…)"
        unread = {name: (why, f"{instead}, {needed}") for name, instead in INSTEAD.items()}
    sources = [imported(argument.maker) for graph in graphs for argument in graph.sources]
    if sources and all(getattr(maker, "reads_no_data", False) for maker in sources):
        unread |= dict.fromkeys(
            OF_DATA, (f"for {program.name}, which makes its data", "none, or a program that reads it")
        )
    own = of_user(graphs)
    if own or any(made.evaluates for made in _definitions(graphs)):
        unread = {name: said for name, said in unread.items() if name == "eval_groups"}
    options = [dict(node.options) for graph in graphs for node in graph.nodes]
    engines = {each["engine"] or flags.engine for each in options if "engine" in each}
    if not own and engines <= {OUR_ENGINE}:
        unread["mismatch_limit"] = ("without another engine to compare", "none, or --engine vllm")
    return [
        Fault("unmet-rule", f"--{name.replace('_', '-')}", f"{value} {why}", needed, program.where)
        for name, (why, needed) in unread.items()
        if name in typed and (value := getattr(flags, name)) and not problems_made(str(value))
    ]


def _definitions(graphs: Sequence[Graph]) -> list[NodeDef[..., Any]]:
    nodes = [node for graph in graphs for node in graph.nodes]
    return [made for node in nodes if isinstance(made := imported(node.op), NodeDef)]


def of_user(graphs: Sequence[Graph]) -> bool:
    """True if a maker, or a node with a state or the context, is the user's: it may read any flag and any data."""
    readers = [made.path for made in _definitions(graphs) if made.init or made.interface.context]
    readers += [argument.maker for graph in graphs for argument in graph.arguments]
    return not all(path.startswith("penstock.") for path in readers)


def measures(graphs: Sequence[Graph]) -> bool:
    """True if something may be measured on held-out problems: by an evaluation, or by a node."""
    return len(graphs) > 1 or of_user(graphs) or any(made.evaluates for made in _definitions(graphs))


def adapter_lacks(graphs: Sequence[Graph], flags: Any) -> Iterator[Fault]:
    """Faults for the flags of adapters beside a program of which no value can have some."""
    given = {name: value for name in ("lora", "lora_alpha", "lora_targets") if (value := getattr(flags, name, None))}
    for argument in (argument for graph in graphs if given for argument in graph.carried):
        with suppress(GraphError):  # a maker that is missing is reported itself
            if (maker := opened(argument.maker)) is not None and maker.lora:
                return
    for name, value in given.items() if graphs else ():
        lack = f"{as_typed(value)} and {graphs[0].name}, of which no value has adapters"
        yield Fault("unmet-requirement", f"--{name.replace('_', '-')}", lack, "a program with a policy that learns")


def precision_unused(graphs: Sequence[Graph], flags: Any) -> Iterator[Fault]:
    """A fault for --generator-precision where no node computes in such a format."""
    precision = getattr(flags, "generator_precision", "")
    if graphs and precision and not any(node.precision for graph in graphs for node in graph.nodes):
        lack = f"{precision} and {graphs[0].name}, of which no node computes in it"
        yield Fault("unmet-requirement", "--generator-precision", lack, "a program that generates with a model")


def in_precision(graph: Graph, precision: str, trained: Graph | None = None) -> Graph:
    """The graph with a precision for each broadcast to nodes that can compute in 8-bit formats: its own; else that of
    the same value and pool in the `trained` graph, with which it shares a channel; else `precision`."""
    sent = {
        (node.inputs[0].ref.node, node.pool): node.precision
        for node in (trained.nodes if trained is not None else ())
        if node.construct == "broadcast"
    }
    able = {
        item.ref.node
        for node in graph.nodes
        if isinstance(definition := imported(node.op), NodeDef) and definition.precisions
        for item in node.inputs
    }
    nodes = (
        replace(node, precision=node.precision or sent.get((node.inputs[0].ref.node, node.pool)) or precision)
        if node.construct == "broadcast" and node.name in able
        else node
        for node in graph.nodes
    )
    return graph.replace(nodes=tuple(nodes))


def try_inputs(graphs: Sequence[Graph], flags: RunOptions, sources: dict[str, Source] | None = None) -> list[Fault]:
    """The faults of the nodes for this run. Checks what makers require, opens the sources (adding them to `sources`),
    and reads a little from each. Raises ValueError for a problem with any of these."""
    # In the order in which a user fixes problems: imports, then requirements of makers, then the data.
    sources = {} if sources is None else sources
    for graph in graphs:
        reach(graph.op)
    for graph in graphs:
        for argument in graph.arguments:
            load(argument.maker)
        # Import what the workers of a node import: `check` knows its requirements only then.
        for node in graph.nodes:
            if node.construct == "call":
                load(node.op)
            for _, option in node.options:
                resolve(option)
    for _, text in unmet(graphs, flags):
        raise ValueError(text)
    for graph in graphs:
        # Only after its requirements are met: a source may open files that they check.
        for argument in graph.sources:
            sources[argument.name] = load(argument.maker)(context_of(argument.name, graphs, flags, Context()))
            sources[argument.name].read(0)
    check_meshes(graphs, flags)
    faults, meshes = list[Fault](), read_meshes(flags.mesh)
    for graph in graphs:
        # A node may require that its own mesh has, or lacks, an axis.
        places = {node.name: Context(device=flags.device, mesh=meshes.get(node.pool, ())) for node in graph.nodes}
        places |= {argument.name: Context(device=flags.device) for argument in graph.arguments}
        contexts = {name: context_of(name, graphs, flags, place) for name, place in places.items()}
        faults += check(graph, sources=sources, contexts=contexts)
    return list(dict.fromkeys(faults))


def unmet(graphs: Sequence[Graph], flags: RunOptions) -> Iterator[tuple[Fault, str]]:
    """The requirements of makers (`requires`) that a run of these graphs does not meet, in program order, each as a
    fault and as a text. No maker is called.

    A requirement of several values is reported for the first of them.
    """
    told: set[tuple[Check[Context], str]] = set()
    arguments: dict[str, Argument] = {}
    for argument in (argument for graph in graphs for argument in graph.arguments):
        # A name in two graphs is one value, which the maker of the first graph makes.
        arguments.setdefault(argument.name, argument)
    for argument in arguments.values():
        what = f"{argument.kind} {argument.name!r}"
        context = context_of(argument.name, graphs, flags, Context())
        try:
            required_ones = requirements(load(argument.maker))
        except GraphError as error:
            known = [fault for fault in error.faults if argument.maker]  # `check` has reported a missing maker
            for fault in known:
                yield dataclasses.replace(fault, what=f"{what}: maker", where=argument.where), fault.given
            continue
        for required in required_ones:
            try:
                required(context)
            except ValueError as error:
                if (required, text := str(error)) not in told:
                    needed = f"what {getattr(required, '__name__', 'its check')} requires ({defined(required)})"
                    lack = LACK.fullmatch(text)
                    given, needed = (
                        (f"{lack['place'] or ''}{lack['given']}", lack["needed"]) if lack else (text, needed)
                    )
                    yield Fault("unmet-requirement", what, given, needed, argument.where), text
                told.add((required, text))


def check_meshes(graphs: Sequence[Graph], flags: RunOptions) -> None:
    """Raises ClusterError for a pool's mesh by which a model of that pool cannot be cut.

    This is known only if the model's maker says which model it opens (`opens`), with a spec that can check meshes. For
    other models, the ranks report it.
    """
    meshes = {pool: axes for pool, axes in read_meshes(flags.mesh).items() if num_ranks(axes) > 1}
    # The carried values, and the values with whose weights streams (which decode) compute.
    models: list[tuple[str, str, Context, bool]] = []
    for graph in graphs:
        contexts = {argument.name: context_of(argument.name, graphs, flags, Context()) for argument in graph.carried}
        models += [(argument.pool, argument.maker, contexts[argument.name], False) for argument in graph.carried]
        for node in graph.nodes:
            weights = context_of(node.name, graphs, flags, Context()).weights.values() if node.stream else ()
            models += [(node.pool, origin.maker, origin.context, True) for origin in weights]
    for pool, maker, context, decodes in models:
        try:
            if pool in meshes and (found := opened(maker)) and hasattr(spec := found.spec(context), "check_mesh"):
                spec.check_mesh(meshes[pool], decodes=decodes)
        except ValueError as error:
            lack = axis_lack("generator" if decodes else "trainer", meshes[pool])
            code = lack.code if lack else "mesh-cut"
            raise ClusterError(f"--mesh {pool}={spelled(meshes[pool])} [{code}]: {error}") from error


def run_here(path: str) -> int:
    """Run the folder's run in this process; returns the exit status."""
    from penstock.runtime.cli.display import PlainDisplay, Progress, write_line
    from penstock.runtime.control.inprocess import run_in_process  # imports torch
    from penstock.runtime.control.process import told

    folder = RunFolder.open(path)
    config = RunConfig.load(folder)
    progress = Progress(config.graph.name, config.flags.updates)
    tell = stop_if_output_closes(PlainDisplay(progress, write_line).tell, lambda: signal.raise_signal(signal.SIGTERM))
    try:
        status = run_in_process(folder, tell)
    except Exception as raised:
        # Show the message of a RecordError; for other errors, the traceback from the user's node on.
        status = "failed"
        progress.errors = [str(raised) if isinstance(raised, RecordError) else told(raised).rstrip("\n")]
    for error in progress.errors:
        print(visible(f"penstock: {error}"), file=sys.stderr)
    stopped = PREEMPTED if progress.cause == "preempted" else INTERRUPTED
    return {"done": DONE, "stopped": stopped}.get(status, FAILED)


def main(mode: str, words: str) -> int:
    # Nearly all of its objects are imported modules, which stay: collect garbage rarely, and not at the exit, where it
    # would take half a second.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    if mode == "run":
        try:
            with on_stop(interrupt):
                return run_here(words)
        except KeyboardInterrupt as interruption:
            return PREEMPTED if isinstance(interruption, Preempted) else INTERRUPTED
    # Ctrl-C, or a closed pipe while help is printed, ends it without a traceback.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    with os.fdopen(int(words), "r+") as memfd:
        arguments = json.load(memfd)
        memfd.seek(0)
        memfd.truncate()
        try:
            found = json.dumps(answered(lambda: resolve_name(mode)(*arguments)))
        except SystemExit:
            memfd.write("null")
            raise
        # Flush what the program printed: os._exit does not.
        sys.stdout.flush()
        memfd.write(found)
    # torch is slow to exit, and all output is written.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
