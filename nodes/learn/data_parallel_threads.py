"""Data-parallel threads: each works on micro-batches of its own, with the same weights and its own gradients.

If all threads shared each matrix product, every operation would wait for the slowest thread, and stall when another
process takes a core. Threads with micro-batches of their own synchronise once per update (two cores, a model of 3
million parameters: 1.9 times one thread, against 1.6). `each` splits all other work on many tensors in the same way.

Worker i % `count` gets micro-batch i, and the workers' gradients are added in their order: equal micro-batches make
equal sums to the bit, for a given number of workers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")
Result = TypeVar("Result")

# Each worker has a gradient as large as the model. More threads than these work inside the workers' operations.
MAX_WORKERS = 4


class DataParallelThreads(Generic[Model]):
    """At most `threads` workers, each with a model that shares the storage of `model`'s weights; `model` is the first.

    `count` is their number, `parameters` the model's by name: changing them in place changes every worker's model.
    """

    def __init__(self, model: Model, threads: int) -> None:
        self.count = min(threads, MAX_WORKERS)
        self._inner = threads // self.count
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.models = [model, *(_alias(model) for _ in range(self.count - 1))]
        self._threads: ThreadPoolExecutor | None = None
        self._gradients: list[dict[str, Tensor]] = [{} for _ in self.models]
        for alias, gradients in zip(self.models, self._gradients, strict=True):
            for name, parameter in alias.named_parameters():
                if parameter.requires_grad:
                    add = partial(_add_gradient, gradients, name)
                    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def map(self, work: Callable[[Model, Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work(model, item)` of each item, in order. If one raises, its exception is raised when all workers have
        ended."""
        count = self.count
        if count == 1:
            return [work(self.models[0], item) for item in items]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, "worker", torch.set_num_threads, (self._inner,))
        grad = torch.is_grad_enabled()  # a setting of each thread
        goes_on = True

        def share(worker: int) -> list[Result]:
            with torch.set_grad_enabled(grad):
                return [work(self.models[worker], item) for item in items[worker::count] if goes_on]

        # Wait for all before an exception, or Ctrl-C, is raised: the others still add to gradients.
        shares: list[Future[list[Result]]] = []
        try:
            shares += (self._threads.submit(share, worker) for worker in range(count))
            wait(shares)
        finally:
            goes_on = False
            wait(shares)
        found = [each.result() for each in shares]
        return [found[index % count][index // count] for index in range(len(items))]

    def backward(
        self, loss: Callable[[Model, Item], tuple[Tensor, Result]], items: Sequence[Item], *, last: bool = True
    ) -> list[Result]:
        """Add up the gradients of the items' losses. Return the second result of `loss` for each, in order. `last`, for
        the last items before `collect`, matters only to `Shards`."""

        def work(model: Model, item: Item) -> Result:
            total, found = loss(model, item)
            total.backward()  # type: ignore[no-untyped-call]
            return found

        return self.map(work, items)

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work(item)` of each item, in order, without a model."""
        return self.map(lambda _, item: work(item), items)

    def collect(self) -> dict[str, Tensor]:
        """The sum of all gradients since the last call, float32, by the parameter's name."""

        def total(name: str) -> Tensor:
            # In the workers' order, not in that of their ends, so that equal items make equal bits.
            first, *others = (gradients.pop(name) for gradients in self._gradients if name in gradients)
            for other in others:
                first.add_(other)
            return first

        names = list(dict.fromkeys(name for gradients in self._gradients for name in gradients))
        return dict(zip(names, self.each(total, names), strict=True))

    @torch.no_grad()
    def update(self, masters: Mapping[str, Tensor]) -> None:
        """Copy these weights to the model."""
        changed = [name for name, master in masters.items() if master is not self.parameters[name]]
        self.each(lambda name: self.parameters[name].copy_(masters[name]), changed)

    def norm(self, parts: Mapping[str, Tensor]) -> float:
        """The 2-norm of all tensors together, which are laid out as the weights are."""
        norms = self.each(torch.linalg.vector_norm, list(parts.values()))
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def not_finite(self, parts: Mapping[str, Tensor]) -> list[dict[str, int]]:
        """The number of elements of each tensor that are not finite, by rank; tensors without any are left out."""
        return [count_not_finite(parts)]

    def whole(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """A copy of each of these weights, on the CPU."""
        return ((name, self.parameters[name].detach().to("cpu", copy=True)) for name in names)


def count_not_finite(parts: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of NaN and infinite elements of each tensor; tensors without any are left out."""
    counts = {name: part.numel() - int(part.isfinite().sum()) for name, part in parts.items()}
    return {name: count for name, count in counts.items() if count}


def _add_gradient(gradients: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Add a gradient in float32 for any dtype of weights: there are many micro-batches, and bfloat16 has 8 bits."""
    assert parameter.grad is not None
    gradient, parameter.grad = parameter.grad, None
    gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient.float()


def _alias(model: Model) -> Model:
    """A separate model whose parameters share the storage of `model`'s."""
    shared: dict[int, Tensor] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return deepcopy(model, shared)
