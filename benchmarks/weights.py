"""Weights that a benchmark publishes, with the interface of a policy."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Weights:
    """The weights of one rank, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return self.tensors, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.tensors.update(tensors)

    def export(self, folder: str) -> None:
        """Do nothing: there is nothing for other tools to read."""
