"""GSPO (Zheng et al. 2025, Qwen, arXiv 2507.18071): PPO's clip on whole responses.

    prompts → generate → score → group_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

The ratio of a response is the geometric mean of its tokens' ratios (equation 7), so a response is clipped as a whole.
Left out: GSPO-token with advantages that differ within a response (section 4.3), which needs another advantage node.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn import losses
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def gspo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    clip_low: float = 0.03,
    clip_high: float = 0.04,
    minibatches: int = 4,
    lr: float = 1e-4,
) -> Policy:
    """Group sequence policy optimisation (section 4.1).

    Args:
        samples: responses per prompt; their rewards' mean and deviation make the advantages.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip_low: how far a response's ratio may fall below 1; the paper has 3e-4 for thousands of tokens.
        clip_high: how far it may rise above 1; 4e-4 in the paper.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards, normalize=True)
    loss = partial(losses.gspo, clip_low=clip_low, clip_high=clip_high)
    return policy_update(
        policy, rollouts, advantage, loss=loss, average="sequence_mean", minibatches=minibatches, lr=lr
    )
