"""`penstock run PROGRAM` once it is traced, and `penstock resume DIR`: a run from its command line or last checkpoint.

`config.json` keeps what a run was given beside its flags: the digests of its data and code (`sources`), its cluster,
and the folder from which it was started. A resume needs the data unchanged, and other hosts only if it names them.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from penstock.graph.hub import model_folder
from penstock.runtime.cli.base_model import base_model
from penstock.runtime.cli.display import Display
from penstock.runtime.cli.enrolling import Enrolled, agents_words, check_agents, enrolment, needed_agents, placed, tell
from penstock.runtime.cli.flags import (
    ELSEWHERE,
    NEW,
    NO_PLAN,
    AgentsFlags,
    FolderFlags,
    RunFlags,
    changes,
    read_flags,
    with_changes,
)
from penstock.runtime.cli.launching import (
    asked,
    configure,
    decided,
    go,
    going_on,
    require_installed,
    require_processes,
)
from penstock.runtime.cli.planned import Chosen, chosen, machines, plan_lacks, require_devices, require_precision
from penstock.runtime.cli.sources import changed_inputs, edited_code, lost_code, sha256, source_digests
from penstock.runtime.cli.submitting import Manager, Submission, submitter
from penstock.runtime.cli.tracing import CommandError, Traced, faults_text, require_inputs
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import read_meshes, spelled, why_no_turns
from penstock.runtime.cluster.slots import moved
from penstock.runtime.control.early import Early
from penstock.runtime.control.failure import MENDABLE
from penstock.runtime.control.run_config import OnResume, RunConfig, RunOptions, Shown, annotation, plan_for
from penstock.runtime.control.signals import DONE, FAILED
from penstock.runtime.record.checkpoints import (
    CUT,
    SavedCheckpoint,
    latest_checkpoint,
    part_path,
    read_facts,
    refusal,
    require_no_link,
    update_of,
    without,
)
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.event_log import read_log
from penstock.runtime.record.folder import MARKS, RunFolder, absolute, default_path
from penstock.runtime.record.metrics import rows_before
from penstock.runtime.record.typed_json import ConfigFile, Cut, Summary, require_shape
from penstock.runtime.schedule.compile import Tables
from penstock.runtime.schedule.scheduler import Scheduler


def run_traced(
    traced: Traced, argv: Sequence[str], behind: tuple[str, ...], began: float, early: Early | None = None
) -> int:
    """Create a run folder and run in it; the exit status. `behind` are the words after a "--"; `early` has processes
    that wait for the run."""
    if manager := require_consistent(traced.flags, behind):
        if early is not None:
            early.close()
        return manager.submit(Submission(traced, argv[0], behind))
    if traced.flags.resume == "auto" and absolute(traced.flags.out).joinpath("config.json").is_file():
        return _go_on_as(traced, began, early)
    if not traced.flags.on:
        status, path = _run(traced, machines(traced.flags, traced.gpus), argv, began, early=early)
        return _restarted(status, path, traced.flags, {})
    traced.sound()
    # The agents of a run find its folder before there is a plan.
    need = needed_agents(traced.flags, traced.flags, traced.plan)
    with _new_folder(traced) as folder, enrolment(traced.flags, folder, traced.name, need) as enrolled:
        cluster = enrolled.await_agents(traced.flags.startup_deadline, need.total if need is not None else 0)
        enrolled.again = traced.flags.restarts > 0
        status, path = _run(traced, cluster, argv, began, folder, enrolled, early)
    return _restarted(status, path, traced.flags, {})


def require_consistent(flags: RunFlags, behind: Sequence[str]) -> Manager | None:
    """Who hands the run over, as `submitter` says it. Raises CommandError for flags that contradict each other."""
    check_agents(flags, flags.cluster)
    manager = submitter(flags, behind)
    if manager is None and flags.resume == "auto" and not flags.out:
        raise CommandError("--resume auto: given no --out DIR, needed the folder in which the run is or will be", 2)
    return manager


def sound_run(found: Chosen, cluster: Cluster) -> RunConfig:
    """The run of a chosen program on a cluster. Raises CommandError and ClusterError for all that is known to keep it
    from starting, however it is started."""
    traced, flags = found.traced, found.traced.flags
    config = configure(traced, cluster, flags.model, found.plan)
    require_devices(config.plan, cluster, config.flags.dtype, traced.gpus)
    require_precision(config.graphs, cluster, config.flags)
    require_installed(config, cluster)
    if traced.base and not flags.model and not is_made_up(flags.data):
        raise CommandError(
            f"--data: given {flags.data!r} without a model; needed --model DIR with it, since the base model that is "
            f"built by default knows arithmetic only (--model {NEW} takes an untrained one)",
            2,
        )
    return config


@contextmanager
def _new_folder(traced: Traced) -> Iterator[RunFolder]:
    """A new run folder, of which nothing is left if nothing has run in it."""
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
    """Run a traced program on a cluster, in a folder that is `made` already or else created; the exit status, and the
    folder."""
    # First: what a plan was made for explains why its options do not suit what is here.
    if lacks := tuple(plan_lacks(traced, cluster)):
        raise CommandError(faults_text([*lacks, *traced.faults]))
    traced.sound()
    flags = absolute_paths(traced.flags)
    found = chosen(replace(traced, flags=flags), cluster)
    if enrolled is not None and found.plan is None:
        said = "generators" in traced.typed or flags.generators != RunOptions.generators
        cluster, options = placed(flags.place, found.traced.graph, cluster, flags.generators if said else None)
        found = replace(found, traced=replace(found.traced, flags=replace(found.traced.flags, **options)))
    config = sound_run(found, cluster)
    require_processes(config, cluster, flags)
    needs_base = traced.base and not flags.model
    data = [data for data in (flags.data, flags.eval_data) if not is_made_up(data)]
    digests = source_digests([*data, *traced.code])
    # Created after all that may be refused: a mistake on the command line leaves no folder.
    with nullcontext(made) if made else _new_folder(traced) as folder:
        for line in found.lines:
            print(visible(line), flush=True)

        def prepare(display: Display) -> None:
            model = str(base_model(flags.data, display.tell)) if needs_base else config.flags.model
            complete = replace(config, flags=replace(config.flags, model=model))
            complete.write(folder, asked(argv[0], argv, cluster, digests, _wanted(traced, flags), agents_words(flags)))
            if config.flags.offload == "on" and (why := why_no_turns(config.graph, config.plan)):
                text = f"--offload on frees no memory that anybody needs: {why}"
                display.tell({"kind": "note", "level": "warning", "text": text})

        status = go(folder, config, cluster, flags, began, prepare, enrolled=enrolled, early=early)
        return status, folder.path


def _wanted(traced: Traced, flags: RunFlags) -> dict[str, Any]:
    """What a command line asks for, as JSON. `flags` have absolute paths."""
    graphs = {"program": traced.sound(), "evaluation": traced.evaluation}
    return {
        "path": traced.path,
        "options": json.loads(json.dumps(asdict(flags.options(flags.model)))),
        "of_program": dict(traced.sound().options),
        **{name: "" if graph is None else graph.digest() for name, graph in graphs.items()},
        "plan": sha256(Path(flags.plan)) if flags.plan not in ("", NO_PLAN) else flags.plan,
    }


def _go_on_as(traced: Traced, began: float, early: Early | None) -> int:
    """Go on with the run in --out, which has to be one of this command line; the exit status. Raises CommandError with
    the differences."""
    traced.sound()
    flags: RunFlags = absolute_paths(traced.flags)
    folder = RunFolder.open(flags.out)
    _require_own(folder)
    was = folder.read_json("config.json", ConfigFile).get("asked", {})
    then, now = was.get("wanted") or {}, _wanted(traced, flags)
    given, differences = dict[str, Any](), list[str]()
    may_change = {field.name for field in fields(RunOptions) if annotation(RunOptions, field.name, OnResume)}

    def differ(what: str, value: object, before: object) -> None:
        differences.append(f"  {what}: given {_said(value)}, needed {_said(before)}")

    if now["path"] != then.get("path"):
        differ("PROGRAM", now["path"], then.get("path"))
    else:
        for name, value in {**now["options"], **now["of_program"]}.items():
            before = {**then["options"], **then["of_program"]}.get(name)
            if value != before and name in may_change:
                given[name] = getattr(flags, name)
            elif value != before:
                differ(f"--{name.replace('_', '-')}", value, before)
        for what in ("plan", "program", "evaluation") if not differences else ():
            if now[what] != then[what]:
                name = "--plan" if what == "plan" else f"the graph of the {what}"
                differ(name, f"one with SHA-256 {now[what]}" if now[what] else "", then[what])
    if differences:
        text = f"{folder.path}: --resume auto: the run there is one of another command line; nothing was changed:"
        raise CommandError("\n".join([text, *differences]), 2)
    if flags.cluster and Cluster.read(Path(flags.cluster)) == _cluster_of(folder, was):
        flags = replace(flags, cluster="")
    try:
        status = _go_on(folder, flags, given, began, now, early)
        return _restarted(status, folder.path, flags, given)
    except _AllDone as done:
        summary = folder.read_json("summary.json", Summary)
        print(json.dumps(summary) if flags.json else visible(f"{done}: there is nothing left to do"))
        return DONE


def _said(value: object) -> str:
    """An option's value as it is typed."""
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return words or "none"


@dataclass(frozen=True)
class ResumeFlags(AgentsFlags, FolderFlags):
    """Go on with a run exactly where its last complete checkpoint is.

    The program, its options and the plan are those of the run folder. What was done after the checkpoint is done again.
    The data, the model and the program's file must be where they were, and the data unchanged. A resume runs the code
    that the folder names, with your rights: where other users have made the folder, it asks first.

    Examples:
      penstock resume runs/aipo-20250304-050607
      penstock resume runs/aipo-20250304-050607 --updates 200
      penstock resume runs/aipo-20250304-050607 --cluster fewer.toml"""

    cluster: Annotated[str, Shown("FILE", "as it was")] = ""
    """Other hosts: those in the place of the former ones, in order, if they have as many cores and GPUs; else the plan
    is made anew. They must reach the parts of the last checkpoint."""

    trust: bool = False
    """Run the code that the folder names even if other users have made the folder, without being asked."""


def resume(argv: Sequence[str]) -> int:
    """Go on with the run of a folder; the exit status."""
    began = monotonic()
    flags: Any = read_flags(with_changes(ResumeFlags), "resume", argv)
    folder = RunFolder.open(flags.dir)
    if not flags.trust:
        _require_own(folder)
    check_agents(flags, flags.cluster)
    if flags.on in ELSEWHERE:
        needed = f"needed `penstock run … --on {flags.on} --out DIR`, which goes on with a run, too"
        raise CommandError(f"--on: given {flags.on}, {needed}", 2)
    given = changes(flags)
    status = _go_on(folder, flags, given, began)
    return _restarted(status, folder.path, flags, given)


def _restarted(status: int, path: Path, flags: ResumeFlags | RunFlags, given: Mapping[str, Any]) -> int:
    """Go on with a run that has ended by the loss of a process, as often as its --restarts says; the exit status in the
    end. `given` are options that the command has changed."""
    if status != FAILED or flags.in_process:
        return status
    most = given.get("restarts", RunConfig.load(RunFolder.open(path)).flags.restarts)
    for number in range(1, most + 1):
        folder = RunFolder.open(path)
        cause = _summary(folder).get("cause", "")
        if status != FAILED or cause not in MENDABLE:
            break
        saved = latest_checkpoint(folder)
        where = f"from the checkpoint of update {saved.update}" if saved is not None else "from its beginning"
        tell(f"restart {number} of {most} (--restarts), {where}")
        # Hosts of a file are in the folder by now.
        status = _go_on(folder, replace(flags, cluster=""), given, monotonic(), left=most - number)
    return status


class _AllDone(CommandError):
    """There is nothing left to do."""


def _go_on(
    folder: RunFolder,
    flags: ResumeFlags | RunFlags,
    given: Mapping[str, Any],
    began: float,
    command: Mapping[str, Any] | None = None,
    early: Early | None = None,
    left: int | None = None,
) -> int:
    """Check that the run can go on, write what is changed, and go on; the exit status. `given` are the options that are
    others now; `command` is what `_wanted` says of a command line that changes any; `left` is how often the run may go
    on by itself after this, by default as its options say."""
    # From here on nobody else can start it; until then nothing has been changed.
    folder.lock()
    with ExitStack() as stack:
        stack.callback(folder.unlock)
        config, was = RunConfig.load(folder), folder.read_json("config.json", ConfigFile).get("asked", {})
        digests, origin = was.get("digests", {}), was.get("folder", "")
        if lacks := [*changed_inputs(config.flags, digests), *lost_code(config, origin)]:
            raise CommandError("\n".join([f"{folder.path}: the run cannot go on; nothing was changed:", *lacks]))
        edited = [*edited_code(digests)]
        for line in edited:
            tell(line)
        summary = _summary(folder)
        require_no_link(folder)
        saved = latest_checkpoint(folder)
        if saved is not None:
            _require_checkpoint(saved, config)
        # Raises LogError for a log that was changed or cut: nothing can be added to it.
        records = max(saved.records if saved else 0, int(summary.get("records", 0)))
        logged = 0.0
        if records or folder.events.exists():
            logged = sum(segment.seconds for segment in read_log(folder.events, records))
        rows_before(folder.metrics, saved.update if saved else 0)
        options = replace(config.flags, **given)
        done, wanted = saved.update if saved else 0, options.updates
        if wanted < done:
            raise CommandError(f"--updates: given {wanted}, but {done} are done already; needed more", 2)
        if wanted == done and summary.get("status") == "done":
            raise _AllDone(f"{folder.path}: all {done} updates are done; --updates {2 * done} would go on")
        former = cluster = _cluster_of(folder, was)
        if was.get("agents") and not (flags.on or flags.cluster or flags.in_process):
            ended = "given a run whose hosts were agents with a ticket, which have ended with it"
            raise CommandError(f"{folder.path}: {ended}; needed: {going_on(folder)}", 2)
        need = needed_agents(flags, options) if flags.on and options.first_generators else None
        enrolled = stack.enter_context(enrolment(flags, folder, config.graph.name, need)) if flags.on else None
        if enrolled is not None:
            # Of the hosts that it had, those that may be late may be late again.
            total = len(former.hosts) if options.first_generators else 0
            fewest = need.first if need is not None and left is not None else 0
            cluster = enrolled.await_agents(options.startup_deadline, total, fewest)
            if total == len(cluster.hosts):
                cluster = _in_need_first(cluster, former, config, saved)
            enrolled.again = (options.restarts if left is None else left) > 0
            if flags.place:
                cluster, _ = placed(flags.place, config.graph, cluster, options.generators)
        elif flags.cluster:
            cluster = Cluster.read(Path(flags.cluster))
        before, anew = config, "mesh" in given
        if cluster is not former:
            on = moved(config.plan, former, cluster)
            if not on.lacks:
                config, cluster = replace(config, plan=on.plan), on.cluster
            elif enrolled is not None and not flags.place:
                cluster, _ = placed((), config.graph, cluster, options.generators)
            if on.lacks and not anew:
                anew, text = True, "the plan is made anew, since the hosts are others than those that it was made for:"
                print(visible("\n  ".join([text, *on.lacks])), flush=True)
        config = _changed(config, cluster, options, anew)
        require_installed(config, cluster)
        require_processes(config, cluster, flags)
        if early is None and not (flags.on or flags.in_process):
            early = Early()
            stack.callback(early.close)
            early.begin(config.modules())
            seen = require_inputs(config.graphs, config.flags, lambda: early)
        else:
            seen = require_inputs(config.graphs, config.flags)
        require_devices(config.plan, cluster, config.flags.dtype, seen)
        require_precision(config.graphs, cluster, config.flags)
        words = agents_words(flags)
        if config != before or words != was.get("agents", []):
            said = {"cluster": cluster.model_dump(mode="json"), "wanted": command or was.get("wanted", {})}
            config.write(folder, {**was, **said, "agents": words})
        # It tells how the last life ended, and this one may be killed before it can tell.
        (folder.path / "summary.json").unlink(missing_ok=True)
        earlier = float(summary.get("wall_s", logged))

        def note_changes(display: Display) -> None:
            """Rows of one run are of several codes and options then: what it has been told says which."""
            for name in given:
                old, new = (_said(getattr(options, name)) for options in (before.flags, config.flags))
                if new != old:
                    folder.add_note(
                        "info", f"from update {done} on: --{name.replace('_', '-')} {new} in place of {old}"
                    )
            for line in edited:
                folder.add_note("warning", f"from update {done} on: {line}")

        status = go(folder, config, cluster, flags, began, note_changes, earlier, enrolled, early)
        if status == FAILED and config != before and latest_checkpoint(folder) == saved:
            before.write(folder, was)  # what was wanted now may be why
        return status


def _in_need_first(cluster: Cluster, former: Cluster, config: RunConfig, saved: SavedCheckpoint | None) -> Cluster:
    """The hosts of a run that goes on, of which the last ones may be late: each in the place of the host that it stands
    for, those that may be late in the places of hosts that may."""
    wait = config.may_be_late - config.holding(saved.cut if saved is not None else None)
    hosts = {host for replica in config.plan.replicas if replica.name not in wait for host in replica.hosts}
    places = sorted(range(len(former.hosts)), key=lambda place: former.hosts[place].name not in hosts)
    ordered = dict(zip(places, cluster.hosts, strict=True))
    return cluster.model_copy(update={"hosts": tuple(ordered[place] for place in range(len(places)))})


def _summary(folder: RunFolder) -> Mapping[str, Any]:
    """What the last life of the run came to; nothing for one that was killed. A summary that was damaged is as good as
    none, and told of: nothing that a run goes on from is in it alone."""
    path = folder.path / "summary.json"
    if not os.path.lexists(path):
        return {}
    try:
        summary: Mapping[str, Any] = folder.read_json("summary.json", Summary)
    except RecordError as error:
        if path.is_symlink() or not path.is_file():  # that is no damage
            raise
        tell(f"{error}; the run goes on without it")
        return {}
    return summary


def _cluster_of(folder: RunFolder, was: Mapping[str, Any]) -> Cluster:
    """The hosts that the run was on before."""
    try:
        return Cluster.model_validate(was.get("cluster"))
    except ValueError as error:
        said = " ".join(str(error).split())
        raise RecordError(f"{folder.config}: asked.cluster: {said}; needed what the run wrote") from None


def _require_own(folder: RunFolder) -> None:
    """Ask whether to go on with a folder that others have made, since its graph names the code that a resume runs.
    Raises CommandError for another answer than yes, and where no terminal is there to ask."""
    if not (foreign := folder.foreign()):
        return
    given = f"{foreign}, and a resume runs the code that the folder names, with your rights"
    needed = "needed a run of your own, or --trust"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandError(f"{given}; {needed}")
    print(visible(f"penstock resume: {given}. Go on? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(f"given no yes; {needed}")


def _require_checkpoint(saved: SavedCheckpoint, config: RunConfig) -> None:
    """Raises RecordError for a checkpoint that the scheduler of this run cannot have written, CommandError for one that
    ranks could not read: both before any process starts."""
    path = saved.folder / CUT
    require_shape(saved.cut, Cut, f"{path}: cut")
    if not update_of(saved.folder.name) == saved.update == saved.cut["update"]:
        given = f"given the cuts before updates {saved.update} and {saved.cut['update']}"
        raise RecordError(f"{path}: {given}; needed that before the update of the folder's name")
    try:
        rules = replace(config, flags=replace(config.flags, updates=saved.update)).rules(0)
        Scheduler(Tables(config.graph, config.plan), rules, saved.cut)
    except ValueError as error:
        raise RecordError(f"{path}: {error}; needed what the run wrote") from None
    parts = (part_path(saved.folder, replica.name, 0) for pool in config.plan.pools for replica in pool.replicas)
    for part in filter(Path.exists, parts):
        try:
            text = refusal(part, read_facts(part))
        except ValueError as error:
            raise CommandError(f"{error}; {without(saved.folder)}") from error
        if text:
            raise CommandError(text)


def _changed(config: RunConfig, cluster: Cluster, options: RunOptions, anew: bool) -> RunConfig:
    """The run with other options; with a plan that is made `anew` for other meshes or hosts."""
    # Else the plan stays as it is, even where this machine has other devices now.
    if not anew:
        return decided(replace(config, flags=options), cluster)
    # Pools that are not named keep their meshes.
    meshes = read_meshes(config.flags.mesh) | read_meshes(options.mesh)
    options = replace(options, mesh=tuple(f"{pool}={spelled(m)}" for pool, m in meshes.items()))
    return decided(replace(config, flags=options, plan=plan_for(config.graphs, cluster, options)), cluster)


def absolute_paths(flags: RunFlags) -> RunFlags:
    """The flags with absolute paths, so that the run can be resumed from any folder; that of a name of the Hub says
    which commit it is."""

    def made(given: str) -> str:
        # What a user's own source understands may be no path at all: it stays as it is.
        return str(absolute(given)) if Path(given).exists() else given

    model = flags.model if flags.model in ("", NEW) else made(model_folder(flags.model))
    data, eval_data = (given if is_made_up(given) else made(given) for given in (flags.data, flags.eval_data))
    file, colon, name = flags.row.rpartition(":")
    row = f"{made(file)}:{name}" if colon and file.endswith(".py") else flags.row
    return replace(flags, model=model, data=data, eval_data=eval_data, row=row)


def is_made_up(data: str) -> bool:
    """Whether `--data` names problems that are drawn from the seed, whatever files there are."""
    return data.partition(":")[0] in ("", "arithmetic")
