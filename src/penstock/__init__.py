"""Penstock: a reinforcement-learning algorithm for a language model is one function; its trace is a graph."""

from pathlib import Path

# In a checkout those folders are links to the repository root. Load them from
# there, so that tracebacks and breakpoints show the real paths. The package's own files are found after them.
_OWN = Path(__file__).parent
__path__ = list(dict.fromkeys(map(str, ((_OWN / "graph").resolve().parent, _OWN))))
__version__ = "0.1.0"
