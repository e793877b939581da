"""Several threads that work on micro-batches at once, on the same weights, each with gradients of its own.

One micro-batch after the other with all threads in each matrix product waits for the slowest thread at every
operation, and stalls where another process wants a core; threads that each have micro-batches of their own meet once
per update (two cores, a model of 3 million parameters: 1.9 times one thread, against 1.6). So does all else that an
update does to many tensors: `each`.

Micro-batch i belongs to worker i modulo the number of workers, and the workers' gradients are added in their order:
equal micro-batches make equal sums to the bit, for a given number of workers.
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

# Each has a gradient as large as the model; threads beyond these work inside the workers' operations.
MAX_WORKERS = 4


class DataParallelThreads(Generic[Model]):
    """At most `threads` workers, each with a model on the storage of `model`'s weights; `model` is the first.

    `count` is their number, `parameters` the model's by name: changed in place, they change the model of every worker.
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
        """`work(model, item)` of each item, in order. What one raises is raised here once all workers are done."""
        count = self.count
        if count == 1:
            return [work(self.models[0], item) for item in items]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, "worker", torch.set_num_threads, (self._inner,))
        grad = torch.is_grad_enabled()  # which is a setting of each thread
        goes_on = True

        def share(worker: int) -> list[Result]:
            with torch.set_grad_enabled(grad):
                return [work(self.models[worker], item) for item in items[worker::count] if goes_on]

        # All are waited for before one's exception, or Ctrl-C, is raised: the others still add to gradients.
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
        """Add up the gradients of the items' losses; what `loss` gave beside each, in order. Whether they are the
        `last` ones before `collect` matters to `Shards` alone."""

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
            # In the workers' order, whichever was done first: equal items make equal bits.
            first, *others = (gradients.pop(name) for gradients in self._gradients if name in gradients)
            for other in others:
                first.add_(other)
            return first

        names = list(dict.fromkeys(name for gradients in self._gradients for name in gradients))
        return dict(zip(names, self.each(total, names), strict=True))

    @torch.no_grad()
    def update(self, masters: Mapping[str, Tensor]) -> None:
        """Compute with these weights from now on."""
        changed = [name for name, master in masters.items() if master is not self.parameters[name]]
        self.each(lambda name: self.parameters[name].copy_(masters[name]), changed)

    def norm(self, parts: Mapping[str, Tensor]) -> float:
        """The 2-norm of tensors that lie as the weights do, all together."""
        norms = self.each(torch.linalg.vector_norm, list(parts.values()))
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def not_finite(self, parts: Mapping[str, Tensor]) -> list[dict[str, int]]:
        """How many elements of each tensor are no finite numbers, by rank; tensors without any are left out."""
        return [count_not_finite(parts)]

    def whole(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """A copy of each of these weights, on the CPU."""
        return ((name, self.parameters[name].detach().to("cpu", copy=True)) for name in names)


def count_not_finite(parts: Mapping[str, Tensor]) -> dict[str, int]:
    """How many elements of each tensor are NaN or infinite; tensors without any are left out."""
    counts = {name: part.numel() - int(part.isfinite().sum()) for name, part in parts.items()}
    return {name: count for name, count in counts.items() if count}


def _add_gradient(gradients: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Sum in float32, whatever the weights' type: micro-batches are many, and bfloat16 has 8 bits."""
    assert parameter.grad is not None
    gradient, parameter.grad = parameter.grad, None
    gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient.float()


def _alias(model: Model) -> Model:
    """A model of its own with parameters of its own on the same storage."""
    shared: dict[int, Tensor] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return deepcopy(model, shared)
