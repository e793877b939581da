"""What becomes of groups and of the values made for them: finished, consumed, dropped, failed; read, freed."""

import heapq
from collections.abc import Sequence

from penstock.graph.ir import Firing
from penstock.runtime.schedule.ledger import Group
from penstock.runtime.schedule.rules.groups import offer
from penstock.runtime.schedule.rules.updates import assemble
from penstock.runtime.schedule.state import State
from penstock.runtime.schedule.tables import Step


def group_done(state: State, step: Step, firing: Firing, replica: str, dropped: bool) -> Sequence[Step] | None:
    """A per-group firing is done. The steps that may start because of it; None where anything may."""
    group = state.ledger.find(firing.index)
    group.working -= 1
    state.tries.pop(firing, None)
    _note_value(state, group, step, replica)
    if group.ordinal in state.ledger.leaving:
        _leave(state, group)
        return None
    if dropped:
        _drop(state, group, firing)
        return None
    offer(state, group.ordinal, group.made, step)
    group.finished = len(group.made) == state.tables.num_group_steps
    complete = group.finished and assemble(state)
    quiet = step.private and not complete and state.cutting is None
    return state.tables.stirs[step.name] if quiet else None


def group_failed(state: State, firing: Firing, replica: str) -> None:
    """A per-group firing failed on some of its ranks: try again, or give the group up."""
    group = state.ledger.find(firing.index)
    group.working -= 1
    state.free(firing, replica)
    tries = state.tries.pop(firing, 0) + 1
    if group.ordinal in state.ledger.leaving:
        _leave(state, group)
    elif tries > state.rules.retries:
        _leave(state, state.ledger.lose(group.ordinal, "failed"))
    else:
        state.tries[firing] = tries
        state.unfire(firing)
        heapq.heappush(state.ready[firing.node], firing.index)


def update_done(state: State, step: Step, firing: Firing, replica: str) -> None:
    """A per-update firing is done. The last one of an update consumes its batch and frees what was made between."""
    state.updates_done[step.name] = firing.index + 1
    if step.readers:
        state.between[firing] = replica
    elif not step.makes:
        state.free(firing, replica)
    if any(done <= state.update for done in state.updates_done.values()):
        return
    for group in state.ledger.consume(state.batch) if state.batch else ():
        _release(state, group)
    for made, holder in state.between.items():
        state.free(made, holder)
    state.between.clear()
    state.update, state.batch = state.update + 1, None


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
    else:
        _leave(state, state.ledger.lose(group.ordinal, "dropped"))


def _leave(state: State, group: Group) -> None:
    """Free what a lost group holds, once nobody works on it any more."""
    if not group.working:
        state.ledger.leaving.pop(group.ordinal, None)
        _release(state, group)


def _release(state: State, group: Group) -> None:
    for name, count in group.readers.items():
        if count:
            state.free(Firing(name, group.ordinal), group.made[name])
