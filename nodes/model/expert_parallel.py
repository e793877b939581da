"""Expert parallelism: rank r of R has E / R of a layer's E whole experts, in runs (GShard, Lepikhin et al., 2021, arXiv
2006.16668, section 3). The outputs of a token's K experts return to the token's rank, which adds them in the same order
as a single rank, so outputs are equal to the bit. Gradients of experts are sums over the tokens of all ranks, and equal
those of a single rank within rounding.

If ranks have different tokens (`TokenExchange`), rows go to their experts and back by two all-to-alls. If all have the
same tokens (`Gather`), as in a generator, no inputs are sent, and each rank sends its experts' outputs to all others.

Shapes: D hidden width, E experts of a layer, O those of a rank, R ranks, M rows: a token has one row for each of its
experts. Rows are in the order of their experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.graph.protocols import experts_at

# (rows [M, D], the number of rows of each of this rank's experts) → the experts' outputs, [M, D].
Compute = Callable[[Tensor, list[int]], Tensor]


class ExpertPlacement(Protocol):
    """The distribution of a layer's experts over ranks."""

    def own(self, experts: int) -> range:
        """This rank's experts, of `experts` in the layer."""

    def outputs(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """The experts' outputs for all rows, [M, D] in their order; `counts_E` are the rows of each expert."""


@dataclass(frozen=True)
class TokenExchange:
    """Ranks of `group` with different tokens. All must call it equally often, with or without gradients."""

    group: dist.ProcessGroup

    def own(self, experts: int) -> range:
        return experts_at(self.group.rank(), experts, self.group.size())

    def outputs(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        sent_RO = counts_E.view(self.group.size(), -1)
        taken_RO = torch.empty_like(sent_RO)
        dist.all_to_all_single(taken_RO, sent_RO, group=self.group)
        # Only one synchronisation with the device.
        of_sent, of_taken = torch.stack((sent_RO, taken_RO)).tolist()
        sent, taken = list(map(sum, of_sent)), list(map(sum, of_taken))
        arrived_MD = _AllToAll.apply(rows_MD, sent, taken, self.group)  # type: ignore[no-untyped-call]
        # Rows arrive by rank, and by expert within a rank.
        own_O = torch.arange(taken_RO.shape[1], device=rows_MD.device)
        order_M = own_O.repeat(len(taken)).repeat_interleave(taken_RO.flatten()).argsort(stable=True)
        made_MD = compute(arrived_MD[order_M], list(map(sum, zip(*of_taken, strict=True))))
        return _AllToAll.apply(made_MD[order_M.argsort()], taken, sent, self.group)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class Gather:
    """Ranks of the default group, `rank` of `ranks`, that all have the same tokens and the same routers. Without
    gradients."""

    ranks: int
    rank: int

    def own(self, experts: int) -> range:
        return experts_at(self.rank, experts, self.ranks)

    def outputs(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        own, counts = self.own(len(counts_E)), counts_E.tolist()
        before, taken = sum(counts[: own.start]), counts[own.start : own.stop]
        made_MD = compute(rows_MD[before : before + sum(taken)], taken)
        # An all-gather with different sizes, which gloo does not have.
        sizes = [sum(each) for each in counts_E.view(self.ranks, -1).tolist()]
        every_MD = made_MD.new_empty(rows_MD.shape)
        dist.all_to_all_single(every_MD, made_MD.repeat(self.ranks, 1), sizes, [len(made_MD)] * self.ranks)
        return every_MD


class _AllToAll(torch.autograd.Function):
    """`sent[r]` rows to rank r, in order, and `taken[r]` from it. Gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, sent: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.taken, ctx.group = sent, taken, group
        return _exchanged(rows_MD, sent, taken, group)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad_MD, ctx.taken, ctx.sent, ctx.group), None, None, None


def _exchanged(rows_MD: Tensor, sent: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    found_MD = rows_MD.new_empty(sum(taken), rows_MD.shape[1])
    dist.all_to_all_single(found_MD, rows_MD.contiguous(), taken, sent, group=group)
    return found_MD
