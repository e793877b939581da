"""Penstock: a reinforcement-learning algorithm for a language model is one function; its trace is a graph."""

from pathlib import Path

# In a checkout those folders are links to the repository root. Load them from
# there, so that tracebacks and breakpoints show the real paths.
__path__ = [str((Path(__file__).parent / "graph").resolve().parent)]
__version__ = "0.1.0"
