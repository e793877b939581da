"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300), synchronous: group-relative advantages and PPO's clip.

With `kl` above 0 a frozen copy of the first policy joins the graph, and the divergence from it is a penalty.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts, Reference
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import grpo_update, reference_logprobs
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
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
) -> dict[str, Policy]:
    """Group-relative policy optimisation (DeepSeekMath, section 4.1).

    Args:
        samples: responses per prompt; their rewards' mean and deviation make the advantages.
        lag: updates that the generator's weights may be old; 0 is synchronous.
        clip: bound of the policy's ratio around 1, PPO's epsilon.
        kl: weight of the divergence from the frozen first policy; 0 leaves that policy out.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards, normalize=True)
    stay_close = reference_logprobs(reference, rollouts) if kl else None
    learnt = grpo_update(policy, rollouts, advantage, stay_close, clip=clip, kl=kl, lr=lr)
    return {"policy": learnt, "reference": reference}
