"""Experts dealt out over ranks: rank r of R has E / R of a layer's E whole experts, in runs (expert parallelism;
GShard, Lepikhin et al., 2021, arXiv 2006.16668, section 3). What a token's K experts make of it comes back to the
token's own rank, which adds it up in the order of one rank: outputs have the bits that they have there. Gradients of
experts are sums over the tokens of all ranks, and equal those of one rank within rounding.

Where ranks have tokens of their own (`TokenExchange`), rows go to their experts and back by two all-to-alls. Where all
have the same ones (`Gather`), as those of a generator, nothing is sent there, and each rank sends all others what its
experts have made.

Shapes: D hidden width, E experts of a layer, O those of a rank, R ranks, M rows: a token has one for each of its
experts. Rows come in the order of their experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.graph.protocols import experts_at

# (rows, [M, D], how many of them are of each of this rank's experts) → what these make of them, [M, D].
Compute = Callable[[Tensor, list[int]], Tensor]


class Dealt(Protocol):
    """How a layer's experts lie on the ranks that have them together."""

    def own(self, experts: int) -> range:
        """This rank's experts, of so many."""

    def outputs(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """What the experts make of all rows, [M, D] in their order; `counts_E` are the rows of each expert."""


@dataclass(frozen=True)
class TokenExchange:
    """Ranks of `group` that have tokens of their own. All call it equally often, with gradients or without."""

    group: dist.ProcessGroup

    def own(self, experts: int) -> range:
        return experts_at(self.group.rank(), experts, self.group.size())

    def outputs(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        sent_RO = counts_E.view(self.group.size(), -1)
        taken_RO = torch.empty_like(sent_RO)
        dist.all_to_all_single(taken_RO, sent_RO, group=self.group)
        # One wait for the device.
        of_sent, of_taken = torch.stack((sent_RO, taken_RO)).tolist()
        sent, taken = list(map(sum, of_sent)), list(map(sum, of_taken))
        arrived_MD = _AllToAll.apply(rows_MD, sent, taken, self.group)  # type: ignore[no-untyped-call]
        # They arrive by rank, and by expert among those of a rank.
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
        # An all-gather of as many rows as each rank has: gloo has none of different sizes.
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
