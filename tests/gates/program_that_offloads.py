"""A program of two values that updates change, one of which reads the other's master weights after its update."""

from penstock.graph import broadcast, program
from penstock.graph.types import Average, Policy, Prompts
from penstock.nodes import ema as averages
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import score


def more_digits(prompt: str, response: str, answer: str) -> float:
    """A reward that an untrained model gets at once."""
    return sum(c.isdigit() for c in response) / 4 - response.count("-") / 8


@program
def averaged(policy: Policy, average: Average, prompts: Prompts, *, lag: int = 0) -> dict[str, Policy]:
    """AIPO with that reward, and the moving average of what it learns."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=4)
    learnt = aipo_update(policy, rollouts, group_advantage(score(rollouts, by=more_digits)), lr=1e-3)
    return {"policy": learnt, "average": averages.ema(average, learnt, decay=0.5)}
