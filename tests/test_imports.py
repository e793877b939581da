"""Imports go one way, and names are the field's. Lists here name what is not yet mended; they only shrink."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx  # type: ignore[import-untyped]
import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("graph", "cluster", "record", "tensor", "schedule", "control", "managers", "report", "plan", "cli")
"""The runtime's packages, each of which imports only those before it. `graph` is below all of them."""
NODES_IN_STRINGS = {
    "runtime/cli/doctor.py",  # starts the sandbox's self-test and the measurements as processes
    "runtime/cli/export.py",  # starts a process that adds adapters to their base
}
"""Files of the runtime that name a module of the nodes in a string."""
STARTING_OTHER_PYTHONS = {
    "runtime/cluster/interpreters.py",  # asks an interpreter which packages it has
    "runtime/control/process.py",  # starts the processes of a run, by the interpreter of their pool
}
"""Files that start an interpreter which may not be this one."""
PRIVATE_FILES = set(
    re.findall(
        r"\w+",
        "ways line learnt once sides enough least found ranked opener opening islands ground gate board meeting part"
        " put parcel handle share cover pieces box crossing adder raised resting holdings stops lanes numbers mastered"
        " account complaint figures",
    )
)
"""File names that say nothing to somebody who has not read the file."""
PRIVATE_WORDS = {
    "adder": 0,
    "beat": 2,
    "beats": 1,
    "board": 5,
    "bridge": 0,
    "bridges": 0,
    "complaint": 0,
    "cut": 38,
    "cuts": 7,
    "fate": 0,
    "fates": 2,
    "gate": 4,
    "ground": 1,
    "holdings": 0,
    "island": 0,
    "islands": 0,
    "learnt": 10,
    "mastered": 0,
    "meeting": 0,
    "opener": 2,
    "parcel": 0,
    "perishing": 0,
    "prover": 0,
    "resting": 1,
    "settle": 5,
    "shadow": 3,
    "spare": 0,
    "trails": 0,
    "way": 0,
    "ways": 0,
}
"""Private words, and the number of files whose identifiers may still contain each."""


def product() -> list[Path]:
    folders = ("graph", "nodes", "runtime", "programs")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module(path: Path) -> str:
    parts = ("penstock", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in product()}


def imported(path: Path, top: bool = False) -> Iterator[str]:
    """Yield our modules that a file imports; with `top`, only those of imports at module level."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def package(name: str) -> str:
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["runtime"] and len(parts) > 2 else parts[-1] if len(parts) < 2 else parts[1]


def upward(name: str, other: str) -> bool:
    lower, higher = package(name), package(other)
    return lower in ORDER and higher in ORDER and ORDER.index(higher) > ORDER.index(lower)


def test_the_runtimes_packages_import_only_those_before_them() -> None:
    upwards = {
        (str(path.relative_to(ROOT)), ".".join(other.split(".")[:3]))
        for name, path in MODULES.items()
        for other in imported(path)
        if upward(name, other)
    }
    assert upwards == set()


def test_no_file_needs_itself_to_be_imported() -> None:
    graph = nx.DiGraph((name, other) for name, path in MODULES.items() for other in imported(path, top=True))
    # A package's __init__ re-exports what its files define; they import each other, not the package.
    cycles = [sorted(found) for found in nx.strongly_connected_components(graph) if len(found) > 1]
    assert cycles == []


def strings(path: Path) -> Iterator[str]:
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return (value for value in constants if isinstance(value, str))


def test_the_runtime_names_no_module_of_the_nodes() -> None:
    files = (ROOT / "runtime").rglob("*.py")
    naming = {path for path in files if any(re.match(r"penstock\.nodes\b", text) for text in strings(path))}
    assert {str(path.relative_to(ROOT)) for path in naming} == NODES_IN_STRINGS


def test_commands_of_this_interpreter_are_made_in_one_place() -> None:
    """Without `-P`, a file in the current folder, such as `types.py`, shadows a module that the command imports."""
    naming = {str(path.relative_to(ROOT)) for path in product() if "-P" in strings(path)}
    assert naming == STARTING_OTHER_PYTHONS


def test_file_names_say_what_is_in_them() -> None:
    assert [str(path.relative_to(ROOT)) for path in product() if path.stem in PRIVATE_FILES] == []


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


@cache
def identifiers() -> Counter[str]:
    """Return, for each word in identifiers, the number of files that contain it."""
    files: Counter[str] = Counter()
    for path in product():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name")}
        files.update(set().union(*(words(name) for name in names if isinstance(name, str))))
    return files


@pytest.mark.parametrize("word", sorted(PRIVATE_WORDS))
def test_private_words_leave_the_identifiers(word: str) -> None:
    assert identifiers()[word] <= PRIVATE_WORDS[word]
