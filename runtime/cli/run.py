"""`penstock run PROGRAM` once it is traced: a new run, or with `--resume auto` the run of the same command line.

Besides the flags, `config.json` has the digests of a run's data and code (`sources`), its cluster, and the folder from
which it was started.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.graph.context import problems_made
from penstock.graph.errors import Fault
from penstock.graph.hub import model_folder
from penstock.runtime.cli.base_model import base_model
from penstock.runtime.cli.display import Display
from penstock.runtime.cli.enrolling import Enrolled, agents_words, check_agents, enrolment, needed_agents, placed
from penstock.runtime.cli.flags import ELSEWHERE, NEW, NO_PLAN, RunFlags, as_typed
from penstock.runtime.cli.launching import asked, configure, go, record_lacks, require_installed, require_processes
from penstock.runtime.cli.planned import (
    Chosen,
    chosen,
    engine_lacks,
    invariance_lacks,
    machines,
    plan_lacks,
    precision_lacks,
    require_devices,
    require_precision,
    rule_lacks,
)
from penstock.runtime.cli.resume import AllDone, cluster_of, go_on, require_own, restarted
from penstock.runtime.cli.sources import sha256, source_digests
from penstock.runtime.cli.submitting import Manager, Submission, submitter
from penstock.runtime.cli.tracing import CommandError, Traced, faults_text, usage_errors
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import why_no_turns
from penstock.runtime.control.early import Early
from penstock.runtime.control.run_config import (
    OnResume,
    RunConfig,
    RunOptions,
    annotation,
    as_written_now,
    choose_device,
)
from penstock.runtime.control.signals import DONE
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import MARKS, RunFolder, absolute, default_path
from penstock.runtime.record.typed_json import ConfigFile, Summary


def run_traced(
    traced: Traced, argv: Sequence[str], manager_args: tuple[str, ...], began: float, early: Early | None = None
) -> int:
    """Create a run folder and run in it; returns the exit status. `manager_args` are the words after a "--"; `early`
    has processes that wait for the run."""
    if manager := require_consistent(traced.flags, manager_args):
        if early is not None:
            early.close()
        return manager.submit(Submission(traced, argv[0], manager_args))
    if traced.flags.resume == "auto" and absolute(traced.flags.out).joinpath("config.json").is_file():
        return _go_on_as(traced, began, early)
    if lacks := all_lacks(traced):
        raise CommandError(faults_text(lacks))
    if not traced.flags.on:
        status, path = _run(traced, machines(traced.flags, traced.gpus), argv, began, early=early)
        return restarted(status, path, traced.flags, {})
    # The agents of a run find its folder before there is a plan.
    need = needed_agents(traced.flags, traced.flags, traced.plan)
    with _new_folder(traced) as folder, enrolment(traced.flags, folder, traced.name, need) as enrolled:
        cluster = enrolled.await_agents(traced.flags.startup_deadline, need.total if need is not None else 0)
        enrolled.again = traced.flags.restarts > 0
        status, path = _run(traced, cluster, argv, began, folder, enrolled, early)
    return restarted(status, path, traced.flags, {})


def require_consistent(flags: RunFlags, manager_args: Sequence[str]) -> Manager | None:
    """The manager to which the run is submitted (see `submitter`). Raises CommandError for flags that contradict each
    other."""
    check_agents(flags, flags.cluster)
    manager = submitter(flags, manager_args)
    if manager is None and flags.resume == "auto" and not flags.out:
        raise CommandError("--resume auto: given no --out DIR, needed the folder in which the run is or will be")
    return manager


def all_lacks(traced: Traced) -> list[Fault]:
    """All faults of a program and its flags that are known before there is a configuration of its run."""
    flags, faults, planned = traced.flags, [*traced.faults], traced.plan is not None
    graphs = [graph for graph in (traced.graph, traced.evaluation) if graph is not None]
    # With --on, only the agents know what their hosts have.
    here = bool(graphs) and not flags.on
    if here and (planned or flags.invariant or any(node.precision for graph in graphs for node in graph.nodes)):
        cluster, given = machines(flags, traced.gpus), flags.generator_precision
        with usage_errors():
            device = "cuda" if planned else choose_device(flags.device, graphs, cluster)
        # First: a plan made for other machines explains why its options do not fit this one.
        faults = [*plan_lacks(traced, cluster), *faults, *precision_lacks(graphs, cluster, device, given)]
        faults += invariance_lacks(graphs, device, flags) if flags.invariant else ()
    if here and (flags.cluster or flags.engine != RunFlags.engine):
        faults += engine_lacks(traced)
    if (flags.track or flags.keep_best) and flags.on not in ELSEWHERE:
        faults += record_lacks(flags)
    return faults if faults or not graphs else [*rule_lacks(traced)]


def sound_run(found: Chosen, cluster: Cluster) -> RunConfig:
    """Make the configuration of a run. Raises CommandError and ClusterError for everything that is known to keep the
    run from starting."""
    traced, flags = found.traced, found.traced.flags
    config = configure(traced, cluster, flags.model, found.plan)
    require_devices(config.plan, cluster, config.flags.dtype, traced.gpus)
    require_precision(config.graphs, cluster, config.flags)
    require_installed(config, cluster)
    if traced.base and not flags.model and problems_made(flags.data) != "arithmetic":
        whose = "" if "data" in traced.typed else f", the default of {traced.name}"
        raise CommandError(
            f"--model: given none for --data {flags.data}{whose}; needed --model DIR, a model that knows such data: "
            f"the one that is built by default knows arithmetic only, and --model {NEW} is untrained (--help has what "
            f"{traced.name} says of it)",
        )
    return config


@contextmanager
def _new_folder(traced: Traced) -> Iterator[RunFolder]:
    """Create a new run folder, and remove it at the end if nothing has run in it."""
    out = traced.flags.out or default_path(traced.name, datetime.now())
    folder = RunFolder.create(out, again=traced.flags.resume == "auto")
    try:
        yield folder
    finally:
        if any((folder.path / mark).exists() for mark in MARKS):
            folder.unlock()
        else:
            folder.discard()


def _run(
    traced: Traced,
    cluster: Cluster,
    argv: Sequence[str],
    began: float,
    made: RunFolder | None = None,
    enrolled: Enrolled | None = None,
    early: Early | None = None,
) -> tuple[int, Path]:
    """Run a traced program on a cluster, in the folder `made` or else in a new one. Returns the exit status and the
    folder."""
    # Agents have said only now what their hosts have.
    if lacks := tuple(plan_lacks(traced, cluster)):
        raise CommandError(faults_text(lacks))
    flags = absolute_paths(traced.flags)
    found = chosen(replace(traced, flags=flags), cluster)
    if enrolled is not None and found.plan is None:
        said = "generators" in traced.typed or flags.generators != RunOptions.generators
        cluster, options = placed(flags.place, found.traced.graph, cluster, flags.generators if said else None)
        found = replace(found, traced=replace(found.traced, flags=replace(found.traced.flags, **options)))
    config = sound_run(found, cluster)
    require_processes(config, cluster, flags)
    needs_base = traced.base and not flags.model
    data = [data for data in (flags.data, flags.eval_data) if not problems_made(data)]
    digests = source_digests([*data, *traced.code])
    # Created after all checks: a mistake on the command line leaves no folder.
    with nullcontext(made) if made else _new_folder(traced) as folder:
        for line in found.lines:
            print(visible(line), flush=True)

        def prepare(display: Display) -> None:
            model = str(base_model(flags.data, display.tell)) if needs_base else config.flags.model
            complete = replace(config, flags=replace(config.flags, model=model))
            complete.write(folder, asked(argv[0], argv, cluster, digests, _wanted(traced, flags), agents_words(flags)))
            if config.flags.offload == "on" and (why := why_no_turns(config.graph, config.plan)):
                text = f"--offload on frees no memory that is needed: {why}"
                display.tell({"kind": "note", "level": "warning", "text": text})

        status = go(folder, config, cluster, flags, began, prepare, 0.0, enrolled, early)
        return status, folder.path


def _wanted(traced: Traced, flags: RunFlags) -> dict[str, Any]:
    """The request of a command line, as JSON. `flags` have absolute paths."""
    graphs = {"program": traced.sound(), "evaluation": traced.evaluation}
    return {
        "path": traced.path,
        "options": json.loads(json.dumps(asdict(flags.options(flags.model)))),
        "of_program": dict(traced.sound().options),
        **{name: "" if graph is None else graph.digest() for name, graph in graphs.items()},
        "plan": sha256(Path(flags.plan)) if flags.plan not in ("", NO_PLAN) else flags.plan,
    }


def _go_on_as(traced: Traced, began: float, early: Early | None) -> int:
    """Go on with the run in --out, which must be of the same command line; returns the exit status. Raises CommandError
    with the differences."""
    traced.sound()
    flags: RunFlags = absolute_paths(traced.flags)
    folder = RunFolder.open(flags.out)
    require_own(folder)
    was = folder.read_json("config.json", ConfigFile).get("asked", {})
    then, now = was.get("wanted") or {}, _wanted(traced, flags)
    given, differences = dict[str, Any](), list[str]()
    may_change = {field.name for field in fields(RunOptions) if annotation(RunOptions, field.name, OnResume)}

    def differ(what: str, value: object, before: object) -> None:
        differences.append(f"  {what}: given {as_typed(value)}, needed {as_typed(before)}")

    if now["path"] != then.get("path"):
        differ("PROGRAM", now["path"], then.get("path"))
    else:
        for name, value in {**now["options"], **now["of_program"]}.items():
            before = {**as_written_now(then["options"]), **then["of_program"]}.get(name)
            # A run that an older version began keeps rows out where nothing is measured, and goes on so.
            if name == "held_out" and before is None and "held_out" not in traced.typed:
                continue
            if value != before and name in may_change:
                given[name] = getattr(flags, name)
            elif value != before:
                differ(f"--{name.replace('_', '-')}", value, before)
        for what in ("plan", "program", "evaluation") if not differences else ():
            if now[what] != then[what]:
                name = "--plan" if what == "plan" else f"the graph of the {what}"
                differ(name, f"one with SHA-256 {now[what]}" if now[what] else "", then[what])
    if differences:
        text = f"{folder.path}: --resume auto: the run there was started by another command line; nothing was changed:"
        raise CommandError("\n".join([text, *differences]))
    if flags.cluster and Cluster.read(Path(flags.cluster)) == cluster_of(folder, was):
        flags = replace(flags, cluster="")
    try:
        status = go_on(folder, flags, given, began, now, early)
        return restarted(status, folder.path, flags, given)
    except AllDone as done:
        summary = folder.read_json("summary.json", Summary)
        print(json.dumps(summary) if flags.json else visible(f"{done}: nothing is left to do"))
        return DONE


def absolute_paths(flags: RunFlags) -> RunFlags:
    """The flags with absolute paths, so that the run can be resumed from any folder. A name on the Hub becomes a path
    that contains the commit."""

    def made(given: str) -> str:
        # A value for a user's own source may not be a path: then it stays as it is.
        return str(absolute(given)) if Path(given).exists() else given

    model = flags.model if flags.model in ("", NEW) else made(model_folder(flags.model))
    data, eval_data = (given if problems_made(given) else made(given) for given in (flags.data, flags.eval_data))
    file, colon, name = flags.row.rpartition(":")
    row = f"{made(file)}:{name}" if colon and file.endswith(".py") else flags.row
    return replace(flags, model=model, data=data, eval_data=eval_data, row=row)
