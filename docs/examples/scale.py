from dataclasses import dataclass

from penstock.graph import Context, Policy, Prompts, Rewards, broadcast, node, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score


@dataclass
class Peak:
    value: float


def make_peak(context: Context) -> Peak:
    return Peak(1.0)


@node(pool="scorer", init=make_peak)
def over_peak(peak: Peak, rewards: Rewards) -> tuple[Peak, Rewards]:
    """Rewards divided by the largest one seen so far."""
    peak = Peak(max(peak.value, float(rewards.values_N.abs().max())))
    return peak, rewards * (1 / peak.value)


@program
def scaled(policy: Policy, prompts: Prompts, *, samples: int = 4, lag: int = 1) -> Policy:
    """AIPO on rewards between −1 and 1."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = over_peak(score(rollouts, by=math_answer))
    return aipo_update(policy, rollouts, group_advantage(rewards))
