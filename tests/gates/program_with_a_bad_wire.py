"""A program whose generator flips one bit of the weights of version 2 as they arrive from the trainer's process."""

from collections.abc import Sequence

import torch

from penstock.graph import broadcast, node, program
from penstock.graph.types import Context, Prompts, Rollouts, Weights
from penstock.nodes.fake import FakeEngine, FakePolicy, FakePrompts, fake_generate, fake_score, fake_update
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.one_sided import OneSidedTransport

_receive = OneSidedTransport.receive
"""How weights come to a receiver on the sender's host."""


def _receive_badly(self: OneSidedTransport, version: int, copies: Sequence[Copy], shards: Shards) -> int:
    received = _receive(self, version, copies, shards)
    if version == 2:
        shards["values"].tensor.view(torch.int32)[7] ^= 1
    return received


def _spoil(context: Context, *, samples: int) -> FakeEngine:
    OneSidedTransport.receive = _receive_badly  # type: ignore[method-assign]
    return FakeEngine(samples, 1.0)


@node(pool="generator", init=_spoil)
def generate_over_a_bad_wire(
    engine: FakeEngine, prompts: Prompts, behaviour: Weights, *, samples: int = 4
) -> tuple[FakeEngine, Rollouts]:
    """`fake_generate` in a process with a bad wire."""
    made: tuple[FakeEngine, Rollouts] = fake_generate.fn(engine, prompts, behaviour, samples=samples)
    return made


@program
def bad_wire(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    """The toy program on it."""
    rollouts = generate_over_a_bad_wire(prompts, broadcast(policy))
    return fake_update(policy, rollouts, fake_score(rollouts))
