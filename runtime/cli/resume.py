"""`penstock resume DIR`, and automatic restarts: go on with a run from its last checkpoint.

Everything that can keep the run from going on is reported before anything starts or is changed. The data must be
unchanged (`sources`). The hosts change only if the command names others.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os.path import isfile
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from penstock.graph.imports import names_function
from penstock.runtime.cli.display import Display
from penstock.runtime.cli.enrolling import Enrolled, agents_words, check_agents, enrolment, needed_agents, placed, tell
from penstock.runtime.cli.flags import (
    ELSEWHERE,
    AgentsFlags,
    FolderFlags,
    RunFlags,
    as_typed,
    changes,
    read_flags,
    with_changes,
)
from penstock.runtime.cli.launching import (
    complete_trackers,
    decided,
    go,
    going_on,
    record_lacks,
    require_installed,
    require_processes,
)
from penstock.runtime.cli.planned import require_devices, require_precision
from penstock.runtime.cli.sources import changed_inputs, edited_code, lost_code
from penstock.runtime.cli.tracing import CommandError, faults_text, require_inputs
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import read_meshes, spelled
from penstock.runtime.cluster.slots import moved
from penstock.runtime.control.early import Early
from penstock.runtime.control.failure import MENDABLE
from penstock.runtime.control.run_config import RunConfig, RunOptions, Shown, plan_for
from penstock.runtime.control.signals import DONE, FAILED
from penstock.runtime.record.checkpoints import (
    CUT,
    SavedCheckpoint,
    latest_checkpoint,
    part_path,
    read_facts,
    refusal,
    require_no_link,
    resume_point_without,
    update_of,
)
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.event_log import read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import rows_before
from penstock.runtime.record.typed_json import ConfigFile, Cut, Summary, require_shape
from penstock.runtime.schedule.compile import Tables
from penstock.runtime.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class ResumeFlags(AgentsFlags, FolderFlags):
    """Continue a run from its last complete checkpoint.

    The program, its options and the plan come from the run folder. Updates after the checkpoint are repeated. The data,
    the model and the program's file must be where they were, and the data unchanged. A resume runs the code that the
    folder names, with your rights. If another user made the folder, it asks first.

    Examples:
      penstock resume runs/aipo-20250304-050607
      penstock resume runs/aipo-20250304-050607 --updates 200
      penstock resume runs/aipo-20250304-050607 --cluster fewer.toml"""

    cluster: Annotated[str, Shown("FILE", "as it was")] = ""
    """Other hosts. They replace the former ones in order, if they have as many cores and GPUs; else a new plan is made.
    They must be able to read all parts of the last checkpoint."""

    trust: bool = False
    """Run the code that the folder names without asking, even if another user made the folder."""


def resume(argv: Sequence[str]) -> int:
    """Go on with the run of a folder; returns the exit status."""
    began = monotonic()
    about = ", which leaves other options as they were"
    flags: Any = read_flags(with_changes(ResumeFlags), "resume", argv, about, _unchanged(argv))
    folder = RunFolder.open(flags.dir)
    if not flags.trust:
        require_own(folder)
    check_agents(flags, flags.cluster)
    if flags.on in ELSEWHERE:
        needed = f"needed `penstock run … --on {flags.on} --out DIR`, which goes on with a run, too"
        raise CommandError(f"--on: given {flags.on}, {needed}")
    given = changes(flags)
    status = go_on(folder, flags, given, began)
    return restarted(status, folder.path, flags, given)


def _unchanged(argv: Sequence[str]) -> dict[str, str]:
    """A text for each option of the run that `argv` names, including its program's; empty if it names no run."""
    # Unlike `Path.is_file`, this is False of a name that cannot be looked at.
    folder = next((word for word in argv if not word.startswith("-") and isfile(Path(word) / "config.json")), "")
    try:
        config = RunConfig.load(RunFolder.open(folder)) if folder else None
    except ValueError:
        return {}  # errors of the folder are reported once the flags are parsed
    options = {**vars(config.flags), **dict(config.graph.options)} if config is not None else {}
    return {name: f", which is {as_typed(value)} in this run" for name, value in options.items()}


def restarted(status: int, path: Path, flags: ResumeFlags | RunFlags, given: Mapping[str, Any]) -> int:
    """Restart a run that has ended by the loss of a process, as often as its --restarts allows; returns the final exit
    status. `given` are the options that the command has changed."""
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
        # The hosts of a --cluster file are in the run folder by now.
        status = go_on(folder, replace(flags, cluster=""), given, monotonic(), left=most - number)
    return status


class AllDone(CommandError):
    """All updates are done: there is nothing left to do."""


def go_on(
    folder: RunFolder,
    flags: ResumeFlags | RunFlags,
    given: Mapping[str, Any],
    began: float,
    command: Mapping[str, Any] | None = None,
    early: Early | None = None,
    left: int | None = None,
) -> int:
    """Check that the run can go on, write changed options, and go on; returns the exit status. `given` are the changed
    options. `command` is the request of the command line if that replaces the run's (see `run`). `left` is how often
    the run may restart by itself after this; None: as its options say."""
    # From here on no other process can start the run. Nothing has been changed so far.
    folder.lock()
    with ExitStack() as stack:
        stack.callback(folder.unlock)
        past = _past(folder)
        before, was, done = past.config, past.asked, past.updates
        options = replace(before.flags, **given)
        if options.updates < done:
            raise CommandError(f"--updates: given {options.updates}, but {done} are done already; needed more")
        if options.updates == done and past.summary.get("status") == "done":
            return _complete(past, options, given, flags, by_run=command is not None)
        if was.get("agents") and not (flags.on or flags.cluster or flags.in_process):
            ended = "given a run whose hosts were agents with a ticket, which have ended with it"
            raise CommandError(f"{folder.path}: {ended}; needed: {going_on(folder)}")
        need = needed_agents(flags, options) if flags.on and options.first_generators else None
        enrolled = stack.enter_context(enrolment(flags, folder, before.graph.name, need)) if flags.on else None
        if enrolled is not None:
            fewest = need.first if need is not None and left is not None else 0
            cluster = _enrolled_hosts(enrolled, past, options, fewest)
            enrolled.again = (options.restarts if left is None else left) > 0
            if flags.place:
                cluster, _ = placed(flags.place, before.graph, cluster, options.generators)
        else:
            cluster = Cluster.read(Path(flags.cluster)) if flags.cluster else past.cluster
        spread = enrolled is not None and not flags.place
        config, cluster = _placed_anew(past, cluster, options, "mesh" in given, spread)
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
            given_now = {"cluster": cluster.model_dump(mode="json"), "wanted": command or was.get("wanted", {})}
            config.write(folder, {**was, **given_now, "agents": words})
        # The summary is of the last life; this life may be killed before it can write its own.
        (folder.path / "summary.json").unlink(missing_ok=True)

        notes = partial(_note_changes, past, config, given)
        status = go(folder, config, cluster, flags, began, notes, past.seconds, enrolled, early)
        if status == FAILED and config != before and latest_checkpoint(folder) == past.saved:
            before.write(folder, was)  # undo the change: it may be the reason of the failure
        return status


@dataclass(frozen=True)
class _Past:
    """The state left by the earlier lives of a run. `asked` is the part of `config.json` about the user's request,
    `edited` has a line for each changed code file, and `seconds` is how long the run has worked so far."""

    folder: RunFolder
    config: RunConfig
    asked: Mapping[str, Any]
    summary: Mapping[str, Any]
    saved: SavedCheckpoint | None
    edited: tuple[str, ...]
    seconds: float

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_of(self.folder, self.asked)

    @property
    def updates(self) -> int:
        """How many updates are done and need not be repeated."""
        return self.saved.update if self.saved is not None else 0


def _complete(
    past: _Past, options: RunOptions, given: Mapping[str, Any], flags: ResumeFlags | RunFlags, *, by_run: bool
) -> int:
    """Send to trackers what they lack of a run whose updates are all done; returns the exit status. Raises AllDone if
    they lack nothing. `by_run`: the command is `run`, which may have other options, too."""
    folder, done = past.folder, past.updates
    tracked = past.summary.get("tracked", {})
    lacking = [name for name in options.track if not tracked.get(name, {}).get("complete")]
    if not lacking:
        raise AllDone(f"{folder.path}: all {done} updates are done; --updates {2 * done} would go on")
    if not by_run and (others := sorted(given.keys() - {"track"})):
        needed = f"--track alone, since all {done} updates are done, or more of them"
        raise CommandError(f"--{others[0].replace('_', '-')}: given {given[others[0]]}, needed {needed}")
    if faults := list(record_lacks(replace(options, track=tuple(lacking)))):
        raise CommandError(faults_text(faults))
    config = replace(past.config, flags=replace(past.config.flags, track=options.track))
    if config != past.config:
        config.write(folder, dict(past.asked))
    complete = complete_trackers(folder, config, past.summary, lacking, flags)
    # Trackers never change how a run ends, but `resume` was asked for them alone.
    return DONE if complete or by_run else FAILED


def _note_changes(past: _Past, config: RunConfig, given: Mapping[str, Any], display: Display) -> None:
    """Note the changes of options and code: the run's rows are then of several versions of them."""
    folder, since = past.folder, f"from update {past.updates} on: "
    for name in given:
        old, new = (as_typed(getattr(options, name)) for options in (past.config.flags, config.flags))
        if new != old:
            said = f"{since}--{name.replace('_', '-')} {new} in place of {old}"
            jumps = name == "updates" and _follows_length(config)
            if jumps:
                said += "; the learning rate is that of this update in a run of the new length"
                display.tell({"kind": "note", "level": "warning", "text": said})
            folder.add_note("warning" if jumps else "info", said)
    for line in past.edited:
        folder.add_note("warning", f"{since}{line}")


def _follows_length(config: RunConfig) -> bool:
    """True if a learning rate may follow a schedule over all updates of the run: by a flag, or as a function."""
    rates = (value for node in config.graph.nodes for name, value in node.options if name == "lr")
    decay = config.flags.lr_decay
    return decay != "constant" if decay else any(map(names_function, rates))


def _past(folder: RunFolder) -> _Past:
    """Read the state from which a run goes on, and report what is damaged or edited. Raises CommandError, RecordError
    or LogError if the run cannot go on from it."""
    config, asked = RunConfig.load(folder), folder.read_json("config.json", ConfigFile).get("asked", {})
    digests = asked.get("digests", {})
    if lacks := [*changed_inputs(config.flags, digests), *lost_code(config, asked.get("folder", ""))]:
        raise CommandError("\n".join([f"{folder.path}: the run cannot go on; nothing was changed:", *lacks]))
    edited = tuple(edited_code(digests))
    for line in edited:
        tell(line)
    summary = _summary(folder)
    require_no_link(folder)
    saved = latest_checkpoint(folder)
    if saved is not None:
        _require_checkpoint(saved, config)
    # Raises LogError for a changed or cut log: nothing can be appended to it.
    records = max(saved.records if saved else 0, int(summary.get("records", 0)))
    logged = 0.0
    if records or folder.events.exists():
        logged = sum(segment.seconds for segment in read_log(folder.events, records))
    rows_before(folder.metrics, saved.update if saved else 0)
    seconds = float(summary.get("wall_s", logged))
    return _Past(folder, config, asked, summary, saved, edited, seconds)


def _enrolled_hosts(enrolled: Enrolled, past: _Past, options: RunOptions, fewest: int) -> Cluster:
    """Wait for the agents; returns their hosts, in an order that suits the old plan. `fewest` agents are enough."""
    # Hosts that could be late at the start may be late again.
    total = len(past.cluster.hosts) if options.first_generators else 0
    cluster = enrolled.await_agents(options.startup_deadline, total, fewest)
    if total != len(cluster.hosts):
        return cluster
    # The last hosts may be late: give them the places of old hosts whose replicas may be late, too.
    plan = past.config.plan
    wait = past.config.may_be_late - past.config.holding(past.saved.cut if past.saved is not None else None)
    needed = {host for replica in plan.replicas if replica.name not in wait for host in replica.hosts}
    places = sorted(range(total), key=lambda place: past.cluster.hosts[place].name not in needed)
    ordered = dict(zip(places, cluster.hosts, strict=True))
    return cluster.model_copy(update={"hosts": tuple(ordered[place] for place in range(total))})


def _placed_anew(
    past: _Past, cluster: Cluster, options: RunOptions, anew: bool, spread: bool
) -> tuple[RunConfig, Cluster]:
    """The run with other options, and its hosts, each in the place of a former one. The plan is made `anew` for other
    meshes; also, with a message, if the hosts lack something, and then generators may be `spread` over them."""
    config = past.config
    if cluster is not past.cluster:
        on = moved(config.plan, past.cluster, cluster)
        if not on.lacks:
            config, cluster = replace(config, plan=on.plan), on.cluster
        elif spread:
            cluster, _ = placed((), config.graph, cluster, options.generators)
        if on.lacks and not anew:
            anew, text = True, "a new plan is made, since the hosts differ from those of the old one:"
            print(visible("\n  ".join([text, *on.lacks])), flush=True)
    # Otherwise the plan stays as it is, even if this machine has other devices now.
    if not anew:
        return decided(replace(config, flags=options), cluster), cluster
    # Pools without a new mesh keep their meshes.
    meshes = read_meshes(config.flags.mesh) | read_meshes(options.mesh)
    options = replace(options, mesh=tuple(f"{pool}={spelled(m)}" for pool, m in meshes.items()))
    return decided(replace(config, flags=options, plan=plan_for(config.graphs, cluster, options)), cluster), cluster


def _summary(folder: RunFolder) -> Mapping[str, Any]:
    """The summary of the run's last life; empty if it was killed. A damaged summary is reported and counts as empty: a
    resume needs nothing that only the summary has."""
    path = folder.path / "summary.json"
    if not os.path.lexists(path):
        return {}
    try:
        summary: Mapping[str, Any] = folder.read_json("summary.json", Summary)
    except RecordError as error:
        if path.is_symlink() or not path.is_file():  # not damage, but another file put there
            raise
        tell(f"{error}; the run goes on without it")
        return {}
    return summary


def cluster_of(folder: RunFolder, was: Mapping[str, Any]) -> Cluster:
    """The hosts on which the run was before."""
    try:
        return Cluster.model_validate(was.get("cluster"))
    except ValueError as error:
        said = " ".join(str(error).split())
        raise RecordError(f"{folder.config}: asked.cluster: {said}; needed what the run wrote") from None


def require_own(folder: RunFolder) -> None:
    """Ask whether to go on with a folder that other users have made or may change, since its graph names the code that
    a resume runs. Raises CommandError unless the answer is yes, and if there is no terminal to ask."""
    if not (foreign := folder.foreign()):
        return
    given = f"{foreign}, and a resume runs the code that the folder names, with your rights"
    needed = "needed a run of your own, or --trust"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandError(f"{given}; {needed}")
    print(visible(f"penstock resume: {given}. Go on? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(f"given another answer than yes; {needed}")


def _require_checkpoint(saved: SavedCheckpoint, config: RunConfig) -> None:
    """Check a checkpoint before any process starts. Raises RecordError if the scheduler of this run cannot have written
    it, CommandError if ranks could not read it."""
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
            raise CommandError(f"{error}; {resume_point_without(saved.folder)}") from error
        if text:
            raise CommandError(text)
