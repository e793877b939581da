from functools import partial

from dapo_groups import overlong, teaches
from dapo_loss import clip_higher

from penstock.graph import Policy, Prompts, broadcast, keep, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def my_dapo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    high: float = 0.28,
    longest: int = 16,
    buffer: int = 4,
    minibatches: int = 2,
    lr: float = 1e-4,
) -> Policy:
    """DAPO, from its equations.

    Args:
        samples: responses per prompt.
        lag: updates that the generator's weights may be old; 0 is synchronous, as in the paper.
        high: how far a token's ratio may rise above 1.
        longest: tokens of a response that cost a whole reward.
        buffer: tokens before that from which on length costs.
        minibatches: optimizer steps per update.
        lr: learning rate of AdamW.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = keep(score(rollouts, by=math_answer), when=teaches)
    rewards = overlong(rewards, rollouts, longest=longest, buffer=buffer)
    advantage = group_advantage(rewards, normalize=True)
    loss = partial(clip_higher, high=high)
    return policy_update(policy, rollouts, advantage, loss=loss, minibatches=minibatches, lr=lr)
