"""Decoupled PPO, the objective of AReaL (Fu et al. 2025, arXiv 2505.24298, section 5.2, after Hilton et al. 2021).

    prompts → generate ┬→ score → group_advantage ─┬→ policy_update → policy
                       └→ policy_logprobs ─────────┘
      policy ⇢ generate: weights, at most `lag` updates old; policy → policy_logprobs: as it is before the update

PPO clips around the policy that sampled, which pulls the update of a stale batch back to old weights. Here the clip is
around the policy before the update, and the ratio to the one that sampled is a weight. Left out: AReaL's interrupted
responses, whose tokens are from several versions; the objective is the same, since each token has its own μ.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn import losses
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def decoupled_ppo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 2,
    clip: float = 0.2,
    minibatches: int = 4,
    lr: float = 1e-4,
) -> Policy:
    """Asynchronous PPO whose clip is decoupled from the policy that sampled.

    Args:
        samples: responses per prompt; their rewards' mean and deviation make the advantages.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip: bound of the policy's ratio to the policy before the update, PPO's epsilon.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer), normalize=True)
    old = policy_logprobs(policy, rollouts)
    loss = partial(losses.decoupled_ppo, clip_low=clip, clip_high=clip)
    return policy_update(policy, rollouts, advantage, proximal=old, loss=loss, minibatches=minibatches, lr=lr)
