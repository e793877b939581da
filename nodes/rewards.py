"""What is done with rewards before they become advantages: penalties, and which groups are worth learning from."""

from penstock.graph import node
from penstock.graph.types import Rewards, Rollouts
from penstock.nodes.learn.advantages import overlong_penalty


def mixed(rollouts: Rollouts, rewards: Rewards) -> bool:
    """Do the rewards of a group differ? Where they are all equal there is nothing to learn from.

    For `keep`: dynamic sampling of DAPO (arXiv 2503.14476), equation 11.
    """
    return bool((rewards.values_N != rewards.values_N[0]).any())


@node(pool="scorer")
def penalize_overlong(rewards: Rewards, rollouts: Rollouts, *, max_length: int, buffer: int) -> Rewards:
    """Rewards less what a response's length costs: nothing up to `max_length` − `buffer` tokens, then up to 1.

    Soft overlong punishment: DAPO (arXiv 2503.14476), equation 13.
    """
    return rewards + overlong_penalty(rollouts.response_lengths_N, max_length=max_length, buffer=buffer)
