"""Seconds per update of a plan, and what bounds it: the largest of a few sums, by the argument of `graph.passes`. Pure.

A batch of groups counts as one firing of each node. With GPUs of its own each pool works beside the others, so that the
period is at least each pool's work; and from one version of the policy to the version that is trained on its samples
the sync, the batch's rollout (with its tail), the frozen model's pass and the steps follow each other, 1 + lag updates
at a time. A frozen model that reads groups as they are finished is behind the rollout by one group only. Pools on the
same GPUs take turns, whatever the lag is. What queueing between groups adds is left to the simulator.
"""

from dataclasses import dataclass

from penstock.graph.passes import Bound
from penstock.runtime.plan.roles import Roles


@dataclass(frozen=True)
class Times:
    """Seconds of a batch, or lower bounds of them. `train` has the frozen model's pass in it if that is on the
    trainer's GPUs; `read` is of that pass on GPUs of its own. `steady` and `rollout` are as in `sides.Generating`;
    `switch` is of the GPUs that both stages share."""

    train: float
    steady: float
    rollout: float
    sync: float = 0.0
    switch: float = 0.0
    read: float = 0.0


def bounds(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> tuple[Bound, ...]:
    """All that bounds the period, the largest first. Each grows with each of the times."""
    generates = times.rollout
    if times.read and roles.reads_groups:
        generates = max(times.rollout, times.read) + times.read / prompts
    elif times.read:
        generates += times.read
    total = times.sync + times.switch + generates + times.train
    if shared:
        return (Bound(total, pool=f"{roles.trainer} and {roles.generator}, which share GPUs"),)
    found = [
        Bound(total / (1 + lag), roles.cycle, 1 + lag),
        Bound(times.train, pool=roles.trainer),
        Bound(times.steady, pool=roles.generator),
        Bound(times.sync, roles.cycle[1:2]),
    ]
    if times.read:
        found.append(Bound(times.read, pool=roles.reader))
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def period(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> float:
    return bounds(roles, times, lag, prompts, shared=shared)[0].seconds
