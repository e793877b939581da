"""A run is a folder: where each thing of a run is, who may use it, and how its small files are written.

A file appears whole or not at all. While a run is alive its lock is held; processes that inherit `lock_fd` keep it
held after the one that took it has died.
"""

import contextlib
import fcntl
import json
import os
from datetime import datetime
from pathlib import Path
from time import sleep
from typing import Any

from penstock.runtime.record.faults import PLACE, RecordError, disk_fault

LOCK = "lock"
MARKS = ("config.json", "events.log", "metrics.jsonl")
"""A folder with one of these holds a run."""
TRIES, TRY_S = 20, 0.01
"""How often a lock that is taken is tried for, and the seconds between two tries."""
READABLE = 1 << 20
"""Characters up to which a JSON file is written with line breaks; a large one would take ten times as long."""


class RunFolder:
    """The folder of one run. `create` makes a new one, `open` takes an existing one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_fd: int | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunFolder":
        """A new run's folder, locked, readable by its owner only. Raises RecordError unless it is new or empty."""
        folder = cls(absolute(path))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            os.chmod(folder.path, 0o700)
            folder.lock()
            present = sorted(p.name for p in folder.path.iterdir() if p.name != LOCK)
            if present:
                raise RecordError(f"{folder.path}: {_content(present)}; needed a new or empty folder (--out DIR)")
            for name in ("logs", "checkpoints"):
                (folder.path / name).mkdir(mode=0o700)
        except FileExistsError:
            raise RecordError(f"{folder.path}: given a file, needed a new or empty folder (--out DIR)") from None
        except OSError as error:
            raise disk_fault(folder.path, error, choice="--out DIR") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run's folder. Raises RecordError if there is no run in it."""
        folder = cls(absolute(path))
        if not folder.path.is_dir():
            raise RecordError(f"{folder.path}: no such folder; needed the folder of a run")
        if not folder.config.is_file():
            raise RecordError(f"{folder.path}: holds no run (there is no config.json); needed the folder of a run")
        return folder

    # Where things are --------------------------------------------------------------------------------------

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def events(self) -> Path:
        return self.path / "events.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    # One at a time -----------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Make this process the folder's user until `unlock` or its death. Raises RecordError if another one is."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_fault(self.path / LOCK, error) from error
        if not _locked(fd):
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            owner = f"process {pid}" if pid else "another process"
            raise RecordError(f"{self.path}: a run is alive there ({owner}); needed its end")
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock is held all the same, and has no name in it
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self.lock_fd = fd

    def unlock(self) -> None:
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None

    @property
    def alive(self) -> bool:
        """Is a run alive there, one of its processes at least? Read access is all that is needed."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    # Small files -------------------------------------------------------------------------------------------

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically: a reader sees the old content or the new. Raises RecordError."""
        text = json.dumps(value, allow_nan=False)
        if len(text) < READABLE:
            text = json.dumps(value, indent=1)
        write_atomic(self.path / name, text.encode() + b"\n")

    def read_json(self, name: str) -> Any:
        """Raises RecordError for a file that is missing or no JSON, with the line."""
        path = self.path / name
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            raise RecordError(f"{path}: no such file; needed the folder of a run that was not changed") from None
        except ValueError as error:
            raise RecordError(
                f"{path}: given something that is not JSON ({error}); needed what the run wrote"
            ) from None


def _locked(fd: int) -> bool:
    """Take a lock for this process. Whoever looks whether a run is alive has it for a moment, so it is tried again."""
    for _ in range(TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sleep(TRY_S)
        else:
            return True
    return False


def absolute(path: str | Path) -> Path:
    """The path as any folder knows it. Where `..` leads depends on links, so one with it is resolved; others keep their
    links, which another host may know, too."""
    made = Path(path).absolute()
    return made.resolve() if ".." in made.parts else made


def default_path(program: str, now: datetime) -> Path:
    """runs/<program>-<date-time>, with a number where that is taken."""
    stem = f"{program}-{now:%Y%m%d-%H%M%S}"
    number, path = 1, Path("runs") / stem
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def write_atomic(path: Path, content: bytes, choice: str = PLACE) -> None:
    """Replace a file's content at once. Raises RecordError, and leaves the old file, if that cannot be done. `choice`
    is the flag that names the file or its folder, for the error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise disk_fault(path, error, len(content), choice) from error


def _content(present: list[str]) -> str:
    if any(mark in present for mark in MARKS):
        return "holds a run already, which is never overwritten (`penstock resume` goes on with it)"
    return f"holds files already ({', '.join(present[:3])}{', …' if len(present) > 3 else ''})"
