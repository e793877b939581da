"""A program whose pools write down which interpreter runs them."""

import json
import sys
from pathlib import Path
from typing import Any

import penstock
from penstock.graph import broadcast, node, program
from penstock.graph.context import Context
from penstock.graph.types import Prompts, Rewards, Rollouts, Weights
from penstock.nodes.fake import FakeEngine, FakePolicy, FakePrompts, fake_score, fake_update


def note(pool: str, folder: str) -> None:
    Path(folder, pool).write_text(json.dumps([sys.prefix, penstock.__file__, sys.path]))


def make_noting(context: Context, *, folder: str, **options: Any) -> FakeEngine:
    note("generator", folder)
    return FakeEngine(ms=0.0, **options)


@node(pool="generator", init=make_noting)
def noting_generate(
    engine: FakeEngine, prompts: Prompts, behaviour: Weights, *, samples: int = 4, folder: str
) -> tuple[FakeEngine, Rollouts]:
    raise NotImplementedError("workers drive the engine itself")


@node(pool="scorer")
def noting_score(rollouts: Rollouts, *, folder: str) -> Rewards:
    note("scorer", folder)
    scored: Rewards = fake_score.fn(rollouts)
    return scored


@program
def noting(policy: FakePolicy, prompts: FakePrompts, *, folder: str, lag: int = 1) -> FakePolicy:
    rollouts = noting_generate(prompts, broadcast(policy, lag=lag), samples=4, folder=folder)
    return fake_update(policy, rollouts, noting_score(rollouts, folder=folder))
