"""Per-update firings: when the batch is complete, and when a step of the current update may start."""

from penstock.graph.ir import Firing
from penstock.runtime.schedule.rules.cuts import drained
from penstock.runtime.schedule.rules.weights import spare
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
    begun can always be finished. While a cut is due, none begins, and a step trails only if versions that it keeps may
    be in the way of what the cut waits for."""
    in_flight = state.cutting is None or state.begun()
    for step in steps:
        if step.trails and (in_flight or not drained(state)):
            _start_trailing(state, step)
    if not in_flight or state.update >= state.rules.end or (state.tables.takes_groups and state.batch is None):
        return
    for step in steps:
        firing, replica = Firing(step.name, state.update), state.tables.by_pool[step.pool][0]
        waiting = not step.trails and not state.over(step.name) and firing not in state.running
        if waiting and state.room(replica) > 0 and _has_inputs(state, step, replica.name):
            state.fire(firing, replica.name, state.batch or () if step.groups else ())


def _start_trailing(state: State, step: Step) -> None:
    """Start a step that no update waits for: at the update that it is next to fire at, now or some time ago."""
    update, replica = state.next_update(step), state.tables.by_pool[step.pool][0]
    firing = Firing(step.name, update)
    waiting = update <= state.update and update < state.rules.end and firing not in state.running
    if waiting and state.room(replica) > 0 and _has_weights(state, step, update, replica.name):
        state.fire(firing, replica.name)


def _has_inputs(state: State, step: Step, replica: str) -> bool:
    if not all(state.over(name) for name in (*step.updates, *step.after)):
        return False
    if not all(spare(state, channel) for channel in step.publishes):
        return False
    return _has_weights(state, step, state.update, replica)


def _has_weights(state: State, step: Step, update: int, replica: str) -> bool:
    for channel, lag in step.weights:
        receiver = state.ways[channel].receivers[replica]
        if receiver.live < max(update - lag, 0) or receiver.swapping:
            return False
    return state.has_fixed(step, replica)
