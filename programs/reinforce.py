"""REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms", Machine Learning 8).

    prompts → generate → score → plain_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

A response is an episode, its tokens are the actions, and its reward comes at the end. Left out: rewards within an
episode, and a learnt baseline (see ppo); other responses to the same prompt are a better baseline (see rloo).
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import plain_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import reinforce as loss
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def reinforce(
    policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 0, baseline: float = 0.0, lr: float = 1e-4
) -> Policy:
    """REINFORCE: Σ_t ∇ log π(y_t) · (r − b), averaged over responses.

    The loss is also divided by --max-tokens. Steps of AdamW do not depend on such a factor.

    Args:
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be; nothing corrects for them.
        baseline: a constant that is subtracted from each reward.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = plain_advantage(rewards, baseline=baseline)
    return policy_update(policy, rollouts, advantage, loss=loss, average="constant", lr=lr)
