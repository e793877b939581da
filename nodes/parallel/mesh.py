"""The ranks that train or run one model together: the axes of their mesh and this rank's place, the assignment of
micro-batches to ranks (`assign`), and the exchange of results (`gather`).

Over "dp", "fsdp" and "ep" ranks work on different micro-batches. Over "fsdp" weights are sharded, over "dp" they are
replicated, over "ep" each rank has some of the experts and a shard of the other weights. Over "tp" ranks share each
micro-batch and shard the matrices; over "pp" each has some of the layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.protocols import DATA, EXPERT, FSDP, STAGE, TENSOR, Axes, described, num_ranks

# The axes of a model, outermost first.
AXES = (STAGE, DATA, FSDP, EXPERT, TENSOR)


@dataclass(frozen=True)
class Ranks:
    """The `mesh` of a replica, and the place of this `rank` on it.

    Raises ValueError for an axis that models do not have, a size below 1, and a rank outside of the mesh.
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
        """The size of an axis; 1 if the mesh does not have it."""
        return dict(self.mesh).get(axis, 1)

    def place(self, axis: str, rank: int | None = None) -> int:
        """The coordinate of a rank (this one, if None) on an axis; 0 if the mesh does not have it."""
        rank = self.rank if rank is None else rank
        for name, size in reversed(self.mesh):
            rank, at = divmod(rank, size)
            if name == axis:
                return at
        return 0

    @property
    def shares(self) -> int:
        """The number of different micro-batches that ranks work on at the same time."""
        return self.size(DATA) * self.size(FSDP) * self.size(EXPERT)

    def share(self, rank: int | None = None) -> int:
        """The number of the share that a rank works on."""
        copy = self.place(DATA, rank) * self.size(FSDP) + self.place(FSDP, rank)
        return copy * self.size(EXPERT) + self.place(EXPERT, rank)

    def reporting_ranks(self) -> list[int]:
        """For each share the rank whose results count: the first one on the last stage."""
        last = self.size(STAGE) - 1
        ranks = [r for r in range(self.count) if self.place(TENSOR, r) == 0 and self.place(STAGE, r) == last]
        return sorted(ranks, key=self.share)

    def neighbour(self, axis: str, step: int) -> int:
        """The rank `step` further along an axis, with the same coordinates on all other axes."""
        inner = self.mesh[[name for name, _ in self.mesh].index(axis) + 1 :]
        return self.rank + step * num_ranks(inner)

    def __str__(self) -> str:
        return described(self.mesh)


def assign(costs: Sequence[int], parts: int) -> list[list[int]]:
    """The items of each part, in the order of `costs`. The costliest items are assigned first, each to the part with
    the lowest cost so far.

    Among equals the first item and the first part are taken, so all ranks agree without a message.
    """
    # No part gets more than ⌈items / parts⌉: every rank makes as many rounds as the one with most items.
    most = -(-len(costs) // parts)
    shares: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        part = min((p for p in range(parts) if len(shares[p]) < most), key=lambda p: totals[p])
        shares[part].append(item)
        totals[part] += costs[item]
    return [sorted(share) for share in shares]


def gather(results: Sequence[Any], device: torch.device) -> list[list[Any]]:
    """[rank][i]: result i of each rank of the default group; ranks may have different numbers of results.

    A result is a tensor, a mapping of tensors by name, or None.
    """
    # As safetensors, so that nothing is pickled. They do not keep the order, so a name begins with the number of the
    # result and that of the item within a mapping.
    leaves = {"": torch.tensor(len(results))}
    for index, result in enumerate(results):
        named = result if isinstance(result, Mapping) else {} if result is None else {"": result}
        for place, (name, leaf) in enumerate(named.items()):
            leaves[f"{index:09d} {place:09d} {name}"] = leaf.detach().clone().contiguous()
    own = torch.frombuffer(bytearray(save(leaves)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    # `all_gather` needs equal lengths: shorter vectors are padded, and the padding is cut off afterwards.
    longest = max(int(each) for each in lengths)
    every = [own.new_empty(longest) for _ in lengths]
    dist.all_gather(every, torch.nn.functional.pad(own, (0, longest - len(own))))
    return [_rebuilt(each[: int(n)], device) for each, n in zip(every, lengths, strict=True)]


def _rebuilt(saved: Tensor, device: torch.device) -> list[Any]:
    """The results of one rank, from its safetensors."""
    leaves = load(saved.numpy(force=True).tobytes())
    found: list[Any] = [None] * int(leaves.pop(""))
    for key in sorted(leaves):
        index, _, name = key.split(" ", 2)
        leaf = leaves[key].to(device)
        found[int(index)] = {**(found[int(index)] or {}), name: leaf} if name else leaf
    return found
