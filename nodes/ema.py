"""A copy that follows the policy in the trainer's pool: its moving average, or a snapshot of some of its versions."""

from typing import ClassVar

import torch

from penstock.graph import node, opens, requires
from penstock.graph.context import Context
from penstock.graph.protocols import Carried
from penstock.graph.types import AnyAverage, Average, Metrics, Policy
from penstock.nodes import option_checks
from penstock.nodes.model import CausalLM
from penstock.nodes.policy import (
    LanguageModel,
    language_policy,
    open_learning,
    policy_spec,
    require_policy,
)
from penstock.nodes.trainable import MasterWeights, expect


class FollowingPolicy(LanguageModel, MasterWeights[CausalLM], Average):
    """A policy that does not learn by itself."""

    called: ClassVar[str] = "average"


@opens(policy_spec, lora=True)
@requires(require_policy)
def make_average(context: Context) -> Carried:
    """A copy of the initial policy. With `--lora` it has adapters, too, and follows the policy's matrix by matrix."""
    model, tokenizer = open_learning(context)
    return FollowingPolicy(model.requires_grad_(False), tokenizer, context)


@requires(option_checks.decay("decay"))
@node(pool="trainer", clock="update")
def ema(average: AnyAverage, policy: Policy, *, decay: float = 0.9) -> tuple[AnyAverage, Metrics]:
    """average ← decay · average + (1 − decay) · policy, in float32: Polyak and Juditsky 1992, with a fixed decay.

    `policy` is the policy after its update. Metric: `average_distance`, the 2-norm of the difference before this step,
    as a share of the policy's.
    """
    return average, _follow(average, policy, decay)


@node(pool="trainer", clock="update")
def refresh(average: AnyAverage, policy: Policy) -> tuple[AnyAverage, Metrics]:
    """average ← policy after its update. Metric: `average_distance`, as in `ema`."""
    return average, _follow(average, policy, 0.0)


@torch.no_grad()
def _follow(average: Average, policy: Policy, decay: float) -> Metrics:
    average = expect(FollowingPolicy, average, "average")
    learner = language_policy(policy)
    if average.model.lora != learner.model.lora:
        given, needed = average.model.lora, learner.model.lora
        raise ValueError(f"average: given adapters of {given}, needed those of what it follows: {needed} (--lora)")
    goals = learner.masters
    # Average the masters: in the run's dtype small steps would be lost to rounding.
    apart = {name: average.masters[name] - goal for name, goal in goals.items()}
    distance = average.workers.norm(apart) / average.workers.norm(goals)
    for name, goal in goals.items():
        average.masters[name].lerp_(goal, 1 - decay)  # exactly the goal if decay is 0
    average.copy_masters()
    average.version += 1
    return {"average_distance": distance}
