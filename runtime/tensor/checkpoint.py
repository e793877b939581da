"""One rank's part of a checkpoint: carried values, node states and groups' values, in one file of `files`.

Tensors are named by what they belong to: "carried/NAME/TENSOR", "state/NODE/0", "value/NODE/ORDINAL/OUTPUT/0".
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.graph.ir import Firing
from penstock.graph.types import Carried
from penstock.runtime.tensor.codec import decode, encode
from penstock.runtime.tensor.files import load_state, save_state

T = TypeVar("T")


def part_path(folder: Path, replica: str, rank: int) -> Path:
    return folder / f"{replica.replace('/', '-')}-{rank}.safetensors"


def value_name(firing: Firing, output: str) -> str:
    return f"value/{firing.node}/{firing.index}/{output}"


def write_part(
    folder: Path,
    replica: str,
    rank: int,
    carried: Mapping[str, Carried],
    states: Mapping[str, Any],
    values: Mapping[tuple[Firing, str], Any],
    earlier: Mapping[str, Carried] | None = None,
) -> None:
    """Write all that this rank contributes to a cut; rank 0 exports carried values for other tools, too.

    `earlier` are carried values as they were before, by names of their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {"carried": {}, "encoded": {}, "keys": [[*f, output] for f, output in values]}
    for name, value in {**carried, **(earlier or {})}.items():
        own, facts["carried"][name] = value.state()
        tensors.update((f"carried/{name}/{key}", tensor) for key, tensor in own.items())
        if rank == 0 and name in carried:
            (folder / name).mkdir(exist_ok=True)
            value.export(str(folder / name))
    encoded = {f"state/{name}": state for name, state in states.items()}
    encoded |= {value_name(*key): value for key, value in values.items()}
    for name, value in encoded.items():
        parts, facts["encoded"][name] = encode(value)
        tensors.update((f"{name}/{index}", tensor) for index, tensor in enumerate(parts))
    save_state(part_path(folder, replica, rank), tensors, facts)


class Part:
    """What `write_part` wrote."""

    def __init__(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._tensors, self._facts = tensors, facts

    @property
    def made(self) -> list[tuple[Firing, str]]:
        """The groups' values in it."""
        return [(Firing(*firing), output) for *firing, output in self._facts["keys"]]

    def carried(self, name: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        prefix = f"carried/{name}/"
        own = {k.removeprefix(prefix): t for k, t in self._tensors.items() if k.startswith(prefix)}
        return own, self._facts["carried"][name]

    def value(self, name: str, cls: type[T]) -> T:
        meta = self._facts["encoded"][name]
        count = len(meta["tensors"])
        return decode(cls, [self._tensors[f"{name}/{index}"] for index in range(count)], meta)


def read_part(folder: Path, replica: str, rank: int) -> Part:
    return Part(*load_state(part_path(folder, replica, rank)))
