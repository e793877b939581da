"""Which checkpoint a run goes on from. A folder counts once its `cut.json` is written: the last thing of a cut."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.record.folder import RunFolder

CUT = "cut.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete cut: before which update, the scheduler's part of it, the accuracies known by then, and the figures of
    pending groups that stand in no row yet (see `metrics.Rows.to_json`)."""

    folder: Path
    update: int
    cut: Mapping[str, Any]
    accuracy: Mapping[str, float | None]
    figures: Mapping[str, Any]


def checkpoint_name(update: int) -> str:
    return f"{update:08d}"


def write_cut(
    folder: RunFolder,
    update: int,
    cut: Mapping[str, Any],
    accuracy: Mapping[str, float | None],
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Make the checkpoint of `update` count."""
    name = f"{folder.checkpoints.name}/{checkpoint_name(update)}/{CUT}"
    folder.write_json(name, {"update": update, "cut": cut, "accuracy": accuracy, "figures": figures or {}})


def latest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest complete checkpoint; None before the first."""
    complete = sorted(path.parent for path in folder.checkpoints.glob(f"*/{CUT}"))
    if not complete:
        return None
    facts = folder.read_json(str(complete[-1].relative_to(folder.path) / CUT))
    return Checkpoint(complete[-1], facts["update"], facts["cut"], facts["accuracy"], facts.get("figures", {}))
