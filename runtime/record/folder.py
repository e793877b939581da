"""A run is a folder: where each file of a run is, who may use it, how its files are opened.

For everything that writes or reads a run. No torch.

**One user at a time.** While a run is alive, its lock is held. Processes that inherit `lock_fd` keep it held after the
process that took it has died.

**No file of another user is written.** Another user may have prepared a folder: links and hard links named like the
files that a command is about to write, pipes that block it. So all of Penstock writes through this file. A file that
is replaced is made under an unguessable name, exclusively, and renamed: it appears whole or not at all. A file that is
appended to must be a regular file with one name. Neither follows a link below the folder, and `make_folder` accepts
none.
"""

import errno
import fcntl
import json
import math
import os
import pwd
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO

from penstock.runtime.record.errors import PLACE, RecordError, disk_fault
from penstock.runtime.record.typed_json import NoteLine, parse_json, require_shape

LOCK = "lock"
# Names of files that a run writes: a folder with one of them holds a run.
MARKS = ("config.json", "events.log", "metrics.jsonl")
# How often a lock that is taken is tried for, and the seconds between two tries.
TRIES, TRY_S = 20, 0.01
# Bytes of the longest JSON file that is read.
JSON_BYTES = 256 << 20
# Names of a batch job's script and of its output, which may be there before its run.
JOB = ("job.sh", "job.out")
# Names of what a run makes before it begins.
_BEGUN = (LOCK, "logs", "checkpoints", "graph.json", "plan.json", "ticket.json", "shared.token", *JOB)
# The names that `replacing` gives to a run's own files until they are whole.
_HALF = re.compile(r"\.(config|graph|plan|processes|summary|trace)\.json\.[0-9a-f]{16}")
# Characters up to which a JSON file is written with line breaks; a large one would take ten times as long.
READABLE = 1 << 20


class _Inside:
    """The path of a file or folder in a run's folder, wherever that is now."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.path / self.name


class RunFolder:
    """The folder of one run. `create` makes a new one, `open` takes an existing one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_fd: int | None = None
        self._undo = ExitStack()
        self._facts: os.stat_result | None = None
        self._held: int | None = None

    @classmethod
    def create(cls, path: str | Path, *, again: bool = False) -> "RunFolder":
        """A new run's folder, locked, readable by its owner only.

        Raises RecordError unless it is new, or empty and this user's. A path that is refused stays as it was. `again`:
        what a run has left that was killed before it had begun is removed.
        """
        folder = cls(absolute(path))
        try:
            folder._create(again)
        except BaseException as error:
            folder.discard()
            if isinstance(error, OSError):
                raise disk_fault(folder.path, error, choice="--out DIR") from error
            raise
        return folder

    def _create(self, again: bool) -> None:
        """Each step leaves in `_undo` how it is taken back."""

        def remove_empty(folder: Path) -> None:
            with suppress(OSError):
                folder.rmdir()

        def empty(folder: Path) -> None:
            for path in folder.iterdir():
                if path.name in JOB:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

        for place in reversed([self.path, *self.path.parents]):
            if not place.is_dir():
                with suppress(FileExistsError):  # another run makes the same parents
                    place.mkdir(mode=0o700 if place == self.path else 0o777)
                    self._undo.callback(remove_empty, place)
        self._facts = facts = self.path.stat()
        if not stat.S_ISDIR(facts.st_mode):
            raise RecordError(f"{self.path}: given a file, needed a new or empty folder (--out DIR)")
        if facts.st_uid != os.geteuid():
            given = f"given a folder of user {owner_name(facts.st_uid)}"
            raise RecordError(f"{self.path}: {given}; needed a new folder, or an empty one of your own (--out DIR)")
        locked = (self.path / LOCK).exists()
        if locked:  # left by a run that came to nothing, or held by one that is alive
            self.lock_fd = self._lock()
            if again and all(path.name in _BEGUN or _HALF.fullmatch(path.name) for path in self.path.iterdir()):
                empty(self.path)
        self._require_empty()
        os.chmod(self.path, 0o700)
        self._undo.callback(os.chmod, self.path, stat.S_IMODE(facts.st_mode))
        if not locked:
            self.lock_fd = self._lock(os.O_CREAT)  # raises where another run was faster
            self._require_empty()
        self._undo.callback(empty, self.path)
        self._sign()
        for name in ("logs", "checkpoints"):
            make_folder(self.path / name, fresh=True)

    def _require_empty(self) -> None:
        present = sorted(p.name for p in self.path.iterdir() if p.name not in (LOCK, *JOB))
        if not present:
            return
        given = f"holds files already ({', '.join(present[:3])}{', …' if len(present) > 3 else ''})"
        if any(mark in present for mark in MARKS):
            given = "holds a run already, which is never overwritten (`penstock resume` goes on with it)"
        raise RecordError(f"{self.path}: {given}; needed a new or empty folder (--out DIR)")

    def discard(self) -> None:
        """Take back what `create` did: a folder that it made is removed, another one is as empty as it was. A folder
        that has been moved away stays, and so does the one that is in its place."""
        with suppress(OSError):
            if self._facts is not None and not os.path.samestat(self.path.stat(), self._facts):
                self._undo.pop_all()
            self._undo.close()
        self.unlock()

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

    config = _Inside("config.json")
    events = _Inside("events.log")
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples.jsonl")
    notes = _Inside("notes.jsonl")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")

    # One at a time -----------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Make this process the folder's user until `unlock` or its death. Raises RecordError if another one is."""
        self.lock_fd = self._lock(os.O_CREAT)
        self._sign()

    def _lock(self, create: int = 0) -> int:
        try:
            fd = open_regular(self.path / LOCK, os.O_RDWR | create)
        except OSError as error:
            raise disk_fault(self.path / LOCK, error) from error
        # `alive` of another process holds the lock for a moment, so it is tried again.
        for _ in range(TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sleep(TRY_S)
            else:
                return fd
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        owner = f"process {pid}" if pid else "another process"
        raise RecordError(f"{self.path}: a run is alive there ({owner}); needed its end")

    def _sign(self) -> None:
        """Write this process's pid into the lock that it holds."""
        assert self.lock_fd is not None
        os.ftruncate(self.lock_fd, 0)
        # On a full disk the lock is held all the same, with no pid in it.
        with suppress(OSError):
            os.pwrite(self.lock_fd, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None

    @property
    def alive(self) -> bool:
        """Is a process of a run alive there? Needs no more than read access."""
        try:
            fd = open_regular(self.path / LOCK, os.O_RDONLY)
        except (OSError, RecordError):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def foreign(self) -> str:
        """What in the folder another user has made or may change, in words; "" if that is nothing."""
        places = [self.path, *(Path(top, name) for top, dirs, files in os.walk(self.path) for name in (*dirs, *files))]
        entered = self.path.stat().st_mode & stat.S_IXOTH
        for place in places:
            facts = place.stat() if place == self.path else place.lstat()
            if facts.st_uid != os.geteuid():
                return f"{place} belongs to user {owner_name(facts.st_uid)}"
            if entered and facts.st_mode & stat.S_IWOTH and not stat.S_ISLNK(facts.st_mode):
                return f"every user may change {place}"
        return ""

    # Still there? ------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep a descriptor of this folder, so that it is known wherever it is moved. Raises RecordError if there is
        none."""
        if self._held is None:
            try:
                self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise disk_fault(self.path, error) from error

    def require(self) -> None:
        """Raises RecordError, with where it is now, if the folder that is held is no longer at its path."""
        assert self._held is not None
        held = os.fstat(self._held)
        with suppress(OSError):
            if os.path.samestat(os.stat(self.path), held):
                return
        now = os.readlink(f"/proc/self/fd/{self._held}")
        became = f"moved to {now}" if held.st_nlink and not now.endswith(" (deleted)") else "removed"
        needed = "needed it to stay where it is until the run has ended"
        raise RecordError(f"{self.path}: the run folder was {became} while the run went on; {needed}")

    def follow(self) -> str:
        """Take the path that the folder which is held has now. Returns why the path has changed, "" if it has not, or
        if no folder is held."""
        if self._held is None:
            return ""
        try:
            self.require()
        except RecordError as fault:
            now = Path(os.readlink(f"/proc/self/fd/{self._held}"))
            self.path = now if now.is_dir() else self.path
            return str(fault)
        return ""

    @property
    def held(self) -> Path:
        """A path to the folder that is held, wherever it is moved. Valid in this process alone."""
        return Path(f"/proc/self/fd/{self._held}")

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def sweep(self) -> None:
        """Remove the half-written files of processes that were killed. Call it with the lock held. A report is left
        alone: `penstock report` writes it without the lock."""
        with suppress(OSError):
            for path in self.path.iterdir():
                if _HALF.fullmatch(path.name):
                    path.unlink()

    # Small files -------------------------------------------------------------------------------------------

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically: a reader sees the old content or the new. Raises RecordError."""
        try:
            text = _json_text(value)
        except ValueError:  # of what is infinite or no number; that is seldom, and a trace is long
            mark = secrets.token_hex(16)
            text = _json_text(_marked(value, mark))
            # Readers of JSON take a number that is too large for infinity; they know no name for it.
            text = text.replace(f'"{mark}"', "1e999").replace(f'"-{mark}"', "-1e999")
        write_atomic(self.path / name, text.encode() + b"\n")

    def read_json(self, name: str, shape: Any = Any) -> Any:
        """Raises RecordError for a file that is missing, no JSON, or not of the type `shape` (see `typed_json`)."""
        path = self.path / name
        try:
            value = parse_json(read_file(path, JSON_BYTES), str(path))
        except FileNotFoundError:
            raise RecordError(f"{path}: no such file; needed the folder of a run that was not changed") from None
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
        require_shape(value, shape, str(path))
        return value

    def add_note(self, level: str, text: str) -> None:
        """Keep what the user is told, for those who watch; of the folder that is held. Where the disk is full it is
        lost, which is not worth the run."""
        line = json.dumps({"level": level, "text": text}).encode() + b"\n"
        with suppress(RecordError), closing(AppendFile(self.held / self.notes.name)) as notes:
            notes.write(bytearray(line))

    def read_notes(self, start: int = 0) -> tuple[list[NoteLine], int]:
        """What the user was told, from this byte on, and the byte from which to read the next time."""
        found: list[NoteLine] = []
        try:
            new = read_file(self.notes, JSON_BYTES, start)
        except (OSError, RecordError):
            return found, start
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines():
            with suppress(RecordError):  # half of one, as a full disk leaves it
                note = parse_json(line, str(self.notes))
                require_shape(note, NoteLine, str(self.notes))
                found.append(note)
        return found, start + len(whole)


def absolute(path: str | Path) -> Path:
    """The path as any folder knows it. Where `..` leads depends on links, so one with it is resolved; others keep their
    links, which another host may know, too."""
    made = Path(path).absolute()
    return made.resolve() if ".." in made.parts else made


def default_path(program: str, now: datetime) -> Path:
    """runs/<program>-<date-time>, with a number where that is taken."""
    return unused(Path("runs") / f"{program}-{now:%Y%m%d-%H%M%S}", "-")


def unused(path: Path, mark: str) -> Path:
    """The path, with a mark and a number behind it where something has it already."""
    numbered = chain([path], (path.with_name(f"{path.name}{mark}{number}") for number in count(2)))
    return next(path for path in numbered if not os.path.lexists(path))


def owner_name(uid: int) -> str:
    """A user's name, or number where this machine knows no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# How files are opened --------------------------------------------------------------------------------------


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file that is no link. A file that is to be written may have no second name: by that it
    would be a file elsewhere. Never blocks. Raises RecordError for anything else, and OSError."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link; a folder; a socket or an unread pipe
            raise _odd(path, path.lstat()) from None
        raise
    # Of the descriptor, not of the path: another file may have taken the path meanwhile.
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or (writes and facts.st_nlink > 1):
        os.close(fd)
        raise _odd(path, facts)
    os.set_blocking(fd, True)
    return fd


def open_append(path: Path) -> int:
    """A descriptor that appends to a file, making it if it is not there (mode 0600). Raises as `open_regular`."""
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class AppendFile:
    """A file of a run that grows; `keep` bytes of it are kept where it is there already, None for all of them. Each
    method raises RecordError where the disk is full."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        try:
            self._fd = open_append(path)
            if keep is not None:
                os.ftruncate(self._fd, keep)
        except OSError as error:
            raise disk_fault(path, error) from error

    def write(self, data: bytearray) -> None:
        """Hand `data` to the system. It is empty then; where the disk is full, it has what was not written."""
        try:
            while data:
                # A full disk may take a part: what is written is dropped at once, so that no byte is written twice.
                del data[: os.write(self._fd, data)]
        except OSError as error:
            raise disk_fault(self.path, error, len(data)) from error

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise disk_fault(self.path, error) from error

    def close(self) -> None:
        os.close(self._fd)


def read_file(path: Path, limit: int, start: int = 0) -> bytes:
    """The content of a regular file from byte `start` on, if the file has `limit` bytes at most. Raises RecordError for
    another one, and OSError."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise RecordError(f"{path}: given a file of {size} bytes; needed {limit} at most")
        file.seek(start)
        return file.read()


def _json_text(value: Any) -> str:
    """JSON by lines where it is short. Raises ValueError for a number that JSON has no name for."""
    text = json.dumps(value, allow_nan=False)
    return json.dumps(value, indent=1) if len(text) < READABLE else text


def _marked(value: Any, mark: str) -> Any:
    """A value of JSON with a text in place of each number that is infinite."""
    if isinstance(value, Mapping):
        return {key: _marked(item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, mark) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return mark if value > 0 else f"-{mark}"
    return value


def create_file(path: Path, content: bytes) -> None:
    """A new file of mode 0600, which has its name once it is whole. Raises FileExistsError whatever has the name, a
    link among others, and OSError."""
    # What gets the name meanwhile is replaced, and not written to. Not by a hard link, which some file systems lack.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with _beside(path, 0o600) as file:
        file.write(content)


def make_folder(path: Path, *, fresh: bool = False) -> Path:
    """A folder in a run folder (mode 0700), which may be there already unless it has to be `fresh`. Raises RecordError
    for a link or a file of that name, and OSError."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        facts = path.lstat()
        if fresh or not stat.S_ISDIR(facts.st_mode):
            raise _odd(path, facts, "no such file yet" if fresh else "a folder") from None
    return path


def write_atomic(path: Path, content: bytes, choice: str = PLACE) -> None:
    """Replace a file's content at once. Raises RecordError, and leaves the old file, if that cannot be done. `choice`
    is the flag that names the file or its folder, for the error."""
    with replacing(path, choice, len(content)) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, choice: str = PLACE, size: int = 0) -> Iterator[BinaryIO]:
    """A new file that the body writes; after the body it is synced and takes the place of `path`. A library that writes
    by path is given its `name`. Where the body or a step after it fails, nothing is left of the new file, and `path` is
    as it was. An OSError becomes a RecordError with `choice` and `size` (see `disk_fault`)."""
    try:
        with _beside(path, 0o666) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_fault(path, error, size, choice) from error


@contextmanager
def _beside(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A new file that the body writes, and that takes the place of `path` after it; nothing is left of it where the
    body or that fails."""
    beside = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    with open(beside, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, mode)) as file:
        try:
            yield file
            file.close()
            beside.replace(path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise


def _odd(path: Path, facts: os.stat_result, needed: str = "a regular file of one name") -> RecordError:
    """The error for what has the name of a run's file and is none."""
    kinds = {
        stat.S_IFLNK: "a symbolic link, which is not followed here",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: f"a file of {facts.st_nlink} names" if facts.st_nlink > 1 else "a file",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return RecordError(f"{path}: given {kinds.get(stat.S_IFMT(facts.st_mode), 'a device')}; needed {needed}")


def sync(path: Path) -> None:
    """Have the disk keep a file, or what a folder lists. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
