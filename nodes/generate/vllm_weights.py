"""Weights that our links have brought, as vLLM's own: an engine of ours among its engines of weight transfer.

A layer of vLLM computes with one matrix, such as `qkv_proj`, where a model directory has several (`LAYER`). A link lays
those side by side (`Fusing`), so that on a CPU the layer's weight is the memory which the link has filled. vLLM packs
it from there for its kernels, and nothing is copied before. On a GPU, whose graphs know addresses, each tensor is
copied to the rows of vLLM's weight that it is.

A rank of several has its part of each tensor, cut as ours are: attention and MLP as vLLM cuts them, too, and the
vocabulary into equal runs, which vLLM's layers are told (`share_words`).

Shapes: B rows of a probe, V vocabulary, D inputs of a linear map.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, functional

# Before vLLM is imported: one process, nothing sent home, threads as the agent has set them.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

try:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # Small functions that it would compile: that takes a C++ compiler, and 15 s of the first group.
        current_platform.simple_compile_backend = "eager"
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
except ImportError as error:
    import sys

    from penstock.graph.engines import ENGINES

    given = f"{sys.executable}, where it cannot be imported ({type(error).__name__}: {error})"
    needed = f"vLLM 0.32 or one like it: {sys.executable} {ENGINES['vllm'].install}"
    raise ImportError(f"--engine vllm [no-engine]: given {given}; needed {needed}") from error

# A layer of vLLM's, or its model: their attributes are theirs.
Layer = Any

BACKEND = "penstock"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Of `suspects`: rows of a probe, and the relative difference of a linear map's outputs that rounding explains.
PROBES, ROUNDING = 8, {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Fused(NamedTuple):
    """A parameter of vLLM's, by its module, and the tensors of a model directory that it is, side by side."""

    module: Layer
    kind: str
    names: tuple[str, ...]


def fused_parameters(model: Layer) -> list[Fused]:
    """All parameters of vLLM's model, but for a head that is the embedding."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    tied, found = bool(model.config.tie_word_embeddings), list[Fused]()
    for path, module in model.named_modules():
        prefix, _, leaf = path.rpartition(".")
        names = [f"{prefix}.{part}".removeprefix(".") for part in packed.get(leaf, [leaf])]
        for kind, _ in module.named_parameters(recurse=False):
            fused = Fused(module, kind, tuple(f"{name}.{kind}" for name in names))
            if not (tied and fused.names == (HEAD,)):
                found.append(fused)
    return found


@dataclass
class _Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """vLLM need not be told anything to begin with."""


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The weights, in this process, by the names of a model directory; `copied` is called with the bytes that had to
    be."""

    tensors: Mapping[str, Tensor]
    copied: Callable[[int], object] = lambda nbytes: None


class LinkedWeights(WeightTransferEngine[_Nothing, Version]):  # type: ignore[misc]
    """Makes tensors of this process the weights of vLLM's model. Raises ValueError for those that are not its."""

    init_info_cls, update_info_cls = _Nothing, Version

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """The links are opened by the rank."""

    def start_weight_update(self) -> None:
        self._left = {fused.names: fused for fused in fused_parameters(self.model)}
        self._placed = dict[int, Layer]()

    @torch.no_grad()
    def receive_weights(self, update_info: Version) -> None:
        for names in [names for names in self._left if all(name in update_info.tensors for name in names)]:
            fused = self._left.pop(names)
            _place(fused, [update_info.tensors[name] for name in names], update_info.copied)
            self._placed[id(fused.module)] = fused.module

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        if self._left:
            lacking = ", ".join(name for names in self._left for name in names)
            raise ValueError(f"vllm: given weights without {lacking}, needed all that its model has")
        if self.device.type != "cpu":
            return
        for module in self._placed.values():
            # An embedding is looked up where it lies.
            if isinstance(module, LinearBase | ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        if self.model_config.hf_config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
            pack_tied_head(self.model.lm_head)

    def shutdown(self) -> None:
        """The rank closes its links."""


WeightTransferEngineFactory.register_engine(BACKEND, LinkedWeights)


def _place(fused: Fused, tensors: Sequence[Tensor], copied: Callable[[int], object]) -> None:
    """Make tensors, one below the other, vLLM's parameter."""
    module, kind, _ = fused
    rows = module.num_embeddings_per_partition if _is_cut(module) else sum(len(each) for each in tensors)
    if not tensors[0].is_cpu:
        parameter, first = getattr(module, kind), 0
        for each in tensors:
            parameter[first : first + len(each)].copy_(each)
            first += len(each)
        parameter[first:].zero_()
        return
    whole = joined(tensors)
    if whole is None or len(whole) < rows:
        # Of a vocabulary that its ranks do not divide the last one has fewer words.
        padding = tensors[0].new_zeros(rows - sum(len(each) for each in tensors), *tensors[0].shape[1:])
        whole = torch.cat([*tensors, padding])
        copied(whole.nbytes)
    # An object of its own: its kernels take the place of what vLLM has packed.
    setattr(module, kind, Parameter(whole, requires_grad=False))


def _is_cut(module: Layer) -> bool:
    """Has it some of the words, beside other ranks?"""
    return isinstance(module, VocabParallelEmbedding) and module.tp_size > 1


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view of tensors whose rows lie one after the other in one piece of memory; None if they do not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for each in tensors:
        alike = each.dtype == first.dtype and each.shape[1:] == first.shape[1:] and each.is_contiguous()
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (alike and same and each.data_ptr() == end):
            return None
        end += each.nbytes
    return first.as_strided((sum(len(each) for each in tensors), *first.shape[1:]), first.stride())


def pack_tied_head(head: Layer) -> None:
    """Have a tied head compute with the embedding as it is now."""
    # On a CPU a head multiplies by a copy that was packed for it. vLLM's own reload packs those of layers that have
    # weights of their own: a tied head would go on with its first weights, in silence.
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def share_words(model: Layer) -> None:
    """Cut the vocabulary of vLLM's embedding and head as ours are: into equal runs of words, without padding between
    them."""
    for module in model.modules():
        if not _is_cut(module):
            continue
        total, ranks = module.org_vocab_size, module.tp_size
        each = -(-total // ranks)
        module.padding_size = ranks
        module.org_vocab_size_padded = module.num_embeddings_padded = module.output_size = each * ranks
        indices = module._get_indices(each * ranks, each * ranks, total, total, module.tp_rank, ranks)
        module.shard_indices = indices
        module.num_embeddings_per_partition = module.output_size_per_partition = each
        module.num_org_embeddings_per_partition = indices.num_org_elements
        module.output_partition_sizes = [each]
        if module.weight.is_cpu:
            continue  # every version brings its own
        module.weight.data = module.weight.data[:each]


def suspects(model: Layer, reference: torch.nn.Module) -> list[str]:
    """Weights, by the names of a model directory, with which vLLM's embeddings, linear maps or norms compute something
    else than the tensors of `reference`, this rank's, say.

    It asks each layer by itself for the images of some random rows: the weights may be packed, or gone.
    """
    tensors, found = dict(reference.named_parameters()), list[str]()
    generator = torch.Generator().manual_seed(0)

    def probe(like: Tensor) -> Tensor:
        return torch.randn(PROBES, like.shape[1], generator=generator).to(like)

    layers: dict[int, dict[str, Fused]] = {}
    for fused in fused_parameters(model):
        layers.setdefault(id(fused.module), {})[fused.kind] = fused
    with torch.inference_mode():
        for kinds in layers.values():
            module, names = kinds["weight"].module, kinds["weight"].names
            weights: list[Tensor] = [tensors[name] for name in names]
            biases: Sequence[Tensor | None] = [tensors[n] for n in kinds["bias"].names] if "bias" in kinds else []
            if isinstance(module, LinearBase | ParallelLMHead):
                x_BD = probe(weights[0])
                # Not the layer itself, which would add up over the ranks.
                given = module.quant_method.apply(module, x_BD, module.bias if biases else None)
                needed = [
                    functional.linear(x_BD, weight, bias)
                    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
                ]
            elif isinstance(module, VocabParallelEmbedding):
                given = module.quant_method.embedding(module, torch.arange(len(weights[0]), device=weights[0].device))
                needed = weights
            else:
                given, needed = module.weight, weights
            found += _differing(names, given, needed)
        if model.config.tie_word_embeddings:
            x_BD, head = probe(tensors[EMBEDDING]), model.lm_head
            given, needed = head.quant_method.apply(head, x_BD), [functional.linear(x_BD, tensors[EMBEDDING])]
            found += _differing([f"{EMBEDDING}, as {HEAD}"], given, needed)
    return found


def _differing(names: Sequence[str], given: Tensor, needed: Sequence[Tensor]) -> list[str]:
    """The images of a fused layer stand side by side; those of a padded vocabulary end with nothing."""
    widths = [part.shape[-1] for part in needed]
    found = []
    for name, part, right in zip(names, torch.split(given[..., : sum(widths)], widths, dim=-1), needed, strict=True):
        off = (part.float() - right.float()).norm() / right.float().norm().clamp_min(1e-12)
        if not off <= ROUNDING[right.dtype]:
            found.append(name)
    return found
