"""Rates of matrix products as decoders have them: square weights of many layers, one after the other.

A figure is of products with `LAYERS` · 7 different weights in turn, as a decoder's pass has them, so that what of them
stays in a cache does so here as well. Forward: x · Wᵀ. Training: with the gradients of both. The
lanes of a trainer work at once, each with an `x` of its own on the same weights.

Shapes: R rows, W width.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from penstock.nodes.calibrate.clock import seconds
from penstock.nodes.learn.lanes import Lanes
from penstock.nodes.model.linear import linear

LAYERS = 8
WEIGHTS = 7 * LAYERS
MOST_BYTES, MOST_FLOPS = 128 << 20, 8e9
"""Of one figure: more than any cache keeps; with many rows fewer weights will do, since reading them is hidden."""
Rate = tuple[int, int, float]
"""Rows of a lane, width, and FLOPs per second of all lanes together."""


def weights(rows: int, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    one = width * width * dtype.itemsize
    count = max(2, min(WEIGHTS, MOST_BYTES // one, int(MOST_FLOPS / (2 * rows * width**2))))
    return [torch.randn(width, width, device=device).mul_(width**-0.5).to(dtype) for _ in range(count)]


def forward_rates(dtype: torch.dtype, rows: list[int], widths: list[int], device: str) -> list[Rate]:
    """With as many threads in each product as torch has been told to take."""
    found: list[Rate] = []
    for width, count in product(widths, rows):
        own = weights(count, width, dtype, device)
        x_RW = torch.randn(count, width, device=device).to(dtype)

        def work(x_RW: Tensor = x_RW, own: list[Tensor] = own) -> None:
            for weight in own:
                linear(x_RW, weight)

        with torch.inference_mode():
            found.append((count, width, 2.0 * count * width**2 * len(own) / seconds(work)))
    return found


def training_rates(dtype: torch.dtype, rows: list[int], widths: list[int], threads: int) -> list[Rate]:
    """Both ways, three products for each weight, on a CPU."""
    found: list[Rate] = []
    lanes = Lanes(nn.Identity(), threads)
    for width, count in product(widths, rows):
        own = weights(3 * count, width, dtype, "cpu")
        work = [_both(count, width, own, dtype) for _ in range(lanes.count)]
        taken = seconds(partial(lanes.map, lambda _, each: each(), work))
        found.append((count, width, 6.0 * count * width**2 * len(own) * lanes.count / taken))
    return found


def _both(rows: int, width: int, shared: list[Tensor], dtype: torch.dtype) -> Callable[[], None]:
    """One lane's part; its parameters lie on the storage that all lanes share."""
    own = [weight.detach().requires_grad_() for weight in shared]
    x_RW = torch.randn(rows, width).to(dtype).requires_grad_()
    grad_RW = torch.randn(rows, width).to(dtype)

    def work() -> None:
        for weight in own:
            linear(x_RW, weight).backward(grad_RW)  # type: ignore[no-untyped-call]
            x_RW.grad = weight.grad = None

    return work
