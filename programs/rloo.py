"""RLOO (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740): REINFORCE with a leave-one-out baseline.

    prompts → generate → score → leave_one_out_advantage → policy_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

Left out: the penalty on divergence from a reference, which the paper subtracts from the reward (grpo has one in the
loss).
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import leave_one_out_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import reinforce
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def rloo(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 0, lr: float = 1e-4) -> Policy:
    """REINFORCE leave-one-out: each response's baseline is the mean reward of the prompt's other responses.

    Args:
        samples: responses per prompt, at least 2.
        lag: how many updates old the generator's weights may be; nothing corrects for them.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = leave_one_out_advantage(rewards)
    return policy_update(policy, rollouts, advantage, loss=reinforce, average="constant", lr=lr)
