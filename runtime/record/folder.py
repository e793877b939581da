"""The run folder: where each file of a run is, who may use it, how its files are opened.

For all code that writes or reads a run. No torch.

**One process at a time.** While a run is alive, its lock is held. Processes that inherit `lock_fd` keep the lock after
the process that took it has died.

**No file of another user is written.** Another user may have prepared a folder: symbolic and hard links with the names
of files that a command will write, or pipes that block it. So all of Penstock writes through this file. A file that is
replaced is created exclusively under an unguessable name, then renamed: it appears whole or not at all. A file that is
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
# How often a lock is tried while another process holds it, and the seconds between two tries.
TRIES, TRY_S = 20, 0.01
# The longest JSON file that is read, in bytes.
JSON_BYTES = 256 << 20
# The script and the output of a batch job, which may be in the folder before its run.
JOB = ("job.sh", "job.out")
# Files and folders that a run makes before it begins.
_BEGUN = (LOCK, "logs", "checkpoints", "graph.json", "plan.json", "ticket.json", "shared.token", *JOB)
# The names that `replacing` gives to a run's files until they are complete.
_HALF = re.compile(r"\.(config|graph|plan|processes|summary|trace)\.json\.[0-9a-f]{16}")
# JSON up to this many characters is written with line breaks; for a large file that takes ten times as long.
READABLE = 1 << 20


class _Inside:
    """The path of a file or folder in the run folder, wherever the run folder is now."""

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
        """Make a new run's folder, locked, readable by its owner only.

        Raises RecordError unless it is new, or empty and this user's. A refused path stays as it was. `again`: the
        files of a run that was killed before it began are removed.
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
        """Each step adds its reversal to `_undo`."""

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
        if locked:  # left by a run that never began, or held by a live one
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
        """Undo `create`: a folder that it made is removed, an existing one is emptied again. If the folder has been
        moved away, it stays, and so does the folder in its place."""
        with suppress(OSError):
            if self._facts is not None and not os.path.samestat(self.path.stat(), self._facts):
                self._undo.pop_all()
            self._undo.close()
        self.unlock()

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open an existing run's folder. Raises RecordError if there is no run in it."""
        folder, needed = cls(absolute(path)), "needed the folder of a run"
        try:
            if not folder.path.is_dir():
                raise RecordError(f"{folder.path}: no such folder; {needed}")
            if not folder.config.is_file():
                raise RecordError(f"{folder.path}: holds no run (there is no config.json); {needed}")
        except OSError as error:  # its name is too long, or a folder above it is another user's
            raise RecordError(f"{folder.path}: cannot be read: {error.strerror}; {needed}") from error
        return folder

    # Paths -------------------------------------------------------------------------------------------------

    config = _Inside("config.json")
    events = _Inside("events.log")
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples.jsonl")
    notes = _Inside("notes.jsonl")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")

    # The lock ----------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the folder's lock until `unlock` or the death of this process. Raises RecordError if another process
        holds it."""
        self.lock_fd = self._lock(os.O_CREAT)
        self._sign()

    def _lock(self, create: int = 0) -> int:
        try:
            fd = open_regular(self.path / LOCK, os.O_RDWR | create)
        except OSError as error:
            raise disk_fault(self.path / LOCK, error) from error
        # Another process that asks `alive` holds the lock for a moment, so try again.
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
        """Write this process's pid into the lock file."""
        assert self.lock_fd is not None
        os.ftruncate(self.lock_fd, 0)
        # On a full disk the lock is held nevertheless, without a pid in the file.
        with suppress(OSError):
            os.pwrite(self.lock_fd, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None

    @property
    def alive(self) -> bool:
        """True if a process of a run is alive there. Needs only read access."""
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
        """Describe a file or folder here that another user owns or may change; "" if there is none."""
        places = [self.path, *(Path(top, name) for top, dirs, files in os.walk(self.path) for name in (*dirs, *files))]
        entered = self.path.stat().st_mode & stat.S_IXOTH
        for place in places:
            facts = place.stat() if place == self.path else place.lstat()
            if facts.st_uid != os.geteuid():
                return f"{place} belongs to user {owner_name(facts.st_uid)}"
            if entered and facts.st_mode & stat.S_IWOTH and not stat.S_ISLNK(facts.st_mode):
                return f"every user may change {place}"
        return ""

    # A folder that is moved --------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep a descriptor of this folder, so that it can be found if it is moved. Raises RecordError if it cannot be
        opened."""
        if self._held is None:
            try:
                self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise disk_fault(self.path, error) from error

    def require(self) -> None:
        """Raises RecordError if the held folder is no longer at its path; the message says where it is now."""
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
        """Set `path` to the present path of the held folder. Returns why it has changed; "" if it has not, or if no
        folder is held."""
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
        """A path to the held folder, valid wherever it is moved, but only in this process."""
        return Path(f"/proc/self/fd/{self._held}")

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def sweep(self) -> None:
        """Remove the half-written files of killed processes. The caller holds the lock. A half-written report stays:
        `penstock report` writes it without the lock."""
        with suppress(OSError):
            for path in self.path.iterdir():
                if _HALF.fullmatch(path.name):
                    path.unlink()

    # Small files -------------------------------------------------------------------------------------------

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically: a reader sees the old content or the new one. Raises RecordError."""
        try:
            text = _json_text(value)
        except ValueError:  # infinite or NaN: rare, and a trace is too long to look for it beforehand
            mark = secrets.token_hex(16)
            text = _json_text(_marked(value, mark))
            # JSON has no name for infinity, but readers parse a number that is too large as infinity.
            text = text.replace(f'"{mark}"', "1e999").replace(f'"-{mark}"', "-1e999")
        write_atomic(self.path / name, text.encode() + b"\n")

    def read_json(self, name: str, shape: Any = Any) -> Any:
        """Read a JSON file. Raises RecordError if it is missing, not JSON, or not of the type `shape` (see
        `typed_json`)."""
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
        """Append a message to the user to the notes of the held folder, for `watch`. On a full disk the note is lost:
        that must not end the run."""
        line = json.dumps({"level": level, "text": text}).encode() + b"\n"
        with suppress(RecordError), closing(AppendFile(self.held / self.notes.name)) as notes:
            notes.write(bytearray(line))

    def read_notes(self, start: int = 0) -> tuple[list[NoteLine], int]:
        """The notes from byte `start` on, and the byte from which to read the next time."""
        found: list[NoteLine] = []
        try:
            new = read_file(self.notes, JSON_BYTES, start)
        except (OSError, RecordError):
            return found, start
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines():
            with suppress(RecordError):  # half a note, as a full disk leaves it
                note = parse_json(line, str(self.notes))
                require_shape(note, NoteLine, str(self.notes))
                found.append(note)
        return found, start + len(whole)


def absolute(path: str | Path) -> Path:
    """The absolute path. A path with `..` is resolved, since its meaning depends on links. Other paths keep their
    links, which may be valid on other hosts, too."""
    made = Path(path).absolute()
    return made.resolve() if ".." in made.parts else made


def default_path(program: str, now: datetime) -> Path:
    """runs/<program>-<date-time>, with a number if that exists."""
    return unused(Path("runs") / f"{program}-{now:%Y%m%d-%H%M%S}", "-")


def unused(path: Path, mark: str) -> Path:
    """The path, followed by `mark` and a number if it exists already."""
    numbered = chain([path], (path.with_name(f"{path.name}{mark}{number}") for number in count(2)))
    return next(path for path in numbered if not os.path.lexists(path))


def owner_name(uid: int) -> str:
    """A user's name, or the number if this machine knows no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# How files are opened --------------------------------------------------------------------------------------


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file that is not a link; returns a descriptor. A file to be written must not have a second name,
    which could be a file elsewhere. Never blocks. Raises RecordError for anything else, and OSError."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link; a folder; a socket or an unread pipe
            raise _wrong_kind(path, path.lstat()) from None
        raise
    # From the descriptor, not the path: another file may have the path now.
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or (writes and facts.st_nlink > 1):
        os.close(fd)
        raise _wrong_kind(path, facts)
    os.set_blocking(fd, True)
    return fd


def open_append(path: Path) -> int:
    """Open a file for appending, creating it with mode 0600 if necessary; returns a descriptor. Raises as
    `open_regular`."""
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class AppendFile:
    """A growing file of a run. The first `keep` bytes of an existing file are kept, all of them if None. Each method
    raises RecordError if the disk is full."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        try:
            self._fd = open_append(path)
            if keep is not None:
                os.ftruncate(self._fd, keep)
        except OSError as error:
            raise disk_fault(path, error) from error

    def write(self, data: bytearray) -> None:
        """Write `data` to the file and empty it. If the disk is full, `data` has what was not written."""
        try:
            while data:
                # A full disk may take a part: drop written bytes at once, so that none is written twice.
                del data[: os.write(self._fd, data)]
        except OSError as error:
            raise disk_fault(self.path, error, len(data)) from error

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise disk_fault(self.path, error) from error

    def close(self) -> None:
        os.close(self._fd)


def read_file(path: Path, limit: int, start: int = 0) -> bytes:
    """The content of a regular file of at most `limit` bytes, from byte `start` on. Raises RecordError for any other
    file, and OSError."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise RecordError(f"{path}: given a file of {size} bytes; needed {limit} at most")
        file.seek(start)
        return file.read()


def _json_text(value: Any) -> str:
    """The value as JSON, with line breaks if it is short. Raises ValueError for an infinity or NaN."""
    text = json.dumps(value, allow_nan=False)
    return json.dumps(value, indent=1) if len(text) < READABLE else text


def _marked(value: Any, mark: str) -> Any:
    """The value with `mark` in place of each infinity; "-" before it for a negative one."""
    if isinstance(value, Mapping):
        return {key: _marked(item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, mark) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return mark if value > 0 else f"-{mark}"
    return value


def create_file(path: Path, content: bytes) -> None:
    """Create a file of mode 0600, which gets its name once it is complete. Raises FileExistsError if anything has the
    name, even a link, and OSError."""
    # A file that gets the name meanwhile is replaced, not written to. A hard link would refuse it, but some file
    # systems have none.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with _beside(path, 0o600) as file:
        file.write(content)


def make_folder(path: Path, *, fresh: bool = False) -> Path:
    """Make a folder in a run folder (mode 0700). It may exist already, unless `fresh`. Raises RecordError for a link or
    a file of that name, and OSError."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        facts = path.lstat()
        if fresh or not stat.S_ISDIR(facts.st_mode):
            raise _wrong_kind(path, facts, "no such file yet" if fresh else "a folder") from None
    return path


def write_atomic(path: Path, content: bytes, choice: str = PLACE) -> None:
    """Replace a file's content atomically. Raises RecordError, and leaves the old file, if that fails. `choice` is the
    flag that names the file or its folder, for the error."""
    with replacing(path, choice, len(content)) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, choice: str = PLACE, size: int = 0) -> Iterator[BinaryIO]:
    """Yield a new file for the body to write; then sync it and move it to `path`. A library that writes by path gets
    the file's `name`. If the body or a step after it fails, the new file is removed, and `path` is as it was. An
    OSError becomes a RecordError with `choice` and `size` (see `disk_fault`)."""
    try:
        with _beside(path, 0o666) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_fault(path, error, size, choice) from error


@contextmanager
def _beside(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a new file for the body to write; then move it to `path`. If either fails, the new file is removed."""
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


def _wrong_kind(path: Path, facts: os.stat_result, needed: str = "a regular file of one name") -> RecordError:
    """The error for a file of the wrong kind at the path of a run's file."""
    kinds = {
        stat.S_IFLNK: "a symbolic link, which is not followed here",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: f"a file of {facts.st_nlink} names" if facts.st_nlink > 1 else "a file",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return RecordError(f"{path}: given {kinds.get(stat.S_IFMT(facts.st_mode), 'a device')}; needed {needed}")


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
