"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with a higher upper clip, and only prompts that teach something.

    prompts → generate → score → keep if mixed → penalize_overlong → group_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

Its four changes: clip-higher (section 3.1), dynamic sampling (3.2: groups that are all right or all wrong are dropped,
and the next ones take their places), the mean over tokens (3.3), soft overlong punishment (3.4). Left out: overlong
filtering, the other remedy of section 3.4, which excludes truncated responses from the loss.
"""

from functools import partial

from penstock.graph import broadcast, keep, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, mixed, penalize_overlong, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def dapo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_length: int | None = None,
    buffer: int = 4,
    minibatches: int = 1,
    lr: float = 1e-4,
) -> Policy:
    """Decoupled clip and dynamic sampling policy optimisation (algorithm 1).

    Args:
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip_low: how far a token's ratio may fall below 1.
        clip_high: how far it may rise above 1.
        max_length: tokens of a response at which the penalty is a whole reward; by default the run's --max-tokens.
        buffer: the penalty begins this many tokens before max_length.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rollouts, rewards = keep(rollouts, score(rollouts, by=math_answer), when=mixed)
    rewards = penalize_overlong(rewards, rollouts, max_length=max_length, buffer=buffer)
    advantage = group_advantage(rewards, normalize=True)
    loss = partial(ppo, clip_low=clip_low, clip_high=clip_high)
    return policy_update(policy, rollouts, advantage, loss=loss, minibatches=minibatches, lr=lr)
