"""Shared-memory segments of a run, and references to the values in them. No torch: the controller passes references on,
and the launcher removes the segments of dead runs.

A segment is a file `penstock-<run>-<owner>-<k>`. Its owner keeps an exclusive `flock` on it for as long as it lives.
The kernel drops the lock with the process, however it died, so checking liveness needs no pid, clock or lock file. A
run is dead when none of its segments is locked; `sweep` then removes them all.
"""

import errno
import fcntl
import mmap
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

from penstock.runtime.packable import Packable

SHM = Path("/dev/shm")
_PREFIX = "penstock-"
# Names that `segment_name` makes: without a zero byte, for which `open` raises ValueError, and without a path.
_NAME = re.compile(r"penstock-[0-9A-Za-z]+-[\w.~%-]*-[0-9]+", re.ASCII)
# Bytes that are mapped at a time, and the `madvise` requests for it (Linux 5.14), for reading or writing.
PIECE = 16 << 20
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOENT, errno.EACCES, errno.EROFS}


class SegmentError(RuntimeError):
    """There is no room for a segment, or a segment is missing or may not be read."""


def segment_name(run: str, owner: str, number: int) -> str:
    """The name of a segment. `owner` is quoted as in a URL, so that "generator/0" becomes a single file name."""
    if not run.isalnum():
        raise ValueError(f"run id: given {run!r}, needed letters and digits")
    return f"{_PREFIX}{run}-{quote(owner, safe='')}-{number}"


class ShmSegment:
    """One mapped segment: `view` is shared with every process that maps it; `size` in bytes never changes."""

    def __init__(self, path: Path, descriptor: int, size: int, prot: int) -> None:
        self.path = path
        self.name = path.name
        self.size = size
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=prot)
        # Map all pages now: a page fault costs more than copying the page. In pieces, since no other Python thread,
        # such as a heartbeat, runs meanwhile: 3 GB took 8 s.
        how = _POPULATE_WRITE if prot & mmap.PROT_WRITE else _POPULATE_READ
        with suppress(OSError):  # an older kernel
            for start in range(0, size, PIECE):
                self._map.madvise(how, start, min(PIECE, size - start))
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap the segment; its name stays."""
        self.view.release()
        self._map.close()
        os.close(self._descriptor)

    def unlink(self) -> None:
        """Remove the name: processes that have the segment mapped keep it until they unmap it."""
        self.path.unlink(missing_ok=True)


def create_segment(name: str, size: int, folders: Sequence[Path]) -> ShmSegment:
    """A new locked segment of `size` allocated bytes, in the first folder with room for it."""
    refusals = []
    for folder in folders:
        try:
            return _create(folder / name, size)
        except FileExistsError as error:
            raise SegmentError(f"segment {folder / name} is there already: made twice, or a dead run's") from error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            refusals.append(f"{folder}: {error.strerror}, {room(folder)}")
    raise SegmentError(f"no room for segment {name} of {size} bytes ({'; '.join(refusals)})")


def open_segment(name: str, folders: Sequence[Path], writable: bool = False) -> ShmSegment:
    """Map an existing segment, for reading or also writing. Only this user may have access to it."""
    if not _NAME.fullmatch(name):
        raise SegmentError(f"given {name!r}, needed a segment's name ({_PREFIX}<run>-<owner>-<k>)")
    for folder in folders:
        try:
            # Follow no links: in a folder that all may write to, one could lead anywhere.
            access = os.O_RDWR if writable else os.O_RDONLY
            descriptor = os.open(folder / name, access | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or not facts.st_size:
            # Do not read values from a file that another user could have made or can change.
            os.close(descriptor)
            given = f"user {facts.st_uid}, mode {facts.st_mode & 0o777:o}, {facts.st_size} bytes"
            raise SegmentError(f"segment {name}: given {given}; needed this user's alone, and not empty")
        prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        return ShmSegment(folder / name, descriptor, facts.st_size, prot)
    raise SegmentError(f"segment {name} is in none of {', '.join(map(str, folders))}: its owner has closed it")


def sweep(run: str | None = None, folders: Sequence[Path] = (SHM,)) -> list[str]:
    """Remove this user's segments of `run`, whose processes the caller knows to be gone; without a run, those of every
    dead run. Return the removed names.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.glob(f"{_PREFIX}*-*-*")):
            found[path.name.split("-")[1]].append(path)
    removed = []
    for name, paths in found.items():
        if run not in (None, name):
            continue
        with ExitStack() as held, suppress(OSError):  # alive, gone meanwhile, or another user's
            # Hold the locks until the files are gone: an owner that is just creating one waits, and sees that.
            for path in paths if run is None else ():
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in paths:
                with suppress(OSError):  # gone already, or another user's
                    path.unlink()
                    removed.append(path.name)
    return removed


def _create(path: Path, size: int) -> ShmSegment:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Held until the process ends: the kernel then releases it, however the process ended.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # another run's sweep removed the file before it was locked: try again
    try:
        # Otherwise a full file system would cause SIGBUS at the first write instead of an error here.
        os.posix_fallocate(descriptor, 0, size)
        return ShmSegment(path, descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise


def room(folder: Path) -> str:
    """How much of a folder's file system is free, in words."""
    try:
        facts = os.statvfs(folder)
    except FileNotFoundError:
        return "no such folder"
    return f"{facts.f_bavail * facts.f_frsize} of {facts.f_blocks * facts.f_frsize} bytes free"


class ObjectRef(Packable, frozen=True):
    """A reference to a value that stays with its maker: `nbytes` at `offset` in a segment of the store of `owner`.

    `serial` is the number that the store gave the value; a later value in its place has another. `host` is the owner's,
    by its name in the plan: readers there map the segment, readers on other hosts ask the owner at `endpoint` ("" if
    the owner does not listen, since there are no such readers).
    """

    segment: str
    offset: int
    nbytes: int
    serial: int
    owner: str
    host: str = ""
    endpoint: str = ""

    def __str__(self) -> str:
        where = f" on host {self.host}" if self.host else ""
        return f"{self.segment}[{self.offset}:{self.offset + self.nbytes}] of {self.owner}{where} (value {self.serial})"


def owner_of(replica: str, rank: int) -> str:
    """The `owner` of a rank's values: "generator.0.1" is rank 1 of generator/0."""
    return f"{replica.replace('/', '.')}.{rank}"


class ObjectRefError(RuntimeError):
    """A reference whose value cannot be read: never made, freed already, damaged, or out of reach. The peer's fault.
    `handle` is the reference, if known."""

    handle: ObjectRef | None = None
