from functools import partial

from penstock.graph import Logprobs, Policy, Prompts, Rollouts, broadcast, node, program
from penstock.graph.types import LearningRate
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.batching import sampled_mask
from penstock.nodes.learn.losses import aipo, effective_sample_size
from penstock.nodes.learn.optimizer import cosine
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score


@program
def warmed(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, lr: float = 2e-4) -> Policy:
    """AIPO with a rate that rises over ten updates and falls to a tenth."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer))
    return policy_update(policy, rollouts, advantage, loss=aipo, lr=partial(cosine, peak=lr, warmup=10, final=0.1))


@node(pool="trainer", clock="update")
def as_fresh(rollouts: Rollouts, now: Logprobs, *, peak: float) -> LearningRate:
    """`peak` times the effective sample size of the tokens' ratios π / μ, as a share of the tokens."""
    place = sampled_mask(rollouts)
    ratio_P = (now.logprobs_NT - rollouts.logprobs_NT)[place].exp()
    return LearningRate(peak * float(effective_sample_size(ratio_P)) / len(ratio_P))


@program
def careful(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 4, lr: float = 2e-4) -> Policy:
    """AIPO that takes smaller steps where the rollouts are further from the policy."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer))
    rate = as_fresh(rollouts, policy_logprobs(policy, rollouts), peak=lr)
    return policy_update(policy, rollouts, advantage, rate=rate, loss=aipo)
