"""Importance weights of tokens or of whole responses, truncated or masked (Liu et al. 2025, "When Speed Kills
Stability: Demystifying RL Collapse from the Training-Inference Mismatch", section 4.2).

    prompts → generate → score → group_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

Only the weight of a whole response, Π_t π / μ, makes the gradient unbiased; its variance grows with the length of the
response. A bound trades variance for bias: "truncate" replaces larger weights by the bound, "mask" by 0.
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
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        level: weights of single tokens or of whole responses.
        bound: what happens to a weight above the cap.
        cap: upper bound of a weight.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer))
    loss = partial(importance_weighted, level=level, bound=bound, cap=cap)
    return policy_update(policy, rollouts, advantage, loss=loss, average="constant", lr=lr)
