"""ReMax (Li et al. 2023, arXiv 2310.10505): REINFORCE whose baseline is the reward of the greedy response.

    prompts ┬→ generate → score ──────────┬→ greedy_advantage → policy_update → policy
            └→ generate, greedy → score_2 ┘
      policy ⇢ both: weights, at most `lag` updates old

Left out: the penalty on divergence from a reference, which the paper subtracts from the reward.
`reward_mean` is that of the sampled responses; the greedy ones' is `score_2.reward_mean`.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import greedy_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import reinforce
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"updates": 150})
def remax(policy: Policy, prompts: Prompts, *, samples: int = 4, lag: int = 0, lr: float = 1e-4) -> Policy:
    """ReMax: a response's advantage is its reward minus that of the greedy response (section 4).

    Args:
        samples: responses per prompt beside the greedy one; the paper has 1.
        lag: how many updates old the generator's weights may be; nothing corrects for them.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    greedy = generate(prompts, behaviour, samples=1, temperature=0.0)
    rewards = score(rollouts, by=math_answer)
    advantage = greedy_advantage(rewards, score(greedy, by=math_answer))
    return policy_update(policy, rollouts, advantage, loss=reinforce, average="constant", lr=lr)
