"""The ranks that train or run one model together: axes of a mesh, and this rank's place; which rank works on which
micro-batches (`assign`); and the exchange of what they have found (`gather`).

Over "dp", "fsdp" and "ep" ranks work on micro-batches of their own; over "fsdp" the weights are cut, over "dp" they are
replicated, over "ep" each rank has some of the experts, and a cut of the rest. Over "tp" ranks share each micro-batch,
and cut the matrices; over "pp" each has some of the layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from penstock.graph.protocols import DATA, EXPERT, FSDP, STAGE, TENSOR, Axes, described, num_ranks
from penstock.graph.types import Context

# The axes of a model, outermost first.
AXES = (STAGE, DATA, FSDP, EXPERT, TENSOR)


@dataclass(frozen=True)
class Ranks:
    """The `mesh` of a replica; `rank` is this one's place on it.

    Raises ValueError for an axis that means nothing to a model, a size below 1, and a place outside the mesh.
    """

    mesh: Axes = ()
    rank: int = 0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.mesh]
        given = f"given a mesh of {self}"
        if len(set(names)) < len(names) or not set(names) <= set(AXES):
            raise ValueError(f"{given}, needed each of the axes {', '.join(AXES)} at most once")
        if any(size < 1 for _, size in self.mesh):
            raise ValueError(f"{given}, needed sizes of 1 or more")
        if not 0 <= self.rank < self.count:
            raise ValueError(f"{given} and rank {self.rank}, needed a rank of 0 to {self.count - 1}")

    @classmethod
    def of(cls, context: Context) -> Self:
        return cls(tuple((name, size) for name, size in context.mesh), context.rank)

    @property
    def count(self) -> int:
        return num_ranks(self.mesh)

    def size(self, axis: str) -> int:
        """1 for an axis that is not there."""
        return dict(self.mesh).get(axis, 1)

    def place(self, axis: str, rank: int | None = None) -> int:
        """The coordinate of a rank (this one, if None) on an axis; 0 on one that is not there."""
        rank = self.rank if rank is None else rank
        for name, size in reversed(self.mesh):
            rank, at = divmod(rank, size)
            if name == axis:
                return at
        return 0

    @property
    def shares(self) -> int:
        """How many different micro-batches are worked on at the same time."""
        return self.size(DATA) * self.size(FSDP) * self.size(EXPERT)

    def share(self, rank: int | None = None) -> int:
        """Which of them a rank works on."""
        copy = self.place(DATA, rank) * self.size(FSDP) + self.place(FSDP, rank)
        return copy * self.size(EXPERT) + self.place(EXPERT, rank)

    def speakers(self) -> list[int]:
        """For each share the rank that speaks for it: the first of the last stage that have the same."""
        last = self.size(STAGE) - 1
        ranks = [r for r in range(self.count) if self.place(TENSOR, r) == 0 and self.place(STAGE, r) == last]
        return sorted(ranks, key=self.share)

    def neighbour(self, axis: str, step: int) -> int:
        """The rank that is `step` further along an axis, and at the same place on all others."""
        inner = self.mesh[[name for name, _ in self.mesh].index(axis) + 1 :]
        return self.rank + step * num_ranks(inner)

    def __str__(self) -> str:
        return described(self.mesh)


def assign(costs: Sequence[int], parts: int) -> list[list[int]]:
    """The items of each part, in the order of `costs`: the costliest first, each to the part that has least so far.

    Among equals the first item and the first part are taken: all ranks agree without a message.
    """
    # No part gets more than ⌈items / parts⌉: every rank takes part in as many rounds as the one with most items.
    most = -(-len(costs) // parts)
    shares: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        part = min((p for p in range(parts) if len(shares[p]) < most), key=lambda p: totals[p])
        shares[part].append(item)
        totals[part] += costs[item]
    return [sorted(share) for share in shares]


def gather(results: Sequence[Any], device: torch.device) -> list[list[Any]]:
    """[rank][i]: result i of each rank of the default group; ranks may have different numbers of them.

    A result is a tensor, a mapping of tensors by name, or None.
    """
    # As safetensors, so that nothing is pickled. Their order is lost, so a name begins with the numbers of the result
    # and, within a mapping, of the item.
    leaves = {"": torch.tensor(len(results))}
    for index, result in enumerate(results):
        named = result if isinstance(result, Mapping) else {} if result is None else {"": result}
        for place, (name, leaf) in enumerate(named.items()):
            leaves[f"{index:09d} {place:09d} {name}"] = leaf.detach().clone().contiguous()
    own = torch.frombuffer(bytearray(save(leaves)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    # `all_gather` takes equal lengths only: shorter vectors are padded, and what stands behind them is cut off.
    longest = max(int(each) for each in lengths)
    every = [own.new_empty(longest) for _ in lengths]
    dist.all_gather(every, torch.nn.functional.pad(own, (0, longest - len(own))))
    return [_rebuilt(each[: int(n)], device) for each, n in zip(every, lengths, strict=True)]


def _rebuilt(saved: Tensor, device: torch.device) -> list[Any]:
    """The results of one rank."""
    leaves = load(saved.numpy(force=True).tobytes())
    found: list[Any] = [None] * int(leaves.pop(""))
    for key in sorted(leaves):
        index, _, name = key.split(" ", 2)
        leaf = leaves[key].to(device)
        found[int(index)] = {**(found[int(index)] or {}), name: leaf} if name else leaf
    return found
