"""What is done with rewards before they become advantages: penalties, and which groups are worth learning from."""

from penstock.graph import node, requires
from penstock.graph.call import Call
from penstock.graph.types import Context, Rewards, Rollouts
from penstock.nodes.learn.advantages import overlong_penalty
from penstock.nodes.numbers import count


def mixed(rollouts: Rollouts, rewards: Rewards) -> bool:
    """Do the rewards of a group differ? Where they are all equal there is nothing to learn from.

    For `keep`: dynamic sampling of DAPO (arXiv 2503.14476), equation 11.
    """
    return bool((rewards.values_N != rewards.values_N[0]).any())


def buffer_fits(call: Call) -> None:
    """What a penalty on length requires: a buffer that ends at the longest length, and is no longer than that."""
    longest, buffer, said = call.options["max_length"], call.options["buffer"], "max_length="
    if longest is None and call.context is not None:
        longest, said = call.context.max_tokens, "--max-tokens "
    if type(longest) is int and type(buffer) is int and buffer > longest:
        raise call.lack(repr(buffer), f"at most {said}{longest}, where the buffer ends", "buffer")


@requires(count(1, "max_length", "buffer"), buffer_fits)
@node(pool="scorer")
def penalize_overlong(
    rewards: Rewards,
    rollouts: Rollouts,
    *,
    buffer: int,
    max_length: int | None = None,
    context: Context | None = None,
) -> Rewards:
    """Rewards less what a response's length costs: nothing up to `max_length` − `buffer` tokens, then up to 1.

    `max_length` None is the run's `max_tokens`, where responses are cut. Soft overlong punishment: DAPO
    (arXiv 2503.14476), equation 13. Raises ValueError without either, outside of a run.
    """
    longest = context.max_tokens if max_length is None and context is not None else max_length
    if longest is None:
        raise ValueError("penalize_overlong: given no max_length outside of a run, needed one")
    return rewards + overlong_penalty(rollouts.response_lengths_N, max_length=longest, buffer=buffer)
