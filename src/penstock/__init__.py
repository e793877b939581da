"""Penstock: a reinforcement-learning algorithm for a language model is one function; its trace is a graph."""

import os
from pathlib import Path

# In a checkout those folders are links to the repository root. Load them from
# there, so that tracebacks and breakpoints show the real paths. The package's own files are found after them.
_OWN = Path(__file__).parent
__path__ = list(dict.fromkeys(map(str, ((_OWN / "graph").resolve().parent, _OWN))))
__version__ = "0.1.0"


def cache_folder() -> Path:
    """Where what is made once for a user is kept: $PENSTOCK_CACHE, else `penstock` in the user's cache folder."""
    given = os.environ.get("PENSTOCK_CACHE")
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
