"""One rank's part of a language model under tensor parallelism, for generation: plain tensors, explicit collectives.

As in Megatron-LM (Shoeybi et al., 2019, section 3): each rank has some of the heads and of the MLP's inner width, and
what attention and MLP write is summed over the ranks. The embedding is cut over the vocabulary, so that a look-up is
such a sum too; so is the head, and logits are gathered. Ranks sample from logits that are the same to the bit.

Shapes: B rows, S tokens of a row, D hidden width, V vocabulary, W words of a rank.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.linear import linear
from penstock.nodes.model.llama import Llama
from penstock.nodes.model.parallel import part_config


class LlamaPart(Llama):
    """Part `part` of `parts`, which are the ranks of the default group in order. No gradient goes through it.

    `config` is that of the whole model. Raises ModelError for a model that cannot be cut so.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str, parts: int, part: int) -> None:
        super().__init__(part_config(config, parts, part), dtype, device)
        self._heads, self.config, self.parts = self.config, config, parts
        self._most_words = -(-config.vocab_size // parts)
        self.model.embed_tokens = _Words(self.model.embed_tokens, part * self._most_words)
        for name, module in self.model.named_modules():
            if name.endswith(("o_proj", "down_proj")):
                module.register_forward_hook(_sum)

    @property
    def attention_config(self) -> ModelConfig:
        return replace(self._heads, vocab_size=self.config.vocab_size)

    def head_weight(self) -> Tensor:
        """The matrix of the whole vocabulary, [V, D], put together each time."""
        return self._gather(super().head_weight().T).T

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        return self._gather(linear(hidden_BSD, super().head_weight()))

    def _gather(self, own: Tensor) -> Tensor:
        """[…, W] of each rank as […, V]."""
        padded = F.pad(own, (0, self._most_words - own.shape[-1])).contiguous()
        every = [torch.empty_like(padded) for _ in range(self.parts)]
        dist.all_gather(every, padded)
        return torch.cat(every, dim=-1)[..., : self.config.vocab_size]


class _Words(nn.Embedding):
    """An embedding of the words from `first` on; the others are on other ranks."""

    def __init__(self, own: nn.Embedding, first: int) -> None:
        super().__init__(own.num_embeddings, own.embedding_dim, _weight=own.weight)
        self.first = first

    def forward(self, tokens_BS: Tensor) -> Tensor:
        own_BS = tokens_BS - self.first
        elsewhere_BS = (own_BS < 0) | (own_BS >= self.num_embeddings)
        found_BSD = F.embedding(own_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return _sum(self, (), found_BSD.masked_fill(elsewhere_BS[..., None], 0.0))


def _sum(module: nn.Module, given: tuple[Tensor, ...], own: Tensor) -> Tensor:
    """Over all ranks. A hook of the modules whose output each rank has a summand of."""
    dist.all_reduce(own)
    return own
