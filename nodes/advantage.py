"""How much better a response is than what was to be expected: nodes that make advantages of rewards.

Those of one prompt group fire per group, those of a whole batch per update. Shapes: N responses.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.call import Call
from penstock.graph.types import Advantages, Rewards, Rollouts
from penstock.nodes.learn.advantages import (
    group_mean_advantages,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rloo_advantages,
)

OTHERS = "2 or more responses to a prompt, since they are each other's baseline (option samples)"


def several_samples(call: Call) -> None:
    """What comparing the rewards of one prompt with each other requires."""
    if call.clock == "group" and call.samples("rewards") == 1:
        raise call.lack("rewards of samples=1, one response to a prompt", OTHERS)


def one_greedy(call: Call) -> None:
    """What a baseline that is one response's reward requires."""
    if (samples := call.samples("greedy")) not in (None, 1):
        raise call.lack(f"greedy rewards of samples={samples}", "samples=1: one greedy response to each prompt")


By = Callable[[Rollouts], Sequence[object]]
"""What sub-group each row of rollouts is of: anything that equals itself, such as a text or a number."""


def named_rows(call: Call) -> None:
    """What sub-groups require: rollouts, of which they are told."""
    if call.options["by"] is not None and "rollouts" in call.left_out:
        raise call.lack("sub-groups of no rollouts", "the rollouts, as the input `rollouts`", "by")


@requires(several_samples, named_rows)
@node(pool="scorer")
def group_advantage(
    rewards: Rewards, rollouts: Rollouts | None = None, *, normalize: bool = False, by: By | None = None
) -> Advantages:
    """A = r − mean of the rewards of the same prompt's samples (LlamaRL, arXiv 2505.24034, section 6).

    That is Dr. GRPO's advantage too (arXiv 2503.20783). With `normalize` it is divided by the group's standard
    deviation, as in GRPO (arXiv 2402.03300, section 4.1.2); a group whose rewards are all equal has advantage 0 either
    way. Raises ValueError for a group of one, whose advantage is always 0.

    `by(rollouts)` names the sub-group of each row; then rows are compared with those of their sub-group only, and one
    that is alone in it has advantage 0.
    """
    values_N = _samples(rewards, "group_advantage")
    make = grpo_advantages if normalize else group_mean_advantages
    return Advantages(make(values_N, _groups(values_N, rollouts, by)))


@requires(several_samples, named_rows)
@node(pool="scorer")
def leave_one_out_advantage(rewards: Rewards, rollouts: Rollouts | None = None, *, by: By | None = None) -> Advantages:
    """A = r − mean of the rewards of the same prompt's other samples (RLOO, arXiv 2402.14740).

    With `by`, of the other samples of the same sub-group, as in `group_advantage`. Raises ValueError for a row alone.
    """
    values_N = _samples(rewards, "leave_one_out_advantage")
    return Advantages(rloo_advantages(values_N, _groups(values_N, rollouts, by)))


@node(pool="scorer")
def plain_advantage(rewards: Rewards, *, baseline: float = 0.0) -> Advantages:
    """A = r − b: the reward itself, less a constant (REINFORCE, Williams 1992)."""
    return Advantages(torch.as_tensor(rewards.values_N, dtype=torch.float32) - baseline)


@requires(one_greedy)
@node(pool="scorer")
def greedy_advantage(rewards: Rewards, greedy: Rewards) -> Advantages:
    """A = r − reward of the greedy response to the same prompt (ReMax, arXiv 2310.10505, section 4)."""
    if len(greedy.values_N) != 1:
        raise ValueError(f"greedy_advantage: given {len(greedy.values_N)} greedy responses to a prompt, needed one")
    values_N = torch.as_tensor(rewards.values_N, dtype=torch.float32)
    return Advantages(remax_advantages(values_N, torch.as_tensor(greedy.values_N), _one_group(values_N)))


@node(pool="scorer", clock="update")
def batch_normalized(advantage: Advantages) -> Advantages:
    """(A − mean) / standard deviation over the responses of a whole batch (REINFORCE++, arXiv 2501.03262).

    All are 0 where they do not differ.
    """
    return Advantages(reinforce_plus_plus_advantages(advantage.values_N))


def _samples(rewards: Rewards, name: str) -> Tensor:
    """The rewards of a group that can be compared with each other, float32 [N]."""
    values_N = torch.as_tensor(rewards.values_N, dtype=torch.float32)
    if len(values_N) < 2:
        raise ValueError(f"{name}: given {len(values_N)} sample for a prompt, needed {OTHERS}")
    return values_N


def _groups(values_N: Tensor, rollouts: Rollouts | None, by: By | None) -> Tensor:
    """Which rows are compared with each other, int64 [N]."""
    if by is None:
        return _one_group(values_N)
    if rollouts is None:
        raise ValueError("advantage: given sub-groups (by) of no rollouts, needed the input `rollouts`")
    names = list(by(rollouts))
    if len(names) != len(values_N):
        called = getattr(by, "__name__", repr(by))
        raise ValueError(
            f"by={called}: given {len(names)} names of sub-groups, needed {len(values_N)}, one for each row"
        )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _one_group(values_N: Tensor) -> Tensor:
    return torch.zeros(len(values_N), dtype=torch.long)
