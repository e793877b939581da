"""AIPO with a replay buffer: some past prompt groups are trained on again beside each fresh batch, with their tokens
weighted by π / μ like all stale ones (LlamaRL, Wu et al. 2025, arXiv 2505.24034; a buffer as in Mnih et al. 2015,
"Human-level control through deep reinforcement learning").

    prompts ─► generate ─► score ─► group_advantage ─► replay ─► policy_update ─► policy
       policy ───▲  └──────────────────────────────────▲ ↺

Left out: priorities, and replayed groups in place of fresh ones: an update has a whole batch of fresh groups.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes import replay_buffer as buffer
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def replay(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 1,
    take: int = 16,
    capacity: int = 256,
    max_age: int = 4,
    rho: float = 4.0,
    lr: float = 1e-4,
) -> Policy:
    """Asynchronous importance-weighted policy optimisation that learns from some groups twice.

    Args:
        samples: responses per prompt; their mean reward is the baseline.
        lag: how many updates old the generator's weights may be when a group is fresh.
        take: past groups beside each fresh batch.
        capacity: groups in the buffer, which keeps the newest ones.
        max_age: updates after which the buffer drops a group.
        rho: upper bound of a token's importance ratio.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards)
    batch, worth = buffer.replay(rollouts, advantage, take=take, capacity=capacity, max_age=max_age)
    return policy_update(policy, batch, worth, loss=partial(aipo, rho=rho), lr=lr)
