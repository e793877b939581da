from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock import Context, Rewards, node


class Places:
    """The mean reward of a group's first response, of its second, and so on, float [samples]."""

    maker: ClassVar[str] = f"{__file__}:make_places"

    def __init__(self, mean_N: Tensor) -> None:
        self.mean_N = mean_N

    def weights(self) -> Mapping[str, Tensor]:
        """What `broadcast` sends: shapes and dtypes stay as they are."""
        return {"mean": self.mean_N}

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """All that a checkpoint keeps: tensors, and facts that JSON can hold."""
        return {"mean": self.mean_N}, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.mean_N = tensors["mean"].clone()

    def export(self, folder: str) -> None:
        """There is nothing that other tools read."""


def make_places(context: Context) -> Places:
    return Places(torch.zeros(context.options["samples"]))


@node(pool="trainer", clock="update")
def follow_places(places: Places, rewards: Rewards, *, rate: float = 0.1) -> Places:
    seen_N = rewards.values_N.reshape(-1, len(places.mean_N)).mean(0)
    return Places(places.mean_N + rate * (seen_N - places.mean_N))
