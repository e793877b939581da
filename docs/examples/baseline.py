from penstock.graph import Advantages, Metrics, Policy, Prompts, Rewards, broadcast, node, program
from penstock.nodes.carried import carried
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@carried
class Baseline:
    """A mean of rewards that moves with every update."""

    mean: float = 0.0


@node(pool="trainer", clock="update")
def above(baseline: Baseline, rewards: Rewards) -> Advantages:
    return Advantages(rewards.values_N - baseline.mean)


@node(pool="trainer", clock="update")
def follow(baseline: Baseline, rewards: Rewards, *, rate: float) -> tuple[Baseline, Metrics]:
    mean = baseline.mean + rate * (float(rewards.values_N.mean()) - baseline.mean)
    return Baseline(mean), {"baseline": mean}


@program(evaluation=evaluate)
def reinforce(
    policy: Policy, baseline: Baseline, prompts: Prompts, *, samples: int = 8, lag: int = 1, rate: float = 0.1
) -> dict[str, object]:
    """Policy gradient with a running mean of the rewards as its baseline."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = above(baseline, rewards)
    learnt = aipo_update(policy, rollouts, advantage)
    return {"policy": learnt, "baseline": follow(baseline, rewards, rate=rate)}
