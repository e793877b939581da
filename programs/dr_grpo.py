"""Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783): GRPO without its two biases.

    prompts → generate → score → group_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

Advantages are not divided by their group's deviation, which would favour prompts that are too easy or too hard. Token
losses are divided by a constant, so that tokens of long responses do not count less. Left out: nothing.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def dr_grpo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    clip: float = 0.2,
    minibatches: int = 1,
    lr: float = 1e-4,
) -> Policy:
    """GRPO done right (section 3.2).

    Args:
        samples: responses per prompt; their mean reward is the baseline.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip: bound of the policy's ratio around 1, PPO's epsilon.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards)
    loss = partial(ppo, clip_low=clip, clip_high=clip)
    return policy_update(policy, rollouts, advantage, loss=loss, average="constant", minibatches=minibatches, lr=lr)
