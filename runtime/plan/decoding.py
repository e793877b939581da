"""Seconds of a generator: prefill, a decoding step, and a batch of responses, which `rollout` simulates. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.lengths import IntArray
from penstock.runtime.plan.links import reduce_s, send_s
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.rollout import Batch, Replicas, Rollout, rollout
from penstock.runtime.plan.shape import Shape
from penstock.runtime.plan.slots import Lines
from penstock.runtime.plan.work import (
    attention_flops,
    cache_bytes,
    decode_attention_flops,
    elementwise_bytes,
    product_flops,
    touched,
)

KERNELS, EXPERT_KERNELS = 10, 6
"""Launches of a layer in a decoding step: two norms, queries to values, rotary embedding and cache, attention, its
output, gate and up, activation, down, and the residual; beside them routing and permutations."""
LOGIT_PASSES = 3
"""How often sampling reads or writes the logits in float32."""


@dataclass(frozen=True)
class Generator:
    """A replica that decodes on `mesh.tp * mesh.pp` GPUs, at most `slots` rows at once. Weights are in `precision`, the
    cache in `cache`. `overhead_s` is what the engine adds to each step on its host."""

    shape: Shape
    gpu: Gpu
    mesh: Parallel
    slots: int
    precision: Precision = "bf16"
    cache: Precision = "bf16"
    overhead_s: float = 0.0

    @property
    def bytes_each(self) -> float:
        """Of weights on each rank, all that travel to it."""
        return self.shape.parameters * BYTES[self.precision] / (self.mesh.tp * self.mesh.pp)

    def prefill_s(self, tokens: float, squares: float) -> float:
        """Prompts of `tokens` in all, whose squared lengths sum to `squares`; the products bound it, or the weights."""
        if not tokens:
            return 0.0
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        products = product_flops(shape) * tokens / mesh.tp / gpu.flops(self.precision)
        attention = attention_flops(shape, squares) / mesh.tp / gpu.attention_flops
        elements = elementwise_bytes(shape) * tokens / mesh.tp / gpu.bandwidth
        # Stages work on different prompts at once, so that a token costs its share of one stage's time.
        reduced: float = self._reduced_s(tokens)
        return (products + attention + elements + reduced) / mesh.pp

    def step(self, rows: float, context: float) -> Cost:
        """One token for each of `rows` rows, which have `context` tokens in the cache between them. A roofline: the
        larger of the bytes over the bandwidth and the FLOPs over the rate, then what nothing hides.

        A pipeline's stages each have rows / pp at a time; the step is over when all stages have had all rows.
        """
        return Cost({name: float(seconds) for name, seconds in self._step(rows, context).items()})

    @cached_property
    def lines(self) -> Lines:
        """Of a step with each number of rows."""
        rows = np.arange(self.slots + 1, dtype=np.float64)
        empty, million = (sum(self._step(rows, context).values()) for context in (0.0, 1e6))
        return Lines(empty, (million - empty) / 1e6)

    def rollout(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> Rollout:
        """All responses, in order, on so many replicas. A prompt is computed once for its `samples`, on the replica
        that gets the first of them."""
        prefill_s = self.prefill_s(prompt_tokens, prompt_tokens**2)
        return rollout(Replicas(replicas, self.slots, self.lines), Batch(responses, prompt_tokens, samples, prefill_s))

    def stream_s(self, responses: IntArray, prompt_tokens: int, samples: int = 1, replicas: int = 1) -> float:
        """Seconds of one batch among others that follow without a pause: of three in a row, the last one's share."""
        two = self.rollout(np.tile(responses, 2), prompt_tokens, samples, replicas).seconds
        three = self.rollout(np.tile(responses, 3), prompt_tokens, samples, replicas).seconds
        return three - two

    def _step(self, rows: Any, context: float) -> dict[str, Any]:
        """Seconds by part, of a number of rows or of an array of them."""
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        at_once = rows / mesh.pp
        used = shape.dense_parameters - (0 if shape.tied else shape.vocab * shape.hidden)
        weights = (used + shape.expert_parameters * touched(shape, at_once)) * BYTES[self.precision] / mesh.tp
        cached = context * cache_bytes(shape, BYTES[self.cache], mesh.tp) / gpu.bandwidth
        products = product_flops(shape) * rows / mesh.tp / gpu.flops(self.precision)
        attention = decode_attention_flops(shape, context) / mesh.tp / gpu.attention_flops
        launches = (shape.layers * KERNELS + shape.moe_layers * EXPERT_KERNELS) * gpu.launch_s
        return {
            "weights": np.maximum(weights / gpu.bandwidth, products / mesh.pp),
            "cache": max(cached, attention) / mesh.pp,
            "logits": rows * shape.vocab * 4 * LOGIT_PASSES / mesh.tp / gpu.bandwidth,
            "tp": self._reduced_s(at_once),
            "launches": launches,
            "pp": mesh.pp * send_s(gpu, at_once * shape.hidden * 2, mesh.tp) if mesh.pp > 1 else 0.0,
            "engine": self.overhead_s,
        }

    def _reduced_s(self, tokens: Any) -> Any:
        """Two all-reduces of the activations in each layer, and one of the logits' maxima, which is left out."""
        return 2 * self.shape.layers * reduce_s(self.gpu, tokens * self.shape.hidden * 2, self.mesh.tp)
