"""From a traced program to processes: what `run`, `resume` and the base model share."""

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from penstock import __version__
from penstock.runtime.cli.display import Display, open_display
from penstock.runtime.cli.figures import clock, percent
from penstock.runtime.cli.progress import Line
from penstock.runtime.cli.traced import Traced
from penstock.runtime.control.config import RunConfig
from penstock.runtime.control.launch import DONE, INTERRUPTED, Launcher
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.place import place
from penstock.runtime.record.faults import RecordError
from penstock.runtime.record.folder import RunFolder

STATUS = {DONE: "done", INTERRUPTED: "stopped"}


@dataclass(frozen=True)
class Look:
    """How a run is shown, whether in one process, and when the command began."""

    plain: bool
    json: bool
    in_process: bool
    began: float


def configure(traced: Traced, cluster: Cluster, model: str) -> RunConfig:
    """The run of a traced program on a cluster. Raises CommandError for its faults, ClusterError for pools or
    devices that the cluster lacks."""
    flags = traced.flags.control(model)
    graphs = [traced.sound()] + ([traced.evaluation] if traced.evaluation is not None else [])
    plan = place(graphs, cluster, generators=flags.generators, slots=flags.slots, device=flags.device)
    return RunConfig(traced.sound(), traced.evaluation, plan, flags, secrets.token_hex(6))


def asked(name: str, argv: Sequence[str], cluster: Cluster) -> dict[str, Any]:
    """What the user asked for, as `config.json` keeps it."""
    return {
        "program": name,
        "command": list(argv),
        "cluster": cluster.model_dump(mode="json"),
        "penstock": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def launch(folder: RunFolder, cluster: Cluster, tell: Callable[[Line], None]) -> int:
    """Run what the folder says in processes of its own; the exit status."""
    return Launcher(folder.path, secrets.token_hex(6), cluster, tell).run()


def launch_here(folder: RunFolder) -> int:
    """Run it in one process that has the terminal, so that a debugger works; the exit status."""
    child = subprocess.Popen([sys.executable, "-m", "penstock.runtime.cli.inprocess_child", str(folder.path)])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the child's
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def go(
    folder: RunFolder,
    config: RunConfig,
    cluster: Cluster,
    look: Look,
    prepare: Callable[[Display], None] | None = None,
) -> int:
    """Run to the end with a display, write and tell the summary; the exit status. `prepare` comes first, on display."""
    name, updates = config.graph.name, config.flags.updates
    errors: list[str] = []
    with open_display(name, updates, relative(folder.path), plain=look.plain or look.in_process) as display:
        if prepare is not None:
            prepare(display)
        status = launch_here(folder) if look.in_process else launch(folder, cluster, display.tell)
        errors = display.progress.errors
    for error in errors:
        print(f"penstock: {error}", file=sys.stderr)
    summary = finish(folder, status, errors, monotonic() - look.began)
    print(json.dumps(summary) if look.json else summary_text(summary, updates, relative(folder.path)))
    return status


def finish(folder: RunFolder, status: int, errors: Sequence[str], seconds: float) -> dict[str, Any]:
    """The summary with the whole command's seconds; one is made where the controller could not."""
    try:
        summary: dict[str, Any] = folder.read_json("summary.json")
    except RecordError:
        summary = {
            "status": STATUS.get(status, "failed"),
            "accuracy_before": None,
            "accuracy_after": None,
            "updates": 0,
            "groups": 0,
            "wall_s": round(seconds, 3),
            "error": "\n".join(errors),
            "folder": str(folder.path),
        }
    summary["command_s"] = round(seconds, 3)
    folder.write_json("summary.json", summary)
    return summary


def summary_text(summary: Mapping[str, Any], updates: int, folder: str) -> str:
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    rows = [("status", str(summary["status"]))]
    if before is not None or after is not None:
        rows.append(("accuracy", f"{percent(before)} → {percent(after)}"))
    rows.append(("updates", f"{summary['updates']} of {updates}, {summary['groups']} prompt groups"))
    rows.append(("time", clock(summary["command_s"])))
    rows.append(("folder", folder))
    if summary["status"] == "stopped":
        rows.append(("to go on", f"penstock resume {folder}"))
    return "\n".join(f"{name:<11}{value}" for name, value in rows)


def relative(path: Path) -> str:
    """The path as one would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
