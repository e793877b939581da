"""Why a replica has nothing in work: the one list of causes, and how the scheduler's state tells them. Pure.

There are two grains. Rows of `metrics.jsonl`, displays and simulations count by `cause`: data, weights, start, saving
and done. The report divides "data" and "weights" further (`detailed_cause`), which takes a look at what is ready:

data        what it reads is not made yet
straggler   a batch is ready but for its last tenth (or one group), or another rank of its replica is not done
admission   the groups that are ready are too far ahead: the weights that would admit them are not made yet
weights     those weights are made, and are not on their way
syncing     they are on their way: snapshot, wire or swap
start       the first weights that it will ever have are on their way, or on the sender
starting    its process, or the run, is not up yet
saving      a checkpoint is being written
failed      what it did failed, so was of no use
rest        its pool has nothing due at this update, or nothing in this stage
done        the run has no group or update left for it
"""

from typing import NamedTuple

from penstock.runtime.schedule.admission import needed_version
from penstock.runtime.schedule.compile import NodeStep
from penstock.runtime.schedule.scheduler import Scheduler


class Cause(NamedTuple):
    """How a cause is called in the report, at the head of a column of it, and of a pool that a display shows; "" where
    it does not come up."""

    title: str
    column: str = ""
    display: str = ""


CAUSES = {
    "data": Cause("waiting for data", "data", "waits for data"),
    "straggler": Cause("waiting for a straggler", "straggler"),
    "admission": Cause("waiting for the admission bound", "admission bound"),
    "weights": Cause("waiting for weights", "weights", "waits for weights"),
    "start": Cause("", "", "waits for its first weights"),
    "syncing": Cause("syncing weights", "syncing"),
    "starting": Cause("starting processes", "starting"),
    "saving": Cause("saving a checkpoint", "saving", "waits for the checkpoint"),
    "failed": Cause("work that failed", "failed"),
    "rest": Cause("nothing due", "nothing due"),
    "done": Cause("nothing left to do", "nothing left", "has nothing left to do"),
}
"""In the order of the report."""


def cause(scheduler: Scheduler, replica: str) -> str:
    """Why a replica without firings in work is idle: "data", "weights", "start", "saving" or "done"."""
    if over := _over(scheduler):
        return over
    if any(way.expects_first(replica) for way in scheduler.ways.values()):
        return "start"
    return "weights" if _ready(scheduler, replica) else "data"


def detailed_cause(scheduler: Scheduler, replica: str) -> str:
    """The same for a report, but for "start", which is one of the other causes there."""
    if over := _over(scheduler):
        return over
    if step := _ready(scheduler, replica):
        return _missing_weights(scheduler, step, replica)
    pool = scheduler.tables.pool_of[replica]
    group_steps, update_steps = scheduler.tables.group_steps[pool], scheduler.tables.update_steps[pool]
    waiting = [step for step in update_steps if not step.trails]
    if not waiting and not any(not step.source for step in group_steps):
        return "rest"
    if waiting:
        batch = scheduler.rules.batch
        takes = any(step.groups for step in waiting) and scheduler.batch is None
        return "straggler" if takes and scheduler.ledger.finished >= batch - max(1, batch // 10) else "data"
    return "done" if _all_made(scheduler, group_steps) else "data"


def _over(scheduler: Scheduler) -> str:
    """The cause that all replicas have once nothing more is begun; "" before that."""
    if scheduler.finished or scheduler.update >= scheduler.rules.end:
        return "done"
    return "saving" if scheduler.cutting is not None else ""


def _ready(scheduler: Scheduler, replica: str) -> NodeStep | None:
    """The first step of a replica's pool that reads weights and has groups ready; None if there is none."""
    steps = scheduler.tables.group_steps[scheduler.tables.pool_of[replica]]
    return next((s for s in steps if scheduler.ready[s.name] and (s.weights or s.fixed)), None)


def _all_made(scheduler: Scheduler, steps: tuple[NodeStep, ...]) -> bool:
    """Have all groups of the run been through these steps?"""
    ledger = scheduler.ledger
    if ledger.before(ledger.next) < scheduler.total:
        return False
    return all(step.source or step.name in group.made for group in ledger.groups.values() for step in steps)


def _missing_weights(scheduler: Scheduler, step: NodeStep, replica: str) -> str:
    """What the first group that is ready for a step waits for."""
    group = scheduler.ready[step.name][0]
    before = scheduler.ledger.before(group) if group in scheduler.ledger.groups else 0
    for channel, lag in step.weights:
        way, carried = scheduler.ways[channel], scheduler.tables.channels[channel].carried
        needed = max(needed_version(before, lag, scheduler.rules.batch), scheduler.rules.start)
        receiver = way.receivers[replica]
        if receiver.live >= needed and not scheduler.pinned:
            continue
        if scheduler.version(carried) < needed:
            return "admission"
        moving = way.publishing or receiver.sending or receiver.swapping or receiver.shadow > receiver.live
        return "syncing" if moving else "weights"
    for channel in step.fixed:
        way = scheduler.ways[channel]
        if way.receivers[replica].live < scheduler.rules.start:
            return "syncing" if way.publishing or way.receivers[replica].sending else "weights"
    return "data"
