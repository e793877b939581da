"""C that is compiled at run time for this processor, and kept in the user's cache for later processes."""

import ctypes
import hashlib
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from penstock.graph.types import NodeWarning
from penstock.host import cache_folder

COMPILE_S = 60.0
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_HEADERS = f"-I{Path(__file__).parent}"

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that the C functions support."""


class NoCompilerWarning(NodeWarning):
    """Without a C compiler, models on a CPU are slower than they could be."""


def compiler() -> str:
    return os.environ.get("CC", "cc")


def compile_c(source: Path, dtype: torch.dtype, given: Sequence[str] = ()) -> ctypes.CDLL:
    """The functions of a file for tensors of a dtype of `DTYPES`, compiled with the options `given`, now or by an
    earlier process. Raises OSError or subprocess.TimeoutExpired if it does not compile, or without a compiler."""
    narrow = ["-DBF16"] if dtype == torch.bfloat16 else []
    try:
        program = shlex.split(compiler())
    except ValueError as error:  # an open quotation mark
        raise OSError(str(error)) from error
    if not program:
        raise FileNotFoundError("it names no compiler")
    command = [*program, *_FLAGS, _HEADERS, *given, *narrow, str(source), "-lm"]
    name = f"{source.stem}-{_key(command, source)}.so"
    kept = None
    try:
        kept = _kept()
    except OSError as error:
        # The same text for all files: a run shows each text once.
        needed = "a folder that this user alone can write to (PENSTOCK_CACHE=DIR): each start compiles again"
        warnings.warn(f"compiled code: given {error}, needed {needed}", NodeWarning, stacklevel=3)
    try:
        if kept is not None:
            with suppress(OSError):  # it is missing or damaged, or nothing may be executed from there
                return ctypes.CDLL(f"/proc/self/fd/{kept}/{name}")
        # A loaded library stays when its file is deleted.
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / name
            done = subprocess.run([*command, "-o", library], capture_output=True, text=True, timeout=COMPILE_S)
            if done.returncode:
                raise OSError(done.stderr.strip()[-500:] or f"status {done.returncode}")
            if kept is not None:
                with suppress(OSError):  # such as a full disk: the next process compiles it again
                    _keep(library, kept)
            return ctypes.CDLL(str(library))
    finally:
        if kept is not None:
            os.close(kept)


def _key(command: Sequence[str], source: Path) -> str:
    """A hash of everything that a library depends on: the command, the files that it reads, the compiler, and this
    processor. Raises OSError without the compiler."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"no {command[0]}")
    facts, key = os.stat(program), hashlib.sha256()
    key.update(repr((list(command), program, facts.st_size, facts.st_mtime_ns)).encode())
    for path in (source, *sorted(Path(__file__).parent.glob("*.h"))):
        key.update(path.read_bytes())
    # The first core's facts, without its present frequency.
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    key.update("\n".join(line for line in first.splitlines() if "mhz" not in line.lower()).encode())
    return key.hexdigest()[:32]


def _kept() -> int:
    """A descriptor of the folder of libraries. It must belong to this user, and no other user may write to it: so all
    its files are this user's. Raises OSError if it cannot be made, or if others could write to it."""
    folder = cache_folder() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    facts = os.fstat(opened)
    if facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o022:
        return opened
    os.close(opened)
    raise PermissionError(f"{folder}, to which other users can write")


def _keep(library: Path, kept: int) -> None:
    """Put a library into the folder, atomically, also if other processes do the same. Raises OSError."""
    half = f".{secrets.token_hex(8)}"
    try:
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=kept), "wb") as file:
            file.write(library.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.rename(half, library.name, src_dir_fd=kept, dst_dir_fd=kept)
    except OSError:
        with suppress(OSError):
            os.unlink(half, dir_fd=kept)
        raise


def compiled_or_warned(source: Path, dtype: torch.dtype, given: Sequence[str] = ()) -> ctypes.CDLL | None:
    """As `compile_c`; None with a warning if it does not compile, and None for another dtype."""
    if dtype not in DTYPES:
        return None
    try:
        return compile_c(source, dtype, given)
    except (OSError, subprocess.TimeoutExpired) as error:
        # The same text for all files: a run shows each text once.
        needed = "a C compiler with OpenMP: models on a CPU take up to twice as long without one"
        warnings.warn(f"given {compiler()!r} ({error}), needed {needed}", NoCompilerWarning, stacklevel=3)
        return None
