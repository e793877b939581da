"""The ways in which a model can learn, or be read, on so many GPUs, and what they do not go below. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.graph.protocols import Axes
from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.plan.collectives import SAFE
from penstock.runtime.plan.model_shape import Parallel
from penstock.runtime.plan.train_cost import Packed, Trainer, packed
from penstock.runtime.plan.workload import Workload
from tests.oracles.plan_search.islands import Island
from tests.oracles.plan_search.layouts import micro_tokens, trainer_meshes
from tests.oracles.plan_search.once import Once

SHARED_OUT = ("products", "attention", "elementwise", "logits")
"""Parts of a step that n GPUs do in no less than an nth of one GPU's time."""


@dataclass(frozen=True)
class Alike:
    """Ways that share out the data and cut the layers alike. They differ in how weights are sharded: over the shards of
    each mesh, and for each micro-batch or not."""

    first: Trainer
    meshes: tuple[Parallel, ...]

    def all(self) -> Iterator[Trainer]:
        for mesh in self.meshes:
            for zero3 in (False, True) if mesh.fsdp > 1 else (False,):
                yield replace(self.first, mesh=mesh, zero3=zero3)


@dataclass(frozen=True)
class Candidates:
    work: Workload
    _once: Once = field(default_factory=Once, compare=False, repr=False)

    def on(self, island: Island, gpus: int, pin: Axes | None = None) -> Iterator[Trainer]:
        """All on `gpus` GPUs, whether they fit or not; with the mesh `pin`, if it is given."""
        for alike in self.alike(island, gpus, pin):
            yield from alike.all()

    def alike(self, island: Island, gpus: int, pin: Axes | None = None) -> list[Alike]:
        meshes: dict[tuple[int, ...], list[Parallel]] = {}
        for mesh in trainer_meshes(self.work.shape, island, gpus):
            if pin is None or pin == mesh.axes:
                meshes.setdefault((mesh.data, mesh.tp, mesh.pp), []).append(mesh)
        tokens = tuple(micro_tokens(self.work.context, self.work.micro_tokens))
        return [Alike(self._first(island, some[0], each), tuple(some)) for some in meshes.values() for each in tokens]

    def bounds(self, alike: Alike, passes: int, learners: int) -> tuple[float, float]:
        """Seconds of so many passes, and of the steps of so many that learn, that none of them goes below."""
        passed = alike.first.least(self.whole, backward=False) if passes else 0.0
        steps = sum(alike.first.least(part, backward=True) for part in self.parts) if learners else 0.0
        return passed * passes * SAFE, steps * self.work.epochs * learners * SAFE

    def least(self, gpu: Gpu) -> tuple[float, float]:
        """GPU-seconds of one pass and of an update's steps that no layout of this kind goes below."""

        def least() -> tuple[float, float]:
            work = self.work
            alone = Trainer(work.shape, gpu, Parallel(), micro_tokens=int(work.sequence_tokens.sum()))
            costs = alone.passed(self.whole), alone.step(work.sequence_tokens) * work.epochs
            passed, steps = (sum(cost.parts[part] for part in SHARED_OUT) for cost in costs)
            return passed, steps

        return self._once(("least", id(gpu)), least)

    @cached_property
    def whole(self) -> Packed:
        """All that an update learns from."""
        return packed(self.work.sequence_tokens)[0]

    @cached_property
    def parts(self) -> tuple[Packed, ...]:
        """Of each minibatch."""
        return packed(self.work.sequence_tokens, self.work.minibatches)

    def _first(self, island: Island, mesh: Parallel, tokens: int) -> Trainer:
        return Trainer(self.work.shape, island.gpu, mesh, micro_tokens=tokens, zero3=False)
