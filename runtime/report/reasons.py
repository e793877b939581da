"""Why a rank has nothing in work, as one word for each cause. Pure: it reads the scheduler's state.

data        what it reads is not made yet
straggler   a batch is ready but for its last tenth (or one group), or another rank of its replica is not done
admission   the groups that are ready are too far ahead: the weights that would admit them are not made yet
weights     those weights are made, and are not on their way
syncing     they are on their way: snapshot, wire or swap
saving      a checkpoint is being written
rest        its pool has nothing due at this update, or nothing in this stage
done        the run has no group or update left for it
"""

from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.tables import Step

CAUSES = {
    "data": "waiting for data",
    "straggler": "waiting for a straggler",
    "admission": "waiting for the admission bound",
    "weights": "waiting for weights",
    "syncing": "syncing weights",
    "starting": "starting processes",
    "saving": "saving a checkpoint",
    "failed": "work that failed",
    "rest": "nothing due",
    "done": "nothing left to do",
}
"""The causes of being idle, in the order of the report, with their names."""


def reason(scheduler: Scheduler, replica: str, finished: int) -> str:
    """Why a replica without work is idle. `finished` is the number of groups that lie ready for the next update."""
    if scheduler.finished or scheduler.update >= scheduler.rules.end:
        return "done"
    if scheduler.cutting is not None:
        return "saving"
    pool = scheduler.tables.pool_of[replica]
    group_steps, update_steps = scheduler.tables.group_steps[pool], scheduler.tables.update_steps[pool]
    for step in group_steps:
        if scheduler.ready[step.name] and (step.weights or step.fixed):
            return _weights(scheduler, step, replica)
    waiting = [step for step in update_steps if not step.trails]
    if not waiting and not any(not step.source for step in group_steps):
        return "rest"
    if waiting:
        batch = scheduler.rules.batch
        takes = any(step.groups for step in waiting) and scheduler.batch is None
        return "straggler" if takes and finished >= batch - max(1, batch // 10) else "data"
    return "done" if _all_made(scheduler, group_steps) else "data"


def _all_made(scheduler: Scheduler, steps: tuple[Step, ...]) -> bool:
    """Have all groups of the run been through these steps?"""
    ledger = scheduler.ledger
    if ledger.before(ledger.next) < scheduler.total:
        return False
    return all(step.source or step.name in group.made for group in ledger.groups.values() for step in steps)


def _weights(scheduler: Scheduler, step: Step, replica: str) -> str:
    """Which of the ways in which weights can be missing it is, for the first group that is ready."""
    group = scheduler.ready[step.name][0]
    before = scheduler.ledger.before(group) if group in scheduler.ledger.groups else 0
    for channel, lag in step.weights:
        way, carried = scheduler.ways[channel], scheduler.tables.channels[channel].carried
        needed = max(before // scheduler.rules.batch - lag, scheduler.rules.start)
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
