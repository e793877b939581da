from torch import Tensor

from penstock.graph import Policy, Prompts, Rewards, Rollouts, broadcast, node, program, requires
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import Sampled, aipo, imitate, reads, segment_max, segment_sum
from penstock.nodes.learn.update import policy_update, term
from penstock.nodes.score import math_answer, score


@node(pool="scorer")
def right(rollouts: Rollouts, rewards: Rewards) -> Rollouts:
    """Those that were right, or none: a row is taken where its mark is true."""
    return rollouts.take(rewards.values_N > 0)


@requires(reads("group"))
def spread(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """log of the response's share of the probability of all responses to its prompt: below it is spread out."""
    whole_N = segment_sum(logprobs_P, sampled.sequence_P, len(sampled.group_N))
    whole_N = whole_N - segment_max(whole_N.detach(), sampled.group_N)[sampled.group_N]  # so that no sum of exp is 0
    share_N = whole_N - segment_sum(whole_N.exp(), sampled.group_N).log()[sampled.group_N]
    return share_N[sampled.sequence_P] / sampled.lengths_P


@program
def mixed(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, own: float = 0.1) -> Policy:
    """AIPO beside imitation of one's own right answers, and a price on saying one thing alone."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards)
    good, wide = term(right(rollouts, rewards), loss=imitate, weight=own), term(rollouts, loss=spread, weight=0.01)
    return policy_update(policy, rollouts, advantage, beside=[good, wide], loss=aipo)
