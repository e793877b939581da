"""A program whose policy has 16 MiB of weights beside the fake one's, with options that disturb their transfer.

`way` "messages" makes every rank believe that it is alone on its host. "no room" limits the size of the generator's
files, so that it gets no segment for its arena. With a `mark`, the sender stops in the middle of version `at`: it makes
that file when half of the bytes are sent, and goes on when there is a second file, `mark`.go.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.graph import broadcast, node, program
from penstock.graph.context import Context
from penstock.graph.protocols import Carried
from penstock.graph.types import Metrics, Prompts, Rewards, Rollouts, Weights
from penstock.nodes.fake import FakeEngine, FakePolicy, FakePrompts, fake_generate, fake_score, fake_update
from penstock.runtime.tensor import link, one_sided
from penstock.runtime.tensor.process_group import Connection, Message

PARTS, PART_BYTES, FILE_LIMIT = 8, 2 << 20, 16 << 20
SMALL = 1 << 18  # bytes: more than all other data that is sent with the versions
PATIENCE_S = 60.0
COPY, SEND = one_sided.copy_elements, Connection.send  # type: ignore[attr-defined]


class LargePolicy(FakePolicy):
    """The fake policy with large tensors. Each version changes one in a hundred of their elements."""

    maker: ClassVar[str] = f"{__file__}:make_large_policy"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.large = {f"large.{index}": torch.zeros(PART_BYTES // 4) for index in range(PARTS)}

    def weights(self) -> Mapping[str, Tensor]:
        for tensor in self.large.values():
            tensor[self.version % 100 :: 100] = self.version
        return {**super().weights(), **self.large}


class Halfway:
    """Called for each piece or message that is sent; blocks in the middle of a version. `moved` counts the bytes of
    large pieces and messages, of all versions."""

    def __init__(self, mark: Path, at: int) -> None:
        self.mark, self.first = mark, at * PARTS * PART_BYTES
        self.moved, self.works = 0, list[Message]()

    def __call__(self, nbytes: int) -> None:
        before, half = self.moved, self.first + PARTS * PART_BYTES // 2
        self.moved += nbytes if nbytes > SMALL else 0
        if not before <= half < self.moved:
            return
        for work in self.works:
            work.wait()
        self.mark.touch()
        until = monotonic() + PATIENCE_S
        while not self.mark.with_suffix(".go").exists() and monotonic() < until:
            sleep(0.01)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self(source.nbytes)
        COPY(target, source)

    def send(self, connection: Connection, buffer: Tensor, *address: Any) -> Message:
        self(buffer.nbytes)
        work = SEND(connection, buffer, *address)
        if buffer.nbytes > SMALL and self.moved > self.first + SMALL:
            self.works.append(work)  # of this version
        return work


def make_large_policy(context: Context) -> Carried:
    options: dict[str, Any] = context.options
    on_a_host_of_its_own(options["way"])
    if options["mark"]:
        halfway = Halfway(Path(options["mark"]), options["at"])
        one_sided.copy_elements = halfway.copy  # type: ignore[attr-defined]
        Connection.send = lambda *given: halfway.send(*given)  # type: ignore[method-assign]
    return LargePolicy(context)


def on_a_host_of_its_own(way: str) -> None:
    if way == "messages":
        link._host = os.getpid


def make_engine(context: Context, *, samples: int, ms: float) -> FakeEngine:
    on_a_host_of_its_own(context.options["way"])
    if context.options["way"] == "no room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return FakeEngine(samples, ms)


@node(pool="generator", init=make_engine)
def generate_with_large_weights(
    engine: FakeEngine, prompts: Prompts, behaviour: Weights, *, samples: int = 4, ms: float = 1.0
) -> tuple[FakeEngine, Rollouts]:
    """`fake_generate` with large weights as input."""
    made: tuple[FakeEngine, Rollouts] = fake_generate.fn(engine, prompts, behaviour, samples=samples)
    return made


@node(pool="trainer", clock="update")
def update_large_weights(
    policy: LargePolicy, rollouts: Rollouts, rewards: Rewards, *, ms: float = 10.0
) -> tuple[LargePolicy, Metrics]:
    """`fake_update` of large weights."""
    _, metrics = fake_update.fn(policy, rollouts, rewards, ms=ms)
    return policy, metrics


@program
def large(
    policy: LargePolicy, prompts: FakePrompts, *, lag: int = 4, way: str = "", mark: str = "", at: int = 2
) -> LargePolicy:
    """The toy program with these weights."""
    rollouts = generate_with_large_weights(prompts, broadcast(policy, lag=lag))
    return update_large_weights(policy, rollouts, fake_score(rollouts))
