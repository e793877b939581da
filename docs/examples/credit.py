import torch

from penstock.graph import Policy, broadcast, node, program
from penstock.graph.types import Rollouts, TokenAdvantages, TurnRewards
from penstock.nodes.environments.environment import turn_rewards
from penstock.nodes.environments.guessing_game import Secrets, guessing_game
from penstock.nodes.generate import converse
from penstock.nodes.learn.batching import turn_of_tokens
from penstock.nodes.learn.update import aipo_update


@node(pool="scorer")
def to_come(rollouts: Rollouts, rewards: TurnRewards, *, discount: float = 0.9) -> TokenAdvantages:
    """What a turn's tokens are worth: the rewards from there on, less their mean over the rows that had such a turn."""
    worth_NK = rewards.values_NK.clone()
    for turn in range(worth_NK.shape[1] - 2, -1, -1):
        worth_NK[:, turn] += discount * worth_NK[:, turn + 1]
    had_NK = torch.arange(worth_NK.shape[1]) < rewards.turns_N[:, None]
    better_NK = worth_NK - (worth_NK * had_NK).sum(0) / had_NK.sum(0)
    turn_NT = turn_of_tokens(rollouts)
    return TokenAdvantages(better_NK.gather(1, turn_NT.clamp(min=0)).masked_fill(turn_NT < 0, 0.0))


@program
def credited(policy: Policy, prompts: Secrets, *, samples: int = 8, turns: int = 3, lag: int = 1) -> Policy:
    """AIPO on the guessing game, where a guess answers for what follows it, not for what was before."""
    words = {"higher": "+", "lower": "-", "unclear": ":"}
    behaviour = broadcast(policy, lag=lag)
    rollouts, replies = converse(prompts, behaviour, environment=guessing_game, turns=turns, samples=samples, **words)
    return aipo_update(policy, rollouts, to_come(rollouts, turn_rewards(rollouts, replies)))
