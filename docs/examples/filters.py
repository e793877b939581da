from functools import partial

from penstock.graph import Policy, Prompts, Rollouts, broadcast, keep, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score


def some_finished(rollouts: Rollouts, *, least: int = 1) -> bool:
    """Did any response end by itself?"""
    return int(rollouts.finished_N.sum()) >= least


@program
def filtered(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, least: int = 1) -> Policy:
    """AIPO on groups in which at least some responses end by themselves."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rollouts = keep(rollouts, when=partial(some_finished, least=least))
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
