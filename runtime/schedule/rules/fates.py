"""What becomes of groups and of the values made for them: finished, consumed, dropped, failed; read, freed."""

import heapq
from collections.abc import Sequence

from penstock.graph.ir import Firing
from penstock.runtime.schedule.ledger import Group
from penstock.runtime.schedule.rules import turns
from penstock.runtime.schedule.rules.groups import offer
from penstock.runtime.schedule.rules.updates import assemble
from penstock.runtime.schedule.rules.weights import spare
from penstock.runtime.schedule.state import State
from penstock.runtime.schedule.tables import Step


def group_done(
    state: State, step: Step, firing: Firing, replica: str, *, dropped: bool, again: bool
) -> Sequence[Step] | None:
    """A per-group firing is done. The steps that may start because of it; None where anything may."""
    group = state.ledger.find(firing.index)
    group.working -= 1
    if state.tries:
        state.tries.pop(firing, None)
    made = _take_turn(state, group, step, firing, replica, again) if step.turns else {step.name: replica}
    for name, holder in made.items():
        _note_value(state, group, state.tables.steps[name], holder)
    if group.ordinal in state.ledger.leaving:
        _leave(state, group)
        return None
    if dropped:
        _drop(state, group, firing)
        return None
    if not made:
        return None
    offer(state, group.ordinal, group.made, [state.tables.steps[name] for name in made])
    if len(group.made) == state.tables.num_group_steps:
        state.ledger.finish(group)
    complete = group.finished and assemble(state)
    quiet = step.private and not step.turns and not complete and state.cutting is None
    return state.tables.stirs[step.name] if quiet else None


def group_failed(state: State, firing: Firing, replica: str) -> None:
    """A per-group firing failed on some of its ranks: try again, or give the group up."""
    group = state.ledger.find(firing.index)
    group.working -= 1
    state.free(firing, replica)
    tries = state.tries.pop(firing, 0) + 1
    state.failures += 1
    updates = 1 + state.tables.max_lag
    limit = max(state.rules.failures * state.rules.batch * updates, state.rules.retries + 1)
    if state.failures >= limit:
        waiting = state.update + (state.batch is not None)
        given = f"given {state.failures} failed firings of groups for update {waiting}"
        needed = f"needed an update before {state.rules.failures * updates} batches of them have failed (--failures)"
        state.finish("failed", f"{given}; {needed}. The last failure was {state.raised}")
        return
    if group.ordinal in state.ledger.leaving:
        _leave(state, group)
    elif tries > state.rules.retries:
        _leave(state, state.ledger.lose(group.ordinal, "failed"))
    else:
        state.tries[firing] = tries
        state.ledger.retried += 1
        state.unfire(firing)
        heapq.heappush(state.ready[firing.node], firing.index)


def update_done(state: State, step: Step, firing: Firing, replica: str) -> None:
    """A per-update firing is done."""
    if step.readers:
        state.between[firing] = replica
    elif not step.makes:
        state.free(firing, replica)
    if step.trails:
        state.trailing[step.name] = step.due(firing.index + 1)
    else:
        state.updates_done[step.name] = firing.index + 1


def end_updates(state: State) -> None:
    """Consume the batch of an update that is over, and free what was made between its steps. One at which no step is
    due is over when its batch is there."""
    while _is_over(state):
        for group in state.ledger.consume(state.batch) if state.batch else ():
            _release(state, group)
        for made, holder in state.between.items():
            state.free(made, holder)
        state.between.clear()
        state.update, state.batch, state.drops, state.failures = state.update + 1, None, 0, 0
        state.updates_done = dict.fromkeys(state.updates_done, state.update)


def _is_over(state: State) -> bool:
    """Are all due steps done, and may the versions go of those values that this update leaves as they are?"""
    if state.update >= state.rules.end or not all(map(state.over, state.updates_done)):
        return False
    if state.cutting is not None and not state.begun():
        return False
    assemble(state)
    if state.tables.takes_groups and state.batch is None:
        return False
    left = [state.tables.steps[name] for name, done in state.updates_done.items() if done == state.update]
    return all(spare(state, channel) for step in left for channel in step.publishes)


def _take_turn(state: State, group: Group, step: Step, firing: Firing, replica: str, again: bool) -> dict[str, str]:
    """A step of a bounded cycle is done: what the cycle has made, and where, if that was its end."""
    if group.ordinal in state.ledger.leaving:
        state.free(firing, replica)
    elif not step.answers:
        turns.spoken(state, group, step, firing, replica)
    elif turns.answered(state, group, step, firing, replica, again):
        return turns.finish(group, step)
    return {}


def _note_value(state: State, group: Group, step: Step, replica: str) -> None:
    """The step's output is there, and it has read its inputs."""
    group.made[step.name] = replica
    group.readers[step.name] = len(step.readers)
    if not step.readers:
        state.free(Firing(step.name, group.ordinal), replica)
    for name in step.groups:
        group.readers[name] -= 1
        if not group.readers[name]:
            state.free(Firing(name, group.ordinal), group.made[name])


def _drop(state: State, group: Group, firing: Firing) -> None:
    if state.pinned:
        state.finish("failed", f'{firing} dropped its group: a filter needs versions="free", given "pinned"')
        return
    _leave(state, state.ledger.lose(group.ordinal, "dropped"))
    state.drops += 1
    # Groups of so many updates are under way at once, and any of them may be dropped.
    updates = 1 + state.tables.max_lag
    if state.drops >= state.rules.drops * state.rules.batch * updates:
        kept = state.ledger.finished - len(state.batch or ())
        waiting = state.update + (state.batch is not None)
        where = f" (written at {place})" if (place := state.tables.steps[firing.node].where) else ""
        given = f"{state.drops} groups dropped for update {waiting}, the last by {firing}{where}, and {kept} kept"
        needed = f"{state.rules.batch} kept ones before {state.rules.drops * updates} batches are dropped (--drops)"
        state.finish("failed", f"given {given}; needed {needed}, or a filter that keeps more")


def _leave(state: State, group: Group) -> None:
    """Free what a lost group holds, once nobody works on it any more."""
    if not group.working:
        state.ledger.leaving.pop(group.ordinal, None)
        _release(state, group)


def _release(state: State, group: Group) -> None:
    for talk in group.talks.values():
        for made, holder in talk.made.items():
            state.free(made, holder)
    for name, count in group.readers.items():
        if count:
            state.free(Firing(name, group.ordinal), group.made[name])
