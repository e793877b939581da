"""Importance weights of tokens or of whole responses, truncated or masked (Liu et al. 2025, "When Speed Kills
Stability: Demystifying RL Collapse from the Training-Inference Mismatch", section 4.2).

    prompts → generate → score → group_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

Only the weight of a whole response, Π_t π / μ, makes the gradient unbiased; it varies more the longer the response is.
A bound trades that for bias: "truncate" keeps what is above it with the bound as its weight, "mask" throws it out.
Left out: the geometric mean of a response's ratios as a rule for masking.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import Bound, Level, importance_weighted
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def sequence_weighting(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 2,
    level: Level = "sequence",
    bound: Bound = "truncate",
    cap: float = 2.0,
    lr: float = 1e-4,
) -> Policy:
    """REINFORCE on stale samples, reweighted.

    Args:
        samples: responses per prompt; their mean reward is the baseline.
        lag: updates that the generator's weights may be old; 0 is synchronous.
        level: whose weight it is, the token's or its response's.
        bound: what becomes of a weight above the cap.
        cap: upper bound of a weight.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer))
    loss = partial(importance_weighted, level=level, bound=bound, cap=cap)
    return policy_update(policy, rollouts, advantage, loss=loss, average="constant", lr=lr)
