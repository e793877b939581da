"""Errors about a run's files that tell the user what to do, and text that is safe to show on a terminal."""

import errno
import re
import shutil
from contextlib import suppress
from pathlib import Path


class RecordError(ValueError):
    """A run's folder or one of its files cannot be used. The message says which, what was found, and what is needed."""


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with escapes such as \\u001b for control characters, for marks that change the direction of writing, and
    for bytes that are not UTF-8, so that a terminal shows them and does not obey them. Line breaks and tabs stay. JSON
    keeps its meaning."""
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

# What the user types to name the folder, for each verb that writes a run.
PLACE = "run --out DIR, resume DIR"


def disk_fault(path: Path, error: OSError, size: int = 0, choice: str = PLACE) -> RecordError:
    """Make the error for a `path` that could not be written. `size` is the number of bytes to write, 0 if unknown.
    `choice` is what the user types to name another place: a flag and DIR or FILE."""
    place = "folder" if choice.endswith("DIR") else "file"
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = f"{size} bytes of free space there" if size else "free space there"
        # Say how much is free: part of the `size` bytes may have fitted.
        with suppress(OSError):
            space += f", where {shutil.disk_usage(path.parent).free} are left" if size else ""
        needed = f"{space}, or another {place} ({choice})"
    elif error.errno == errno.EFBIG:
        needed = f"a limit that leaves room for {size} bytes more" if size else "a higher limit"
    else:
        needed = f"a {place} that can be written to ({choice})"
    return RecordError(f"{path}: cannot be written: {reason}; needed {needed}")
