"""AIPO with a curriculum: prompts of the kind whose rewards varied most in earlier updates.

    candidates ─► choose ─► generate ─► score ─► group_advantage ─► policy_update ─► policy
       varied (delayed) ┘      ▲ policy   └─► remember ─► varied

After "Prioritized Level Replay" (Jiang et al. 2021, arXiv 2010.03934), with the variance of a group's rewards in place
of the value loss. Left out: replay of prompts that were seen before, and staleness-aware sampling.
"""

from functools import partial

from penstock.graph import broadcast, delay, program
from penstock.graph.types import Policy
from penstock.nodes.advantage import group_advantage
from penstock.nodes.curriculum import Candidates, Varied, choose, remember
from penstock.nodes.evaluate import measure
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def curriculum(
    policy: Policy,
    varied: Varied,
    candidates_of_group: Candidates,
    *,
    samples: int = 8,
    candidates: int = 4,
    lag: int = 1,
    look: int = 10,
    rho: float = 4.0,
    lr: float = 1e-4,
) -> dict[str, object]:
    """Prompts whose rewards vary come first; every `look` updates the policy is measured beside the training.

    Args:
        samples: responses per prompt; their mean reward is the baseline.
        candidates: prompts from which each group's prompt is chosen.
        lag: how many updates old the generator's weights, and the rewards behind a choice, may be.
        look: updates between two measurements on held-out problems.
        rho: upper bound of a token's importance ratio.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    prompts = choose(candidates_of_group, delay(varied, lag=lag))
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = score(rollouts, by=math_answer)
    learnt = policy_update(policy, rollouts, group_advantage(rewards), loss=partial(aipo, rho=rho), lr=lr)
    measure.every(look)(broadcast(policy))
    return {"policy": learnt, "varied": remember(varied, prompts, rewards)}
