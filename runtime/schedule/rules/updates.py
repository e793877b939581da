"""Per-update firings: when the batch is complete, and when a step of the current update may start."""

from penstock.graph.ir import Firing
from penstock.runtime.schedule.state import State
from penstock.runtime.schedule.tables import Step


def assemble(state: State) -> bool:
    """Take the batch of the current update when its groups are finished; true if that made it complete."""
    if not state.tables.takes_groups or state.batch is not None or state.update >= state.rules.end:
        return False
    state.batch = state.ledger.take(state.rules.batch)
    return state.batch is not None


def start_updates(state: State, steps: tuple[Step, ...]) -> None:
    """Start the steps of the current update whose inputs are there, once its batch is complete: an update that has
    begun can always be finished. While a cut is due, none begins."""
    if state.update >= state.rules.end or (state.tables.takes_groups and state.batch is None):
        return
    if state.cutting is not None and not state.begun():
        return
    for step in steps:
        firing, replica = Firing(step.name, state.update), state.tables.by_pool[step.pool][0]
        waiting = state.updates_done[step.name] == state.update and firing not in state.running
        if waiting and state.room(replica) > 0 and _has_inputs(state, step, replica.name):
            state.fire(firing, replica.name, state.batch or () if step.groups else ())


def _has_inputs(state: State, step: Step, replica: str) -> bool:
    if any(state.updates_done[name] <= state.update for name in (*step.updates, *step.after)):
        return False
    if not all(_may_donate(state, channel) for channel in step.publishes):
        return False
    for channel, lag in step.weights:
        receiver = state.ways[channel].receivers[replica]
        if receiver.live < state.update - lag or receiver.swapping:
            return False
    return state.has_fixed(step, replica)


def _may_donate(state: State, channel: str) -> bool:
    """May the update change what `channel` publishes? Not while it is read, nor while its version is still needed."""
    way = state.ways[channel]
    if way.publishing:
        return False
    if state.pinned and not all(way.holds(state.update, replica) for replica in way.receivers):
        return False
    for reader, lag in state.tables.weight_readers[channel]:
        first = state.tables.by_pool[reader.pool][0].name
        waits = reader.per_update and state.updates_done[reader.name] <= state.update
        if waits and not way.holds(state.update - lag, first):
            return False
    return True
