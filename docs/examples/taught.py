from penstock.graph import Policy, Prompts, Rollouts, broadcast, node, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.data import Demonstrations
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import aipo, imitate
from penstock.nodes.learn.sft import demonstrated, rollouts_of
from penstock.nodes.learn.update import policy_update, term
from penstock.nodes.policy import language_model
from penstock.nodes.score import math_answer, score


def finished(rollouts: Rollouts) -> list[bool]:
    """Responses that ended by themselves are compared with each other, and those that were cut."""
    return rollouts.finished_N.tolist()


@node(pool="trainer", clock="update")
def solutions(policy: Policy, prompts: Prompts) -> Rollouts:
    """The reference answer to each prompt, as if it had been a response."""
    return rollouts_of(language_model(policy).tokenizer, prompts.texts, prompts.answers)


@program
def taught(
    policy: Policy, prompts: Prompts, shown: Demonstrations, *, samples: int = 8, lag: int = 1, weight: float = 0.1
) -> Policy:
    """AIPO beside a teacher's demonstrations and the answers to the problems themselves."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer), rollouts, by=finished)
    teacher = term(demonstrated(policy, shown), loss=imitate, weight=weight, name="teacher")
    answers = term(solutions(policy, prompts), loss=imitate, weight=weight, name="answers")
    return policy_update(policy, rollouts, advantage, beside=[teacher, answers], loss=aipo)
