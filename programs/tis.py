"""TIS: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"): PPO's clip, with a bounded weight for the difference between generator and trainer.

    prompts → generate ┬→ score → group_advantage ─┬→ policy_update → policy
                       └→ policy_logprobs ─────────┘
      policy ⇢ generate: weights, at most `lag` updates old; policy → policy_logprobs: as it is before the update

The clip is around the trainer's own log-probabilities π_old, so that it bounds only what an update changes;
min(π_old / μ, cap) corrects for stale weights and for different kernels and number formats. Left out: other bounds than
this one by token (see sequence_weighting).
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
def tis(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 1,
    cap: float = 2.0,
    clip: float = 0.2,
    minibatches: int = 4,
    lr: float = 1e-4,
) -> Policy:
    """Truncated importance sampling by token.

    Args:
        samples: responses per prompt; their rewards' mean and deviation make the advantages.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        cap: upper bound of a token's importance weight.
        clip: bound of the policy's ratio to the policy before the update, PPO's epsilon.
        minibatches: optimizer steps per update, each on an equal share of the batch.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer), normalize=True)
    old = policy_logprobs(policy, rollouts)
    loss = partial(losses.tis, cap=cap, clip_low=clip, clip_high=clip)
    return policy_update(policy, rollouts, advantage, proximal=old, loss=loss, minibatches=minibatches, lr=lr)
