"""Seconds of decoding: a step's roofline, and batches of responses simulated event by event. Pure.

There is one event model, `Slots`: a replica decodes up to `slots` rows at once. Between two events (a response ends,
another takes its slot) it decodes the same rows, and its step grows only with their context. `rollout` runs a batch on
the replicas of a plan with it, and the simulator (`simulate.DecodingReplica`) runs groups as they arrive. A test
compares it with a loop over single steps. So the tail of a batch, in which few rows are left, has its real cost, which
a mean length would hide.

If filters drop groups, a replacement begins only when the longest response of the dropped group is done. It waits for
slots on the replica with least work. With slots for all, a batch takes as long as its longest chain of groups.
"""

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.runtime.cluster.gpus import BYTES, Gpu, Precision
from penstock.runtime.plan.collectives import Cost, gather_s, reduce_s, send_s
from penstock.runtime.plan.model_shape import Parallel, Shape, stages_of
from penstock.runtime.plan.train_cost import (
    ADAPTER_KERNELS,
    RESERVED,
    Memory,
    attention_flops,
    cache_bytes,
    elementwise_bytes,
    weighted,
)
from penstock.runtime.plan.workload import FloatArray, IntArray, Workload


@dataclass(frozen=True, eq=False)
class Lines:
    """[slots + 1], by number of rows: the seconds of a step with an empty cache, and per token in the cache. A step's
    seconds are linear in the context, on one side of the roofline."""

    fixed: FloatArray
    slope: FloatArray

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """(fixed, slope) for each number of rows."""
        return list(zip(self.fixed.tolist(), self.slope.tolist(), strict=True))


class Slots:
    """One replica's rows in work, from one event to the next. `now` is the end of the last step, in seconds."""

    def __init__(self, slots: int, lines: Lines) -> None:
        self.slots = slots
        self.now = 0.0
        self._lines = lines.pairs
        self._steps = self._context = 0
        # The step after which each row ends, the row, and the tokens that it will hold.
        self._rows: list[tuple[int, int, int]] = []
        self._due: float | None = inf

    def __len__(self) -> int:
        """The number of rows in work."""
        return len(self._rows)

    @property
    def free(self) -> int:
        return self.slots - len(self._rows)

    @property
    def due(self) -> float:
        """The time at which the next row ends; infinity if none is in work."""
        if self._due is None:
            self._due = self.now + self._seconds(self._rows[0][0] - self._steps) if self._rows else inf
        return self._due

    def take(self, row: int, length: int, prompt: int, prefill_s: float) -> None:
        """Give a slot to a response of `length` tokens, after `prefill_s` for its prompt (0 if it is in the cache)."""
        # A prefill runs between two steps of the rows in work, which wait.
        self.now += prefill_s
        heapq.heappush(self._rows, (self._steps + length, row, prompt + length))
        self._context += prompt
        self._due = None

    def advance(self) -> list[int]:
        """Advance to the next end of rows; return the rows that end, in order."""
        rows = self._rows
        self._go(rows[0][0] - self._steps)
        ended = []
        while rows and rows[0][0] == self._steps:
            _, row, held = heapq.heappop(rows)
            self._context -= held
            ended.append(row)
        return ended

    def reach(self, time: float) -> None:
        """Advance to the end of the step in work at `time`: a row that arrives at `time` takes its slot between two
        steps. No row ends before `time`."""
        if not self._rows:
            self.now = max(self.now, time)
        elif time > self.now:
            fixed, slope = self._lines[len(self._rows)]
            # The root of n * (fixed + slope * (context + rows * (n - 1) / 2)) = time - now, the seconds of n steps.
            square = slope * len(self._rows) / 2
            linear = fixed + slope * self._context - square
            passed = time - self.now
            count = 2 * passed / (linear + sqrt(linear * linear + 4 * square * passed))
            # Rounding errors of the root must not add a step.
            self._go(min(self._rows[0][0] - self._steps, max(1, ceil(count - 1e-9))))

    def _seconds(self, steps: int) -> float:
        """The seconds of `steps` steps with the rows in work: the mean is the middle step's."""
        rows = len(self._rows)
        fixed, slope = self._lines[rows]
        return steps * (fixed + slope * (self._context + rows * (steps - 1) / 2))

    def _go(self, steps: int) -> None:
        self.now += self._seconds(steps)
        self._steps += steps
        self._context += steps * len(self._rows)
        self._due = None


def rollout(
    lengths: IntArray,
    lines: Lines,
    *,
    slots: int,
    replicas: int = 1,
    prompt: int = 0,
    samples: int = 1,
    prefill_s: float = 0.0,
    replacements: Mapping[int, int] = MappingProxyType({}),
    prefixes: IntArray | None = None,
) -> FloatArray:
    """Decode a batch on `replicas` replicas. Returns [responses], the seconds at which each ends.

    lengths: [responses], in tokens. Each `samples` consecutive responses are a group, and its prompt of `prompt` tokens
    takes `prefill_s` once. `replacements`: the groups that filters drop, each with the later group that takes its
    place; these are the last groups of the batch. `prefixes`: [responses], tokens of each that are in the cache before.

    Responses wait in one queue, for the replica whose slot is free first. With replacements each replica has its own
    queue, since a replacement joins the shortest. The first response of a group pays for the prompt.
    """
    tokens, begun = lengths.tolist(), len(lengths) - samples * len(replacements)
    contexts = [prompt] * len(tokens) if prefixes is None else (prefixes + prompt).tolist()
    filled = min(begun, replicas * slots)
    waits = len(tokens) - filled
    # One deque, shared by all replicas: the first free slot takes the next response.
    waiting = [deque(range(filled, begun))] * replicas
    if replacements:
        waiting = [deque(range(filled + number, begun, replicas)) for number in range(replicas)]
    left, ends = [samples] * -(-len(tokens) // samples), [0.0] * len(tokens)
    engines = [Slots(slots, lines) for _ in range(replicas)]
    events: list[tuple[float, int]] = []

    def fill(number: int) -> None:
        """Give free slots to waiting responses."""
        nonlocal waits
        engine, line = engines[number], waiting[number]
        while line and engine.free:
            row = line.popleft()
            engine.take(row, tokens[row], contexts[row], 0.0 if row % samples else prefill_s)
            waits -= 1
        if len(engine):
            heapq.heappush(events, (engine.due, number))

    # All slots are filled at the start, so all their prompts are computed before the first step.
    for number, engine in enumerate(engines):
        rows = range(number, filled, replicas)
        for row in rows:
            engine.take(row, tokens[row], contexts[row], 0.0)
        engine.now = sum(row % samples == 0 for row in rows) * prefill_s
        fill(number)
    # Once no response waits for a slot, replicas are independent.
    while waits:
        due, number = heapq.heappop(events)
        engine = engines[number]
        if due != engine.due:  # it has taken rows since
            continue
        following = []
        for row in engine.advance():
            ends[row] = engine.now
            left[row // samples] -= 1
            if not left[row // samples] and row // samples in replacements:
                following.append(replacements[row // samples])
        fill(number)
        for group in following:
            # It replaces a dropped group; that the group is dropped is known only now.
            shortest = min(range(replicas), key=lambda each: len(engines[each]) + len(waiting[each]))
            waiting[shortest].extend(range(group * samples, (group + 1) * samples))
            engines[shortest].reach(engine.now)
            fill(shortest)
    for engine in engines:
        while len(engine):
            for row in engine.advance():
                ends[row] = engine.now
    return np.array(ends)


# Kernels of a layer in a step, counted in a profile of this project's engine: two norms, queries to values, rotary
# embedding, cache, attention in two parts, its output, gate and up, activation, down, and two sums. Extra for experts:
# routing and permutations. Extra for a latent cache: two more projections with norms, two absorbed products, and the
# concatenation of the parts of heads.
KERNELS, EXPERT_KERNELS, LATENT_KERNELS = 13, 6, 10
# How many times sampling reads or writes the logits in float32.
LOGIT_PASSES = 3


@dataclass(frozen=True)
class Generator:
    """A replica that decodes at most `slots` rows at once, on `mesh.tp * mesh.pp` GPUs; or on `mesh.ep` GPUs, each with
    a share of the experts and all other weights, which all compute the same rows. Weights are in `precision`, keys and
    values in `cache`."""

    shape: Shape
    gpu: Gpu
    mesh: Parallel
    slots: int
    precision: Precision = "bf16"
    cache: Precision = "bf16"

    @property
    def bytes_each(self) -> float:
        """The bytes of weights that are sent to each rank: with adapters, only these."""
        shape, mesh = self.shape, self.mesh
        held = (shape.dense_parameters + shape.expert_parameters / mesh.ep) / mesh.tp
        held = held if shape.lora is None else shape.layers * shape.adapted(mesh.tp)
        return held * BYTES[self.precision] / mesh.pp

    @cached_property
    def multiplied(self) -> float:
        """The number of weights that a token is multiplied with on a rank; those of experts are weighted by how much
        slower their products are."""
        whole, dense = weighted(self.shape, self.gpu), self.shape.dense_parameters
        dense -= 0 if self.shape.tied else self.shape.vocab * self.shape.hidden
        return (dense + (whole - dense) / self.mesh.ep) / self.mesh.tp

    @cached_property
    def unevenness(self) -> float:
        """The seconds of the slowest pipeline stage over the mean of all."""
        active = [stage.active for stage in stages_of(self.shape, self.mesh.pp)]
        return max(active) * len(active) / sum(active)

    @cached_property
    def lines(self) -> Lines:
        """The seconds of a step by number of rows."""
        rows = np.arange(self.slots + 1, dtype=np.float64)
        # On one side of the roofline the cost is linear in the context: two points determine the line.
        empty, million = (sum(self._step(rows, context).values()) for context in (0.0, 1e6))
        return Lines(empty, (million - empty) / 1e6)

    def step(self, rows: float, context: float) -> Cost:
        """The cost of one token for each of `rows` rows, with `context` tokens in the cache in total."""
        return Cost({name: float(seconds) for name, seconds in self._step(rows, context).items()})

    def prefill_s(self, tokens: float) -> float:
        """Seconds of a prompt of `tokens` tokens, bound by the products."""
        if not tokens:
            return 0.0
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        products = 2.0 * self.multiplied * tokens / gpu.flops(self.precision)
        attention = attention_flops(shape, tokens**2) / mesh.tp / gpu.attention_flops
        elements = elementwise_bytes(shape) * tokens / mesh.tp / gpu.bandwidth
        # Stages work on different prompts in parallel, so a prompt costs 1 / pp of the sum over stages.
        reduced: float = self._reduced_s(tokens) + self._gathered_s(tokens)
        return (products + attention + elements + reduced) / mesh.pp

    def rollout(
        self,
        responses: IntArray,
        prompt_tokens: int,
        samples: int = 1,
        replicas: int = 1,
        replacements: Mapping[int, int] = MappingProxyType({}),
        prefixes: IntArray | None = None,
    ) -> FloatArray:
        """[responses]: the seconds at which each ends, on `replicas` replicas. A prompt is computed once for its
        `samples` responses, on the replica that gets the first of them."""
        return rollout(
            responses, self.lines, slots=self.slots, replicas=replicas, prompt=prompt_tokens, samples=samples,
            prefill_s=self.prefill_s(prompt_tokens), replacements=replacements, prefixes=prefixes,
        )  # fmt: skip

    def _step(self, rows: Any, context: float) -> dict[str, Any]:
        """Seconds by part, for a number of rows or an array of numbers. A roofline: the larger of bytes / bandwidth and
        FLOPs / rate, plus the parts that do not overlap.

        Each stage of a pipeline has rows / pp rows at a time. The step is over when every stage has processed all rows,
        and every stage is taken to be as slow as the slowest.
        """
        shape, gpu, mesh = self.shape, self.gpu, self.mesh
        # Which experts are read depends on the rows that one stage decodes at a time.
        at_once = rows / mesh.pp
        # The embedding is only looked up. The share of experts that some token uses, routed evenly: 1 - (1 - k/E)^n.
        used = shape.dense_parameters - (0 if shape.tied else shape.vocab * shape.hidden)
        touched = 1.0 - (1.0 - shape.active / shape.experts) ** at_once if shape.experts else 0.0
        weights = (used + shape.expert_parameters * touched / mesh.ep) * BYTES[self.precision] / mesh.tp
        rate = gpu.flops(self.precision) * gpu.efficiency.decode
        products = 2.0 * self.multiplied * rows / rate
        cached = context * cache_bytes(shape, mesh.tp, precision=self.cache) / gpu.bandwidth
        # Each head reads the latent cache directly (DeepSeek-V2, section 2.1.2: up-projections are absorbed).
        width = shape.qk_width + shape.value_width
        if shape.latent is not None:
            width = shape.heads * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
        attention = 2.0 * shape.layers * context * width / mesh.tp / gpu.attention_flops
        engine, work = (
            gpu.engine,
            {
                "weights": np.maximum(weights / gpu.bandwidth, products / mesh.pp) * self.unevenness,
                "logits": rows * shape.vocab * 4 * LOGIT_PASSES / mesh.tp / gpu.bandwidth,
                "tp": self._reduced_s(at_once),
                **({"ep": self._gathered_s(at_once)} if mesh.ep > 1 else {}),
                "pp": mesh.pp * send_s(gpu, at_once * shape.hidden * 2, mesh.tp) if mesh.pp > 1 else 0.0,
            },
        )
        routed = shape.moe_layers * EXPERT_KERNELS + (shape.layers * LATENT_KERNELS if shape.latent else 0)
        routed += shape.layers * ADAPTER_KERNELS * len(shape.lora.targets) if shape.lora is not None else 0
        kernels = shape.layers * KERNELS + routed
        if engine.eager and (shape.experts or mesh.tp * mesh.pp * mesh.ep > 1):
            # The host launches ahead of the GPU, so only excess time counts. The cache's time is left out of the
            # comparison: a step must stay linear in the context.
            launches = np.maximum(0.0, kernels * engine.eager_us * 1e-6 - sum(work.values()))
        else:
            launches = kernels * gpu.launch_s
        return {
            **work,
            "cache": max(cached, attention) / mesh.pp * self.unevenness,
            "launches": launches * self.unevenness,
            "host": engine.step_ms * 1e-3 + rows * engine.row_us * 1e-6,
        }

    def _reduced_s(self, tokens: Any) -> Any:
        """Seconds of two all-reduces of the activations in each layer; the one of the logits' maxima is left out."""
        return 2 * self.shape.layers * reduce_s(self.gpu, tokens * self.shape.hidden * 2, self.mesh.tp)

    def _gathered_s(self, tokens: Any) -> Any:
        """Seconds to gather the output of each rank's experts on all ranks, in each layer with experts."""
        made = tokens * self.shape.active * self.shape.hidden * 2
        return self.shape.moe_layers * gather_s(self.gpu, made, self.mesh.ep)


def rollout_s(work: Workload, generator: Generator, replicas: int) -> float:
    """Seconds of a batch alone, simulated over its lengths, including the tail and replacements of dropped groups."""
    prefixes = work.prefix_tokens if work.begun else None
    ends = generator.rollout(work.response_tokens, work.prompt_tokens, work.rows, replicas, work.replacements, prefixes)
    return float(ends.max())


# Versions of the weights that a generator has: one in use, and the next one, which arrives.
VERSIONS = 2


def generator_memory(generator: Generator, context: float, copies: int = VERSIONS) -> Memory:
    """The memory of a rank of the fullest stage with all slots in use, with `context` tokens in each on average, and
    `copies` of the weights."""
    shape, mesh = generator.shape, generator.mesh
    fullest = max(stage.dense + stage.experts / mesh.ep for stage in stages_of(shape, mesh.pp))
    weights = fullest / mesh.tp * BYTES[generator.precision]
    # With adapters, only these have copies.
    weights = weights * copies if shape.lora is None else weights + shape.layers * shape.adapted(mesh.tp) * 2 * copies
    return Memory(
        {
            "weights": weights,
            "cache": cache_bytes(shape, mesh.tp, mesh.pp, generator.cache) * generator.slots * context,
            "activations": generator.slots * shape.hidden * 2 * 8.0,
            "logits": generator.slots * shape.vocab * 6.0 / mesh.tp,
            "reserved": RESERVED,
        }
    )
