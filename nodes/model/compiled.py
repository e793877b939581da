"""C that is compiled where it runs, for this processor."""

import ctypes
import os
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.graph.types import NodeWarning

COMPILE_S = 60.0
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_HEADERS = f"-I{Path(__file__).parent}"

DTYPES = (torch.float32, torch.bfloat16)
"""That there are functions for."""


class NoCompilerWarning(NodeWarning):
    """A CPU is slower than it could be."""


def compiler() -> str:
    return os.environ.get("CC", "cc")


def compile_c(source: Path, dtype: torch.dtype, given: Sequence[str] = ()) -> ctypes.CDLL:
    """The functions of a file for tensors of a dtype of `DTYPES`, compiled with such definitions. Raises OSError or
    subprocess.TimeoutExpired where it does not compile, or there is no compiler."""
    # Compiled by each process, in a third of a second: nobody else can have written what is loaded, and it is of this
    # processor. What is loaded stays when its file goes.
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / f"{source.stem}.so")
        narrow = ["-DBF16"] if dtype == torch.bfloat16 else []
        command = [*shlex.split(compiler()), *_FLAGS, _HEADERS, *given, *narrow, str(source), "-o", library, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
        if done.returncode:
            raise OSError(done.stderr.strip()[-500:] or f"status {done.returncode}")
        return ctypes.CDLL(library)


def compiled_or_warned(source: Path, dtype: torch.dtype, given: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The same; None where it does not compile, of which it warns, and for another dtype."""
    if dtype not in DTYPES:
        return None
    try:
        return compile_c(source, dtype, given)
    except (OSError, subprocess.TimeoutExpired) as error:
        # One text for all files: a run shows each once.
        needed = "a C compiler with OpenMP: models on a CPU take up to twice as long without one"
        warnings.warn(f"given {compiler()!r} ({error}), needed {needed}", NoCompilerWarning, stacklevel=3)
        return None
