"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): PPO's clip without a critic, advantages normalised over the batch.

    prompts → generate → score → plain_advantage → batch_normalized → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

With `baseline` the mean of each prompt's rewards is subtracted first (REINFORCE++-baseline), for several samples per
prompt. Left out: the penalty on divergence from a reference, which the paper subtracts from the rewards of tokens.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import batch_normalized, group_advantage, plain_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def reinforce_pp(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    baseline: bool = False,
    clip: float = 0.2,
    minibatches: int = 1,
    lr: float = 1e-4,
) -> Policy:
    """REINFORCE++: one baseline and one scale for all prompts of an update.

    Args:
        samples: responses per prompt; 1 is enough without `baseline`.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        baseline: subtract the mean of each prompt's rewards before normalising.
        clip: bound of the policy's ratio around 1, PPO's epsilon.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = batch_normalized(group_advantage(rewards) if baseline else plain_advantage(rewards))
    loss = partial(ppo, clip_low=clip, clip_high=clip)
    return policy_update(policy, rollouts, advantage, loss=loss, minibatches=minibatches, lr=lr)
