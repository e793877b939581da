"""What a conversation was worth to its environment."""

import torch

from penstock.graph import node
from penstock.graph.types import Metrics, Replies, Rewards


@node(pool="scorer")
def outcome(replies: Replies) -> tuple[Rewards, Metrics]:
    """The rewards that the environment gave with its last replies. Raises ValueError if it gave none."""
    if replies.rewards_N is None:
        raise ValueError("outcome: given an environment that gives no rewards, needed one that does, or a scorer")
    values_N = torch.as_tensor(replies.rewards_N, dtype=torch.float32)
    return Rewards(values_N), {"reward_mean": float(values_N.mean())}
