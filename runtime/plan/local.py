"""Seconds of an update on a CPU: decoding in fixed slots, training in lanes, the optimizer, and weight sync. Pure.

Each pass is the sum of its matrix products at the measured rate of their shape, what is read and written between them,
attention, and a launch for each operation: on a CPU the thread that launches an operation is the one that works on it,
so that nothing hides anything. The generator computes all of its slots at each step, used or not, and attends to whole
blocks of positions up to the farthest that is in use, as `nodes.generate` does; the trainer's micro-batches are padded
to their longest sequence, as `nodes.learn.packing` cuts them.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from penstock.runtime.plan.cost import Cost
from penstock.runtime.plan.decoding import KERNELS as DECODE_KERNELS
from penstock.runtime.plan.gpus import BYTES, Precision
from penstock.runtime.plan.machine import Passes
from penstock.runtime.plan.shape import Shape
from penstock.runtime.plan.training import KERNELS
from penstock.runtime.plan.work import attention_flops, elementwise_bytes

STEP_KERNELS = 4 * DECODE_KERNELS
"""Operations of a decoding step beside those of its layers: positions, masks, embedding, the head and sampling."""
LOGIT_PASSES = 9
"""How often sampling reads or writes a number of 4 bytes for each logit: normalised, exponentials, their sums in
float64, the search in these."""
TRAIN_LOGIT_PASSES = 14
"""The same of training, both ways: normalised, gathered, the entropy, and back."""
CACHE_ITEM = 4
"""Bytes of a number in a CPU's cache of keys and values, whatever the model's type is."""
ADDED_BYTES = 12
"""Of each parameter, to add a micro-batch's gradient to the sum of those before it, in float32."""
FIRST_BLOCK, LARGEST_BLOCK = 16, 256
"""Positions of the cache's blocks: the first, then as many as stand before one, up to the largest."""
PREFILL_TOKENS = 128
"""Of prompts that are computed at once, padding included."""
BACKWARD_ATTENTION = 3.5
"""Attention both ways over forward: backward is twice the forward, and repeats half of it."""


def products(shape: Shape) -> list[tuple[int, int, int]]:
    """(inputs, outputs, how many) of a decoder's matrices, of all layers, and its head. Raises ValueError for shapes
    that runs on CPUs do not have."""
    if shape.experts or shape.latent is not None:
        raise ValueError(f"model {shape.name}: given experts or latent attention, needed a dense decoder on a CPU")
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = [(shape.hidden, queries, 1), (shape.hidden, keys, 2), (queries, shape.hidden, 1)]
    layer += [(shape.hidden, shape.inner, 2), (shape.inner, shape.hidden, 1)]
    return [(k, n, count * shape.layers) for k, n, count in layer] + [(shape.hidden, shape.vocab, 1)]


def reached(reach: int) -> int:
    """Positions of the blocks up to the one that holds the last of `reach`."""
    end = 0
    while end < reach:
        end += min(LARGEST_BLOCK, max(FIRST_BLOCK, end))
    return end


@dataclass(frozen=True)
class LocalGenerator:
    """A generator of `slots` rows on a CPU; `longest` is the end of its cache."""

    shape: Shape
    passes: Passes
    slots: int
    longest: int
    precision: Precision = "fp32"

    def step(self, reach: int) -> Cost:
        """One token for every slot, of which the farthest sees `reach` positions."""
        shape, passes = self.shape, self.passes
        positions = min(reached(reach), self.longest)
        cached = shape.layers * self.slots * positions * shape.cache_width * CACHE_ITEM
        launches = shape.layers * DECODE_KERNELS + STEP_KERNELS
        return self._forward(self.slots) + Cost(
            {
                "cache": cached / (passes.attention_gb_s * 1e9) if passes.attention_gb_s else 0.0,
                "logits": self.slots * shape.vocab * 4 * LOGIT_PASSES / (passes.element_gb_s * 1e9),
                "launches": launches * passes.launch_us * 1e-6,
            }
        )

    def prefill(self, prompts: int, prompt_tokens: int) -> Cost:
        """All prompts, each padded to a power of two."""
        width = max(8, 1 << max(prompt_tokens - 1, 0).bit_length())
        at_once = max(1, PREFILL_TOKENS // width)
        launches = self.shape.layers * DECODE_KERNELS * self.passes.launch_us * 1e-6
        return (self._forward(at_once * width) + Cost({"launches": launches})) * ceil(prompts / at_once)

    def scored(self, rows: int, tokens: float) -> Cost:
        """The log-probabilities of one finished group, which measure its mismatch."""
        launches = self.shape.layers * DECODE_KERNELS * self.passes.launch_us * 1e-6
        return self._forward(rows * tokens) + Cost({"launches": launches})

    def rollout(
        self, lengths: Sequence[int], prompt_tokens: int, samples: int, follows: Mapping[int, int] | None = None
    ) -> Cost:
        """All responses in the order of their groups: a slot that falls free takes the next; with prompts and one
        measured group. `follows`: groups that are dropped when they are done, and which one begins then."""
        follows = follows or {}
        late = set(follows.values())
        waiting = deque(row for row in range(len(lengths)) if row // samples not in late)
        found = self.prefill(ceil(len(lengths) / samples), prompt_tokens)
        steps: dict[int, int] = {}
        now, left = 0, Counter(row // samples for row in range(len(lengths)))
        ends: list[tuple[int, int, int]] = []
        while waiting or ends:
            while waiting and len(ends) < self.slots:
                row = waiting.popleft()
                ends.append((now + lengths[row], now, row // samples))
            # The first token comes from the prompt's own logits, without a step of the model.
            reach = prompt_tokens + now - min(begun for _, begun, _ in ends)
            steps[reached(reach)] = steps.get(reached(reach), 0) + 1
            now += 1
            left.subtract(group for end, _, group in ends if end <= now)
            over = dict.fromkeys(group for end, _, group in ends if end <= now and not left[group])
            for group in [follows[group] for group in over if group in follows]:
                waiting.extend(range(group * samples, (group + 1) * samples))
            ends = [row for row in ends if row[0] > now]
        for reach, count in steps.items():
            found += self.step(reach) * count
        mean = sum(lengths) / len(lengths)
        return found + self.scored(samples, prompt_tokens + mean)

    def _forward(self, tokens: float) -> Cost:
        rows = tokens / self.passes.lanes
        flops = sum(2.0 * tokens * k * n * c / self.passes.flops(rows, sqrt(k * n)) for k, n, c in products(self.shape))
        moved = elementwise_bytes(self.shape) * BYTES[self.precision] / BYTES["bf16"] * tokens
        return Cost({"products": flops, "elementwise": moved / (self.passes.element_gb_s * 1e9)})


@dataclass(frozen=True)
class LocalTrainer:
    """A trainer whose lanes each have micro-batches of their own. `copy_gb_s` is of gradients that are added up."""

    shape: Shape
    passes: Passes
    copy_gb_s: float
    micro_tokens: int = 2048
    precision: Precision = "fp32"

    def micro(self, rows: int, width: int) -> Cost:
        """Forward and backward of one micro-batch on one lane while the others have their own."""
        shape, passes, tokens = self.shape, self.passes, rows * width
        flops = sum(6.0 * tokens * k * n * c / passes.flops(tokens, sqrt(k * n)) for k, n, c in products(shape))
        moved = 3 * elementwise_bytes(shape) * BYTES[self.precision] / BYTES["bf16"] * tokens
        attention = BACKWARD_ATTENTION * attention_flops(shape, rows * width**2)
        each = {
            "products": flops,
            "elementwise": moved / (passes.element_gb_s * 1e9),
            "attention": attention / (passes.attention_gflops * 1e9) if passes.attention_gflops else 0.0,
            "logits": tokens * shape.vocab * 4 * TRAIN_LOGIT_PASSES / (passes.element_gb_s * 1e9),
        }
        # Rates are of all lanes together, launches of each.
        launches = 3 * KERNELS * shape.layers * passes.launch_us * 1e-6
        return Cost(each) * passes.lanes + Cost({"launches": launches})

    def step(self, lengths: Sequence[int]) -> Cost:
        """An optimizer's step on sequences of these lengths (what is predicted with: all but the last token)."""
        lanes: list[Cost] = [Cost() for _ in range(self.passes.lanes)]
        micros = micro_batches(lengths, self.micro_tokens, self.passes.lanes)
        added = self.shape.parameters * ADDED_BYTES * self.passes.lanes / (self.copy_gb_s * 1e9)
        for index, (rows, width) in enumerate(micros):
            again = Cost({"gradients": added if index >= self.passes.lanes else 0.0})
            lanes[index % len(lanes)] += self.micro(rows, width) + again
        slowest = max(lanes, key=lambda lane: lane.seconds)
        return slowest + Cost({"optimizer": self.passes.optimizer_s(self.shape.parameters)})


def micro_batches(lengths: Sequence[int], most: int, multiple: int) -> list[tuple[int, int]]:
    """(rows, width) of each: about equally large, none over `most` tokens with padding, their number a multiple of
    `multiple`; the longest sequences first."""
    ordered = sorted(lengths, reverse=True)
    count = len(_cut(ordered, most))
    count += -count % multiple
    low, high = 1, max(most, ordered[0])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(ordered, middle)) <= count else (middle + 1, high)
    return _cut(ordered, low)


def _cut(ordered: Sequence[int], most: int) -> list[tuple[int, int]]:
    found, first = [], 0
    while first < len(ordered):
        rows = min(max(1, most // ordered[first]), len(ordered) - first)
        found.append((rows, ordered[first]))
        first += rows
    return found
