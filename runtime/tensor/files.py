"""Tensors with JSON facts on disk: one safetensors file, which is there whole or not at all.

The facts are JSON in the file's metadata, so that they and the tensors cannot come from different moments.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.runtime.record.folder import open_regular, sync

_FORMAT = "penstock-state-1"


class StateError(RuntimeError):
    """A state that could not be written, or a file that is no state. It names the file."""


def save_state(path: Path | str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write `tensors` and JSON-able `facts` to `path`, replacing it in one step; durable on return.

    On an error the file at `path`, if there was one, is as it was.
    """
    path = Path(path)
    metadata = {"format": _FORMAT, "facts": json.dumps(facts)}
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(_separate(tensors), part, metadata)
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        needed = sum(t.nbytes for t in tensors.values())
        raise StateError(f"{path}: cannot write {needed} bytes of state ({_free(path.parent)}): {error}") from error


def load_state(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_state` wrote; the tensors are on the CPU."""
    file = StateFile.open(path)
    return file.tensors(), file.facts


@dataclass(frozen=True)
class StateFile:
    """What `save_state` wrote, read as it is needed: its facts, and the names of its tensors."""

    path: Path
    facts: dict[str, Any]
    names: tuple[str, ...]

    @staticmethod
    def open(path: Path | str) -> "StateFile":
        """Raises StateError for a file that is missing or no state."""
        with _reading(Path(path)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise StateError(f"{path}: given format {metadata.get('format')!r}, needed {_FORMAT!r}")
            return StateFile(Path(path), json.loads(metadata["facts"]), tuple(file.keys()))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Those whose names begin with `prefix`, by the rest of their names; on the CPU."""
        with _reading(self.path) as file:
            return {n.removeprefix(prefix): file.get_tensor(n) for n in self.names if n.startswith(prefix)}

    def piece(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of one tensor; no more of the file is read."""
        with _reading(self.path) as file:
            piece: Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
            return piece


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        # By number: safetensors opens no path that is not UTF-8, and would follow a link.
        with (
            open(open_regular(path, os.O_RDONLY), "rb") as opened,
            safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file,
        ):
            yield file
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise StateError(f"{path}: not a readable state: {error}") from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory: safetensors refuses names for the same bytes, such as tied weights."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        if own.numel() and own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        separate[name] = own
    return separate


def _free(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except FileNotFoundError:
        return "no such folder"
    return f"{room.f_bavail * room.f_frsize} bytes free"
