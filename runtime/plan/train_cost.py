"""Seconds of a training step and of a pass for log-probabilities, their FLOPs and bytes, and the memory of each GPU by
component. Pure.

A step: micro-batches of packed sequences go through the pipeline, forward and backward, then the optimizer. Overlap is
as in FSDP2 and Megatron-LM: gathers of weights and reductions of gradients overlap with computation, and only their
excess counts; collectives of tensor parallelism do not overlap. Pipeline stages hold whole layers, the first one also
the embedding, the last one the head, as the trainer cuts them. Every micro-batch takes as long as on the slowest stage.
The bubble is a micro-batch's time on the other stages: p - 1 times its time on one, if all p are equal (Narayanan et
al., 2021, section 2.2).

Matrix products: 2 FLOPs for each weight that a token is multiplied with (Kaplan et al., 2020, section 2.1). Causal
attention: 2 · L · s² · d per sequence of s tokens and width d of all heads, half of the square (Narayanan et al., 2021,
appendix, with the causal half left out). Backward: twice the forward; without gradients of weights, once.

Memory is that of `nodes.trainable`, as `tests/nodes/test_memory.py` counts it. Per parameter, a single rank has the
weight in the run's format, a float32 master if that is another format, and in float32 two moments and the gradient: 18
bytes with bfloat16. Several ranks have shards of masters, moments and gradients, 16 bytes, and gather the weights for
computation. ZeRO-1, which no run has, keeps weights and gradients whole. With recomputation only a layer's input is
kept (Chen et al., 2016), and one layer at a time has all that `layer_bytes` counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, prod
from typing import NamedTuple

import numpy as np

from penstock.runtime.cluster.capabilities import Recompute
from penstock.runtime.cluster.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.collectives import Cost, added, exchange_s, gather_s, reduce_s, send_s
from penstock.runtime.plan.model_shape import Parallel, Shape, StageShape, stages_of
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.sync_cost import Table, adapter_tensors, layer_tensors
from penstock.runtime.plan.workload import IntArray


def attention_flops(shape: Shape, squares: float) -> float:
    """FLOPs of the forward pass of causal attention, where `squares` is the sum of the sequences' squared lengths:
    queries by keys, and weights by values."""
    return shape.layers * squares * (shape.qk_width + shape.value_width)


def weighted(shape: Shape, gpu: Gpu) -> float:
    """The number of weights that one token is multiplied with; those of experts are weighted by how much slower their
    products are."""
    routed = shape.expert_parameters * shape.active / shape.experts if shape.experts else 0.0
    return shape.active_parameters + routed * (1 / gpu.efficiency.experts - 1)


def elementwise_bytes(shape: Shape, tp: int = 1) -> float:
    """Bytes that fused kernels read and write between matrix products, forward, for one token in bfloat16: two norms
    with residual (each reads and writes the width twice), rotary embedding, the gated activation, and for experts five
    passes over the rows of all experts: two permutations on each side of them, and the weighted sum. With sequence
    parallelism `tp` cuts all of it (Korthikanti et al., 2022)."""
    norms = 8 * shape.hidden
    rotary = 2 * (shape.qk_width + shape.cache_width)
    used = shape.active * shape.expert_inner + shape.shared * shape.expert_inner
    routed = 3 * used + 10 * shape.active * shape.hidden
    dense = 3 * shape.inner
    mlps = (shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed
    return 2.0 * (shape.layers * (norms + rotary) + mlps) / tp


def cache_bytes(shape: Shape, tp: int, pp: int = 1, precision: Precision = "bf16") -> float:
    """Bytes of one token's cache on the rank that holds most: heads are divided among ranks, a latent cache is on every
    rank."""
    parts = 1 if shape.latent is not None else min(tp, shape.kv_heads)
    return ceil(shape.layers / pp) * shape.cache_width * BYTES[precision] / parts


def linear_widths(shape: Shape) -> float:
    """How many numbers of one token go into the layers' matrix products, and come out: the mean of both."""
    attention = 2 * shape.hidden + 2 * shape.qk_width + shape.kv_heads * shape.head_dim
    used = (shape.active + shape.shared) * shape.expert_inner
    dense = 2 * shape.hidden + 3 * shape.inner
    routed = (2 * shape.active + 1) * shape.hidden + 3 * used
    return (shape.layers * attention + (shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed) / 2


# Bytes per number that is converted to fp8: read once for the maximum and once for itself, written twice.
QUANTISE_BYTES = 6.0
# Kernels of a layer, forward: products, norms, rotary embedding, attention, activation, copies. Backward: twice.
KERNELS = 24
# The same of an adapter: two products, the scale and the sum.
ADAPTER_KERNELS = 4
# Bytes per parameter in an optimizer step: gradient, master weight and two moments in float32 read; all but the
# gradient written, and the weight in bfloat16.
OPTIMIZER_BYTES = 30.0
# The same for the update of a copy that follows the policy: both read in float32, the copy written, also in bfloat16.
FOLLOW_BYTES = 14.0
# Bytes per logit, forward: written in bfloat16, read, written and read again in float32 for the loss, as PyTorch does
# without a fused kernel. Backward: the same again.
LOGIT_BYTES = 10.0


class PackedBatch(NamedTuple):
    """The numbers that a step's seconds depend on: the tokens of all sequences and of the longest one, and the sum of
    squared lengths."""

    tokens: float
    longest: float
    squares: float


def packed(sequences: IntArray, parts: int = 1) -> tuple[PackedBatch, ...]:
    """The `PackedBatch` of each of `parts` parts of a batch."""
    split = np.array_split(sequences.astype(np.float64), parts)
    return tuple(PackedBatch(float(part.sum()), float(part.max()), float(np.square(part).sum())) for part in split)


@dataclass(frozen=True)
class Trainer:
    """A replica that trains. `micro_tokens`: the most tokens of a micro-batch. `recompute`: the share of the forward
    pass that the backward pass repeats (0 to 1).

    `frozen`: a model that is only read, without gradients. With adapters (`Shape.lora`), only these have gradients,
    masters and moments. `zero3`: weights are gathered, and their gradients reduced, for each micro-batch (FSDP); else
    once per step (ZeRO-1, Megatron's distributed optimizer).

    With expert parallelism (`mesh.ep`), tokens are sent to their experts. `cp`: over how many ranks of `fsdp` each
    sequence is cut (ring attention, Liu et al., 2023), which no run has.
    `logit_elements`: how many logits are in memory at once; 0: as suits the GPU. `host_state`: moments are on the host.
    """

    shape: Shape
    gpu: Gpu
    mesh: Parallel
    precision: Precision = "bf16"
    micro_tokens: int = 8192
    recompute: float = 1.0
    frozen: bool = False
    zero3: bool = True
    cp: int = 1
    logit_elements: int = 0
    host_state: bool = False

    @cached_property
    def tokens_of_chunk(self) -> int:
        """For how many tokens a rank has the logits of its part of the vocabulary at once."""
        return max(1, int((self.logit_elements or logit_elements(self.gpu)) // ceil(self.shape.vocab / self.mesh.tp)))

    @cached_property
    def stages(self) -> tuple[StageShape, ...]:
        return stages_of(self.shape, self.mesh.pp)

    @cached_property
    def slowest(self) -> StageShape:
        """The stage on which a token is multiplied with most weights."""
        return max(self.stages, key=lambda stage: stage.active)

    @cached_property
    def filling(self) -> float:
        """A micro-batch's time on all other stages, as a multiple of its time on the slowest one."""
        return sum(stage.active for stage in self.stages) / self.slowest.active - 1

    @cached_property
    def local(self) -> float:
        """Parameters of a rank of the fullest stage, with its weights gathered."""
        return max(map(self.held, self.stages))

    def held(self, stage: StageShape) -> float:
        """Parameters of a rank of a stage, with its weights gathered: `tp` cuts all, and `ep` divides the experts."""
        return (stage.dense + stage.experts / self.mesh.ep) / self.mesh.tp

    @cached_property
    def shard(self) -> float:
        """How many parameters' moments a rank keeps."""
        return max(map(self.learnt, self.stages)) / self.mesh.fsdp

    def learnt(self, stage: StageShape) -> float:
        """Parameters of a rank of a stage that learn, before `fsdp` shards them."""
        if self.shape.lora is not None:
            return stage.layers * self.shape.adapted(self.mesh.tp)
        return stage.parameters / self.mesh.tp

    def all_learning(self) -> "Trainer":
        """The same trainer for a model of which all weights learn, such as a critic."""
        return replace(self, shape=replace(self.shape, lora=None)) if self.shape.lora is not None else self

    @property
    def weights_fixed(self) -> bool:
        """True if the matrices that a token is multiplied with have no gradients."""
        return self.frozen or self.shape.lora is not None

    @property
    def layers(self) -> int:
        """The layers of the slowest stage."""
        return self.slowest.layers

    def update(self, sequences: IntArray, epochs: int = 1, minibatches: int = 1, parts: int = 1) -> Cost:
        """The cost of all optimizer steps on sequences of these lengths (prompt and response): `epochs` times one step
        on each of the `minibatches`, whose tokens are divided evenly among the data-parallel ranks and packed into
        micro-batches. Each minibatch arrives in `parts` parts."""
        return self.steps(packed(sequences, minibatches * parts), epochs, parts)

    def steps(self, parts: Sequence[PackedBatch], epochs: int = 1, each: int = 1) -> Cost:
        """The cost of one step on each group of `each` parts, `epochs` times."""
        total = Cost()
        for number, part in enumerate(parts, 1):
            micro, tokens, squares = self._shared_out(part)
            one = self._micro_batch(tokens, squares, backward=True)
            total = total + self._pipeline(one, micro, backward=True)
            total = total if number % each else total + self.once()
        return total * epochs + self._stage()

    def logprobs(self, sequences: IntArray) -> Cost:
        """The cost of a forward pass over sequences of these lengths."""
        return self.passed(packed(sequences)[0])

    def passed(self, batch: PackedBatch) -> Cost:
        """The cost of a forward pass."""
        micro, tokens, squares = self._shared_out(batch)
        one = self._micro_batch(tokens, squares, backward=False)
        return self._pipeline(one, micro, backward=False) + self._stage()

    def _stage(self) -> Cost:
        return Cost({"stage": self.gpu.engine.stage_s})

    def least(self, part: PackedBatch, *, backward: bool) -> float:
        """A lower bound of the seconds of a step on this part, or of a pass over it, however weights are sharded."""
        micro, tokens, squares = self._shared_out(part)
        one = sum(self._computing(tokens, squares, backward).values()) + self._tensor_s(tokens, backward)
        return one * (micro + self.filling)

    def followed(self) -> Cost:
        """The cost of the update of a copy that follows the policy and is sharded like it."""
        return Cost({"copies": self.shard * FOLLOW_BYTES / self.gpu.bandwidth})

    def _shared_out(self, part: PackedBatch) -> tuple[int, float, float]:
        """The number of micro-batches of a data-parallel rank, and the mean tokens and squared lengths of each."""
        # Sequences are not cut (except by `cp`), so the busiest rank has at least the longest one.
        together = max(part.tokens / (self.mesh.data // self.cp), part.longest)
        micro = max(1, ceil(together / max(self.micro_tokens, part.longest) - 1e-9))
        share = together / part.tokens
        return micro, together / micro / self.cp, part.squares * share / micro / self.cp

    def _micro_batch(self, tokens: float, squares: float, *, backward: bool) -> Cost:
        """The cost of one micro-batch on one stage, forward, and with `backward` also backward with recomputation;
        without gathers of weights, which overlap."""
        shape, mesh, gpu = self.shape, self.mesh, self.gpu
        computing = self._computing(tokens, squares, backward)
        hop = send_s(gpu, tokens * shape.hidden * 2, mesh.stage) if mesh.pp > 1 else 0.0
        travels = {"tp": self._tensor_s(tokens, backward), "pp": hop * (1 + backward)}
        times = 2 + (2 + 2 * self.recompute if backward else 0)
        if mesh.ep > 1:
            # Tokens are sent to their experts and back, in each layer with experts.
            travels["ep"] = times * self.slowest.moe_layers * self._exchange_s(tokens)
        if self.cp > 1:
            # Keys and values go around the ring, in parallel with attention.
            keys = tokens * self.cp * shape.cache_width * 2 / min(mesh.tp, shape.kv_heads)
            ring = times / 2 * self.layers * gather_s(gpu, keys, self.cp, mesh.tp)
            travels["cp"] = max(0.0, ring - computing["attention"])
        return Cost(computing | travels)

    def _computing(self, tokens: float, squares: float, backward: bool) -> dict[str, float]:
        """Seconds of the kernels of one micro-batch on the slowest stage, by part. Products are bound by their FLOPs or
        by reading weights."""
        shape, gpu, mesh, stage = self.shape, self.gpu, self.mesh, self.slowest
        share = stage.layers / shape.layers
        again = self.recompute if backward else 0.0
        passes = 1.0 + again + ((1.0 if self.weights_fixed else 2.0) if backward else 0.0)
        both = 1.0 + again + 2.0 * backward
        reads = self.local * BYTES[self.precision] * passes / gpu.bandwidth
        slower = weighted(shape, gpu) / shape.active_parameters
        products = 2.0 * stage.active * slower * tokens / mesh.tp * passes / gpu.flops(self.precision)
        products += 2.0 * stage.layers * shape.adapted(mesh.tp) * tokens * both / gpu.flops(self.precision)
        # Attention's backward pass computes both factors' gradients even if no weight learns, and repeats half of the
        # forward pass.
        attention = attention_flops(shape, squares) * share / mesh.tp * (both + 0.5 * backward) / gpu.attention_flops
        elements = elementwise_bytes(shape, mesh.tp) * share * tokens * both / gpu.bandwidth
        if self.precision == "fp8":
            # Inputs are converted forward, gradients backward, each for reading by rows and by columns; and all weights
            # once in each pass.
            widths = linear_widths(shape) * share * tokens / mesh.tp * (2.0 + again)
            elements += QUANTISE_BYTES * (widths + self.local * (1 + backward)) / gpu.bandwidth
        logits = stage.head * tokens / mesh.tp * shape.vocab * LOGIT_BYTES * (1 + backward) / gpu.bandwidth
        busy = max(products, reads) + attention + elements + logits
        # The host launches kernels ahead of the GPU: only launch time in excess of all their work counts.
        kernels = KERNELS + (ADAPTER_KERNELS * len(shape.lora.targets) if shape.lora is not None else 0)
        launches = kernels * self.layers * both * gpu.launch_s
        return {
            "products": products,
            "reading weights": max(0.0, reads - products),
            "attention": attention,
            "elementwise": elements,
            "logits": logits,
            "launches": max(0.0, launches - busy),
            # Here the host cannot launch ahead: it waits for the number of rows of each expert.
            "routing": stage.moe_layers * both * gpu.engine.experts_ms * 1e-3,
        }

    def _tensor_s(self, tokens: float, backward: bool) -> float:
        """Seconds of the all-reduces of each layer's activations: two forward, two backward, two recomputed (Shoeybi et
        al., 2019, section 3)."""
        # Left out: one for the embedding forward, and one for the head backward.
        times = 2 + (2 + 2 * self.recompute if backward else 0)
        return times * self.layers * reduce_s(self.gpu, tokens * self.shape.hidden * 2, self.mesh.tp)

    def _exchange_s(self, tokens: float) -> float:
        """Seconds of an all-to-all of the tokens' rows. Every rank of `tp` sends all of them."""
        sent = tokens * self.shape.active * self.shape.hidden * 2
        return exchange_s(self.gpu, sent, self.mesh.ep, self.mesh.tp)

    def _pipeline(self, alone: Cost, micro: int, *, backward: bool) -> Cost:
        """The cost of all micro-batches in the pipeline, with the excess of gathers of weights over computation."""
        parts = dict(alone.parts)
        if self.zero3:
            # All weights of a stage are gathered forward and again backward, and their gradients reduced.
            times = (2 if self.weights_fixed else 3) if backward else 1
            each = self._gather_s(2 / self.layers)
            parts["fsdp"] = max(0.0, times * self.layers * each - alone.seconds)
        # Stages wait for the first micro-batch to arrive and for the last one to return.
        bubble = sum(parts.values()) * self.filling
        return Cost({**{name: seconds * micro for name, seconds in parts.items()}, "bubble": bubble})

    def _gather_s(self, nbytes: float) -> float:
        """Seconds in which a rank of the fullest stage gathers its weights, of `nbytes` bytes each. With `ep`, experts
        are gathered from the ranks that shard the same experts."""
        gpu, mesh, stage = self.gpu, self.mesh, max(self.stages, key=self.held)
        if mesh.ep == 1:
            return gather_s(gpu, self.local * nbytes, mesh.fsdp, mesh.tp)
        experts = stage.experts / mesh.ep / mesh.tp * nbytes
        dense = gather_s(gpu, stage.dense / mesh.tp * nbytes, mesh.fsdp, mesh.tp)
        return dense + gather_s(gpu, experts, mesh.fsdp // mesh.ep, mesh.tp * mesh.ep)

    def once(self) -> Cost:
        """The cost of work once per step: the optimizer, the all-reduce of gradients over `dp`, and with ZeRO-1 a
        gather and a reduction, of which one is assumed to be hidden."""
        gpu, mesh = self.gpu, self.mesh
        if self.frozen:
            return Cost()
        # With ZeRO-3 weights are gathered for each micro-batch instead (`_pipeline`).
        whole = self.local if self.shape.lora is None else self.shard * mesh.fsdp
        once = 0.0 if self.zero3 else gather_s(gpu, whole * 2, mesh.fsdp, mesh.tp)
        copies = reduce_s(gpu, self.shard * 2, mesh.dp, mesh.tp * mesh.fsdp)
        parts = {"optimizer": self.shard * OPTIMIZER_BYTES / gpu.bandwidth, "dp": copies, "fsdp": once}
        # Moments come from the host and go back, one direction after the other.
        return Cost({**parts, "moments": 2 * MOMENT_BYTES * self.shard / gpu.pcie} if self.host_state else parts)


# Two moments of a parameter, in float32.
MOMENT_BYTES = 8.0
# How many bytes of moments on the host are on the GPU at once (`nodes/trainable.py`).
BUCKET_BYTES = 256 << 20
# Memory that is not available for tensors: CUDA's context, NCCL's and links' buffers, fragmentation.
RESERVED = 3e9
# The share of a GPU's memory for logits, with two float32 numbers for each.
LOGITS = 1 / 32


def logit_elements(gpu: Gpu) -> int:
    """How many logits a trainer has in memory at once; longer micro-batches are processed in chunks."""
    return 1 << int(log2(gpu.memory_bytes * LOGITS / 8))


@dataclass(frozen=True)
class Memory:
    """`parts` are bytes on the rank that holds most, by component."""

    parts: Mapping[str, float]

    @cached_property
    def bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def used(self) -> float:
        """The bytes without the reserved ones, which a GPU has once for all processes that share it."""
        return self.bytes - self.parts.get("reserved", 0.0)

    def __add__(self, other: "Memory") -> "Memory":
        """The memory of both at once on the same GPU."""
        return Memory({**added(self.parts, other.parts), "reserved": RESERVED})

    def __str__(self) -> str:
        return f"{self.bytes / 1e9:.1f} GB: {self.largest}"

    @property
    def largest(self) -> str:
        """The parts in GB, the largest first; those that would be printed as 0.0 are left out."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size >= 0.05e9)


def trainer_memory(trainer: Trainer, copies: int = 0, snapshots: float = 0.0) -> Memory:
    """The memory of a rank of the stage that needs most. Each stage keeps activations of as many micro-batches as there
    are stages from it to the last one (1F1B). `copies` copies follow the policy: each has a float32 shard, and, unless
    computation gathers that, weights in the run's format. `snapshots` are the bytes of a weight in all versions that
    are kept for receivers."""
    # Of equal stages the first one keeps most.
    first = {stage: place for place, stage in reversed(list(enumerate(trainer.stages)))}
    every = (memory for place in first.values() for memory in step_memory(trainer, place, copies, snapshots).values())
    return max(every, key=lambda memory: memory.bytes)


def step_memory(trainer: Trainer, place: int, copies: int = 0, snapshots: float = 0.0) -> Mapping[str, Memory]:
    """The memory of a rank of stage `place` (0, 1, …) at these times in a step: the look-up of words, the head's
    forward and backward pass, the reduction of its gradient, a layer's backward pass, and the reduction of the
    embedding's gradient."""
    shape, mesh, stage = trainer.shape, trainer.mesh, trainer.stages[place]
    in_flight = mesh.pp - place
    size, learns = min(4.0, max(2.0, BYTES[trainer.precision])), 0.0 if trainer.frozen else 1.0
    local, learnt = trainer.held(stage), trainer.learnt(stage)
    shard = learnt / mesh.fsdp
    # ZeRO-1 shards the optimizer's state alone: weights and gradients stay whole.
    kept = stage.parameters / mesh.tp / mesh.fsdp if trainer.zero3 else local
    with_gradients = kept if shape.lora is None else shard if trainer.zero3 else learnt
    # 1 if the weights themselves learn; with adapters they do not.
    trains = learns * (shape.lora is None)
    adapters = with_gradients * (learns - trains)
    # Several ranks compute with weights gathered from masters; a single rank has a copy of them in its format.
    masters = mesh.ranks > 1 and (trainer.zero3 or mesh.fsdp == 1)
    copied = 4.0 * (not masters and size < 4)
    # Moments on the host, except those of a bucket, or of the largest tensor (embedding or head).
    largest = shape.vocab * shape.hidden / mesh.tp / mesh.fsdp if shape.lora is None else 0.0
    adam = MOMENT_BYTES * shard * learns
    bucket = min(adam, max(float(BUCKET_BYTES), MOMENT_BYTES * largest)) if trainer.host_state else 0.0
    state = {
        "weights": (4 if masters and trains else size) * kept + (4 if masters else size) * adapters,
        "gradients": 4 * with_gradients * learns,
        "moments": copied * shard * learns + (0.0 if trainer.host_state else adam),
        "moments in a step": bucket,
        "copies": ((0 if masters else size) * kept + (4 if masters or copied else 0) * shard) * copies,
        "snapshots": snapshots * shard * learns,
        "reserved": RESERVED,
    }
    tokens, width = trainer.micro_tokens / trainer.cp, shape.hidden
    words, tied = shape.vocab / mesh.tp, shape.tied
    head, embedding = words * width * stage.head, words * width * (place == 0)
    layer = (local - (max(embedding, head) if tied else embedding + head)) / stage.layers
    whole, own = layer_bytes(trainer, stage), size * width
    each = (trainer.recompute * own + (1 - trainer.recompute) * whole) * learns
    # Activations outside the layers: the inputs of the final norm and the head, and the rotary embedding.
    beside = width * (1 + stage.head) + 2 * shape.ropes * shape.head_dim
    activations = tokens * in_flight * (each * stage.layers + size * beside)
    others, rows = activations * (1 - 1 / in_flight), size * tokens * width * learns
    if trainer.tokens_of_chunk < tokens or mesh.tp > 1:
        # A chunk's logits and probabilities in float32; or its gradient and that of the head, which is summed over
        # chunks in float32, beside the gradient of the input. With `tp` these two do not coincide.
        chunk, grads = words * min(tokens, trainer.tokens_of_chunk), 4 * words * width * trains
        once = size * (chunk * learns + words * width * trains)
        logits = rows + (max(8 * chunk, once + grads) if mesh.tp > 1 else max(8 * chunk, once) + grads)
    else:  # autograd keeps them
        logits = (4 + 8 * learns) * words * tokens
        chunk = words * tokens
    # Backward through an MLP: the gradient of its input twice (with adapters once more), of its product, and of two
    # weight matrices.
    inner, sums_in = shape.inner / mesh.tp, 2 + learns - trains
    works = size * (tokens * (sums_in * width + inner) + 2 * width * inner * trains)
    if trainer.frozen:
        works = size * tokens * 3 * (width + inner)
    works += tokens * trainer.recompute * (whole - own) * learns
    # With `ep`: rows as they are received and sent, beside those sorted by expert.
    works += size * tokens * 2 * shape.active * width * (mesh.ep > 1)
    # Embedding, head and each layer are gathered separately, into a buffer of all ranks' parts and from there into the
    # weights. A tied head is kept from the look-up to the end.
    gathers = 2.0 if mesh.fsdp > 1 else 1.0
    kept = size * head * tied
    # Gathered layers: the current one, the next one being gathered, and with recomputation the gradient of the one
    # before while it is reduced, in float32.
    reduced = 4 * layer * trainer.recompute * trains * (mesh.fsdp > 1 or size < 4)
    # A gradient, a copy in float32, and this rank's part of the sum; with one part a quotient instead of the gradient.
    sums = (size + 4 + 4 / mesh.fsdp if mesh.fsdp > 1 else 8 + 4 * (mesh.dp > 1)) * trains
    # For each time: activations, logits, gathered weights and whole gradients.
    moments = {
        "words": (others, 0.0, gathers * size * embedding),
        "head forward": (activations, 8 * chunk * stage.head, kept or gathers * size * head),
        "head backward": (activations, logits * stage.head, size * head),
        "head's gradient": (activations + rows, 0.0, 0.0 if tied else sums * head),
        "layer backward": (activations + works, 0.0, kept * (1 + trains) + 2 * size * layer + reduced),
        "embedding's gradient": (others, 0.0, sums * embedding),
    }
    return {
        name: Memory({**state, "activations": own, "logits": logits, "unsharded blocks": masters * blocks})
        for name, (own, logits, blocks) in moments.items()
    }


def recomputation(trainer: Trainer) -> Recompute:
    """The name of the trainer's recomputation among a run's options."""
    return "layer" if trainer.recompute else "none"


def host_moments(trainer: Trainer) -> float:
    """The bytes of host memory that a rank's moments take if they are there, on the stage that has most. torch rounds
    the pinned memory of each tensor up to a power of two."""
    shape, mesh = trainer.shape, trainer.mesh
    if trainer.frozen or not trainer.host_state:
        return 0.0

    def pinned(table: Table) -> int:
        sizes = (prod(size) / (1 if rule is None else mesh.tp) / mesh.fsdp for size, rule in table.values())
        return sum(2 << (ceil(MOMENT_BYTES / 2 * size) - 1).bit_length() for size in sizes)

    if shape.lora is not None:
        return float(pinned(adapter_tensors(shape)) * max(stage.layers for stage in trainer.stages))
    words, dense = pinned({"": ((shape.vocab, shape.hidden), (0, 0))}), pinned(layer_tensors(shape, dense=True))
    moe = pinned(layer_tensors(shape, dense=False)) if shape.experts else 0
    held = (
        (stage.layers - stage.moe_layers) * dense
        + stage.moe_layers * moe
        + words * ((place == 0) + (stage.head > 0 and not shape.tied))
        for place, stage in enumerate(trainer.stages)
    )
    return float(max(held))


def layer_bytes(trainer: Trainer, stage: StageShape) -> float:
    """The mean bytes that autograd keeps of a token in a layer of a stage: the inputs of its norms and its products,
    the heads' queries, keys, values and results, three times the MLP's width (gate, up, and their product); and in
    float32 a number for each head and each norm."""
    shape, size = trainer.shape, min(4.0, max(2.0, BYTES[trainer.precision]))
    keys = shape.qk_width if shape.latent else shape.kv_heads * shape.head_dim
    values = shape.value_width if shape.latent else shape.kv_heads * shape.head_dim
    routed = 3 * (shape.active + shape.shared) * shape.expert_inner + 2 * shape.active * shape.hidden
    moe = stage.moe_layers / stage.layers
    cut = shape.qk_width + shape.value_width + keys + values + (1 - moe) * 3 * shape.inner + moe * routed
    found = size * (4 * shape.hidden + cut / trainer.mesh.tp) + 4.0 * (shape.heads / trainer.mesh.tp + 2)
    if shape.branch_norms:
        # Two more norms, and those of heads. The inputs of all norms are kept in float32, since their weights have an
        # offset.
        heads = (shape.qk_width + keys) / trainer.mesh.tp
        found += 4.0 * (2 * shape.hidden + heads) + (4.0 - size) * 2 * shape.hidden
    return found


def beside_memory(trainer: Trainer, models: Models) -> Memory:
    """The memory of models that are sharded like the trainer's: weights of frozen models, and weights, gradients and
    moments of critics."""
    own = trainer_memory(trainer.all_learning()).parts
    # A critic has no activations of its own: it never works at the same time as the policy.
    critics = {f"critic {name}": own[name] * models.critics for name in ("weights", "gradients", "moments")}
    still = trainer_memory(replace(trainer, frozen=True)).parts["weights"]
    frozen = {"frozen model": still * models.frozen} if models.frozen else {}
    return Memory({**frozen, **critics} if models.critics else frozen)
