"""The seconds of one update's matrix products alone, the limit with which `train` is compared; and the machine's peak.

Products with the shapes, dtype and sizes of `aipo`'s update and decode steps run on all cores at once with nothing
between them: no sampling, attention, norms, loss, optimizer, weight syncs or waiting. Any time beyond that is overhead
of a system; none can be faster with this library on this machine. Each product uses the fastest of torch, our own
kernels, and a weight that is packed for it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nodes.model import kernels

MICRO_TOKENS = 2048
"""Tokens of each product of the update."""
REPEATS = 20
LARGE = 1024
"""Rows and columns of the matrices with which the peak is measured."""


def inner_size(hidden: int) -> int:
    """Return the width of the MLP of a Llama of `train`: 8/3 of the model's width, rounded down to a multiple of 32."""
    return int(hidden * 8 / 3) // 32 * 32


def shapes(hidden: int, layers: int, vocabulary: int = 128) -> list[tuple[int, int, int]]:
    """Return (count, outputs, inputs) of each matrix in a Llama of `train`: qkv, o, gate and up, down, the head."""
    inner = inner_size(hidden)
    layer = [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    return [(layers, *shape) for shape in layer] + [(1, vocabulary, hidden)]


class Batch(NamedTuple):
    """What an update learns from: prompts, the responses to each, and the tokens of a prompt and of a response."""

    prompts: int
    samples: int
    prompt_tokens: float
    response_tokens: float

    @property
    def tokens(self) -> float:
        """All tokens that must be computed: those of each prompt once, with any number of responses."""
        return self.prompts * (self.prompt_tokens + self.samples * self.response_tokens)


def limit_s(hidden: int, layers: int, batch: Batch, dtype: str, cores: int) -> float:
    """Return the seconds of an update on `cores` if it consisted of products only."""
    kind: torch.dtype = getattr(torch, dtype)
    forward = backward = decode = 0.0
    rows = batch.prompts * batch.samples
    for times, outputs, inputs in shapes(hidden, layers):
        wide, narrow = (torch.randn(MICRO_TOKENS, size, dtype=kind) for size in (outputs, inputs))
        weight, one = torch.randn(outputs, inputs, dtype=kind), torch.randn(rows, inputs, dtype=kind)
        forward += times * _fastest_s(narrow, weight, cores)
        backward += times * (_fastest_s(wide, weight.T.contiguous(), cores) + _gradient_s(wide, narrow, cores))
        decode += times * _fastest_s(one, weight, cores)
    learned = batch.tokens / MICRO_TOKENS * (forward + backward)
    written = batch.prompts * batch.prompt_tokens / MICRO_TOKENS * forward + batch.response_tokens * decode
    return (learned + written) / cores


def flops(hidden: int, layers: int, batch: Batch) -> float:
    """Return the FLOPs of an update's products: one pass to sample, one to learn, and a backward pass with twice as
    many as a pass."""
    weights = sum(times * outputs * inputs for times, outputs, inputs in shapes(hidden, layers))
    return 4 * 2.0 * weights * batch.tokens


def peak(dtype: str, cores: int) -> float:
    """Measure the FLOP/s of all cores together in a large product."""
    x, weight = (torch.randn(LARGE, LARGE, dtype=getattr(torch, dtype)) for _ in range(2))
    return cores * 2.0 * LARGE**3 / _fastest_s(x, weight, cores)


def _fastest_s(x: Tensor, weight: Tensor, cores: int) -> float:
    """Measure the seconds of one core for x @ weight.T, by the fastest method."""
    methods: list[Callable[[], object]] = [lambda: functional.linear(x, weight), lambda: kernels.linear(x, weight)]
    if (ordered := kernels.packed(weight, len(x))) is not None:
        methods.append(lambda: kernels.multiplied(x, ordered))
    return min(_core_s(method, cores) for method in methods)


def _gradient_s(wide: Tensor, narrow: Tensor, cores: int) -> float:
    """Measure the seconds of one core for a weight's gradient, by the fastest method."""
    turned, other = wide.T.contiguous(), narrow.T.contiguous()
    methods: list[Callable[[], object]] = [lambda: wide.T @ narrow, lambda: kernels.linear(turned, other)]
    return min(_core_s(method, cores) for method in methods)


def _core_s(product: Callable[[], object], cores: int) -> float:
    """Measure the seconds of one core for a product while every other core computes the same."""

    def repeat(count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                product()

    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(repeat, [3] * cores))
        begin = perf_counter()
        list(pool.map(repeat, [REPEATS] * cores))
        return (perf_counter() - begin) / REPEATS
