from penstock.graph import Metrics, Policy, Prompts, Rewards, Rollouts, broadcast, node, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import score
from penstock.programs.evaluate import evaluate


def ends_with(prompt: str, response: str, answer: str) -> float:
    """A rule for `score`: what it returns is the reward, and what it raises stops the run."""
    return float(response.strip().endswith(answer))


@node(pool="scorer")
def price(rollouts: Rollouts, rewards: Rewards, *, each: float = 0.01) -> tuple[Rewards, Metrics]:
    """Every token costs `each`."""
    cost = each * rollouts.lengths()
    return rewards - cost, {"cost": float(cost.mean())}


@program(evaluation=evaluate)
def priced(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, each: float = 0.01) -> Policy:
    """AIPO with a price on every token.

    Args:
        samples: responses per prompt.
        lag: updates that the generator's weights may be old.
        each: the price of a token.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = price(rollouts, score(rollouts, by=ends_with), each=each)
    return aipo_update(policy, rollouts, group_advantage(rewards))
