"""A decoder with its tokenizer and its lanes, ready to read rollouts: what every model of a run has in common."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock.graph.sharding import STAGE, Sharding
from penstock.graph.types import Context, Rollouts
from penstock.nodes.learn.lanes import Lanes
from penstock.nodes.learn.packing import Packed, group_rows, pack, sampled_mask
from penstock.nodes.model import Decoder, save_tensors, torch_dtype
from penstock.nodes.model.parallel import stages_of, tensor_parallel, trainer_rules
from penstock.nodes.parallel.ranks import Ranks
from penstock.nodes.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.nodes.parallel.shards import Shards

CPU_MICRO_TOKENS, MICRO_TOKENS = 2048, 16384
"""Tokens of a micro-batch, padding included: on a CPU what stays in its caches, elsewhere what fills the device
without too many activations for the backward pass to keep."""

Model = TypeVar("Model", bound=Decoder)


class SequenceModel(Generic[Model]):
    """A model with its tokenizer. Its `workers` are several ranks that hold it in parts (`Shards`), or one rank's
    lanes: on a CPU its threads work on micro-batches of their own (`Lanes`). `shapes` are those of the whole weights.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, context: Context) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ranks, self.dtype = Ranks.of(context), torch_dtype(context.dtype)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.workers = _workers(model, self.ranks, context)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def pack(self, rollouts: Rollouts, max_tokens: int | None = None, *, whole_groups: bool = False) -> list[Packed]:
        """Micro-batches of at most `max_tokens` tokens with padding; by default what suits the device.

        Only tokens that a policy sampled are predicted, each at the temperature that its response was sampled at. With
        `whole_groups` no prompt group is cut, however large.
        """
        lengths = rollouts.prompt_lengths_N, rollouts.response_lengths_N
        tokens_NS, settings = rollouts.tokens_NS.to(self.device), (sampled_mask(rollouts), rollouts.temperature_N)
        group_N = group_rows(rollouts.ordinals) if whole_groups else None
        return self.pack_tokens(tokens_NS, *lengths, max_tokens, *settings, group_N)

    def pack_tokens(
        self,
        tokens_NS: Tensor,
        prompts_N: Tensor,
        responses_N: Tensor,
        max_tokens: int | None = None,
        sampled_NT: Tensor | None = None,
        temperature_N: Tensor | None = None,
        group_N: Tensor | None = None,
    ) -> list[Packed]:
        """The same of bare tokens: prompts and responses of the given lengths, padded on the right; see `pack`."""
        bound = max_tokens or (CPU_MICRO_TOKENS if self.device.type == "cpu" else MICRO_TOKENS)
        return pack(tokens_NS, prompts_N, responses_N, bound, self.workers.count, sampled_NT, temperature_N, group_N)

    def encode(self, texts: Sequence[str], responses: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """As `encode_texts`. Raises ValueError for a row that is longer than the model's context."""
        return encode_texts(self.tokenizer, texts, responses, self.model.config.max_position_embeddings)

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parts, in the run's dtype."""
        return {name: p.detach().to(self.dtype) for name, p in self.workers.parameters.items()}

    def sharding(self) -> Sharding:
        """How the ranks hold the weights in parts."""
        config, stages = self.model.config, self.ranks.size(STAGE)
        cut = stages_of(config, self.shapes, stages) if stages > 1 else {}
        return Sharding(self.ranks.mesh, self.shapes, trainer_rules(config), tensor_parallel(config), cut)

    def export(self, folder: str) -> None:
        """Write an HF directory: configuration, weights in the run's dtype, tokenizer.

        All ranks call it, to bring the parts of each tensor together, and the first one writes.
        """
        tensors = {name: tensor.to(self.dtype).contiguous() for name, tensor in self.workers.whole()}
        if self.ranks.rank == 0:
            save_tensors(self.model, tensors, folder)
            self.tokenizer.save(folder)


class Frozen(SequenceModel[Model]):
    """A model that never changes, so that the directory it was read from is all the state it has."""

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {}, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Nothing was saved."""

    def export(self, folder: str) -> None:
        """It is the model that the run was given."""


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], responses: Sequence[str], limit: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [N, S], prompt lengths [N], response lengths [N]) of texts and what follows each, on the CPU.

    Each response ends with an end token. Raises ValueError for a row of more than `limit` tokens.
    """
    prompts = [tokenizer.encode_prompt(text) for text in texts]
    wholes = [
        prompt + tokenizer.encode(response) + [tokenizer.eos]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    prompt_lengths_N = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long)
    lengths_N = torch.tensor([len(whole) for whole in wholes], dtype=torch.long)
    tokens_NS = torch.zeros(len(wholes), max(map(len, wholes), default=0), dtype=torch.long)
    for row, whole in enumerate(wholes):
        if limit is not None and len(whole) > limit:
            raise ValueError(f"demonstration {texts[row]!r}: given {len(whole)} tokens, needed at most {limit}")
        tokens_NS[row, : len(whole)] = torch.tensor(whole)
    return tokens_NS, prompt_lengths_N, lengths_N - prompt_lengths_N


def _workers(model: Model, ranks: Ranks, context: Context) -> "Lanes[Model] | Shards[Model]":
    if ranks.count == 1:
        return Lanes(model, context.threads if context.device == "cpu" else 1)
    from penstock.nodes.parallel.shards import Shards  # half a second of imports, for those who need it

    return Shards(model, ranks, torch_dtype(context.dtype))
