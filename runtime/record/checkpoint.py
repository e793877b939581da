"""Which checkpoint a run goes on from, and how a new one comes to be.

All ranks write their parts of a cut into one fresh folder, `UPDATE-RUN-TOKEN`. When they are on the disk, `cut.json`
follows, and then the folder gets a name by which it counts: `UPDATE`, or `UPDATE.2` where the run has one of that
update already. What counts is never written to again, so that a process which dies between any two files leaves the
last checkpoint as it was. A fresh folder that never got its name is removed when the run ends or goes on.

A host with a run folder of its own keeps its parts in the fresh folder: `cut.json` has that name, too.
"""

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.record.faults import RecordError, disk_fault
from penstock.runtime.record.folder import RunFolder, make_folder, sync
from penstock.runtime.record.typed_json import CutFile

CUT = "cut.json"
_COUNTS = re.compile(r"(\d{8,})(?:\.(\d+))?")
_FRESH = re.compile(r"\d{8,}-(\w+)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete cut: before which update, the scheduler's part of it, the accuracies known by then, and the figures of
    pending groups that stand in no row yet (see `metrics.Rows.to_json`). `written` is the name that the folder had
    while it was written, and still has on a host with a run folder of its own."""

    folder: Path
    update: int
    cut: Mapping[str, Any]
    accuracy: Mapping[str, float | None]
    figures: Mapping[str, Any]
    written: str


def update_of(name: str) -> int:
    """The update of a checkpoint's folder."""
    return int(re.split(r"[-.]", name)[0])


def require_no_link(folder: RunFolder) -> None:
    """Raises RecordError where `checkpoints` is a symbolic link, by which cuts would be written elsewhere."""
    if folder.checkpoints.is_symlink():
        given = "given a symbolic link, which is not followed here"
        raise RecordError(f"{folder.checkpoints}: {given}; needed a folder")


def open_cut(folder: RunFolder, run: str, update: int) -> str:
    """Make the fresh folder of a cut before `update` by the run with id `run`; its name. Raises RecordError."""
    name = f"{update:08d}-{run}-{secrets.token_hex(8)}"
    try:
        require_no_link(folder)
        make_folder(folder.checkpoints / name, fresh=True)
    except OSError as error:
        raise disk_fault(folder.checkpoints / name, error) from error
    return name


def write_cut(
    folder: RunFolder,
    name: str,
    cut: Mapping[str, Any],
    accuracy: Mapping[str, float | None],
    figures: Mapping[str, Any] | None = None,
) -> Path:
    """Make the cut in the fresh folder `name`, whose parts are on the disk, a checkpoint that counts; its folder then.
    Raises RecordError."""
    update = update_of(name)
    facts = {"update": update, "cut": cut, "accuracy": accuracy, "figures": figures or {}, "written": name}
    folder.write_json(f"{folder.checkpoints.name}/{name}/{CUT}", facts)
    path, number = folder.checkpoints / f"{update:08d}", 1
    while os.path.lexists(path):
        number += 1
        path = folder.checkpoints / f"{update:08d}.{number}"
    try:
        sync(folder.checkpoints / name)
        os.rename(folder.checkpoints / name, path)
        sync(folder.checkpoints)
    except OSError as error:
        raise disk_fault(path, error) from error
    return path


def latest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest complete checkpoint; None before the first."""
    complete = [
        (int(found[1]), int(found[2] or 1), path.parent)
        for path in folder.checkpoints.glob(f"*/{CUT}")
        if (found := _COUNTS.fullmatch(path.parent.name))
    ]
    if not complete:
        return None
    newest = max(complete)[-1]
    facts = folder.read_json(str(newest.relative_to(folder.path) / CUT), CutFile)
    figures, written = facts.get("figures", {}), facts.get("written", newest.name)
    return Checkpoint(newest, facts["update"], facts["cut"], facts["accuracy"], figures, written)


def sweep_cuts(folder: RunFolder) -> None:
    """Remove the fresh folders of cuts that this run has given up. No process of the run may be alive."""
    with suppress(RecordError, OSError, KeyError, TypeError):
        if folder.checkpoints.is_symlink():
            return
        run = folder.read_json(folder.config.name)["run"]
        for path in folder.checkpoints.iterdir():
            found = _FRESH.fullmatch(path.name)
            if found is not None and found[1] == run and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
