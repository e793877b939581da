"""Why a replica is idle: the list of causes, and how they are derived from the scheduler's state. Pure.

There are two levels of detail. Rows of `metrics.jsonl`, displays and simulations know data, weights, start, saving,
done and absent. The report divides data, weights and start further, which takes a look at the groups that are ready:

data        an input is not made yet
straggler   all but the last tenth of a batch (or one group) is ready, or another rank of its replica is not done
admission   the groups that are ready are too far ahead: the weights that would admit them are not made yet
weights     these weights are made, and are not being sent
syncing     they are being published, sent or swapped in
start       its first weights are being sent, or are on the sender (not in the report)
starting    its process, or the run, has not started yet
saving      a checkpoint is being written
failed      its firing failed, so its work was of no use
rest        its pool has nothing due at this update, or nothing in this stage
done        the run has no group or update left for it
absent      it was lost, or has not joined yet
"""

from typing import NamedTuple

from penstock.runtime.schedule.admission import needed_version
from penstock.runtime.schedule.compile import NodeStep
from penstock.runtime.schedule.scheduler import Scheduler


class Cause(NamedTuple):
    """The name of a cause in the report's text, in the head of its column, and after a pool's name on a display; ""
    where it does not occur."""

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


class States:
    """The state of each replica after each event: "busy", or its cause of being idle.

    Most events concern one replica of a thousand. So besides the replicas that the scheduler has `touched`, only the
    state that all replicas of a pool share is looked at.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._order = {name: place for place, name in enumerate(scheduler.load)}
        self._shared: dict[str, str] = {}
        self._begun: list[bool] = []
        self._known: dict[str, str] = {}

    def changed(self) -> dict[str, str]:
        """The replicas whose state has changed since the last call, each with its state; at first all of them."""
        scheduler = self._scheduler
        touched, scheduler.touched = scheduler.touched, set()
        begun = [channel.begun for channel in scheduler.channels.values()]
        for pool, replicas in scheduler.tables.by_pool.items():
            shared = _of_pool(scheduler, pool)
            if begun != self._begun or self._shared.get(pool) != shared:
                self._shared[pool] = shared
                touched.update(replica.name for replica in replicas)
        self._begun = begun
        found = {}
        for name in sorted(touched, key=self._order.__getitem__):
            state = "busy" if scheduler.load[name] else cause(scheduler, name)
            if self._known.get(name) != state:
                self._known[name] = found[name] = state
        return found


def _of_pool(scheduler: Scheduler, pool: str) -> str:
    """Why the present replicas of a pool that have weights are idle: "data", "weights", "saving" or "done"."""
    if scheduler.finished or scheduler.update >= scheduler.rules.end:
        return "done"
    if scheduler.checkpoint is not None:
        return "saving"
    return "weights" if _ready(scheduler, pool) else "data"


def _ready(scheduler: Scheduler, pool: str) -> NodeStep | None:
    """A step that reads weights and has a group with all its other inputs; None if there is none."""
    for step in scheduler.tables.group_steps[pool]:
        if scheduler.ready[step.name] and (step.weights or step.fixed):
            return step
    return None


def cause(scheduler: Scheduler, replica: str, *, detailed: bool = False) -> str:
    """Why a replica without firings in work is idle: "data", "weights", "start", "saving", "done" or "absent".

    With `detailed`, "data", "weights" and "start" are divided further; "start" is then never returned.
    """
    if replica in scheduler.absent:
        return "absent"
    pool = scheduler.tables.pool_of[replica]
    shared = _of_pool(scheduler, pool)
    if shared in ("done", "saving"):
        return shared
    if not detailed:
        return "start" if any(one.expects_first(replica) for one in scheduler.channels.values()) else shared
    if ready := _ready(scheduler, pool):
        return _missing_weights(scheduler, ready, replica)
    group_steps = scheduler.tables.group_steps[pool]
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
    """Why the first group that is ready for a step does not start on `replica`."""
    group = scheduler.ready[step.name][0]
    # A lost group may still be in the queue; it needs no version.
    before = scheduler.place(group) if group in scheduler.ledger.groups else 0
    start = scheduler.rules.start
    needs = [(name, max(needed_version(before, lag, scheduler.rules.batch), start)) for name, lag in step.weights]
    for name, needed in [*needs, *((name, start) for name in step.fixed)]:
        channel, carried = scheduler.channels[name], scheduler.tables.channels[name].carried
        receiver = channel.receivers[replica]
        # A live version that is new enough may still be the wrong one for a pinned group, which may need an older one.
        if receiver.live >= needed and (name in step.fixed or not scheduler.pinned):
            continue
        if scheduler.version(carried) < needed:
            return "admission"
        moving = channel.publishing or receiver.sending or receiver.swapping or receiver.staged > receiver.live
        return "syncing" if moving else "weights"
    return "data"
