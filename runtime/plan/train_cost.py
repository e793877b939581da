"""Seconds of a training step and of a pass for log-probabilities, and the FLOPs and bytes that they follow from. Pure.

A step: micro-batches of packed sequences through the pipeline, forward and backward, then the optimizer. Overlap as in
FSDP2 and Megatron-LM: gathers of weights and reductions of gradients run beside computation and count as far as they
are longer; tensor and expert parallelism's collectives do not. The bubble of a pipeline of p stages and m micro-batches
is (p - 1) / v of a micro-batch's time with v model chunks per stage (Narayanan et al., 2021, section 2.2).

Matrix products: 2 FLOPs for each weight that a token is multiplied with (Kaplan et al., 2020, section 2.1). Causal
attention: 2 · L · s² · d per sequence of s tokens and width d of all heads, half of the square (Narayanan et al., 2021,
appendix, with the causal half left out). Backward: twice the forward; without gradients of weights, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from penstock.runtime.cluster.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.collectives import Cost, exchange_s, gather_s, reduce_s, send_s
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.plan.workload import IntArray


def product_flops(shape: Shape) -> float:
    """Forward, of one token: all matrix products but attention's own."""
    return 2.0 * shape.active_parameters


def attention_flops(shape: Shape, squares: float) -> float:
    """Forward, of sequences whose squared lengths sum to `squares`: queries by keys and weights by values, causal."""
    return shape.layers * squares * (shape.qk_width + shape.value_width)


def decode_attention_flops(shape: Shape, context: float) -> float:
    """Of one new token that sees `context` tokens. A latent cache is read as it is, by each head (DeepSeek-V2, section
    2.1.2: the up-projections are absorbed)."""
    width = shape.qk_width + shape.value_width
    if shape.latent is not None:
        width = shape.heads * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
    return 2.0 * shape.layers * context * width


def elementwise_bytes(shape: Shape, tp: int = 1) -> float:
    """Forward, of one token in bfloat16: what fused kernels read and write between matrix products: two norms with
    residual (each reads two and writes two of the width), rotary embedding, the gated activation, and for experts the
    two permutations. With sequence parallelism all of it is cut by `tp` (Korthikanti et al., 2022)."""
    norms = 8 * shape.hidden
    rotary = 2 * (shape.qk_width + shape.cache_width)
    used = shape.active * shape.expert_inner + shape.shared * shape.expert_inner
    routed = 3 * used + 4 * shape.active * shape.hidden
    dense = 3 * shape.inner
    mlps = (shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed
    return 2.0 * (shape.layers * (norms + rotary) + mlps) / tp


def cache_bytes(shape: Shape, itemsize: float, tp: int = 1, pp: int = 1) -> float:
    """Of one token on the rank that holds most: heads are shared out, a latent cache is on every rank."""
    parts = 1 if shape.latent is not None else min(tp, shape.kv_heads)
    layers = -(-shape.layers // pp)
    return layers * shape.cache_width * itemsize / parts


def weights_per_rank(shape: Shape, tp: int, pp: int, ep: int = 1, fsdp: int = 1) -> float:
    """Parameters on one rank of a stage: dense ones cut by tp and fsdp; experts by the same, or over ep where that is
    more. Embedding and head count as spread over the stages."""
    spread = tp * fsdp
    return (shape.dense_parameters / spread + shape.expert_parameters / max(ep, spread)) / pp


def touched(shape: Shape, tokens: Any) -> Any:
    """The expected share of the experts that `tokens` tokens (a number, or an array of them) use between them, routed
    evenly: 1 - (1 - k/E)^n."""
    return 1.0 - (1.0 - shape.active / shape.experts) ** tokens if shape.experts else 0.0


KERNELS = 24
"""Launches of a layer, forward: products, norms, rotary embedding, attention, activation, copies. Backward: twice."""
OPTIMIZER_BYTES = 30.0
"""Read and written per parameter: gradient, master weight and two moments in float32 read; all but the gradient
written, and the weight in bfloat16."""
FOLLOW_BYTES = 14.0
"""The same of a copy that goes towards the policy: both in float32 read, the copy written, in bfloat16, too."""
LOGIT_BYTES = 10.0
"""Read and written per logit, forward: written in bfloat16, read, written and read again in float32 for the loss, as
PyTorch does without a fused kernel. The backward pass does the same again."""
ASYNC_TP = 0.5
"""Share of tensor parallelism's collectives that is not hidden when they are cut up and run beside the products
(torchtitan, section 2.2.2: "async TP")."""


Kept = dict[tuple[object, ...], tuple[int, float, Cost]]
"""Micro-batches of a step, tokens and seconds of each, by all that they depend on."""


class Packed(NamedTuple):
    """What a step's seconds depend on: tokens of all sequences, of the longest one, and the squares of all."""

    tokens: float
    longest: float
    squares: float


def packed(sequences: IntArray, parts: int = 1) -> tuple[Packed, ...]:
    """Of each of so many parts of a batch."""
    split = np.array_split(sequences.astype(np.float64), parts)
    return tuple(Packed(float(part.sum()), float(part.max()), float(np.square(part).sum())) for part in split)


@dataclass(frozen=True)
class Trainer:
    """A replica that trains. `recompute` is the share of the forward pass that the backward one repeats (0 to 1).

    `frozen`: no gradients of the weights (an adapter of low rank, whose own cost is left out). `zero3`: weights are
    gathered for each micro-batch and their gradients reduced (FSDP); else once a step (ZeRO-1, Megatron's distributed
    optimizer). `offload`: activations that are kept travel to the host and back.
    """

    shape: Shape
    gpu: Gpu
    mesh: Parallel
    precision: Precision = "bf16"
    micro_tokens: int = 8192
    recompute: float = 1.0
    frozen: bool = False
    zero3: bool = True
    async_tp: bool = False
    chunks: int = 1
    offload: bool = False

    def step(self, sequences: IntArray) -> Cost:
        """Seconds of one optimizer step on sequences of these lengths (prompt and response), shared out evenly by
        tokens over the data-parallel ranks and packed into micro-batches."""
        return self._step(packed(sequences)[0])

    def update(self, sequences: IntArray, epochs: int = 1, minibatches: int = 1) -> Cost:
        """Seconds of all steps on a batch: `epochs` times each of its `minibatches`."""
        return self.steps(packed(sequences, minibatches), epochs)

    def steps(self, parts: Sequence[Packed], epochs: int = 1, kept: Kept | None = None) -> Cost:
        """Seconds of a step on each part, `epochs` times. `kept` is shared by trainers of one model, GPU and precision,
        and empty at first: what those with as many shares of the data have in common."""
        first, *others = (self._step(part, kept) for part in parts)
        total = sum(others, first)
        return total * epochs if epochs > 1 else total

    def logprobs(self, sequences: IntArray) -> Cost:
        """Seconds of a forward pass over these sequences."""
        return self.passed(packed(sequences)[0])

    def passed(self, all_of_it: Packed) -> Cost:
        """Seconds of a forward pass."""
        micro, tokens, squares = self._shared_out(all_of_it)
        alone = self._alone(tokens, squares, backward=False)
        return self._piped(self._micro(alone, tokens, backward=False), micro)

    def least(self, part: Packed, *, backward: bool) -> float:
        """Seconds that a step on this part, or a pass over it, does not go below however weights are sharded."""
        micro, tokens, squares = self._shared_out(part)
        one = sum(self._computing(tokens, squares, backward).values())
        one += self._tensor_s(tokens, self._times(backward))
        return one * (micro + (self.mesh.pp - 1) / self.chunks)

    def followed(self) -> Cost:
        """Seconds in which a copy that is cut like the weights takes in what they have become."""
        shape, mesh = self.shape, self.mesh
        shard = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep, mesh.fsdp * mesh.cp)
        return Cost({"copies": shard * FOLLOW_BYTES / self.gpu.bandwidth})

    def _step(self, part: Packed, kept: Kept | None = None) -> Cost:
        mesh, found = self.mesh, {} if kept is None else kept
        key = (mesh.data, mesh.tp, mesh.pp, mesh.cp, mesh.ep, self.micro_tokens, part)
        if key not in found:
            micro, tokens, squares = self._shared_out(part)
            found[key] = micro, tokens, self._alone(tokens, squares, backward=True)
        micro, tokens, alone = found[key]
        return self._piped(self._micro(alone, tokens, backward=True), micro) + self._once()

    def _shared_out(self, part: Packed) -> tuple[int, float, float]:
        """Micro-batches of a data-parallel rank, and the tokens and squared lengths of each on average."""
        per_rank = max(part.tokens / self.mesh.data, part.longest)
        micro = max(1, ceil(per_rank / max(self.micro_tokens, part.longest) - 1e-9))
        share = per_rank / part.tokens
        return micro, per_rank / micro, part.squares * share / micro

    def _alone(self, tokens: float, squares: float, *, backward: bool) -> Cost:
        """Seconds of one micro-batch on one stage, forward and, if asked for, backward and recomputed, but for what
        travels beside it."""
        gpu, mesh, times = self.gpu, self.mesh, self._times(backward)
        parts = self._computing(tokens, squares, backward)
        hop = send_s(gpu, tokens * self.shape.hidden * 2 / mesh.cp, mesh.stage) if mesh.pp > 1 else 0.0
        parts |= {
            "tp": self._tensor_s(tokens, times),
            "ep": self._expert_s(tokens, times),
            "cp": max(0.0, self._context_s(tokens, times / 2) - parts["attention"]),
            "pp": hop * (1 + backward),
        }
        return Cost(parts)

    def _micro(self, alone: Cost, tokens: float, *, backward: bool) -> Cost:
        """With weights and activations that travel, as far as that takes longer."""
        parts, inner = dict(alone.parts), alone.seconds
        parts["fsdp"] = max(0.0, self._gather_s(backward) - inner) if self.zero3 else 0.0
        parts["offload"] = max(0.0, self._offload_s(tokens) - inner) if self.offload and backward else 0.0
        return Cost(parts)

    def _computing(self, tokens: float, squares: float, backward: bool) -> dict[str, float]:
        """Kernels of one micro-batch on one stage. Products are bound by their FLOPs or by reading the weights."""
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        ways = mesh.tp * mesh.cp * mesh.pp
        again = self.recompute if backward else 0.0
        passes = 1.0 + again + ((1.0 if self.frozen else 2.0) if backward else 0.0)
        both = 1.0 + again + 2.0 * backward
        reads = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep) * BYTES[self.precision] * passes / gpu.bandwidth
        products = product_flops(shape) * tokens / ways * passes / gpu.flops(self.precision)
        # Gradients of attention need both factors even if no weight does, and its kernels repeat half of the forward.
        attention = attention_flops(shape, squares) / ways * (both + 0.5 * backward) / gpu.attention_flops
        elements = elementwise_bytes(shape, mesh.tp) * tokens / mesh.cp / mesh.pp * both / gpu.bandwidth
        logits = tokens / ways * shape.vocab * LOGIT_BYTES * (1 + backward) / gpu.bandwidth
        busy = max(products, reads) + attention + elements + logits
        launches = KERNELS * ceil(shape.layers / mesh.pp) * both * gpu.launch_s
        return {
            "products": products,
            "reading weights": max(0.0, reads - products),
            "attention": attention,
            "elementwise": elements,
            "logits": logits,
            "launches": max(0.0, launches - busy),
        }

    def _piped(self, one: Cost, micro: int) -> Cost:
        """All micro-batches through the pipeline."""
        bubble = one.seconds * (self.mesh.pp - 1) / self.chunks
        return Cost({**{name: seconds * micro for name, seconds in one.parts.items()}, "bubble": bubble})

    def _once(self) -> Cost:
        """What a step does once: the optimizer, gradients between copies, and with ZeRO-1 a gather and a reduction, of
        which one is taken to be hidden."""
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        if self.frozen:
            return Cost()
        local, shards = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep), mesh.fsdp * mesh.cp
        optimizer = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep, shards) * OPTIMIZER_BYTES / gpu.bandwidth
        copies = reduce_s(gpu, local / shards * 2, mesh.dp, mesh.tp * shards)
        once = 0.0 if self.zero3 else gather_s(gpu, local * 2, shards, mesh.tp)
        return Cost({"optimizer": optimizer, "dp": copies, "fsdp": once})

    def _gather_s(self, backward: bool) -> float:
        """All weights of a stage gathered, for forward and again for backward, and their gradients reduced."""
        mesh, shards = self.mesh, self.mesh.fsdp * self.mesh.cp
        nbytes = weights_per_rank(self.shape, mesh.tp, mesh.pp, mesh.ep) * 2
        times = (2 if self.frozen else 3) if backward else 1
        layers = ceil(self.shape.layers / mesh.pp)
        return times * layers * gather_s(self.gpu, nbytes / layers, shards, mesh.tp)

    def _times(self, backward: bool) -> float:
        """How often each layer's activations travel."""
        return 2 + (2 + 2 * self.recompute if backward else 0)

    def _tensor_s(self, tokens: float, times: float) -> float:
        """`times` all-reduces of the activations for each layer (Shoeybi et al., 2019, section 3)."""
        nbytes = tokens / self.mesh.cp * self.shape.hidden * 2
        layers = ceil(self.shape.layers / self.mesh.pp)
        hidden = ASYNC_TP if self.async_tp else 1.0
        return times * layers * hidden * reduce_s(self.gpu, nbytes, self.mesh.tp)

    def _expert_s(self, tokens: float, times: float) -> float:
        """`times` all-to-alls of the tokens, each to its experts or back, for each layer with experts."""
        if self.mesh.ep == 1:
            return 0.0
        sent = tokens / (self.mesh.cp * self.mesh.tp) * self.shape.active * self.shape.hidden * 2
        return times * self.shape.moe_layers / self.mesh.pp * exchange_s(self.gpu, sent, self.mesh.ep)

    def _context_s(self, tokens: float, times: float) -> float:
        """Keys and values around the ring (Liu et al., 2023: ring attention), beside attention."""
        nbytes = tokens * self.shape.cache_width * 2 / min(self.mesh.tp, self.shape.kv_heads)
        layers = ceil(self.shape.layers / self.mesh.pp)
        return times * layers * gather_s(self.gpu, nbytes, self.mesh.cp, self.mesh.tp)

    def _offload_s(self, tokens: float) -> float:
        """Each layer's input to the host and back."""
        nbytes = tokens / (self.mesh.cp * self.mesh.tp) * self.shape.hidden * 2 * ceil(self.shape.layers / self.mesh.pp)
        return 2 * nbytes / self.gpu.pcie
