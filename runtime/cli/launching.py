"""From a traced program to the processes of a run: shared by `run`, `resume` and the base model."""

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any, cast

from penstock import __version__
from penstock.graph.errors import Fault
from penstock.host import module_command
from penstock.runtime.cli.display import Display, Line, clock, open_display, percent
from penstock.runtime.cli.enrolling import Enrolled
from penstock.runtime.cli.flags import StartFlags
from penstock.runtime.cli.tracing import CommandError, Traced, faults_text, usage_errors
from penstock.runtime.cli.tracker_processes import END_S, TrackerProcesses
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.endpoints import tcp_endpoint
from penstock.runtime.cluster.interpreters import interpreter_lacks
from penstock.runtime.cluster.placement import Plan, spelled, why_not
from penstock.runtime.control.early import Early
from penstock.runtime.control.failure import MENDABLE, FailureCode
from penstock.runtime.control.launcher import QUIET_S, Launcher
from penstock.runtime.control.listener import Listener, WireError
from penstock.runtime.control.messages import read_record
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.signals import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    StopRequest,
    on_stop,
    wait_handing_on,
)
from penstock.runtime.record.checkpoints import newest_usable, read_best
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.event_log import read_segments
from penstock.runtime.record.folder import JOB, RunFolder
from penstock.runtime.record.metrics import LOST, read_undamaged
from penstock.runtime.record.trackers import lacks
from penstock.runtime.record.typed_json import ConfigFile
from penstock.runtime.schedule.compile import Tables, check_rules
from penstock.runtime.schedule.events import Event
from penstock.runtime.schedule.replay import SegmentOrigin

# The largest event log, in bytes, that is replayed for the summary of a run whose controller could not write one.
LOG_BYTES = 32 << 20
SCRIPT, _ = JOB
# Seconds for trackers at the end of a preempted run. A resume sends what is missing then.
HASTE_S = 0.5
STATUS = {DONE: "done", INTERRUPTED: "stopped", PREEMPTED: "stopped"}


def configure(traced: Traced, cluster: Cluster, model: str, plan: Plan | None = None) -> RunConfig:
    """Make the configuration of a run of a traced program on a cluster, with `plan` or the placement by its flags.
    Raises CommandError for the program's faults and for flags that it does not allow, ClusterError for pools or devices
    that the cluster lacks."""
    flags = traced.flags.options(model)
    with usage_errors():
        config = decided(RunConfig.make(traced.sound(), traced.evaluation, cluster, flags, plan), cluster)
    try:
        json.dumps(config.to_json(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # The JSON string with the first invalid character: the user needs that name, not the megabyte of JSON around.
        before, after = error.object[: error.start], error.object[error.start :]
        given = before.rpartition('"')[2] + after.partition('"')[0]
        needed = "needed another path or name, for it travels in messages; a run folder may have any"
        raise CommandError(f"given {given!r}, which is no UTF-8; {needed}") from None
    with usage_errors():
        check_rules(Tables(config.graph, config.plan), config.rules(0))
    for channel in config.channels().values():
        if why := why_not(flags.transport, channel.source, channel.replicas, flags.delta):
            raise CommandError(f"--transport: given {flags.transport}: {why}; auto takes what all ranks can")
    return config


def decided(config: RunConfig, cluster: Cluster) -> RunConfig:
    """The run with the options that depend on the memory of its GPUs filled in. Raises ClusterError for a model that
    does not fit there, or in the memory of hosts."""
    if not config.flags.model and config.flags.device == "cpu":
        return config
    # Imports numpy and the cost model, which a small model does not need.
    from penstock.runtime.plan.trainer_fit import fitted, require_hosts

    require_hosts(config, cluster)
    return replace(config, flags=fitted(config, cluster))


def asked(
    name: str,
    argv: Sequence[str],
    cluster: Cluster,
    digests: Mapping[str, str],
    wanted: Mapping[str, Any] | None = None,
    agents: Sequence[str] = (),
) -> dict[str, Any]:
    """The part of `config.json` about the user's request. `digests` are those of the data and code files. `wanted` is
    compared with a later command line that goes on with the run. `agents` are the words of the command line about
    agents."""
    return {
        "program": name,
        "command": list(argv),
        "folder": str(Path.cwd()),
        "digests": dict(digests),
        "wanted": dict(wanted or {}),
        "cluster": cluster.model_dump(mode="json"),
        "agents": list(agents),
        "penstock": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def launch(
    folder: RunFolder,
    cluster: Cluster,
    tell: Callable[[Line], None],
    enrolled: Enrolled | None = None,
    early: Early | None = None,
    stop_request: StopRequest | None = None,
) -> int:
    """Run the folder's run in processes, of which some may have been started `early`, on the agents that have
    `enrolled`; returns the exit status. `stop_request` has the signals received so far."""
    config = RunConfig.load(folder)
    desk, starter = (enrolled.desk, enrolled.agents) if enrolled else (None, None)
    if desk is not None:
        for host in cluster.hosts:
            desk.require(host.name, *config.plan.needs(host.name))
    launcher = Launcher(
        folder.path,
        early.run if early is not None else secrets.token_hex(6),
        cluster,
        tell,
        grace=config.flags.grace,
        # Longer than the controller's own deadlines: it reports a rank that does not answer before this passes.
        deadline=max(config.flags.deadline, config.flags.startup_deadline) + QUIET_S,
        modules=config.modules(),
        desk=desk,
        starter=starter,
        early=early,
        again=enrolled is not None and enrolled.again,
        stop_request=stop_request,
    )
    return launcher.run()


def go(
    folder: RunFolder,
    config: RunConfig,
    cluster: Cluster,
    flags: StartFlags,
    began: float,
    prepare: Callable[[Display], None],
    earlier: float,
    enrolled: Enrolled | None,
    early: Early | None,
) -> int:
    """Run to the end with a display, then write and print the summary; returns the exit status. The command `began` on
    the monotonic clock. `prepare` is called first, with the display. `earlier` are the run's wall seconds before this
    command. `early` has processes that wait for the run."""
    name, updates = config.graph.name, config.flags.updates
    # Hold its descriptor: the user may rename the folder while the run is alive.
    folder.hold()
    with TrackerProcesses() as trackers:
        with open_display(name, updates, relative(folder.path), plain=flags.plain or flags.in_process) as display:
            prepare(display)
            trackers.start(folder, config.flags.track, display.tell)
            stop_request = StopRequest()
            # Signals before the launcher listens are kept for it; later ones have nothing left to end.
            with on_stop(lambda number, _: stop_request.hear(number)):
                if flags.in_process:  # in one process with the terminal, so that a debugger works
                    if early is not None:
                        early.close()
                    command = module_command("penstock.runtime.cli.children", "run", folder.path)
                    status = wait_handing_on(subprocess.Popen(command), stop_request)
                    status = status if status in STATUS else FAILED
                else:
                    status = launch(folder, cluster, display.tell, enrolled, early, stop_request)
                if enrolled is not None:
                    # At once: agents enrol for the run's next life while this one is still being summarised.
                    enrolled.desk.rest()
                    enrolled.reason, enrolled.over = f"the run {STATUS.get(status, 'failed')}", status == DONE
                    enrolled.goes_on = enrolled.again and status == FAILED and display.progress.cause in MENDABLE
                errors = display.progress.errors
                if (moved := folder.follow()) and status != DONE and moved not in errors:
                    errors.append(moved)
                summary = finish(folder, status, errors, monotonic() - began, earlier, display.progress.cause)
        in_haste = status == PREEMPTED
        report, drawn = draw(folder, summary, in_haste=in_haste)
        if trackers.trackers:
            _end_trackers(trackers, folder, report, summary, errors, began, in_haste)
    folder.release()
    _print_end(folder, summary, updates, errors, drawn, flags.json)
    return status


def complete_trackers(
    folder: RunFolder,
    config: RunConfig,
    summary: Mapping[str, Any],
    names: Sequence[str],
    flags: StartFlags,
) -> bool:
    """Send the trackers `names` what they lack of a run that is done, then update and print its `summary`. True if each
    of them has everything now."""
    name, updates, report = config.graph.name, config.flags.updates, folder.path / "report.html"
    stale = [summary.get("tracked", {}).get(tracker, {}).get("warning") for tracker in names]
    warnings = [text for text in summary.get("warnings", ()) if text not in stale]
    ended, errors = {**summary, "warnings": warnings}, list[str]()
    with TrackerProcesses() as trackers, open_display(name, updates, relative(folder.path), plain=True) as display:
        trackers.start(folder, names, display.tell)
        _end_trackers(trackers, folder, report if report.exists() else None, ended, errors, None, in_haste=False)
    _print_end(folder, ended, updates, errors, relative(report) if report.exists() else "", flags.json)
    return all(ended["tracked"][tracker]["complete"] for tracker in names)


def _print_end(
    folder: RunFolder, summary: Mapping[str, Any], updates: int, errors: Sequence[str], drawn: str, as_json: bool
) -> None:
    # The pipe or terminal may be closed: `main` sets the exit status then.
    with suppress(OSError):
        for error in errors:
            print(visible(f"penstock: {error}"), file=sys.stderr)
        text = summary_text(summary, updates, relative(folder.path), drawn, going_on(folder))
        print(json.dumps(summary) if as_json else visible(text))


def _end_trackers(
    trackers: TrackerProcesses,
    folder: RunFolder,
    report: Path | None,
    summary: dict[str, Any],
    errors: list[str],
    began: float | None,
    in_haste: bool,
) -> None:
    """Wait for the trackers of a run as long as allowed, and add their results and the command's duration to the
    summary: it `began` on the monotonic clock, or was not the run's own (None). `in_haste`: a cluster manager is about
    to end this process."""
    ended = trackers.end(report, summary["updates"], HASTE_S if in_haste else END_S)
    summary["tracked"] = {**summary.get("tracked", {}), **ended}
    if began is not None:
        summary["command_s"] = round(monotonic() - began, 3)
    found = [one["warning"] for one in ended.values() if one["warning"]]
    summary["warnings"] = [*summary.get("warnings", ()), *found]
    with suppress(OSError):
        for text in found:
            print(visible(f"penstock: {text}"), file=sys.stderr)
    try:
        folder.write_json("summary.json", summary)
    except RecordError as error:
        errors.append(str(error))


def draw(folder: RunFolder, summary: Mapping[str, Any], *, in_haste: bool) -> tuple[Path | None, str]:
    """Write `report.html` (`end_with_report`). Returns its path (None if there is none), and a text: where it is, or
    how to make it. A failure does not change how the run has ended."""
    from penstock.runtime.report.write import end_with_report  # imports templates: not at the start

    stopped = summary["status"] == "stopped"
    path, reason = end_with_report(folder, float(summary["wall_s"]), stopped=stopped, in_haste=in_haste)
    if path is not None:
        return path, relative(path)
    return None, f"{' '.join(reason.split())} (penstock report {quote(relative(folder.path))})"


def record_lacks(flags: RunOptions) -> Iterator[Fault]:
    """Faults for trackers whose clients are not installed here. Raises CommandError for an invalid --keep-best."""
    try:
        if flags.keep_best:
            read_best(flags.keep_best)
    except ValueError as error:
        raise CommandError(str(error)) from None
    yield from filter(None, map(lacks, dict.fromkeys(flags.track)))


def require_installed(config: RunConfig, cluster: Cluster) -> None:
    """Raises CommandError for trackers whose clients are not installed, and for local interpreters that lack modules
    which ranks need."""
    faults = [*record_lacks(config.flags), *interpreter_lacks(config.graphs, config.plan, cluster, config.flags.engine)]
    if faults:
        raise CommandError(faults_text(faults))


def require_processes(config: RunConfig, cluster: Cluster, flags: StartFlags) -> None:
    """Raises CommandError, before anything is written, for a run in one process whose plan has replicas of several
    ranks, other interpreters or several GPUs, and for a controller that cannot listen at the address in the cluster
    file."""
    for pool in config.plan.pools if flags.in_process else ():
        if pool.python:
            given = f"--in-process with pools.{pool.name}.python ({pool.python})"
            raise CommandError(f"{given}, needed one interpreter for all: leave one of the two out")
    # Try this before the folder is made: a port in use must not leave a folder behind.
    if not flags.in_process and cluster.bind:
        try:
            Listener(tcp_endpoint(cluster.bind), {}).close()
        except WireError as error:
            raise CommandError(str(error.strerror)) from None
    for replica in config.plan.replicas if flags.in_process else ():
        if len(replica.ranks) > 1:
            given = f"--in-process with {replica.name} of {len(replica.ranks)} ranks ({spelled(replica.mesh)})"
            raise CommandError(f"{given}, needed one rank for each: they would wait for each other")
    gpus = {rank.device for replica in config.plan.replicas for rank in replica.ranks} - {"cpu"}
    if flags.in_process and len(gpus) > 1:
        given = f"--in-process with ranks on {', '.join(sorted(gpus))}"
        raise CommandError(f"{given}, needed one device for all: --device {min(gpus)}, or cpu")


def finish(
    folder: RunFolder, status: int, errors: list[str], seconds: float, earlier: float = 0.0, cause: str = ""
) -> dict[str, Any]:
    """Complete and write the summary. If the controller wrote none, it is made from the folder.

    Only this process knows the exit `status`, the code of the first reported failure (`cause`), the whole command's
    `seconds`, the run's wall seconds before this command (`earlier`), and where a resume begins. If the summary cannot
    be written, the reason is added to `errors`.
    """
    try:
        summary: dict[str, Any] = folder.read_json("summary.json")
    except RecordError:
        # The controller was killed, or its disk is full.
        summary = _made(folder, seconds)
    cause = summary.get("cause") or cause
    saved, damaged = newest_usable(folder, refused=cause == FailureCode.CHECKPOINT)
    ended = STATUS.get(status, "failed")
    # The controller's last errors may be missing in its summary.
    reasons = [summary["error"], *(errors if ended != summary["status"] else ())]
    summary |= {
        "status": ended,
        "error": "\n".join(dict.fromkeys(filter(None, reasons))),
        "cause": cause,
        "wall_s": round(summary["wall_s"] + earlier, 3),
        "checkpoint": saved.update if saved else 0,
        **({"damaged": [place.name for place in damaged]} if damaged else {}),
        "command_s": round(seconds, 3),
    }
    try:
        folder.write_json("summary.json", summary)
    except RecordError as error:
        errors.append(str(error))
    return summary


def _made(folder: RunFolder, seconds: float) -> dict[str, Any]:
    """Make a summary from the run folder, without a status."""
    rows, _ = read_undamaged(folder.metrics)
    saved, _ = newest_usable(folder)
    accuracy = saved.accuracy if saved else {}
    groups, last = sum(row.get("groups", 0) for row in rows), rows[-1] if rows else {}
    # The rows count groups up to the last update. Replaying the log adds the counts after it, if that takes only
    # seconds. But the last second of a killed controller's log is lost, so take the maximum of both.
    lost = {name: sum(count for row in rows if isinstance(count := row.get(name), int)) for name in LOST}
    raised = ""
    with suppress(OSError, ValueError, KeyError, RecordError):
        segments, _ = read_segments(folder.events) if folder.events.stat().st_size < LOG_BYTES else ([], None)
        for log in [log for segment in segments for log in segment.stages if log.facts.get("stage") == "train"][-1:]:
            scheduler = SegmentOrigin.from_json(log.facts).scheduler()
            for step in log.steps:
                scheduler.handle(cast(Event, read_record(step.event)))
            known = {**scheduler.ledger.outcomes, "retried": scheduler.ledger.retried}
            lost, raised = {name: max(count, known[name]) for name, count in lost.items()}, scheduler.raised
    return {
        "status": "",
        "accuracy_before": accuracy.get("before"),
        "accuracy_after": accuracy.get("after"),
        "updates": last["update"] + 1 if rows else 0,
        "groups": groups,
        "fates": {"consumed": groups, "dropped": lost["dropped"], "failed": lost["failed"]},
        "retried": lost["retried"],
        "last_failure": raised,
        "wall_s": round(seconds, 3),
        "reward_mean": last.get("reward_mean"),
        **({"accuracy": last["accuracy"]} if "accuracy" in last else {}),
        "dropped_frames": {},
        "warnings": [],
        "error": "",
        "cause": "",
        "folder": str(folder.path),
    }


def summary_text(summary: Mapping[str, Any], updates: int, folder: str, report: str = "", command: str = "") -> str:
    """The summary for people. `updates` is the number asked for. `report` says where the page is, `command` how to go
    on if it is not by `penstock resume` alone."""
    rows = [("status", str(summary["status"]))]
    # Of a program that has changed nothing, or that measures by itself, there is one figure.
    ends = ["accuracy_before", "accuracy_after"] if summary.get("updates") else ["accuracy_before"]
    for figures in (ends, ["accuracy"]):
        if any(summary.get(name) is not None for name in figures):
            rows.append(("accuracy", " → ".join(percent(summary.get(name)) for name in figures)))
            break
    counts = [(summary.get("fates", {}).get(outcome), outcome) for outcome in ("dropped", "failed")]
    counts.append((again := summary.get("retried"), f"firing{'s' * (again != 1)} tried again"))
    lost = "".join(f", {count} {what}" for count, what in counts if count)
    done = summary.get("updates", 0)
    rows.append(("updates", f"{done} of {updates}, {summary.get('groups', 0)} prompt groups{lost}"))
    if wrong := list(summary.get("not_finite") or ()):
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        rows.append(("no number", f"{', '.join(wrong[:5])}{more}: null in metrics.jsonl"))
    if comings := list(summary.get("replicas") or ()):
        said = [f"{one['replica']} {one['event']} at {clock(one['time_s'] or 0.0)}" for one in comings[:4]]
        rows.append(("replicas", ", ".join(said) + (f", and {len(comings) - 4} more" if comings[4:] else "")))
    rows += [("time", clock(summary.get("command_s", 0.0))), ("folder", folder)]
    rows += [("report", report)] if report else []
    for name, one in summary.get("tracked", {}).items():
        lacking = "" if one["complete"] else f" ({one['updates']} of {done} updates)"
        nothing = f"its client opened nothing{' in this life' if one['updates'] else ''}"
        rows.append(("tracked", f"{name}: {one['where'] or nothing}{lacking}"))
    if summary["status"] == "done" and not all(one["complete"] for one in summary.get("tracked", {}).values()):
        rows.append(("to track", f"penstock resume {quote(folder)}, which sends what is missing"))
    at, damaged = summary.get("checkpoint", 0), summary.get("damaged", ())
    if summary["status"] == "stopped" or (summary["status"] == "failed" and (at or damaged)):
        begin = f"update {at}" if at else "the beginning"
        if at < done:
            held = f"the last checkpoint, of update {at}" if at else f"{begin}, since there is no checkpoint"
            begin = f"{held} ({done - at} update{'s' if done - at > 1 else ''} will be done again)"
        first = "".join(f"move {quote(f'{folder}/checkpoints/{name}')} away, then " for name in damaged)
        rows.append(("to go on", f"{first}{command or f'penstock resume {quote(folder)}'}, from {begin}"))
    return "\n".join(f"{name:<11}{value}" for name, value in rows)


def going_on(folder: RunFolder) -> str:
    """The command that goes on with the run of a folder, as typed in this folder; "" if it has no config."""
    try:
        was = folder.read_json("config.json", ConfigFile).get("asked", {})
    except RecordError:
        return ""
    words, path = was.get("agents", []), folder.path
    # A job's script is in the run folder; an array's script is next to the folders of its tasks.
    for script, task in ((path / SCRIPT, ""), (path.parent / SCRIPT, f"--array={quote(path.name)} ")):
        if "slurm" in words and script.is_file():
            return f"sbatch {task}{quote(relative(script))}"
    return " ".join(["penstock resume", quote(relative(path)), *map(quote, words)])


def relative(path: Path) -> str:
    """The path as typed in the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
