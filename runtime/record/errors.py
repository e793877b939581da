"""Errors of a run's files, in words that a user can act on, and text that a terminal can show."""

import errno
import re
import shutil
from contextlib import suppress
from pathlib import Path


class RecordError(ValueError):
    """A run's folder or one of its files cannot be used: which, what was found, what is needed."""


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with escapes such as \\u001b for control characters, for marks that turn the direction of writing, and for
    bytes that are no UTF-8: a terminal shows them and obeys none. Line breaks and tabs stay, JSON means the same."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",
    errno.ENAMETOOLONG: "the path is too long",
    errno.EFBIG: "the file would be larger than this process may write (see `ulimit -f`)",
    errno.EMFILE: "too many open files (see `ulimit -n`)",
}

# How each verb that writes a run is told of its folder.
PLACE = "run --out DIR, resume DIR"


def disk_fault(path: Path, error: OSError, size: int = 0, choice: str = PLACE) -> RecordError:
    """The error to raise when `path` could not be written. `size` is how many bytes were to go there, 0 if unknown.
    `choice` is what the user types to name another place: a flag and DIR or FILE."""
    place = "folder" if choice.endswith("DIR") else "file"
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = f"{size} bytes of free space there" if size else "free space there"
        # How much is free is worth a word: a part of `size` bytes may fit.
        with suppress(OSError):
            space += f", where {shutil.disk_usage(path.parent).free} are left" if size else ""
        needed = f"{space}, or another {place} ({choice})"
    elif error.errno == errno.EFBIG:
        needed = f"a limit that leaves room for {size} bytes more" if size else "a higher limit"
    else:
        needed = f"a {place} that can be written to ({choice})"
    return RecordError(f"{path}: cannot be written: {reason}; needed {needed}")
