"""What all layers take from the host: the command of this interpreter, and the user's own folders."""

import os
import stat
import sys
import tempfile
from pathlib import Path


def module_command(module: str, *words: str | os.PathLike[str]) -> list[str]:
    """The command by which this interpreter runs a module with these words."""
    # -P: files of the current folder, such as a `types.py`, shadow no module that it imports.
    return [sys.executable, "-P", "-m", module, *(os.fspath(word) for word in words)]


def install_command(*extras: str) -> str:
    """The command that installs optional dependencies, for messages."""
    names = ",".join(extras)
    return f"pip install 'penstock[{names}]' (in a checkout '.[{names}]')"


class PrivateFolderError(PermissionError, ValueError):
    """A folder that has to be this user's alone is not."""


def private_folder(temporary: Path | None = None) -> Path:
    """This user's own folder, of mode 0700, in the `temporary` folder of this machine; it is made if it is not there.
    Raises PrivateFolderError where it cannot be made, and where another user has made it first, to read or to plant
    something."""
    folder = (temporary or Path(tempfile.gettempdir())) / f"penstock-{os.geteuid()}"
    needed = f"needed a folder of user {os.geteuid()} alone (mode 0700)"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise PrivateFolderError(f"{folder}: given {error.strerror}; {needed}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        given = f"owner {facts.st_uid}, mode {stat.filemode(facts.st_mode)}"
        raise PrivateFolderError(f"{folder}: given {given}; {needed}")
    return folder


def cache_folder() -> Path:
    """Where what is made once for a user is kept: $PENSTOCK_CACHE, else `penstock` in the user's cache folder, else, of
    a user without a home, as containers have, in the user's `private_folder`. Raises as that does."""
    given = os.environ.get("PENSTOCK_CACHE")
    if given:
        return Path(given).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    except RuntimeError:
        try:
            return private_folder() / "cache"
        except PrivateFolderError as error:
            raise PrivateFolderError(f"{error}, or PENSTOCK_CACHE=DIR: user {os.getuid()} has no home") from error
