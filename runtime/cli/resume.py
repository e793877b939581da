"""`penstock resume DIR`: go on with a run exactly where its last checkpoint is."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import tyro

from penstock.runtime.cli.flags import changes, read_flags, with_changes
from penstock.runtime.cli.inputs import require_inputs
from penstock.runtime.cli.launching import DisplayOptions, go, require_start
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cli.try_inputs import require_inputs_of
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import read_meshes, spelled
from penstock.runtime.control.launcher import FAILED
from penstock.runtime.control.run_config import RunConfig, plan_for
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.event_log import segment_seconds
from penstock.runtime.record.folder import (
    CUT,
    RunFolder,
    SavedCheckpoint,
    latest_checkpoint,
    part_path,
    read_facts,
    refusal,
    require_no_link,
    update_of,
)
from penstock.runtime.record.typed_json import ConfigFile, Cut, Summary, require_shape
from penstock.runtime.schedule.compile import compile_tables
from penstock.runtime.schedule.scheduler import Scheduler

DESCRIPTION = """Go on with a run exactly where its last complete checkpoint is.

The program, its options and the plan are those of the run folder. What was done after the checkpoint is done again.
The data, the model and the program's file must be where they were, and the data unchanged. A resume runs the code
that the folder names, with your rights: where other users have made the folder, it asks first.

Examples:
  penstock resume runs/aipo-20250304-050607
  penstock resume runs/aipo-20250304-050607 --updates 200"""


@dataclass(frozen=True)
class ResumeFlags:
    """Flags of resume"""

    dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder."""
    in_process: bool = False
    """Everything in one process and one thread, for a debugger."""
    trust: bool = False
    """Run the code that the folder names even if other users have made the folder, without being asked."""
    plain: bool = False
    """Plain lines instead of the live display."""
    json: bool = False
    """The last line of output is the summary as JSON."""


def main(argv: Sequence[str]) -> int:
    began = monotonic()
    flags: Any = read_flags(with_changes(ResumeFlags), "resume", argv, DESCRIPTION)
    folder = RunFolder.open(flags.dir)
    if not flags.trust:
        _require_own(folder)
    folder.lock()
    try:
        config, asked = RunConfig.load(folder), folder.read_json("config.json", ConfigFile).get("asked", {})
        require_inputs(folder.path, config, asked)
        earlier = _earlier_seconds(folder)
        require_no_link(folder)
        saved, cluster = latest_checkpoint(folder), _cluster(folder, asked)
        if saved is not None:
            _require_cut(saved, config)
            _require_format(saved, config)
        before, config = config, _changed(folder, config, cluster, changes(flags))
        look = DisplayOptions(flags.plain, flags.json, flags.in_process, began)
        require_start(config, cluster, look)
        require_inputs_of(config.graphs, config.flags)
        if config != before:
            config.write(folder, asked)
        (folder.path / "summary.json").unlink(missing_ok=True)
        status = go(folder, config, cluster, look, earlier=earlier)
        if status == FAILED and config != before and latest_checkpoint(folder) == saved:
            before.write(folder, asked)  # what was wanted now may be why
        return status
    finally:
        folder.unlock()


def _require_own(folder: RunFolder) -> None:
    """Asks whether to go on with a folder that others have made, since its graph names the code that a resume runs.
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


def _earlier_seconds(folder: RunFolder) -> float:
    """Wall seconds of the run so far: as its summary says, else, since nobody lived to write one, as the log does.

    Raises LogError for a log that was changed, which nothing can be added to."""
    logged = sum(segment_seconds(folder.events)) if folder.events.exists() else 0.0
    summary = folder.path / "summary.json"
    return float(folder.read_json(summary.name, Summary).get("wall_s", logged)) if summary.exists() else logged


def _cluster(folder: RunFolder, asked: Mapping[str, Any]) -> Cluster:
    """Raises RecordError for a folder that does not say on what cluster its run was."""
    try:
        return Cluster.model_validate(asked.get("cluster"))
    except ValueError as error:
        said = " ".join(str(error).split())
        raise RecordError(f"{folder.config}: asked.cluster: {said}; needed what the run wrote") from None


def _require_cut(saved: SavedCheckpoint, config: RunConfig) -> None:
    """Raises RecordError for a checkpoint that the scheduler of this run cannot have written."""
    path = saved.folder / CUT
    require_shape(saved.cut, Cut, f"{path}: cut")
    if not update_of(saved.folder.name) == saved.update == saved.cut["update"]:
        given = f"given the cuts before updates {saved.update} and {saved.cut['update']}"
        raise RecordError(f"{path}: {given}; needed that before the update of the folder's name")
    try:
        rules = dataclasses.replace(config, flags=dataclasses.replace(config.flags, updates=saved.update)).rules(0)
        Scheduler(compile_tables(config.graph, config.plan), rules, saved.cut)
    except ValueError as error:
        raise RecordError(f"{path}: {error}; needed what the run wrote") from None


def _require_format(saved: SavedCheckpoint, config: RunConfig) -> None:
    """Raises CommandError for a checkpoint that ranks could not read, before any starts."""
    paths = (part_path(saved.folder, replica.name, 0) for pool in config.plan.pools for replica in pool.replicas)
    for path in filter(Path.exists, paths):
        try:
            text = refusal(path, read_facts(path))
        except ValueError as error:
            raise CommandError(str(error)) from error
        if text:
            raise CommandError(text)


def _changed(folder: RunFolder, config: RunConfig, cluster: Cluster, given: Mapping[str, Any]) -> RunConfig:
    """The run with the options that are given now. Raises CommandError if there is nothing left to do."""
    options = dataclasses.replace(config.flags, **given)
    saved = latest_checkpoint(folder)
    done, wanted = saved.update if saved else 0, options.updates
    if wanted < done:
        raise CommandError(f"--updates: given {wanted}, but {done} are done already; needed more", 2)
    if wanted == done and _finished(folder):
        raise CommandError(f"{folder.path}: all {done} updates are done; --updates {2 * done} would go on")
    if "mesh" not in given:
        return dataclasses.replace(config, flags=options)
    # Pools that are not named keep their meshes.
    meshes = read_meshes(config.flags.mesh) | read_meshes(options.mesh)
    options = dataclasses.replace(options, mesh=tuple(f"{pool}={spelled(m)}" for pool, m in meshes.items()))
    return dataclasses.replace(config, flags=options, plan=plan_for(config.graphs, cluster, options))


def _finished(folder: RunFolder) -> bool:
    path = folder.path / "summary.json"
    return path.exists() and bool(folder.read_json(path.name, Summary)["status"] == "done")
