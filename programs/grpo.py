"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300): group-relative advantages and PPO's clip.

    prompts → generate → score → group_advantage → policy_update → policy
                 └→ reference_logprobs, if kl ─────────↗
      policy ⇢ generate: weights, at most `lag` updates old

With `kl` above 0 the graph has a frozen copy of the initial policy, and the divergence from it is a penalty. Left out:
process rewards (section 4.1.3), iterations with new reward models and references (4.1.4; see moving_reference), and
several updates on a batch (μ in algorithm 1).
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts, Reference
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def grpo(
    policy: Policy,
    reference: Reference,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    clip: float = 0.2,
    kl: float = 0.0,
    lr: float = 1e-4,
    accumulate: int = 0,
) -> dict[str, Policy]:
    """Group-relative policy optimisation (DeepSeekMath, section 4.1).

    Args:
        samples: responses per prompt; their rewards' mean and deviation make the advantages.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip: bound of the policy's ratio around 1, PPO's epsilon.
        kl: weight of the divergence from the frozen initial policy; 0 leaves that policy out.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
        accumulate: prompt groups in each part of its batch that an update takes as they arrive; 0 waits for all.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards, normalize=True)
    close = reference_logprobs(reference, rollouts) if kl else None
    loss = partial(ppo, clip_low=clip, clip_high=clip)
    update = policy_update.accumulate(accumulate)
    learnt = update(policy, rollouts, advantage, close, loss=loss, average="sequence_mean", kl=kl, lr=lr)
    return {"policy": learnt, "reference": reference}
