"""CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1): clip the importance weight, never the gradient.

    prompts → generate → score → group_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

PPO's clip removes the gradient of a token whose ratio has moved too far, often a rare one that decides a chain of
thought; here it keeps its gradient, with a bounded weight. AIPO's loss is this one with another name for the bound.
Left out: dynamic sampling and a penalty on length, which the paper takes from DAPO (see dapo), and the token mask of
its unified form.
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
def cispo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 1,
    clip_high: float = 1.0,
    minibatches: int = 4,
    lr: float = 1e-4,
) -> Policy:
    """Clipped importance-sampling-weight policy optimisation.

    Args:
        samples: responses per prompt; their rewards' mean and deviation make the advantages.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip_high: how far a token's weight may rise above 1.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards, normalize=True)
    loss = partial(losses.cispo, clip_high=clip_high)
    return policy_update(policy, rollouts, advantage, loss=loss, minibatches=minibatches, lr=lr)
