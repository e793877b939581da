from penstock.graph import Policy, Prompts, Rewards, broadcast, node, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score


class Chaser(Policy):
    """Wants to be right."""


class Chased(Policy):
    """Wants to be right where the other one is wrong."""


@node(pool="scorer")
def ahead(own: Rewards, others: Rewards) -> Rewards:
    return own - others.values_N.mean()


@program
def chase(
    chaser: Chaser, chased: Chased, prompts: Prompts, *, samples: int = 8, lag: int = 1
) -> dict[str, Chaser | Chased]:
    """Two policies answer the same problems."""
    theirs = generate(prompts, broadcast(chased, lag=lag), samples=samples)
    ours = generate(prompts, broadcast(chaser, lag=lag), samples=samples)
    right, score_of_theirs = score(ours, by=math_answer), score(theirs, by=math_answer)
    escaped = group_advantage(ahead(score_of_theirs, right))
    return {
        "chaser": aipo_update(chaser, ours, group_advantage(right)),
        "chased": aipo_update(chased, theirs, escaped),
    }
