"""Penstock: a reinforcement-learning algorithm for a language model is one function; its trace is a graph.

    from penstock import Policy, Prompts, broadcast, generate, program

`__init__.pyi` lists the public names. Each is imported when it is first asked for: the controller and the command line
start without torch.
"""

import ast
import functools
import importlib
from pathlib import Path
from typing import Any

# In a checkout those folders are links to the repository root. Load them from
# there, so that tracebacks and breakpoints show the real paths. The package's own files are found after them.
_OWN = Path(__file__).parent
__path__ = list(dict.fromkeys(map(str, ((_OWN / "graph").resolve().parent, _OWN))))
__version__ = "0.1.0"


# Not the library lazy-loader, which does the same: each interpreter of a run imports this file, those of pools with
# packages of their own, too, and would need it.
@functools.cache
def _homes() -> dict[str, str]:
    """By public name, the module that defines it."""
    statements = ast.parse((_OWN / "__init__.pyi").read_text()).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {alias.name: str(statement.module) for statement in imports for alias in statement.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return sorted(_homes())
