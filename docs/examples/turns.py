import torch

from penstock.graph import Policy, Prompts, Rollouts, broadcast, program
from penstock.graph.types import Replies
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.environment import environment
from penstock.nodes.generate import converse
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score


@environment(deadline=10.0)
def once_more(rollouts: Rollouts, *, sign: str = ":") -> Replies:
    """Asks for another try until the newest answer is right."""
    said = zip(rollouts.prompts, rollouts.texts, rollouts.answers, strict=True)
    right = [math_answer(prompt, text, answer) == 1.0 for prompt, text, answer in said]
    return Replies((sign,) * len(right), ("user",) * len(right), torch.tensor(right))


@program
def second_chance(policy: Policy, prompts: Prompts, *, samples: int = 8, tries: int = 3, lag: int = 1) -> Policy:
    """AIPO on conversations in which a wrong answer may be mended."""
    rollouts, _ = converse(prompts, broadcast(policy, lag=lag), environment=once_more, turns=tries, samples=samples)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
