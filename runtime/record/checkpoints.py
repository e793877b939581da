"""A run's checkpoints: which ones are complete, their facts without tensors, which ones are kept. No torch.

**A checkpoint is complete or does not count.** All ranks write their shards into one fresh folder, `UPDATE-RUN-TOKEN`.
When the shards are on the disk, `cut.json` (the scheduler's state) follows. Then the folder gets its final name:
`UPDATE`, or `UPDATE.2` if the run has a checkpoint of that update already. Nothing is written to a folder with a final
name, so a process that dies between any two files leaves the last checkpoint as it was. A fresh folder that never got
its final name is removed when the run ends or is resumed. A host with its own run folder keeps its shards in the fresh
folder; `cut.json` has that name, too.

**The newest are kept, and the best.** When a checkpoint is complete, `surplus` says which older ones go: all but the
`keep` newest and the one with the best value of a metric. Such a folder is first renamed to a fresh name, so that it no
longer counts, then removed in the background: a process that dies meanwhile leaves no half of a checkpoint that counts.
Other hosts remove their folders when they are told which ones stay (`remove_others`).

**Damage is reported.** `cut.json` has a CRC-32 of its facts, and says how many records the event log had by then. A
folder with the final name of a checkpoint but no `cut.json` is damaged. `without` says where a resume would begin
without it.

A shard is a safetensors file: 8 bytes with the length of its header, the header as JSON, the tensors. This file knows
its path and facts; `tensor.checkpoint` writes and reads the tensors.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from penstock.runtime.record.errors import RecordError, disk_fault
from penstock.runtime.record.folder import RunFolder, make_folder, open_regular, sync, unused
from penstock.runtime.record.metrics import NO_NUMBERS
from penstock.runtime.record.typed_json import NEEDED, Count, Number, parse_json, require_shape

CUT = "cut.json"


class StateError(RuntimeError):
    """A rank's part of a checkpoint could not be written or read. The message names the file."""


class UnreadableError(StateError):
    """A part is missing or damaged. Another checkpoint may be whole."""


_COUNTS = re.compile(r"(\d{8,})(?:\.(\d+))?")
_FRESH = re.compile(r"\d{8,}-(\w+)-[0-9a-f]{16}")


class SavedCheckpoint(Struct, frozen=True):
    """A complete checkpoint, as in `cut.json`.

    update: the next update. cut: the scheduler's state; a resume requires it to be a `typed_json.Cut`. accuracy: the
    accuracies known by then. figures: the metrics of pending groups that are in no row yet (`metrics.Rows.to_json`).
    written: the name of the folder while it was written, and still on a host with its own run folder. row: the numbers
    in the row of the update before it (`metrics.jsonl`). records: how many records the event log had by then; 0 in
    checkpoints of versions that did not count them.
    """

    update: Count
    cut: dict[str, Any]
    accuracy: dict[str, Number]
    figures: dict[str, Any] = field(default_factory=dict)
    written: str = ""
    row: dict[str, Number] = field(default_factory=dict)
    records: Count = 0
    folder: Path = Path()


def update_of(name: str) -> int:
    """The update in the name of a checkpoint's folder."""
    return int(re.split(r"[-.]", name)[0])


def require_no_link(folder: RunFolder) -> None:
    """Raises RecordError if `checkpoints` is a symbolic link: checkpoints would be written elsewhere."""
    if folder.checkpoints.is_symlink():
        given = "given a symbolic link, which is not followed here"
        raise RecordError(f"{folder.checkpoints}: {given}; needed a folder")


def begin_checkpoint(folder: RunFolder, run: str, update: int) -> str:
    """Make the fresh folder of a checkpoint before `update` by the run with id `run`. Returns its name. Raises
    RecordError."""
    name = f"{update:08d}-{run}-{secrets.token_hex(8)}"
    try:
        require_no_link(folder)
        make_folder(folder.checkpoints / name, fresh=True)
    except OSError as error:
        raise disk_fault(folder.checkpoints / name, error) from error
    return name


def complete_checkpoint(
    folder: RunFolder,
    name: str,
    cut: Mapping[str, Any],
    accuracy: Mapping[str, float | None],
    figures: Mapping[str, Any] | None = None,
    row: Mapping[str, Any] | None = None,
    records: int = 0,
) -> Path:
    """Write `cut.json` into the fresh folder `name`, whose shards are on the disk, and give it its final name. Returns
    the new path. Raises RecordError."""
    update = update_of(name)
    numbers = {key: value for key, value in (row or {}).items() if isinstance(value, int | float)}
    facts = {"update": update, "cut": cut, "accuracy": accuracy, "figures": figures or {}, "written": name}
    facts |= {"row": numbers, "records": records}
    facts["check"] = _check(facts)
    folder.write_json(f"{folder.checkpoints.name}/{name}/{CUT}", facts)
    path = unused(folder.checkpoints / f"{update:08d}", ".")
    try:
        # All of it must be on the disk before it counts: a power cut may lose a checkpoint, but not half of it.
        sync(folder.checkpoints / name)
        os.rename(folder.checkpoints / name, path)
        sync(folder.checkpoints)
    except OSError as error:
        raise disk_fault(path, error) from error
    return path


def latest_checkpoint(folder: RunFolder) -> SavedCheckpoint | None:
    """The newest complete checkpoint; None before the first. Raises RecordError for one that cannot be read."""
    complete = _complete(folder.checkpoints)
    return _read(folder, complete[-1]) if complete else None


def all_checkpoints(folder: RunFolder) -> list[SavedCheckpoint]:
    """The readable complete checkpoints, the oldest first. A damaged one is left out, and stays where it is."""
    found = []
    for place in _complete(folder.checkpoints):
        with suppress(RecordError):
            found.append(_read(folder, place))
    return found


def checkpoint_of(folder: RunFolder, update: int) -> SavedCheckpoint | None:
    """The newest complete checkpoint before `update`, if there is one. Raises RecordError for one that cannot be
    read."""
    fitting = [place for place in _complete(folder.checkpoints) if update_of(place.name) == update]
    return _read(folder, fitting[-1]) if fitting else None


def newest_usable(folder: RunFolder, *, refused: bool = False) -> tuple[SavedCheckpoint | None, list[Path]]:
    """The newest readable checkpoint, and the folders of newer, unreadable ones: a resume takes it once these are moved
    away. `refused`: ranks could not read their parts of the newest one."""
    damaged: list[Path] = []
    for place in reversed(_complete(folder.checkpoints)):
        if not refused or damaged:
            with suppress(RecordError):
                return _read(folder, place), damaged
        damaged.append(place)
    return None, damaged


def resume_point_without(place: Path) -> str:
    """Say where a resume begins if the damaged checkpoint in the folder `place` is moved away."""
    # A host with its own run folder does not know which folders count.
    if not _COUNTS.fullmatch(place.name):
        return "without this checkpoint's folder a resume begins with the one before it"
    others = [other for other in _complete(place.parent) if other != place]
    return f"without the folder {place} a resume begins with update {update_of(others[-1].name) if others else 0}"


@contextmanager
def in_use(saved: SavedCheckpoint) -> Iterator[None]:
    """Keep runs from removing this checkpoint during the body. Raises RecordError if one has removed it already."""
    path = saved.folder / CUT
    with ExitStack() as opened:
        try:
            file = opened.enter_context(open(open_regular(path, os.O_RDONLY), "rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            # A run that had the lock before may have renamed the folder: then this raises.
            path.lstat()
        except FileNotFoundError:
            needed = "needed one that stays (--keep)"
            raise RecordError(f"{saved.folder}: the run has removed this checkpoint; {needed}") from None
        yield


def _complete(checkpoints: Path) -> list[Path]:
    """The folders with a final name, the oldest first. One that has lost its `cut.json` is among them, so that readers
    report it."""
    try:
        places = [place for place in checkpoints.iterdir() if _COUNTS.fullmatch(place.name) and place.is_dir()]
    except OSError:
        return []
    return sorted(places, key=_rank)


def _rank(place: Path) -> tuple[int, int]:
    """The sort key of a checkpoint's folder: its update, then its order of creation."""
    found = _COUNTS.fullmatch(place.name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def _read(folder: RunFolder, place: Path) -> SavedCheckpoint:
    try:
        facts = folder.read_json(str(place.relative_to(folder.path) / CUT), SavedCheckpoint)
        given = facts.pop("check", None)
        if given is not None and given != _check(facts):
            raise RecordError(f"{place / CUT}: given facts of another checksum than theirs; {NEEDED}")
    except RecordError as error:
        raise RecordError(f"{error}; {resume_point_without(place)}") from None
    saved = msgspec.convert(facts, SavedCheckpoint)
    return structs.replace(saved, folder=place, written=saved.written or place.name)


def _check(facts: Mapping[str, Any]) -> int:
    # Of the values, not the file's bytes: JSON preserves each value.
    return zlib.crc32(json.dumps(facts).encode())


# Which ones stay ------------------------------------------------------------------------------------------


def read_best(text: str) -> tuple[str, int]:
    """Parse the metric of `--keep-best`, "reward_mean" or "kl:min": its name, and 1 if more is better, -1 if less is.
    Raises ValueError for another form, and for names without a number in rows. A node may report any other name;
    whether one does is known with the first rows."""
    metric, colon, better = text.partition(":")
    if not metric or (colon and better not in ("min", "max")):
        raise ValueError(f"--keep-best: given {text!r}, needed the name of a metric, or NAME:min where less is better")
    if metric in NO_NUMBERS:
        given = f"--keep-best: given {metric!r}, for which a row has no number"
        raise ValueError(f"{given}; needed a metric of rows, such as reward_mean")
    return metric, -1 if better == "min" else 1


def surplus(saved: Sequence[SavedCheckpoint], keep: int, best: str) -> list[SavedCheckpoint]:
    """The checkpoints to remove among the complete ones `saved`, the oldest first: all but the `keep` newest (0 keeps
    all) and the one whose row has the best value of the metric `best`, the newest of equals. The newest always
    stays."""
    if not keep:
        return []
    stay = {one.folder for one in saved[-keep:]}
    if best:
        metric, sign = read_best(best)
        known = [(sign * v, _rank(one.folder), one.folder) for one in saved if (v := one.row.get(metric)) is not None]
        stay |= {max(known)[-1]} if known else set()
    return [one for one in saved if one.folder not in stay]


def retire(folder: RunFolder, run: str, gone: Sequence[SavedCheckpoint]) -> dict[Path, Path]:
    """Rename the checkpoints `gone`, so that they no longer count. Returns the new path of each old one. A checkpoint
    stays if another process has it `in_use`, or if its `cut.json` has a second name. Raises RecordError."""
    paths = {}
    for saved in gone:
        path = folder.checkpoints / f"{saved.update:08d}-{run}-{secrets.token_hex(8)}"
        try:
            # Opened for writing although nothing is written: on NFS an exclusive lock needs it.
            with os.fdopen(open_regular(saved.folder / CUT, os.O_RDWR), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(saved.folder, path)
        # The user has removed it, another process reads it, or it is a link.
        except (FileNotFoundError, BlockingIOError, RecordError):
            continue
        except OSError as error:
            raise disk_fault(saved.folder, error) from error
        paths[saved.folder] = path
    if paths:
        sync(folder.checkpoints)
    return paths


def remove_others(folder: Path, run: str, stay: Collection[str]) -> None:
    """Remove a run's checkpoint folders with fresh names that are not in `stay`. On a host with its own run folder, all
    folders have fresh names."""
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            found = _FRESH.fullmatch(path.name)
            if found is not None and found[1] == run and path.name not in stay and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def sweep_checkpoints(folder: RunFolder) -> None:
    """Remove the fresh folders that this run has left behind. No process of the run may be alive."""
    with suppress(RecordError, OSError, KeyError, TypeError):
        if folder.checkpoints.is_symlink():
            return
        remove_others(folder.checkpoints, folder.read_json(folder.config.name)["run"], ())


# Format of a shard's facts. Format 1 had no ranks and layouts. Format 2, which is read, too, had the facts of states
# and values in the header.
FORMAT, READ = 3, (2, 3)
_LENGTH = struct.Struct("<Q")
_LONGEST = 100 << 20  # the limit of safetensors itself


def part_path(folder: Path, replica: str, rank: int) -> Path:
    return folder / f"{replica.replace('/', '-')}-{rank}.safetensors"


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a shard, without its tensors. Raises ValueError for a file that is missing or not a shard."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = parse_json(file.read(min(length, _LONGEST)), "header")
        # Parsed as ranks do: numbers of carried values may be infinite.
        facts: dict[str, Any] = json.loads(header["__metadata__"]["facts"])
        require_shape(facts, dict[str, Any], "facts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"{path}: not a readable state: {error}") from error
    return facts


def refusal(path: Path, facts: Mapping[str, Any]) -> str:
    """Why a run cannot be resumed from a shard with these facts; "" if it can."""
    given = facts.get("format", 1)
    if given in READ:
        return ""
    needed = f"{FORMAT}: go on with the Penstock that wrote it, or start from its exported model (--model)"
    return f"{path}: given a checkpoint of format {given}, needed {needed}"
