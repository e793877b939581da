"""What goes wrong with files, in words a user can act on."""

import errno
from pathlib import Path


class RecordError(ValueError):
    """A run's folder or one of its files cannot be used: which, what was found, what is needed."""


REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ENAMETOOLONG: "the path is too long",
    errno.EMFILE: "too many open files (see `ulimit -n`)",
}


def disk_fault(path: Path, error: OSError) -> RecordError:
    """The error to raise when `path` could not be written."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    needed = "free space there, or another folder (--out DIR)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    needed = needed or "a folder that can be written to (--out DIR)"
    return RecordError(f"{path}: cannot be written: {reason}; needed {needed}")
