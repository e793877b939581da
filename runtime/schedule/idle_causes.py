"""Why a replica has nothing in work: the one list of causes, and how the scheduler's state tells them. Pure.

There are two grains. Rows of `metrics.jsonl`, displays and simulations count by data, weights, start, saving and done.
The report divides "data" and "weights" further, which takes a look at what is ready:

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
absent      it was lost, or has not come yet
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


# In the order of the report.
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
    "absent": Cause("not there", "not there", "is not there"),
}


def states_of(scheduler: Scheduler) -> dict[str, str]:
    """What each replica is at: "busy", or its cause of being idle."""
    return {name: "busy" if load else cause(scheduler, name) for name, load in scheduler.load.items()}


def cause(scheduler: Scheduler, replica: str, *, detailed: bool = False) -> str:
    """Why a replica without firings in work is idle: "data", "weights", "start", "saving", "done" or "absent".

    With `detailed`, "data" and "weights" are divided further, and "start" is one of the causes that they are divided
    into.
    """
    if replica in scheduler.absent:
        return "absent"
    if scheduler.finished or scheduler.update >= scheduler.rules.end:
        return "done"
    if scheduler.checkpoint is not None:
        return "saving"
    if not detailed and any(channel.expects_first(replica) for channel in scheduler.channels.values()):
        return "start"
    pool = scheduler.tables.pool_of[replica]
    group_steps = scheduler.tables.group_steps[pool]
    ready = next((s for s in group_steps if scheduler.ready[s.name] and (s.weights or s.fixed)), None)
    if not detailed:
        return "weights" if ready else "data"
    if ready:
        return _missing_weights(scheduler, ready, replica)
    waiting = [step for step in scheduler.tables.update_steps[pool] if not step.off_path]
    if not waiting and not any(not step.source for step in group_steps):
        return "rest"
    ledger, batch = scheduler.ledger, scheduler.rules.batch
    if waiting:
        takes = any(step.groups for step in waiting) and not scheduler.whole
        return "straggler" if takes and ledger.finished >= batch - max(1, batch // 10) else "data"
    to_come = ledger.before(ledger.next) < scheduler.total
    made = all(step.source or step.name in group.made for group in ledger.groups.values() for step in group_steps)
    return "done" if made and not to_come else "data"


def _missing_weights(scheduler: Scheduler, step: NodeStep, replica: str) -> str:
    """What the first group that is ready for a step waits for."""
    group = scheduler.ready[step.name][0]
    # A group that was lost meanwhile may still be in the queue; it needs no version.
    before = scheduler.place(group) if group in scheduler.ledger.groups else 0
    start = scheduler.rules.start
    needs = [(name, max(needed_version(before, lag, scheduler.rules.batch), start)) for name, lag in step.weights]
    for name, needed in [*needs, *((name, start) for name in step.fixed)]:
        channel, carried = scheduler.channels[name], scheduler.tables.channels[name].carried
        receiver = channel.receivers[replica]
        # A pinned group may need an older version than the live one.
        if receiver.live >= needed and (name in step.fixed or not scheduler.pinned):
            continue
        if scheduler.version(carried) < needed:
            return "admission"
        moving = channel.publishing or receiver.sending or receiver.swapping or receiver.staged > receiver.live
        return "syncing" if moving else "weights"
    return "data"
