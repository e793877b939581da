"""What a run was given beside its flags: data, a model, the user's own modules. A resume needs all of it, unchanged."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.runtime.cli.flags import NEW, RunFlags
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.folder import absolute

OURS = "penstock"


def absolute_paths(flags: RunFlags) -> RunFlags:
    """The flags with absolute paths, so that the run can be resumed from any folder."""
    model = flags.model if flags.model in ("", NEW) else _absolute(flags.model)
    data, eval_data = (given if is_made_up(given) else _absolute(given) for given in (flags.data, flags.eval_data))
    return replace(flags, model=model, data=data, eval_data=eval_data)


def is_made_up(data: str) -> bool:
    """Does `--data` name problems that are drawn from the seed, whatever files there are?"""
    return data.partition(":")[0] in ("", "arithmetic")


def _absolute(given: str) -> str:
    """What a user's own source understands may be no path at all: it stays as it is."""
    return str(absolute(given)) if Path(given).exists() else given


def file_digests(flags: RunFlags | RunOptions) -> dict[str, str]:
    """The SHA-256 of each data file, by its path."""
    paths = [Path(data) for data in (flags.data, flags.eval_data) if not is_made_up(data)]
    return {str(path): _sha256(path) for path in paths if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_inputs(folder: Path, config: RunConfig, asked: Mapping[str, Any]) -> None:
    """Raises CommandError with all that is missing or not as it was when the run of `folder` began. `asked` is of its
    `config.json`."""
    flags, digests = config.flags, asked.get("digests", {})
    lacks = [*_model_lacks(flags.model), *_data_lacks(flags, digests), *_module_lacks(config, asked.get("folder", ""))]
    if lacks:
        raise CommandError("\n".join([f"{folder}: the run cannot go on; nothing was changed:", *lacks]))


def _model_lacks(model: str) -> Iterator[str]:
    path = Path(model)
    if model and not (path / "config.json").is_file():
        given = "a folder without config.json" if path.is_dir() else "no folder there"
        yield f"  the model {model}: given {given}, needed the one that the run began with"


def _data_lacks(flags: RunOptions, digests: Mapping[str, str]) -> Iterator[str]:
    for data in dict.fromkeys((flags.data, flags.eval_data)):
        path, needed = Path(data), digests.get(data, "")
        if (needed or path.is_absolute()) and not path.exists():
            yield f"  the data {data}: given no file there, needed the one that the run began with"
        elif needed and (given := _sha256(path)) != needed:
            change = f"given a file with SHA-256 {given}, needed {needed}"
            yield f"  the data {data}: it has changed, so that groups would be others than they were: {change}"


def _module_lacks(config: RunConfig, folder: str) -> Iterator[str]:
    graphs = [graph.to_json() for graph in config.graphs]
    folders = [str(Path.cwd()), *(str(Path(graph.op.rpartition(":")[0]).parent) for graph in config.graphs)]
    for place in dict.fromkeys(path.rpartition(":")[0] for path in _import_paths(graphs)):
        if place.endswith(".py"):
            if not Path(place).is_file():
                yield f"  the program's file {place}: given no file there, needed the one that the run began with"
            continue
        package = place.partition(".")[0]
        if package not in ("", OURS) and not find_spec(package) and not PathFinder.find_spec(package, folders):
            needed = f"a resume from {folder}, where the run began" if folder else "it installed, or another folder"
            yield f"  the program's module {place}: given a folder from which it cannot be imported, needed {needed}"


def _import_paths(value: Any) -> Iterator[str]:
    """All that a graph's JSON names by import path."""
    if isinstance(value, list):
        for item in value:
            yield from _import_paths(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("op", "maker", "path") and isinstance(item, str):
                yield item
            else:
                yield from _import_paths(item)
