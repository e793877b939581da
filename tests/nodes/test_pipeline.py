"""The stages of a pipeline, each in a thread, on channels that are ordered and unbuffered like NCCL's."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from penstock.nodes.learn.batching import Packed
from penstock.nodes.model import CausalLM, ModelConfig
from penstock.nodes.parallel.mesh import Ranks
from penstock.nodes.parallel.pipeline import PipelineStage
from tests.unbuffered import Unbuffered

# The results, the gradients by name, and the most micro-batches whose activations were kept at once.
Staged = tuple[list[Tensor], dict[str, Tensor | None], int]
CONFIG = ModelConfig(13, 8, 12, 6, 2, 1, 4)
STAGES, MICRO_BATCHES = (2, 3, 6), (1, 2, 3, 5, 8)


def micro_batches(count: int) -> list[tuple[Packed, bool]]:
    """Return micro-batches of different shapes. The last one does not count, like the filler of a rank without work."""
    generator, found = torch.Generator().manual_seed(3), []
    for number in range(count):
        shape = (1 + number % 3, 4 + number % 2)
        tokens_RW = torch.randint(13, shape, generator=generator)
        at_P = torch.arange(tokens_RW.numel())
        item = Packed(tokens_RW, at_P, torch.randint(13, at_P.shape, generator=generator), at_P, at_P)
        found.append((item, number < max(1, count - 1)))
    return found


def loss(model: CausalLM, item: Packed) -> Tensor:
    logits_PV = model.logits(model(item.tokens_RW)).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits_PV, item.targets_P)


def model_of() -> CausalLM:
    model = CausalLM(CONFIG)
    model.init_weights(1)
    return model


class Saved:
    """A tensor that the backward pass of a micro-batch needs. It lives as long as the graph."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.tensor, self.number = tensor, number


@dataclass
class Kept:
    """Counts the micro-batches whose activations are kept at once."""

    live: WeakSet[Saved] = field(default_factory=WeakSet)
    number: int = -1
    most: int = 0

    def save(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor, self.number)
        self.live.add(saved)
        self.most = max(self.most, len({each.number for each in self.live}))
        return saved


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Staged]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(stages: int, todo: Sequence[tuple[Packed, bool]], learns: bool) -> list[Staged]:
        """Return, for each stage, its results, its gradients, and the most micro-batches that it kept."""
        world = Unbuffered(stages)
        world.as_torch(monkeypatch)
        return world.run(*(partial(one, rank, stages, todo, learns) for rank in range(stages)))

    yield run
    torch.set_num_threads(threads)


def one(rank: int, stages: int, todo: Sequence[tuple[Packed, bool]], learns: bool) -> Staged:
    torch.set_num_threads(1)
    model, kept = model_of(), Kept()
    stage = PipelineStage(model, Ranks((("pp", stages),), rank), torch.float32)
    numbers = {id(item.tokens_RW): number for number, (item, _) in enumerate(todo)}

    def begin(_: Any, given: tuple[Tensor, ...]) -> None:
        kept.number = numbers[id(given[0])]

    model.register_forward_pre_hook(begin)

    def work(item: Packed, counts: bool) -> Tensor:
        total = loss(model, item)
        if learns:
            (total if counts else total * 0).backward()  # type: ignore[no-untyped-call]
        return total.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(kept.save, lambda saved: saved.tensor)
    with torch.set_grad_enabled(learns), hooks:
        found = stage.run(work, todo)
    return found, {name: p.grad for name, p in model.named_parameters()}, kept.most


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("count", MICRO_BATCHES)
@pytest.mark.parametrize("stages", STAGES)
def test_a_pipeline_ends_without_buffers_with_the_bits_of_one_rank(
    staged: Callable[..., list[Staged]], stages: int, count: int, learns: bool
) -> None:
    todo, whole, needed = micro_batches(count), model_of(), []
    for item, counts in todo:
        total = loss(whole, item)
        (total if counts else total * 0).backward()  # type: ignore[no-untyped-call]
        needed.append(total.detach())
    found = staged(stages, todo, learns)
    assert all(not said for said, _, _ in found[:-1])
    assert all(torch.equal(a, b) for a, b in zip(found[-1][0], needed, strict=True))
    given = {name: gradient for _, gradients, _ in found for name, gradient in gradients.items()}
    assert given.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        gradient = given[name]
        assert (gradient is not None) == learns, name
        assert gradient is None or (parameter.grad is not None and torch.equal(gradient, parameter.grad)), name


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("stages", STAGES)
def test_a_stage_keeps_activations_of_no_more_micro_batches_than_stages_from_it_on(
    staged: Callable[..., list[Staged]], stages: int, count: int
) -> None:
    most = [each for _, _, each in staged(stages, micro_batches(count), learns=True)]
    assert most == [min(count, stages - stage) for stage in range(stages)]
