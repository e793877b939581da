"""Checkpoints: `copy_shard` copies the state of one rank (carried values, node states, groups' values), and
`ShardCopy.write` writes it, perhaps later and in another thread. `CheckpointShard` reads it for a rank of the same or
of another mesh.

A shard is one safetensors file, which is complete or absent. Its facts are JSON in the file's metadata, so that facts
and tensors are always of the same moment. Tensors are named by what they belong to: "carried/NAME/TENSOR",
"state/NODE/0", "value/NODE/ORDINAL/OUTPUT/0". The metadata also has a CRC-32 of the facts and of each tensor, so that
corrupted data is never used for training. The parts of a state or a value that are no tensors, such as the texts of
rollouts, are JSON in a tensor of bytes, "value/NODE/ORDINAL/OUTPUT/facts": safetensors allows at most 100 MB of
metadata.

For a carried value that is sharded over its ranks, the facts have its layout, so that any other mesh can read it
(`assemble`). The tensors of such a state are named KIND.TENSOR, such as exp_avg.model.norm.weight, where TENSOR is a
logical tensor of the layout; all kinds are sharded as it is. States and groups' values are the same on all ranks of a
replica.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.graph.ir import Firing
from penstock.graph.protocols import Carried, Sharded
from penstock.runtime.record.checkpoints import (
    FORMAT,
    StateError,
    UnreadableError,
    part_path,
    refusal,
    resume_point_without,
)
from penstock.runtime.record.folder import open_regular, sync
from penstock.runtime.record.typed_json import NEEDED
from penstock.runtime.tensor.codec import CodecError, decode, encode
from penstock.runtime.tensor.layout import Layout, Mesh, sharded
from penstock.runtime.tensor.reshard import reshard
from penstock.runtime.tensor.shm import room

_FORMAT = "penstock-state-1"
_FACTS = "facts"


def save_state(path: Path | str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write `tensors` and JSON-able `facts` to `path`, replacing it in one step; durable on return.

    On an error the file at `path`, if there was one, is as it was.
    """
    _write_state(Path(path), tensors, json.dumps(facts))


def _write_state(path: Path, tensors: Mapping[str, Tensor], facts: str) -> None:
    separate = _separate(tensors)
    checks = {name: _check(tensor) for name, tensor in separate.items()}
    # In the file itself, so that facts and tensors are of the same moment.
    metadata = {"format": _FORMAT, "facts": facts, "facts_check": str(zlib.crc32(facts.encode()))}
    metadata["checks"] = json.dumps(checks)
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(separate, part, metadata)
        sync(part)
        # Sync the data, then rename, then sync the folder: a crash leaves the old file or the new one, complete.
        os.replace(part, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        needed = sum(t.nbytes for t in tensors.values())
        raise StateError(f"{path}: cannot write {needed} bytes of state ({room(path.parent)}): {error}") from error


def _check(tensor: Tensor) -> int:
    # By zlib, not with torch: it uses one core, and leaves the others to the threads that train meanwhile.
    return zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class StateFile:
    """Lazily reads what `save_state` wrote: its facts, the names of its tensors, and their checksums, which earlier
    versions did not write."""

    path: Path
    facts: dict[str, Any]
    names: tuple[str, ...]
    checks: dict[str, int]

    @staticmethod
    def open(path: Path | str) -> "StateFile":
        """Open a file. Raises UnreadableError if it is missing, no state, or its facts are damaged."""
        with _reading(Path(path)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise UnreadableError(f"{path}: given format {metadata.get('format')!r}, needed {_FORMAT!r}")
            facts = metadata["facts"]
            if metadata.get("facts_check", check := str(zlib.crc32(facts.encode()))) != check:
                raise _damage(Path(path), "facts: given bytes of another checksum than theirs")
            checks = json.loads(metadata.get("checks", "{}"))
            return StateFile(Path(path), json.loads(facts), tuple(file.keys()), checks)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names; on the CPU. Raises UnreadableError
        for a damaged one."""
        return {name.removeprefix(prefix): tensor for name, tensor in self._whole(prefix)}

    def require_undamaged(self, prefix: str) -> None:
        """Read the tensors whose names begin with `prefix`, one at a time. Raises UnreadableError for a damaged one."""
        for _ in self._whole(prefix):
            pass

    def _whole(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        with _reading(self.path) as file:
            for name in self.names:
                if name.startswith(prefix):
                    tensor = file.get_tensor(name)
                    if name in self.checks and _check(tensor) != self.checks[name]:
                        raise _damage(self.path, f"{name}: given bytes of another checksum than theirs")
                    yield name, tensor

    def piece(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of one tensor. Only this part is read, so its checksum is not checked."""
        with _reading(self.path) as file:
            piece: Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
            return piece


def _damage(path: Path, what: object) -> UnreadableError:
    return UnreadableError(f"{path}: not a readable state: {what}; {NEEDED}; {resume_point_without(path.parent)}")


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        # By descriptor: safetensors cannot open a path that is not UTF-8, and would follow a link.
        with (
            open(open_regular(path, os.O_RDONLY), "rb") as opened,
            safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file,
        ):
            yield file
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _damage(path, error) from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory: safetensors refuses two names for the same bytes, as of tied weights."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        if own.numel() and own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        separate[name] = own
    return separate


def assemble(
    files: Sequence[StateFile], prefix: str, saved: Layout | None, wanted: Layout | None, rank: int
) -> dict[str, Tensor]:
    """The shards that `rank` holds in the layout `wanted`, from the `files` of ranks with the layout `saved`. A layout
    of None means: whole on each rank.

    Raises LayoutError for layouts of other tensors, UnreadableError for a file without a tensor that its layout has.
    """
    known = saved or wanted
    assert known is not None
    source = saved or known.replicated(len(files))
    target = wanted or known.replicated(rank + 1)
    names = dict.fromkeys(name.removeprefix(prefix) for f in files for name in f.names if name.startswith(prefix))
    kinds = dict.fromkeys(kind for name in names if (kind := _kind(name, known)))
    found = {name: tensor for name, tensor in files[0].tensors(prefix).items() if not _kind(name, known)}
    copies = reshard(source, target).receives(rank)
    for kind in kinds:
        parts: dict[str, Tensor] = {}
        for copy in copies:
            file, name = files[copy.source], f"{prefix}{kind}{copy.tensor}"
            regions = source.by_name[copy.tensor].held_by(copy.source)
            held = next(region for region in regions if (region & copy.region) == copy.region)
            if name not in file.names:
                raise _damage(file.path, f"{name} is missing, of which its layout says that {held} is there")
            piece = file.piece(name, copy.region.slices(held))
            (region,) = target.by_name[copy.tensor].held_by(rank)
            if copy.tensor not in parts:
                parts[copy.tensor] = torch.empty(region.shape, dtype=piece.dtype)
            parts[copy.tensor][copy.region.slices(region)] = piece
        for tensor in target.tensors:
            # A rank without a shard of a tensor has an empty one under its name, as in FSDP2.
            empty = torch.empty(0, *tensor.shape[1:])
            found[f"{kind}{tensor.name}"] = parts.get(tensor.name, empty)
    return found


def _kind(name: str, layout: Layout) -> str:
    """The kind of a state's tensor, with its dot; "" if the name is not that of a logical tensor."""
    kind, dot, tensor = name.partition(".")
    return kind + dot if tensor in layout.by_name else ""


T = TypeVar("T")


def value_name(firing: Firing, output: str) -> str:
    return f"value/{firing.node}/{firing.index}/{output}"


class HostBuffers:
    """Host memory for copies of tensors, kept from one checkpoint to the next. It is pinned for tensors of a GPU, which
    are then copied at the bus's full speed."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(self.needed(buffer.nbytes, buffer.is_pinned()) for buffer in self._buffers.values())

    @staticmethod
    def needed(nbytes: int, pinned: bool) -> int:
        """The memory that a buffer of `nbytes` takes: torch allocates pinned memory in powers of two."""
        return 1 << (nbytes - 1).bit_length() if pinned and nbytes else nbytes

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies by the same names, complete on return. Earlier copies are overwritten. On a GPU they are made in the
        caller's stream: after the last optimizer step, before the next one."""
        kept = self._buffers
        self._buffers = {}
        for name, tensor in tensors.items():
            buffer = kept.pop(name, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffer.copy_(tensor.detach(), non_blocking=True)
            self._buffers[name] = buffer
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            # Not the whole device: another stream may be sending weights.
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)


@dataclass(frozen=True)
class ShardCopy:
    """One rank's part of a checkpoint. `exports` finish the files that carried values write for other tools, each into
    its folder. `apart`: the run does not change it, since it is a copy."""

    path: Path
    tensors: Mapping[str, Tensor]
    facts: str
    exported: tuple[Path, ...]
    exports: Mapping[Path, Callable[[], None]]
    apart: bool

    def write(self) -> None:
        """Write all of it to the disk. Raises OSError or StateError if it cannot be written."""
        for folder, export in self.exports.items():
            try:
                export()
            except (OSError, SafetensorError) as error:
                raise StateError(f"{folder}: cannot be written ({room(folder)}): {error}") from error
        for folder in self.exported:
            for path in (folder, *folder.rglob("*")):
                if not path.is_symlink():
                    # Ranks may share the folder: another rank's temporary file may be gone by now.
                    with suppress(FileNotFoundError):
                        sync(path)
        _write_state(self.path, self.tensors, self.facts)


def copy_shard(
    folder: Path,
    replica: str,
    rank: int,
    ranks: int,
    carried: Mapping[str, Carried],
    states: Mapping[str, Any],
    values: Mapping[tuple[Firing, str], Any],
    earlier: Mapping[str, Carried] | None = None,
    run: str = "",
    buffers_for: Callable[[int], HostBuffers | None] = lambda needed: None,
) -> ShardCopy:
    """Copy this rank's shard of a checkpoint. Carried values are also exported for other tools: by rank 0, or by all
    ranks if they are sharded.

    `ranks` is the number of ranks of the replica. `earlier` are earlier versions of carried values, by their own names.
    `run` is the id of the run. `buffers_for` gives buffers of so many bytes for copies of what may change, or None if
    there is no room; without them, write the result before anything changes. Raises OSError if it cannot be written,
    and does not create the run folder again if that is gone.
    """
    # No parents: a removed run folder must not come back with only a checkpoint in it.
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    exported: list[Path] = []
    exports: dict[Path, Callable[[], None]] = {}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "run": run,
        "ranks": ranks,
        "carried": {},
        "layouts": {},
        "keys": [[*f, output] for f, output in values],
    }
    for name, value in {**carried, **(earlier or {})}.items():
        own, facts["carried"][name] = value.state()
        tensors.update((f"carried/{name}/{key}", tensor) for key, tensor in own.items())
        if (layout := layout_of(value)) is not None:
            facts["layouts"][name] = layout.to_json()
        if name in carried and (rank == 0 or layout is not None):
            (folder / name).mkdir(exist_ok=True)
            later = value.export(str(folder / name))
            exported.append(folder / name)
            if later is not None:
                exports[folder / name] = later
    encoded = {f"state/{name}": state for name, state in states.items()}
    plain: dict[str, Tensor] = {}
    # States and values share one table; their names differ by prefix.
    encoded |= {value_name(*key): value for key, value in values.items()}
    for name, value in encoded.items():
        try:
            parts, meta = encode(value)
        except CodecError as error:  # `require_savable` tried the first state; a later one may be of another kind
            kind, _, of = name.partition("/")
            raise CodecError(f"the {kind} of {of} cannot be kept in a checkpoint: {error}") from error
        tensors.update((f"{name}/{index}", tensor) for index, tensor in enumerate(parts))
        plain[f"{name}/{_FACTS}"] = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
    # Groups' values never change, so a reference to them is enough. Exports have made their own copies by now.
    changing = {name: tensor for name, tensor in tensors.items() if not name.startswith("value/")}
    buffers = buffers_for(sum(HostBuffers.needed(tensor.nbytes, tensor.is_cuda) for tensor in changing.values()))
    if buffers is not None:
        tensors |= buffers.copy(changing)
    path = part_path(folder, replica, rank)
    return ShardCopy(path, tensors | plain, json.dumps(facts), tuple(exported), exports, buffers is not None)


def require_savable(states: Mapping[str, Any], carried: Mapping[str, Carried]) -> None:
    """Raise TypeError for a state that no checkpoint can hold. Called at the start, so that the first checkpoint does
    not fail after hours of training."""
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
    """How the logical tensors are sharded over the ranks; None for a value that is whole on each rank.

    A state has several tensors for each logical one (master weight and optimizer moments), all sharded alike; their
    dtypes are not in the layout.
    """
    if not isinstance(value, Sharded):
        return None
    own = value.sharding()
    tensors = [(name, shape, "float32") for name, shape in own.shapes.items()]
    return sharded(tensors, Mesh(own.mesh), own.rules, own.stages or None, experts=own.experts)


class CheckpointShard:
    """What the ranks of `replica` wrote, for `rank` of the same or of another mesh. On the same mesh only its own file
    is read, which may be the only one on its host; on another mesh all files are read.

    Raises UnreadableError for a file that is missing or no state, StateError for another format than is written now, or
    for another `run` ("": any run).
    """

    def __init__(self, folder: Path, replica: str, rank: int, run: str = "") -> None:
        self.rank = rank
        self._paths, self._run = partial(part_path, folder, replica), run
        # Each file has the number of ranks. Take rank 0's if it is here.
        first = self._open(0 if self._paths(0).exists() else rank)
        if text := refusal(first.path, first.facts):
            raise StateError(text)
        self._ranks: int = first.facts["ranks"]
        # All files have the same content, except for sharded values.
        self._own = self._open(min(rank, self._ranks - 1))

    def _open(self, rank: int) -> StateFile:
        file = StateFile.open(self._paths(rank))
        # Hosts without a shared folder keep shards in their own folders, where an earlier run may have left some.
        given = file.facts.get("run", "")
        if self._run and given and given != self._run:
            needed = f"needed one of run {self._run}: each run has a folder of its own on each host"
            raise StateError(f"{file.path}: given a part of run {given}, {needed}")
        return file

    @property
    def made(self) -> list[tuple[Firing, str]]:
        """The firings and outputs of the groups' values in it."""
        return [(Firing(*firing), output) for *firing, output in self._own.facts["keys"]]

    def carried(self, name: str, layout: Layout | None = None) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """The state of a carried value: the shards that this rank holds in `layout`, or the whole."""
        prefix, facts = f"carried/{name}/", self._own.facts["carried"][name]
        written = self._own.facts["layouts"].get(name)
        saved = None if written is None else Layout.from_json(written)
        # The common case: on the same mesh no plan is needed, and no other rank's file is read.
        if saved == layout:
            return self._own.tensors(prefix), facts
        files = [self._open(rank) for rank in range(self._ranks)]
        # Regions have no checksums, so each rank checks some of the files whole: any damage ends the start.
        for file in files if layout is None else files[self.rank :: layout.ranks]:
            file.require_undamaged(prefix)
        return assemble(files, prefix, saved, layout, self.rank), facts

    def value(self, name: str, cls: type[T]) -> T:
        tensors = self._own.tensors(f"{name}/")
        if (plain := tensors.get(_FACTS)) is not None:
            meta = json.loads(plain.numpy().tobytes())
        else:  # of format 2
            meta = self._own.facts["encoded"][name]
        return decode(cls, [tensors[str(index)] for index in range(len(meta["tensors"]))], meta)
