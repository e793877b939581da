from penstock import Rewards, Rollouts, node


def teaches(rewards: Rewards) -> bool:
    """Equation 11: do the rewards of a group differ?"""
    return bool(rewards.values_N.min() < rewards.values_N.max())


@node(pool="scorer")
def overlong(rewards: Rewards, rollouts: Rollouts, *, longest: int, buffer: int) -> Rewards:
    """Equation 13: from `longest` − `buffer` tokens on a response pays, up to 1 at `longest` tokens."""
    beyond_N = rollouts.lengths() - (longest - buffer)
    return rewards - (beyond_N / buffer).clamp(0.0, 1.0)
