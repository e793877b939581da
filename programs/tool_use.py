"""Conversations with a Python tool: the policy may call it, reads its output, and is rewarded for the final answer.

    prompts → generate ⇄ python_tool → score → group_advantage → aipo_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

AIPO (Wu et al. 2025, arXiv 2505.24034) on turns as in ReTool (Feng et al. 2025, arXiv 2504.11536), which keeps the
tool's output out of the loss. Left out: ReTool's PPO with a critic, and state that persists between calls.
"""

from penstock.graph import Policy, broadcast, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.data import Calculations
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.generate import converse
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import accuracy, math_answer, score

# A conversation ends if it has more than `max_prompt` tokens before another turn.
DEFAULTS = {"data": "calculator", "updates": 40, "batch": 16, "max_tokens": 24, "max_prompt": 96}


@program
def calculate(policy: Policy, prompts: Calculations, *, turns: int = 3, sandbox: bool = True) -> Policy:
    """The share of held-out problems that the policy solves greedily, with the tool."""
    rollouts, _ = converse(
        prompts, broadcast(policy), environment=python_tool, turns=turns, samples=1, temperature=0.0, sandbox=sandbox
    )
    accuracy(score(rollouts, by=math_answer))
    return policy


@program(evaluation=calculate, defaults=DEFAULTS)
def tool_use(
    policy: Policy,
    prompts: Calculations,
    *,
    samples: int = 8,
    turns: int = 3,
    lag: int = 1,
    rho: float = 4.0,
    lr: float = 3e-4,
    sandbox: bool = True,
) -> Policy:
    """AIPO (arXiv 2505.24034, section 6) on conversations; the tool's output is only context.

    Its `--model` is the policy of `penstock run tool_sft`: `checkpoints/00000800/policy` in that run's folder.

    Args:
        samples: conversations per prompt; their mean reward is the baseline.
        turns: turns of the policy in a conversation, the answer included.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        rho: upper bound of a token's importance ratio.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
        sandbox: isolate the model's code by bubblewrap; without, it runs with your rights.
    """
    rollouts, _ = converse(
        prompts, broadcast(policy, lag=lag), environment=python_tool, samples=samples, turns=turns, sandbox=sandbox
    )
    advantage = group_advantage(score(rollouts, by=math_answer))  # scores the last turn, not the tool's output
    return aipo_update(policy, rollouts, advantage, rho=rho, lr=lr)
