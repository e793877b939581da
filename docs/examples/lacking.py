from functools import partial

from torch import Tensor

from penstock.graph import Policy, Prompts, broadcast, program, requires
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import Sampled, reads
from penstock.nodes.learn.update import policy_update
from penstock.nodes.option_checks import positive
from penstock.nodes.score import math_answer, score


@requires(reads("behaviour", "proximal"), positive("cap"))
def capped(logprobs_P: Tensor, sampled: Sampled, *, cap: float = 2.0) -> Tensor:
    """The weight that a token had before the update, but no more than `cap`."""
    weights_P = (sampled.proximal_P - sampled.behaviour_P).exp().clamp(max=cap)
    return -weights_P * sampled.advantages_P * logprobs_P


@program
def lacking(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=1)
    advantage = group_advantage(score(rollouts, by=math_answer))
    loss = partial(capped, cap=0.0)
    return policy_update(policy, rollouts, advantage, loss=loss, kl=0.1, average="mean")  # type: ignore[arg-type]
