"""Online DPO (Guo et al. 2024, arXiv 2402.04792): the policy samples, a judge ranks, and DPO learns from the pair.

    prompts ─► generate ─► score ───────────────┐
       policy ───▲  └────► reference_logprobs ─► dpo_update ─► policy

Left out: a language model as the judge (here the rule of `score` ranks), and a correction for stale samples: the loss
compares two responses of any policy. Of more than two samples the best and the worst make the pair.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts, Reference
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def online_dpo(
    policy: Policy,
    reference: Reference,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    beta: float = 0.1,
    lr: float = 1e-4,
) -> dict[str, Policy]:
    """Direct preference optimisation on pairs that the policy has just sampled (arXiv 2402.04792, algorithm 1).

    Args:
        samples: responses per prompt; the best and the worst are compared.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        beta: DPO's beta; larger values keep the policy closer to the initial one.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    stay_close = reference_logprobs(reference, rollouts)
    learnt = dpo_update(policy, rollouts, rewards, stay_close, beta=beta, lr=lr)
    return {"policy": learnt, "reference": reference}
