"""What a conversation was worth to its environment."""

import torch

from penstock.graph import node
from penstock.graph.types import Metrics, Replies, Rewards, Rollouts, TurnRewards


@node(pool="scorer")
def outcome(replies: Replies) -> tuple[Rewards, Metrics]:
    """The rewards that the environment gave with its last replies. Raises ValueError if it gave none."""
    if replies.rewards_N is None:
        raise ValueError("outcome: given an environment that gives no rewards, needed one that does, or a scorer")
    values_N = torch.as_tensor(replies.rewards_N, dtype=torch.float32)
    return Rewards(values_N), {"reward_mean": float(values_N.mean())}


@node(pool="scorer")
def turn_rewards(rollouts: Rollouts, replies: Replies) -> TurnRewards:
    """What the environment gave after each turn of the model, with both outputs of `converse`: not only its last word.

    A row that is done gets nothing more, whatever is said of it at the others' later turns. Raises ValueError for an
    environment that gave no reward at some turn.
    """
    rewards, turns = rollouts.rewarded(replies), rollouts.turns()
    for row, given in enumerate(rewards):
        if None in given:
            where = f"turn_rewards, group {rollouts.ordinals[row]}, row {row}"
            raise ValueError(f"{where}: given no reward for turn {given.index(None)}, needed one for each turn")
    values_NK = torch.zeros(len(rewards), max(turns))
    for row, given in enumerate(rewards):
        values_NK[row, : len(given)] = torch.tensor(given)
    return TurnRewards(values_NK, torch.tensor(turns))
