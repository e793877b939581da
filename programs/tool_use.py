"""Conversations with a Python tool: the policy may call it, reads its output, and is rewarded for the final answer.

    prompts → generate ⇄ python_tool → score → group_advantage → aipo_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

AIPO (Wu et al. 2025, arXiv 2505.24034) on turns as in ReTool (Feng et al. 2025, arXiv 2504.11536), which masks the
tool's output from the loss, too. Left out: ReTool's PPO with a critic, and state that lives from call to call.

The base is made first, by `penstock run tool_sft`: the policy in that run's last checkpoint is this one's `--model`. It
seldom calls, and half of what it reckons in its head is wrong; what is learnt here is to call.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy
from penstock.nodes.advantage import group_advantage
from penstock.nodes.calculator import Calculations
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.generate.converse import converse
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import accuracy, math_answer, score


@program
def calculate(policy: Policy, prompts: Calculations, *, turns: int = 3, max_prompt: int = 96) -> Policy:
    """The share of held-out problems that the policy solves greedily, with the tool at hand."""
    behaviour = broadcast(policy)
    rollouts, _ = converse(prompts, behaviour, environment=python_tool, turns=turns, samples=1, temperature=0.0)
    accuracy(score(rollouts, by=math_answer))
    return policy


@program(evaluation=calculate, defaults={"data": "calculator", "updates": 40, "batch": 16, "max_tokens": 24})
def tool_use(
    policy: Policy,
    prompts: Calculations,
    *,
    samples: int = 8,
    turns: int = 3,
    max_prompt: int = 96,
    lag: int = 1,
    rho: float = 4.0,
    lr: float = 3e-4,
) -> Policy:
    """AIPO (arXiv 2505.24034, section 6) on conversations; the tool's output is context and never learnt from.

    Args:
        samples: conversations per prompt; their mean reward is the baseline.
        turns: turns of the policy in a conversation, the answer included.
        max_prompt: tokens that a conversation may have before its last turn; one that has more ends.
        lag: updates that the generator's weights may be old; 0 is synchronous.
        rho: upper bound of a token's importance ratio.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts, _ = converse(prompts, behaviour, environment=python_tool, samples=samples, turns=turns)
    rewards = score(rollouts, by=math_answer)  # of the last turn alone: what the tool has said earns nothing
    advantage = group_advantage(rewards)
    return aipo_update(policy, rollouts, advantage, rho=rho, lr=lr)
