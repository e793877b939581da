import torch
from torch import Tensor

from penstock.graph import Policy, Prompts, broadcast, program, requires
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import Sampled, reads, segment_sum
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score


@requires(reads("behaviour"))
def tapered(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """TOPR: good responses are imitated; bad ones count less, the less likely they have become since."""
    since_P = logprobs_P.detach() - sampled.behaviour_P
    response_P = segment_sum(since_P, sampled.sequence_P)[sampled.sequence_P]  # log π / μ of the whole response
    weights_P = torch.where(sampled.advantages_P < 0, response_P.clamp(max=0).exp(), 1.0)
    return -weights_P * sampled.advantages_P * logprobs_P


@program
def topr(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 2, lr: float = 1e-4) -> Policy:
    """Tapered off-policy REINFORCE."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer))
    return policy_update(policy, rollouts, advantage, loss=tapered, lr=lr)
