"""What one update's matrix products take by themselves: the limit that `train` is set beside.

Products of the shapes, dtype and sizes of `aipo`'s update and decode steps, on all cores at once and nothing between
them: no sampling, attention, norms, loss, optimizer, weights on their way, and no waiting. What a system takes beyond
that is its own; what is below it, this library and machine cannot do.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch
from torch.nn.functional import linear

MICRO_TOKENS = 2048
"""Tokens that a product of the update takes at once."""
REPEATS = 20


def inner_size(hidden: int) -> int:
    """Of the MLP of a Llama of `train`'s: 8/3 of the model's width, in steps of 32."""
    return int(hidden * 8 / 3) // 32 * 32


def shapes(hidden: int, layers: int, vocabulary: int = 128) -> list[tuple[int, int, int]]:
    """How often a Llama of `train`'s has a matrix, its outputs and its inputs: qkv, o, gate and up, down, the head."""
    inner = inner_size(hidden)
    layer = [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    return [(layers, *shape) for shape in layer] + [(1, vocabulary, hidden)]


def limit_s(hidden: int, layers: int, rows: int, prompt: float, response: float, dtype: str, cores: int) -> float:
    """Seconds of an update on `cores` if products were all there is: `rows` of `prompt` + `response` tokens each."""
    kind: torch.dtype = getattr(torch, dtype)
    forward = backward = decode = 0.0
    for times, outputs, inputs in shapes(hidden, layers):
        wide, narrow = (torch.randn(MICRO_TOKENS, size, dtype=kind) for size in (outputs, inputs))
        weight, one = torch.randn(outputs, inputs, dtype=kind), torch.randn(rows, inputs, dtype=kind)
        turned, flat = weight.T, wide.T
        forward += times * _core_s(lambda w=weight, x=narrow: linear(x, w), cores)
        backward += times * _core_s(lambda w=turned, y=wide, x=narrow, t=flat: (linear(y, w), t @ x), cores)
        decode += times * _core_s(lambda w=weight, x=one: linear(x, w), cores)
    learned = rows * (prompt + response) / MICRO_TOKENS * (forward + backward)
    written = rows * prompt / MICRO_TOKENS * forward + response * decode
    return (learned + written) / cores


def _core_s(product: Callable[[], object], cores: int) -> float:
    """Seconds of one core for a product, while every other core has the same to do."""

    def repeat(count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                product()

    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(repeat, [3] * cores))
        begin = perf_counter()
        list(pool.map(repeat, [REPEATS] * cores))
        return (perf_counter() - begin) / REPEATS
