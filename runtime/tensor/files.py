"""Tensors with JSON facts on disk: one safetensors file, which is there whole or not at all.

The facts are JSON in the file's metadata, so that they and the tensors cannot come from different moments.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        needed = sum(t.nbytes for t in tensors.values())
        raise StateError(f"{path}: cannot write {needed} bytes of state ({_free(path.parent)}): {error}") from error


def load_state(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_state` wrote; the tensors are on the CPU."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise StateError(f"{path}: given format {metadata.get('format')!r}, needed {_FORMAT!r}")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["facts"])  # noqa: SIM118
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


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except FileNotFoundError:
        return "no such folder"
    return f"{room.f_bavail * room.f_frsize} bytes free"
