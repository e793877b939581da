from pathlib import Path

from penstock.graph import Policy, Prompts, alternate, broadcast, program
from penstock.graph.types import FrozenModel
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.environment import outcome
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update


def shown(prompt: str, response: str, answer: str) -> str:
    """What the judge is asked first: here the sum, and what was said to it."""
    return f"{prompt}{response}:"


def agrees(reply: str) -> bool:
    """Ends the conversation."""
    return reply.startswith("+")


def worth(reply: str) -> float:
    """The reward of the conversation so far, by what the judge said last."""
    return float(agrees(reply))


@program
def talking(
    policy: Policy,
    judge: FrozenModel,
    prompts: Prompts,
    *,
    judge_model: Path | None = None,
    samples: int = 4,
    turns: int = 3,
    lag: int = 1,
) -> dict[str, object]:
    """AIPO on conversations with a judge, which says when it is content.

    Args:
        judge_model: the judge's directory; without it the judge is the model that the run starts from.
        samples: conversations per prompt.
        turns: turns of the policy in one.
        lag: updates that the generator's weights may be old.
    """
    partner = generate.of(judge).given(temperature=0.7)
    behaviour = broadcast(policy, lag=lag)
    rollouts, replies = alternate(
        generate, partner, prompts, behaviour, samples=samples, turns=turns, ask=shown, over=agrees, reward=worth
    )
    return {"policy": aipo_update(policy, rollouts, group_advantage(outcome(replies))), "judge": judge}
