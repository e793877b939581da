"""Loading of weights that our links have received into vLLM, by a weight-transfer engine registered with vLLM.

A layer of vLLM computes with one matrix, such as `qkv_proj`, for several of a model directory (`Fused`). A link
receives those into contiguous memory (`Fusing`), so that on a CPU the layer's weight is the memory that the link has
filled. vLLM packs it from there for its kernels, without another copy before. On a GPU, whose graphs have fixed
addresses, each tensor is copied to its rows of vLLM's weight.

With several ranks each has its part of each tensor, sharded as ours are: attention and MLP as in vLLM, too, and the
vocabulary in equal runs, to which vLLM's layers are adapted (`shard_vocab`).

Shapes: B rows of a probe, V vocabulary, D inputs of a linear map.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, functional

# Before vLLM is imported: one process, no usage statistics, threads as the agent has set them.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

try:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # Do not compile small functions: that needs a C++ compiler, and 15 s of the first group.
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

# A layer of vLLM's, or its model.
Layer = Any

BACKEND = "penstock"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# For `suspects`: rows of a probe, and the relative difference of a linear map's outputs that rounding explains.
PROBES, ROUNDING = 8, {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Fused(NamedTuple):
    """A parameter of vLLM's, by its module, and the tensors of a model directory that it joins."""

    module: Layer
    kind: str
    names: tuple[str, ...]


def fused_parameters(model: Layer) -> list[Fused]:
    """All parameters of vLLM's model, except a tied head."""
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
    """Nothing is needed to set up the transfer."""


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The weights, in this process, by the names of a model directory; `copied` is called with the number of bytes that
    had to be copied."""

    tensors: Mapping[str, Tensor]
    copied: Callable[[int], object] = lambda nbytes: None


class LinkedWeights(WeightTransferEngine[_Nothing, Version]):  # type: ignore[misc]
    """Makes tensors of this process the weights of vLLM's model. Raises ValueError if some are missing."""

    init_info_cls, update_info_cls = _Nothing, Version

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """Do nothing: the rank opens the links."""

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
            # An embedding is not packed.
            if isinstance(module, LinearBase | ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        if self.model_config.hf_config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
            pack_tied_head(self.model.lm_head)

    def shutdown(self) -> None:
        """Do nothing: the rank closes its links."""


WeightTransferEngineFactory.register_engine(BACKEND, LinkedWeights)


def _place(fused: Fused, tensors: Sequence[Tensor], copied: Callable[[int], object]) -> None:
    """Make the rows of some tensors vLLM's parameter."""
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
        # If the number of ranks does not divide the vocabulary, the last rank has fewer words.
        padding = tensors[0].new_zeros(rows - sum(len(each) for each in tensors), *tensors[0].shape[1:])
        whole = torch.cat([*tensors, padding])
        copied(whole.nbytes)
    # A new parameter: in place of the old one, which vLLM has packed.
    setattr(module, kind, Parameter(whole, requires_grad=False))


def _is_cut(module: Layer) -> bool:
    """True if this layer has a part of the vocabulary, and other ranks the rest."""
    return isinstance(module, VocabParallelEmbedding) and module.tp_size > 1


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view of tensors whose rows are contiguous in memory; None if they are not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for each in tensors:
        alike = each.dtype == first.dtype and each.shape[1:] == first.shape[1:] and each.is_contiguous()
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (alike and same and each.data_ptr() == end):
            return None
        end += each.nbytes
    return first.as_strided((sum(len(each) for each in tensors), *first.shape[1:]), first.stride())


def pack_tied_head(head: Layer) -> None:
    """Make a tied head compute with the present embedding."""
    # On a CPU a head multiplies by a packed copy. vLLM's own reload packs only layers with weights of their own: a tied
    # head would silently keep its first weights.
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def shard_vocab(model: Layer) -> None:
    """Shard the vocabulary of vLLM's embedding and head as ours: in equal runs of words, without padding in between."""
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
            continue  # each version sets a new weight
        module.weight.data = module.weight.data[:each]


def suspects(model: Layer, reference: torch.nn.Module) -> list[str]:
    """Names, as in a model directory, of weights with which vLLM's embeddings, linear maps or norms compute something
    else than the tensors of `reference`, which are this rank's.

    It compares the outputs of each layer for some random rows: the weights themselves may be packed, or freed.
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
                # Not the layer itself, which would sum over the ranks.
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
    """The names whose outputs differ. Outputs of a fused layer are side by side; a padded vocabulary has more."""
    widths = [part.shape[-1] for part in needed]
    found = []
    for name, part, right in zip(names, torch.split(given[..., : sum(widths)], widths, dim=-1), needed, strict=True):
        off = (part.float() - right.float()).norm() / right.float().norm().clamp_min(1e-12)
        if not off <= ROUNDING[right.dtype]:
            found.append(name)
    return found
