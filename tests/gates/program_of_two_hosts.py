"""AIPO whose generator thinks that it is alone on its host, so that weights come to it as messages over TCP."""

import os

from penstock.graph import broadcast, node, program
from penstock.graph.types import Context, Metrics, Policy, Prompts, Rollouts, Weights
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engine import Engine
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import score
from penstock.runtime.tensor import ways


def more_digits(prompt: str, response: str, answer: str) -> float:
    """A reward that an untrained model gets at once."""
    return sum(c.isdigit() for c in response) / 8 - response.count("-") / 8


def make_far_engine(context: Context, *, samples: int) -> Engine:
    ways._host = os.getpid
    return make_engine(context, samples=samples)


@node(pool="generator", init=make_far_engine)
def far_generate(
    engine: Engine, prompts: Prompts, behaviour: Weights, *, samples: int = 8
) -> tuple[Engine, Rollouts, Metrics]:
    raise NotImplementedError("workers drive the engine itself")


@program
def far(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, lr: float = 1e-4) -> Policy:
    """The loop of `aipo`."""
    rollouts = far_generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=more_digits))
    return aipo_update(policy, rollouts, advantage, lr=lr)
