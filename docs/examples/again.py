from functools import partial

from penstock.graph import Policy, Prompts, broadcast, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import cispo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.replay_buffer import replay
from penstock.nodes.score import math_answer, score


@program
def often(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, take: int = 2) -> Policy:
    """CISPO, two epochs of two steps on each batch, some past groups included."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer), normalize=True)
    batch, worth = replay(rollouts, advantage, take=take, max_age=4)
    loss = partial(cispo, clip_high=1.0)
    return policy_update(policy, batch, worth, loss=loss, epochs=2, minibatches=2)
