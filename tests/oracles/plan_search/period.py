"""Seconds per update of a plan, and what bounds it: the largest of a few sums, by the argument of `graph.passes`. Pure.

A batch of groups counts as one firing of each node. With GPUs of its own each pool works beside the others, so that the
period is at least each pool's work; and from one version of the policy to the version that is trained on its samples
the sync, the batch's rollout (with its tail), the passes of models beside it and the steps follow each other, 1 + lag
updates at a time. Models that read groups as they are finished are behind the rollout by one group only. Pools on the
same GPUs take turns, whatever the lag is. What queueing between groups adds is left to the simulator.

At a lag of k, k other batches are decoded beside a batch. Reading the weights costs a step the same
whoever is in it; what rows and contexts cost, `others` seconds of each batch, comes on top for each. A batch follows
another one by an update's steps, t seconds or more, so that of each the share 1 - t / r falls into a rollout of r.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from penstock.graph.analysis import Bound
from penstock.runtime.plan.roles import Roles

Seconds = Any
"""A number, or an array of them: of as many plans at once."""


@dataclass(frozen=True)
class Times:
    """Seconds of a batch, or lower bounds of them. `train` has the work of models beside the policy in it if they are
    on the trainer's GPUs; `apart` are the passes of each group of pools that has its own, and the steps of its critics,
    which nobody waits for but the next batch. `wait` is what an environment takes to answer all turns. `steady` and
    `rollout` are as in `ways.Generating`; `switch` is of the GPUs that both stages share. `others` is what another
    batch in work beside one adds to its rollout, if it is there from start to end.
    """

    train: Seconds
    steady: Seconds
    rollout: Seconds
    sync: Seconds = 0.0
    switch: Seconds = 0.0
    apart: tuple[tuple[Seconds, Seconds], ...] = ()
    others: Seconds = 0.0
    wait: Seconds = 0.0

    @property
    def read(self) -> Seconds:
        """Passes follow the rollout, those of several groups beside each other."""
        return reduce(np.maximum, (read for read, _ in self.apart), 0.0)

    @property
    def learn(self) -> Seconds:
        return reduce(np.maximum, (learn for _, learn in self.apart), 0.0)


def bounds(
    roles: Roles, times: Times, lag: int, prompts: int, pools: Sequence[Sequence[str]] = (), *, shared: bool
) -> tuple[Bound, ...]:
    """All that bounds the period, the largest first. `pools` are those of each group that is apart."""
    total = float(_around(roles, times, prompts))
    if shared:
        seconds = float(total + times.train + times.learn)
        return (Bound(seconds, pool=f"{roles.trainer} and {roles.generator}, which share GPUs"),)
    found = [
        Bound(float(total + _trained(times, lag)) / (1 + lag), roles.cycle, 1 + lag),
        Bound(times.train, pool=roles.trainer),
        Bound(times.steady, pool=roles.generator),
        Bound(times.sync, roles.cycle[1:2]),
    ]
    groups = zip(pools, times.apart, strict=True)
    found += [Bound(read + learn, pool=", ".join(names)) for names, (read, learn) in groups]
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def period(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> float:
    """That of `bounds`."""
    return float(_largest(roles, times, lag, prompts, _trained(times, lag), shared))


def least_period(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> Seconds:
    """What the period does not go below whichever of the times are longer than given. It grows with each of them but
    for the steps: slower ones may keep batches apart."""
    if shared:
        return _largest(roles, times, lag, prompts, 0.0, shared)
    # Linear in the steps until they take as long as the rollout: the least is at an end.
    slowest = _trained(replace(times, train=np.maximum(times.train, times.rollout)), lag)
    return _largest(roles, times, lag, prompts, np.minimum(_trained(times, lag), slowest), shared)


def alone_s(roles: Roles, times: Times, lag: int, prompts: int, *, shared: bool) -> float:
    """The bound of `graph.passes` for a rollout of so many seconds: per update if no batch slowed another one."""
    return period(roles, replace(times, others=0.0), lag, prompts, shared=shared)


def _around(roles: Roles, times: Times, prompts: int) -> Seconds:
    """Seconds from one version to the next one but for the steps and other batches."""
    generates = times.rollout
    if times.apart and roles.reads_groups:
        generates = np.maximum(times.rollout, times.read) + times.read / prompts
    elif times.apart:
        generates = generates + times.read
    return times.sync + times.switch + times.wait + generates


def _trained(times: Times, lag: int) -> Seconds:
    """The steps, and what the other batches in work add to a rollout."""
    some = times.rollout > 0
    overlap = np.maximum(0.0, 1 - times.train / np.where(some, times.rollout, 1.0))
    return times.train + lag * times.others * some * overlap


def _largest(roles: Roles, times: Times, lag: int, prompts: int, trained: Seconds, shared: bool) -> Seconds:
    total = _around(roles, times, prompts)
    if shared:
        return total + times.train + times.learn
    most = np.maximum(np.maximum((total + trained) / (1 + lag), times.train), np.maximum(times.steady, times.sync))
    for read, learn in times.apart:
        most = np.maximum(most, read + learn)
    return most
