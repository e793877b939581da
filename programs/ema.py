"""AIPO with a moving average of the policy (Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
averaging"): the policy samples and learns, its average is evaluated and exported.

    prompts ─► generate ─► score ─► group_advantage ─► policy_update ─► policy
       policy ───▲                                          └─► ema ─► average

Left out: a decay that grows with the updates, and sampling with the average.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Average, Policy, Prompts
from penstock.nodes import ema as averages
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import accuracy, math_answer, score


@program
def evaluate_average(average: Average, prompts: Prompts) -> Average:
    """Greedy accuracy of the average on held-out problems."""
    rollouts = generate(prompts, broadcast(average), samples=1, temperature=0.0)
    accuracy(score(rollouts, by=math_answer))
    return average


@program(evaluation=evaluate_average)
def ema(
    policy: Policy,
    average: Average,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 1,
    decay: float = 0.9,
    rho: float = 4.0,
    lr: float = 1e-4,
) -> dict[str, Policy]:
    """Asynchronous importance-weighted policy optimisation, and the moving average of the policy.

    Args:
        samples: responses per prompt; their mean reward is the baseline.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        decay: share of the average that each update keeps.
        rho: upper bound of a token's importance ratio.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer))
    learnt = policy_update(policy, rollouts, advantage, loss=partial(aipo, rho=rho), lr=lr)
    return {"policy": learnt, "average": averages.ema(average, learnt, decay=decay)}
