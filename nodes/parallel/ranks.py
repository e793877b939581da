"""The ranks that train or run one model together: axes of a mesh, and this rank's place. Plain data, no torch.

Over "dp" and "fsdp" ranks work on micro-batches of their own; over "fsdp" the weights are cut, over "dp" they are
replicated. Over "tp" ranks share each micro-batch, and cut the matrices; over "pp" each has some of the layers.
"""

from dataclasses import dataclass
from typing import Self

from penstock.graph.sharding import DATA, FSDP, STAGE, TENSOR, Axes, described, num_ranks
from penstock.graph.types import Context

AXES = (STAGE, DATA, FSDP, TENSOR)
"""The axes of a model, outermost first."""


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
        return self.size(DATA) * self.size(FSDP)

    def share(self, rank: int | None = None) -> int:
        """Which of them a rank works on."""
        return self.place(DATA, rank) * self.size(FSDP) + self.place(FSDP, rank)

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
