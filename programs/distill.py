"""On-policy distillation (Thinking Machines Lab 2025; GKD, Agarwal et al. 2023, arXiv 2306.13649): the student samples,
and the teacher computes the log-probability of each token.

    prompts ─► generate ─► reference_logprobs ─► distillation_advantage ─► policy_update ─► policy
       policy ───▲          teacher ──▲

With `full` both are in one pool, and the divergence is over the whole vocabulary:

    prompts ─► generate ─► distill_update ─► policy
       policy ───▲           ▲── teacher

Left out: mixing in texts by the teacher, and other divergences than KL(student ‖ teacher).
"""

from functools import partial
from pathlib import Path

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts, Teacher
from penstock.nodes.distill import distill_update, distillation_advantage, reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import distillation
from penstock.nodes.learn.update import policy_update
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def distill(
    policy: Policy,
    teacher: Teacher,
    prompts: Prompts,
    *,
    teacher_model: Path | None = None,
    samples: int = 8,
    lag: int = 0,
    rho: float = 4.0,
    full: bool = False,
    lr: float = 1e-4,
) -> dict[str, Policy]:
    """On-policy distillation by reverse KL to a teacher (Thinking Machines Lab 2025).

    Args:
        teacher_model: the teacher's directory; it must have the policy's tokenizer.
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        rho: upper bound of a token's importance ratio, for samples of older weights.
        full: compare whole distributions instead of sampled tokens.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    if full:
        return {"policy": distill_update(policy, teacher, rollouts, lr=lr), "teacher": teacher}
    advantage = distillation_advantage(rollouts, reference_logprobs.on("teacher")(teacher, rollouts))
    return {
        "policy": policy_update(policy, rollouts, advantage, loss=partial(distillation, rho=rho), lr=lr),
        "teacher": teacher,
    }
