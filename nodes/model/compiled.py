"""C that is compiled where it runs, for this processor."""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILE_S = 60.0
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_HEADERS = f"-I{Path(__file__).parent}"


def compiler() -> str:
    return os.environ.get("CC", "cc")


def compile_c(source: Path, given: Sequence[str]) -> ctypes.CDLL:
    """The functions of a file, compiled with such definitions. Raises OSError or subprocess.TimeoutExpired where it
    does not compile, or there is no compiler."""
    # Compiled by each process, in a third of a second: nobody else can have written what is loaded, and it is of this
    # processor. What is loaded stays when its file goes.
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / f"{source.stem}.so")
        command = [compiler(), *_FLAGS, _HEADERS, *given, str(source), "-o", library, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
        if done.returncode:
            raise OSError(done.stderr.strip()[-500:] or f"status {done.returncode}")
        return ctypes.CDLL(library)
