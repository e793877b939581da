"""Per-group firings: when a group is opened, where and when a step may start on it."""

import heapq
from collections.abc import Sequence

from penstock.runtime.schedule.state import State
from penstock.runtime.schedule.tables import Step

AHEAD = 1
"""Sources are read up to this many batches before they can be admitted, so that admission finds them ready."""


def open_groups(state: State) -> None:
    """Open the groups that can be admitted now or soon, and have sources read for them."""
    if state.stopping or not state.tables.sources:
        return
    newest = state.update + state.tables.max_lag + 1 + AHEAD
    limit = min(newest, state.rules.end) * state.rules.batch
    while state.ledger.before(state.ledger.next) < limit:
        group = state.ledger.open()
        for step in state.tables.sources:
            heapq.heappush(state.ready[step.name], group.ordinal)


def start_groups(state: State, steps: Sequence[Step]) -> None:
    """Start what may start of `steps`, each in ordinal order. What stops one group stops those after it."""
    for step in steps:
        queue = state.ready[step.name]
        while queue:
            group = state.ledger.groups.get(queue[0])
            if group is not None:
                ordinal = group.ordinal
                replica = _choose(state, step, ordinal)
                if replica is None:
                    break
                group.working += 1
                update = state.slot(ordinal) if step.delays else 0
                state.fire(state.firing(step, ordinal), replica, (ordinal,), free=step.source, update=update)
            heapq.heappop(queue)


def offer(state: State, ordinal: int, made: dict[str, str], steps: Sequence[Step]) -> None:
    """Put a group in the queues of the steps that the new outputs of `steps` were the last inputs of."""
    begins = state.tables.begins
    for reader in begins[steps[0].name] if len(steps) == 1 else dict.fromkeys(r for s in steps for r in begins[s.name]):
        if made.keys() >= set(reader.waits):
            heapq.heappush(state.ready[reader.name], ordinal)


def _choose(state: State, step: Step, ordinal: int) -> str | None:
    """The admissible replica with most room, the first of equals; a step with state knows only its first one."""
    before, admitted = state.ledger.before(ordinal), _admitted(state, step)
    if before >= admitted or not _may_go_on(state, step, ordinal):
        return None
    if step.source:
        return state.tables.by_pool[step.pool][0].name
    if step.stateful:
        first = state.tables.by_pool[step.pool][0]
        return first.name if state.room(first) > 0 and _fresh(state, step, ordinal, before, first.name) else None
    if not (step.weights or step.fixed):
        return state.lines[step.pool].first()
    replica = state.lines[step.pool].first(lambda replica: _fresh(state, step, ordinal, before, replica))
    return replica if replica is None or _leaves_some(state, step, admitted - before, replica) else None


def _admitted(state: State, step: Step) -> int:
    """Groups before this many are needed, and may start on the replica with the newest weights if `step` reads any."""
    admitted = state.total
    for channel, lag in step.weights:
        admitted = min(admitted, (state.ways[channel].newest + lag + 1) * state.rules.batch)
    return admitted


def _leaves_some(state: State, step: Step, admitted: int, replica: str) -> bool:
    """While others of the pool wait for weights that are on their way, a replica takes no more than its share of what
    may start: else the first to have them would take whatever it has room for, and the others find nothing to do."""
    for channel, _ in step.weights:
        if state.ways[channel].awaited:
            waiting = min(admitted, len(state.ready[step.name]))
            return state.load[replica] * (len(state.tables.by_pool[step.pool]) - 1) < waiting
    return True


def _may_go_on(state: State, step: Step, ordinal: int) -> bool:
    """May `step` start on a needed group at all? What it reads delayed is made, and while the state is saved those with
    state rest; these see the groups one by one, in order."""
    if step.delays and any(state.version(carried) < state.slot(ordinal) - lag for carried, lag in step.delays):
        return False
    if step.stateful and not (ordinal == state.first_unfired(step) and state.idle(step)):
        return False
    if state.cutting is None:
        return True
    resting = state.stopping or step.stateful
    return not resting or (not state.saving and state.perishing(ordinal))


def _fresh(state: State, step: Step, ordinal: int, before: int, replica: str) -> bool:
    """Are the live weights of `replica` new enough for a group?"""
    for channel, lag in step.weights:
        receiver = state.ways[channel].receivers[replica]
        if receiver.live < 0 or before >= (receiver.live + lag + 1) * state.rules.batch:
            return False
        if state.pinned and (receiver.swapping or receiver.live != state.pin(ordinal)):
            return False
    return not step.fixed or state.has_fixed(step, replica)
