"""AIPO, the algorithm of LlamaRL (Wu et al. 2025, arXiv 2505.24034, section 6).

    prompts → generate → score → group_advantage → aipo_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

The generator samples with weights that may be `lag` updates old while the trainer learns from earlier samples. Each
token's gradient is weighted by its importance ratio π / μ, bounded from above by `rho`. Left out: nothing.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def aipo(
    policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, rho: float = 4.0, lr: float = 1e-4
) -> Policy:
    """Asynchronous importance-weighted policy optimisation (LlamaRL, section 6).

    Args:
        samples: responses per prompt; their mean reward is the baseline.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        rho: upper bound of a token's importance ratio; 2 to 10 work well.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)  # the generator's copy, at most `lag` updates old
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards)
    return aipo_update(policy, rollouts, advantage, rho=rho, lr=lr)  # the next policy
