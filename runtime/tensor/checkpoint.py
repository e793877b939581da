"""A checkpoint: each rank writes its carried values, node states and groups' values into one file of `files`.

Tensors are named by what they belong to: "carried/NAME/TENSOR", "state/NODE/0", "value/NODE/ORDINAL/OUTPUT/0". Beside
a carried value that its ranks hold in parts stands its layout, so that any other mesh can read it. States and groups'
values are the same on all ranks of a replica.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.graph.ir import Firing
from penstock.graph.protocols import Carried
from penstock.graph.sharding import Sharded
from penstock.runtime.record.folder import sync
from penstock.runtime.tensor.codec import CodecError, decode, encode
from penstock.runtime.tensor.files import StateError, StateFile, save_state
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.mesh import Mesh
from penstock.runtime.tensor.parallel import sharded
from penstock.runtime.tensor.part_file import FORMAT, part_path, refusal
from penstock.runtime.tensor.pieces import assemble

T = TypeVar("T")


def value_name(firing: Firing, output: str) -> str:
    return f"value/{firing.node}/{firing.index}/{output}"


def write_part(
    folder: Path,
    replica: str,
    rank: int,
    ranks: int,
    carried: Mapping[str, Carried],
    states: Mapping[str, Any],
    values: Mapping[tuple[Firing, str], Any],
    earlier: Mapping[str, Carried] | None = None,
    run: str = "",
) -> None:
    """Write all that this rank contributes to a cut; carried values are exported for other tools, too: by rank 0, or
    by all ranks together where they hold parts.

    `ranks` are those of the replica. `earlier` are carried values as they were before, by names of their own. `run` is
    the id of the run. On return all of it is on the disk. Raises OSError or StateError where it cannot be written,
    and does not make the run folder again if that is gone.
    """
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "run": run,
        "ranks": ranks,
        "carried": {},
        "layouts": {},
        "encoded": {},
        "keys": [[*f, output] for f, output in values],
    }
    for name, value in {**carried, **(earlier or {})}.items():
        own, facts["carried"][name] = value.state()
        tensors.update((f"carried/{name}/{key}", tensor) for key, tensor in own.items())
        if (layout := layout_of(value)) is not None:
            facts["layouts"][name] = layout.to_json()
        if name in carried and (rank == 0 or layout is not None):
            (folder / name).mkdir(exist_ok=True)
            value.export(str(folder / name))
            for path in (folder / name, *(folder / name).rglob("*")):
                if not path.is_symlink():
                    # A rank syncs what it has written; of another rank's, a temporary file may be gone by now.
                    with suppress(FileNotFoundError):
                        sync(path)
    encoded = {f"state/{name}": state for name, state in states.items()}
    encoded |= {value_name(*key): value for key, value in values.items()}
    for name, value in encoded.items():
        try:
            parts, facts["encoded"][name] = encode(value)
        except CodecError as error:  # a later state may be of another kind than the first, which was tried at the start
            kind, _, of = name.partition("/")
            raise CodecError(f"the {kind} of {of} cannot be kept in a checkpoint: {error}") from error
        tensors.update((f"{name}/{index}", tensor) for index, tensor in enumerate(parts))
    save_state(part_path(folder, replica, rank), tensors, facts)


def require_savable(states: Mapping[str, Any], carried: Mapping[str, Carried]) -> None:
    """Raises TypeError for a state that no checkpoint can hold, by its name: it is found at the start, not by the first
    checkpoint, after the training."""
    for name, state in states.items():
        try:
            tensors, meta = encode(state)
            decode(type(state), tensors, json.loads(json.dumps(meta)))
        except Exception as error:
            raise TypeError(f"the state of {name}, cannot be kept in a checkpoint: {error}") from error
    for name, value in carried.items():
        own, facts = value.state()
        if wrong := [f"{key}, a {type(given).__name__}" for key, given in own.items() if not isinstance(given, Tensor)]:
            raise TypeError(f"the state of {name} cannot be kept in a checkpoint: given {wrong[0]}, needed tensors")
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            needed = "needed facts that JSON can keep beside the tensors"
            raise TypeError(f"the state of {name} cannot be kept in a checkpoint: {error}; {needed}") from error


def layout_of(value: Carried) -> Layout | None:
    """How the logical tensors lie over the ranks; None for a value that is whole on each.

    A state has several tensors for each (the master and the optimizer's), all cut alike: their dtypes are not here.
    """
    if not isinstance(value, Sharded):
        return None
    own = value.sharding()
    tensors = [(name, shape, "float32") for name, shape in own.shapes.items()]
    return sharded(tensors, Mesh(own.mesh), own.rules, own.stages or None)


class Part:
    """What the ranks of `replica` wrote in `run`, as `rank` of the same or of another mesh needs it."""

    def __init__(self, folder: Path, replica: str, rank: int, run: str) -> None:
        self.rank = rank
        first = StateFile.open(part_path(folder, replica, 0))
        if text := refusal(first.path, first.facts):
            raise StateError(text)
        others = [StateFile.open(part_path(folder, replica, k)) for k in range(1, first.facts["ranks"])]
        self._files = [first, *others]
        for file in self._files:
            _require_run(file, run)
        # The same on all ranks but for what a layout says.
        self._own = self._files[min(rank, len(others))]

    @property
    def made(self) -> list[tuple[Firing, str]]:
        """The groups' values in it."""
        return [(Firing(*firing), output) for *firing, output in self._own.facts["keys"]]

    def carried(self, name: str, layout: Layout | None = None) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """The state of a carried value: the parts that this rank holds of it in `layout`, or all of it."""
        prefix, facts = f"carried/{name}/", self._own.facts["carried"][name]
        written = self._own.facts["layouts"].get(name)
        saved = None if written is None else Layout.from_json(written)
        if saved == layout:
            return self._own.tensors(prefix), facts
        return assemble(self._files, prefix, saved, layout, self.rank), facts

    def value(self, name: str, cls: type[T]) -> T:
        meta = self._own.facts["encoded"][name]
        tensors = self._own.tensors(f"{name}/")
        return decode(cls, [tensors[str(index)] for index in range(len(meta["tensors"]))], meta)


def read_part(folder: Path, replica: str, rank: int, run: str = "") -> Part:
    """Raises StateError for a file that is missing, no state, of another format than is written now, or of another
    `run` ("": of any).
    """
    return Part(folder, replica, rank, run)


def _require_run(file: StateFile, run: str) -> None:
    """Hosts that share no folder keep their parts in folders of their own, which an earlier run may have had."""
    given = file.facts.get("run", "")
    if run and given and given != run:
        needed = f"needed one of run {run}: each run has a folder of its own on each host"
        raise StateError(f"{file.path}: given a part of run {given}, {needed}")
