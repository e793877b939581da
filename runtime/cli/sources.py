"""The files that a run begins with (its data, its model and the user's own code), and whether they have changed.

Changed data are refused: groups would be others. Code may be changed between two lives of a run, and a resume reports
it: the graph is that of the run folder, but the nodes' functions are those of the present files. The user's code is
everything that the tracing process has imported for the program, and everything that this code imports by statements
within functions (`own_files`). Imports by a computed name, as with `importlib.import_module`, are not found.
"""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.runtime.control.run_config import RunConfig, RunOptions


def source_digests(paths: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each of these files and folders that exist."""
    return {path: sha256(Path(path)) for path in paths if Path(path).exists()}


def own_files(modules: Mapping[str, ModuleType]) -> list[str]:
    """The user's own files among these modules (by name), and the files that their import statements name, also within
    functions. Files of Python, of Penstock and of installed packages are left out; editable installs are the user's
    own."""
    pythons = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]

    # Cached by folder: torch imports a thousand files, and the start of a run waits for this.
    @cache
    def installed(folder: str) -> bool:
        return not {"site-packages", "dist-packages"}.isdisjoint(folder.split(os.sep)) or any(
            Path(os.path.realpath(folder)).is_relative_to(python) for python in pythons
        )

    def is_own(file: Any) -> bool:
        # Modules that torch generates have a `__file__` that is not a path.
        path = file if isinstance(file, str) and os.path.isabs(file) and file.endswith(".py") else ""
        return bool(path) and not installed(os.path.dirname(path))

    theirs = [module for name, module in modules.items() if name.partition(".")[0] != "penstock"]
    # `sys.modules` may contain anything. Bypass attribute access, which may load a lazy module or raise.
    facts = [object.__getattribute__(module, "__dict__") for module in theirs if issubclass(type(module), ModuleType)]
    packages = {fact["__file__"]: fact.get("__package__") or "" for fact in facts if is_own(fact.get("__file__"))}
    waiting = [*packages]
    while waiting:
        file = waiting.pop()
        for spec in _named_imports(Path(file), packages[file]):
            if spec.origin not in packages and is_own(spec.origin):
                packages[spec.origin] = spec.parent or ""
                waiting.append(spec.origin)
    return sorted(packages)


def _named_imports(file: Path, package: str) -> Iterator[ModuleSpec]:
    """The specs of the modules that the import statements of a file name, and of the packages that contain them.
    Nothing is imported."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):  # reported when it is imported
        return
    names = set[str]()
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            names |= {alias.name for alias in part.names}
        elif isinstance(part, ast.ImportFrom) and (package or not part.level):
            # A relative import beyond its package raises when it is executed.
            with suppress(ImportError):
                module = resolve_name("." * part.level + (part.module or ""), package)
                names |= {f"{module}.{alias.name}" for alias in part.names}
    for name in sorted(names):
        first, *_ = parts = name.split(".")
        if first == "penstock" or first in sys.stdlib_module_names:
            continue
        folders: Any = None
        for depth in range(1, len(parts) + 1):
            finds = (finder.find_spec(".".join(parts[:depth]), folders) for finder in sys.meta_path)
            if (spec := next(filter(None, finds), None)) is None:
                break
            yield spec
            if (folders := spec.submodule_search_locations) is None:
                break


def sha256(path: Path) -> str:
    """The digest of a file's content, or of the names and contents of a directory's files."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        listed = "".join(f"{file.relative_to(path)} {sha256(file)}\n" for file in files)
        return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_inputs(flags: RunOptions, digests: Mapping[str, str]) -> Iterator[str]:
    """A line for a missing model, and for each missing or changed data file."""
    model, same = Path(flags.model), "needed the one that the run began with"
    if flags.model and not any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
        given = "a folder without config.json" if model.is_dir() else "no folder there"
        yield f"  the model {model}: given {given}, {same}"
    for data in dict.fromkeys((flags.data, flags.eval_data)):
        path, needed = Path(data), digests.get(data, "")
        if (needed or path.is_absolute()) and not path.exists():
            yield f"  the data {data}: given no file there, {same}"
        elif needed and (given := sha256(path)) != needed:
            change = f"given a file with SHA-256 {given}, needed {needed}"
            yield f"  the data {data}: it has changed, so groups would differ: {change}"


def lost_code(config: RunConfig, folder: str) -> Iterator[str]:
    """A line for each of the user's own files and packages that the graphs name and that cannot be found."""
    folders = _code_folders(config)
    for place in _code_places(config):
        package = place.partition(".")[0]
        if place.endswith(".py"):
            if not Path(place).is_file():
                yield f"  the program's file {place}: given no file there, needed the one that the run began with"
        elif not (find_spec(package) or PathFinder.find_spec(package, folders)):
            needed = f"a resume from {folder}, where the run began" if folder else "it installed, or another folder"
            yield f"  the program's module {place}: given a folder from which it cannot be imported, needed {needed}"


def edited_code(digests: Mapping[str, str]) -> Iterator[str]:
    """A line for each code file that has changed or is gone."""
    for place, needed in digests.items():
        if (path := Path(place)).suffix != ".py":
            continue
        if not path.is_file():
            yield f"{path} is gone since the run began: what imports it finds another file of that name now, or none"
        elif sha256(path) != needed:
            yield (
                f"{path} has changed since the run began: nodes do what it says now, and the graph with its options is "
                "the run folder's; for the graph of the file begin a new run"
            )


def _code_places(config: RunConfig) -> list[str]:
    """The distinct files and modules of the user that the graphs name."""
    named = _import_paths([graph.to_json() for graph in config.graphs])
    places = dict.fromkeys(path.rpartition(":")[0] for path in named)
    return [place for place in places if place.partition(".")[0] not in ("", "penstock")]


def _code_folders(config: RunConfig) -> list[str]:
    """The folders in which ranks look for modules: the current folder, and the folder of the program's file."""
    beside = (Path(graph.op.rpartition(":")[0]).parent.absolute() for graph in config.graphs)
    return list(dict.fromkeys(map(str, [Path.cwd(), *beside])))


def _import_paths(value: Any) -> Iterator[str]:
    """All import paths in a graph's JSON."""
    if isinstance(value, list):
        for item in value:
            yield from _import_paths(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("op", "maker", "path") and isinstance(item, str):
                yield item
            else:
                yield from _import_paths(item)
