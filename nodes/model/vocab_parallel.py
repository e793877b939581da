"""The vocabulary sharded over ranks (Megatron-LM, Shoeybi et al., 2019, section 3): each rank has some rows of the
embedding and of the head. A look-up is a sum over the ranks, since each finds only its own words. Each rank computes
the logits of its own words; a loss needs only sums and a maximum over all of them.

After a sum all ranks compute with the same numbers, so each has the full gradient: `sum` passes a gradient on
unchanged. A value that each rank multiplies with its own rows goes through `shared`, which sums the gradient.

Shapes: … any dimensions, D hidden width, V vocabulary, W words of a rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VocabShard:
    """Part `part` of `parts` of a vocabulary, on the ranks of `group` (None: the default one) in order. With one part
    there is no communication.

    A part has ⌈total / parts⌉ consecutive words, the last part may have fewer.
    """

    total: int
    parts: int = 1
    part: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def most(self) -> int:
        """The words of the first part."""
        return -(-self.total // self.parts)

    @property
    def first(self) -> int:
        return self.part * self.most

    @property
    def count(self) -> int:
        return max(0, min(self.most, self.total - self.first))

    def index(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """(the row of each word among this rank's, whether the rank has it); row 0 for a word that it does not have."""
        rows = words - self.first
        here = (rows >= 0) & (rows < self.count)
        return rows.masked_fill(~here, 0), here

    def look_up(self, words: Tensor, weight_WD: Tensor, pad: int | None = None) -> Tensor:
        """The row of each word, […, D]. That of the word `pad` gets no gradient."""
        if pad is not None:
            pad = pad % self.total - self.first
            pad = pad if 0 <= pad < self.count else None
        if self.parts == 1:
            return F.embedding(words, weight_WD, pad)
        rows, here = self.index(words)
        return self.sum(F.embedding(rows, weight_WD, pad).masked_fill(~here[..., None], 0.0))

    def sum(self, own: Tensor) -> Tensor:
        """The sum over the ranks, which all continue with the same numbers."""
        return own if self.parts == 1 else summed(own, self.group)

    def shared(self, same: Tensor) -> Tensor:
        """A value that all ranks have, for computation with each rank's own words: its gradient is summed over the
        ranks."""
        return same if self.parts == 1 else shared(same, self.group)

    @torch.no_grad()
    def max(self, own: Tensor) -> Tensor:
        """The maximum over the ranks, without a gradient."""
        if self.parts == 1:
            return own
        own = own.clone()
        dist.all_reduce(own, dist.ReduceOp.MAX, self.group)
        return own

    def gather(self, own: Tensor) -> Tensor:
        """[…, W] of each rank as […, V] on all ranks, which continue with the same numbers."""
        return own if self.parts == 1 else _Gather.apply(own, self)  # type: ignore[no-untyped-call]


def shared(same: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A value that all ranks of a group have and then use differently: its gradient is summed over the ranks."""
    return _Shared.apply(same, group)  # type: ignore[no-any-return,no-untyped-call]


def summed(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the ranks of a group, which all continue with the same numbers."""
    return _Sum.apply(own, group)  # type: ignore[no-any-return,no-untyped-call]


class WordEmbedding(nn.Embedding):
    """An embedding of `words`, times `scale`. Its weights are the rank's own, and uninitialised. The word `pad` gets no
    gradient here, as in transformers."""

    def __init__(self, vocab: VocabShard, width: int, scale: float = 1.0, pad: int | None = None) -> None:
        super().__init__(vocab.count, width)
        self.vocab, self.scale, self.pad = vocab, scale, pad

    def reset_parameters(self) -> None:
        """Do nothing: weights come from `init_weights` or a file."""
        # To draw numbers for tensors without memory, torch would import its compiler, which takes as long as torch.

    def forward(self, tokens_BS: Tensor) -> Tensor:
        found_BSD = self.vocab.look_up(tokens_BS, own_part(self.weight), self.pad)
        return found_BSD if self.scale == 1 else found_BSD * self.factor(found_BSD.dtype)

    def factor(self, dtype: torch.dtype) -> Tensor:
        """`scale` rounded to the dtype of the embedding, as in transformers."""
        return torch.tensor(self.scale, dtype=dtype)


def own_part(weight: Tensor) -> Tensor:
    """This rank's part of a DTensor as a plain tensor; any other tensor as it is."""
    # By its name: torch.distributed.tensor takes half a second to import, and not every run needs it.
    return weight.to_local() if hasattr(weight, "to_local") else weight


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, vocab: VocabShard) -> Tensor:
        ctx.vocab = vocab
        # `all_gather` takes equal sizes only, and the last rank may have fewer words.
        padded = F.pad(own, (0, vocab.most - own.shape[-1])).contiguous()
        every = [torch.empty_like(padded) for _ in range(vocab.parts)]
        dist.all_gather(every, padded, vocab.group)
        return torch.cat(every, dim=-1)[..., : vocab.total]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        vocab = ctx.vocab
        return grad[..., vocab.first : vocab.first + vocab.count].contiguous(), None
