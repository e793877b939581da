"""A game of turns: the policy guesses a number and is told "+" (higher) or "-" (lower), a few times.

    secrets → generate ⇄ guessing_game → outcome → group_advantage → aipo_update → policy
      policy ⇢ generate: weights, at most `lag` updates old

AIPO (Wu et al. 2025, arXiv 2505.24034). Left out: rewards for single turns, and a discount.
It needs no model to start from: each turn is one token, so an untrained policy guesses right now and then. It learns to
guess numbers, then not to repeat them, then to follow the direction of the reply.
"""

from penstock.graph import broadcast, program
from penstock.graph.types import Policy
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.environment import outcome
from penstock.nodes.environments.guessing_game import Secrets, guessing_game
from penstock.nodes.generate import converse
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import accuracy

WORDS = {"higher": "+", "lower": "-", "unclear": ":"}


@program
def play(policy: Policy, prompts: Secrets, *, turns: int = 3) -> Policy:
    """How often the policy guesses right, playing greedily."""
    behaviour = broadcast(policy)
    _, replies = converse(
        prompts, behaviour, environment=guessing_game, turns=turns, samples=1, temperature=0.0, **WORDS
    )
    accuracy(outcome(replies))
    return policy


@program(evaluation=play, defaults={"model": "new", "max_tokens": 1, "batch": 16, "updates": 150})
def guessing(
    policy: Policy,
    prompts: Secrets,
    *,
    samples: int = 16,
    turns: int = 3,
    lag: int = 1,
    rho: float = 4.0,
    lr: float = 1e-3,
) -> Policy:
    """AIPO (arXiv 2505.24034, section 6) on conversations: only the policy's own tokens are learnt from.

    Args:
        samples: games per secret; their mean reward is the baseline.
        turns: guesses per game.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        rho: upper bound of a token's importance ratio.
        lr: learning rate of AdamW.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts, replies = converse(prompts, behaviour, environment=guessing_game, turns=turns, samples=samples, **WORDS)
    rewards = outcome(replies)
    advantage = group_advantage(rewards)
    return aipo_update(policy, rollouts, advantage, rho=rho, lr=lr)
