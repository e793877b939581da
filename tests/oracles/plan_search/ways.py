"""A way to train and a way to decode on so many GPUs, with its seconds and its memory. Pure."""

from dataclasses import dataclass
from functools import cached_property

from penstock.runtime.plan.collectives import Cost
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.train_cost import Trainer


@dataclass(frozen=True)
class Training:
    """A way to train: seconds of an update's steps and further passes of the policy; of the passes and steps of models
    beside it, if they are on the same GPUs; and the memory of a rank with all of it. Of GPUs that only models beside
    the policy have, there are no steps."""

    trainer: Trainer
    steps: Cost
    reads: Cost
    learns: Cost
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return self.steps.seconds + self.reads.seconds + self.learns.seconds


@dataclass(frozen=True)
class Generating:
    """A way to decode on `replicas` copies of a mesh. Seconds of a batch: `steady` with slots that never run dry,
    `least`, a lower bound of a batch by itself, and `others`, what it adds to another one that is decoded beside it.
    On one kind of hosts those with the same `alike` take the same for a batch by itself."""

    generator: Generator
    replicas: int
    memory: Memory
    steady: float
    least: float
    others: float
    alike: int

    @property
    def gpus(self) -> int:
        return self.replicas * self.generator.mesh.ranks
