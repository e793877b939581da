"""GRPO with a moving reference: every `every` updates the current policy becomes the reference.

    prompts ─► generate ─► score ─► group_advantage ─► policy_update ─► policy
       policy ───▲  └─► reference_logprobs ──────────────▲    └─► refresh ─► reference
                              reference ──▲

GRPO: Shao et al. 2024, arXiv 2402.03300; the reset of the reference: ProRL, Liu et al. 2025, arXiv 2505.24864. Left
out: ProRL's reset of the optimizer, and its other parts.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Average, Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.ema import refresh
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def moving_reference(
    policy: Policy,
    reference: Average,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    kl: float = 0.1,
    every: int = 10,
    lr: float = 1e-4,
) -> dict[str, Policy]:
    """Group-relative policy optimisation, close to the policy of some updates ago.

    Args:
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        kl: weight of the divergence from the reference.
        every: updates between two resets of the reference.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards, normalize=True)
    stay_close = reference_logprobs.per_update.on("trainer")(reference, rollouts)
    learnt = policy_update(policy, rollouts, advantage, stay_close, loss=ppo, average="sequence_mean", kl=kl, lr=lr)
    return {"policy": learnt, "reference": refresh.every(every)(reference, learnt)}
