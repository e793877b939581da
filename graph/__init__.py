"""The language: a reinforcement-learning algorithm is a function with `@program` that calls functions with `@node`.

    @program
    def aipo(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, rho: float = 4.0) -> Policy:
        behaviour = broadcast(policy, lag=lag)
        rollouts = generate(prompts, behaviour, samples=samples)
        rewards = score(rollouts, by=math_answer)
        advantage = group_advantage(rewards)
        return aipo_update(policy, rollouts, advantage, rho=rho)

`trace` makes a graph of it: a frozen value to print, check, plan, simulate and run. Nothing here imports torch.
"""

from penstock.graph.check import check
from penstock.graph.constructs import alternate, broadcast, delay, keep
from penstock.graph.context import Context
from penstock.graph.errors import Fault, GraphError
from penstock.graph.imports import load
from penstock.graph.ir import Firing, Graph
from penstock.graph.node import NodeDef, node
from penstock.graph.program import Program, program, trace
from penstock.graph.requires import opens, requires
from penstock.graph.types import (
    Advantages,
    Logprobs,
    Mean,
    Metrics,
    NodeWarning,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
)

__all__ = [
    "Advantages",
    "Context",
    "Fault",
    "Firing",
    "Graph",
    "GraphError",
    "Logprobs",
    "Mean",
    "Metrics",
    "NodeDef",
    "NodeWarning",
    "Policy",
    "Program",
    "Prompts",
    "Rewards",
    "Rollouts",
    "Weights",
    "alternate",
    "broadcast",
    "check",
    "delay",
    "keep",
    "load",
    "node",
    "opens",
    "program",
    "requires",
    "trace",
]
