"""What becomes of groups and of the values made for them: finished, consumed, dropped, failed; read, freed.

Checkpoints: a consistent cut between two updates, and the way back from it.

Free-running admissions go on while a cut is due and while it is written; they are later than the cut and do not
change it. A final cut with no more in it than the newest complete checkpoint has is not written. What was in work then
starts again in a run that resumes: groups in the middle of their turns at the first one, a step that trails at the
update it was at, with the oldest version that there is by then: the cut's.

Per-update firings: when the batch is complete, and when a step of the current update may start.

Turns: two steps that alternate on one group, the one bounded cycle without a lag.

The turns begin when the inputs of both steps are there. The step that speaks fires for turn 0 as any step does. When it
is done, the one that answers fires for that turn; its answer is another turn, or the end. What a turn has made stays
until the next one has read it; after the last turn it is the group's, as if there had been no other. A cut does not
keep turns: a group in the middle starts again.
"""

import heapq
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.schedule.admission import needed_version, needs_past_version, offer, reclaimable
from penstock.runtime.schedule.compile import NodeStep
from penstock.runtime.schedule.events import Commit, Save, Settle
from penstock.runtime.schedule.state import GroupState, State, Talk


def spoken(state: State, group: GroupState, step: NodeStep, firing: Firing, replica: str) -> None:
    """The step that speaks is done with a turn: what the turn before has made is read, and the answer is due."""
    talk = group.talks.setdefault(step.name, Talk())
    answers = state.tables.steps[step.partner]
    recalled = {made: holder for made, holder in talk.made.items() if answers.recalls and made.node == answers.name}
    for made, holder in talk.made.items():
        if made not in recalled:
            state.free(made, holder)
    talk.made = {**recalled, firing: replica}
    heapq.heappush(state.ready[step.partner], group.ordinal)


def answered(state: State, group: GroupState, step: NodeStep, firing: Firing, replica: str, again: bool) -> bool:
    """The step that answers is done with a turn; true if it was the group's last one."""
    talk = group.talks[step.partner]
    for made in [made for made in talk.made if made.node == step.name]:  # what it recalled
        state.free(made, talk.made.pop(made))
    talk.made[firing] = replica
    if again and talk.turn + 1 < step.turns:
        talk.turn += 1
        heapq.heappush(state.ready[step.partner], group.ordinal)
        return False
    if firing.turn > 0:
        state.say_freed()  # what was recalled of turn 0 has the name that is settled now
        for made, holder in talk.made.items():
            state.out.append(Settle(made, holder))
    return True


def finish(group: GroupState, step: NodeStep) -> dict[str, str]:
    """Forget the turns of a group; the names of the two steps with the replicas that hold what they have made."""
    return {made.node: holder for made, holder in group.talks.pop(step.partner).made.items()}


def save(state: State) -> None:
    """When nothing that moves state is in work, have every replica write its part."""
    if state.saving or state.begun() or any(way.publishing for way in state.ways.values()):
        return
    if any(f.node in state.tables.stateful for f in state.running) or not drained(state):
        return
    cut = {"update": state.update, **state.ledger.to_json(), "trailing": state.trailing}
    if state.stopping and state.complete and _done(state, cut) == _done(state, state.complete):
        state.cutting = None
        state.finish("stopped")
        return
    state.saving = json.dumps(cut, sort_keys=True)
    values: dict[str, list[Firing]] = {r: [] for r in state.tables.replicas}
    for group in state.ledger.groups.values():
        for name, replica in group.made.items():
            if group.readers[name]:
                values[replica].append(Firing(name, group.ordinal))
    for replica, firings in values.items():
        state.ask(Save(state.update, replica, tuple(firings)), ("save", state.update, replica), replica)


def commit(state: State) -> None:
    """All parts are written."""
    state.out.append(Commit(state.update, state.saving))
    if state.complete is not None:
        state.complete = json.loads(state.saving)
    final, state.cutting, state.saving = state.stopping, None, ""
    if final:
        state.finish("stopped")


def _done(state: State, cut: Mapping[str, Any]) -> Any:
    """What a run that resumes from this cut need not do again. Sources are read again; so groups that were only opened
    are nothing."""
    made = {
        ordinal: {n: r for n, r in made.items() if not state.tables.steps[n].source}
        for ordinal, made, _ in cut["groups"]
    }
    return cut["update"], cut["fates"], cut.get("trailing", {}), {g: names for g, names in made.items() if names}


def drained(state: State) -> bool:
    """Pinned: have the groups that need an older version than the resumed run can make been through its readers?"""
    readers = [step for step in state.tables.steps.values() if step.weights and not step.per_update]
    return not state.pinned or all(
        step.name in group.made or not needs_past_version(state, group.ordinal)
        for group in state.ledger.groups.values()
        for step in readers
    )


def restore(state: State, cut: Mapping[str, Any]) -> None:
    """Continue from the state that a `Commit` told. Raises ValueError for one that is of another graph or plan."""
    for ordinal, made, readers in cut["groups"]:
        odd = {*made, *readers} - state.tables.steps.keys() | set(made.values()) - state.tables.replicas.keys()
        if odd or made.keys() != readers.keys() or ordinal >= cut["next"]:
            raise ValueError(f"cut: given group {ordinal} of {cut['next']}, made by {made} and read {readers} times")
    if odd := cut.get("trailing", {}).keys() - state.tables.steps.keys():
        raise ValueError(f"cut: given {', '.join(sorted(odd))}, which the graph does not have")
    state.ledger.restore(cut)
    state.trailing.update(cut.get("trailing", {}))
    for ordinal, group in state.ledger.groups.items():
        if len(group.made) == state.tables.num_group_steps:
            state.ledger.finish(group)
        for step in state.tables.steps.values():
            waiting = not step.per_update and not step.answers and step.name not in group.made
            if waiting and all(name in group.made for name in step.waits):
                heapq.heappush(state.ready[step.name], ordinal)


def assemble(state: State) -> bool:
    """Take the batch of the current update when its groups are finished; true if that made it complete."""
    if not state.tables.takes_groups or state.batch is not None or state.update >= state.rules.end:
        return False
    state.batch = state.ledger.take(state.rules.batch)
    return state.batch is not None


def start_updates(state: State, steps: tuple[NodeStep, ...]) -> None:
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


def _start_trailing(state: State, step: NodeStep) -> None:
    """Start a step that no update waits for: at the update that it is next to fire at, now or some time ago."""
    update, replica = state.next_update(step), state.tables.by_pool[step.pool][0]
    firing = Firing(step.name, update)
    waiting = update <= state.update and update < state.rules.end and firing not in state.running
    if waiting and state.room(replica) > 0 and _has_weights(state, step, update, replica.name):
        state.fire(firing, replica.name)


def _has_inputs(state: State, step: NodeStep, replica: str) -> bool:
    if not all(state.over(name) for name in (*step.updates, *step.after)):
        return False
    if not all(reclaimable(state, channel) for channel in step.publishes):
        return False
    return _has_weights(state, step, state.update, replica)


def _has_weights(state: State, step: NodeStep, update: int, replica: str) -> bool:
    for channel, lag in step.weights:
        receiver = state.ways[channel].receivers[replica]
        if receiver.live < needed_version(update, lag) or receiver.swapping:
            return False
    return state.has_fixed(step, replica)


def group_done(
    state: State, step: NodeStep, firing: Firing, replica: str, *, dropped: bool, again: bool
) -> Sequence[NodeStep] | None:
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


def update_done(state: State, step: NodeStep, firing: Firing, replica: str) -> None:
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
    return all(reclaimable(state, channel) for step in left for channel in step.publishes)


def _take_turn(
    state: State, group: GroupState, step: NodeStep, firing: Firing, replica: str, again: bool
) -> dict[str, str]:
    """A step of a bounded cycle is done: what the cycle has made, and where, if that was its end."""
    if group.ordinal in state.ledger.leaving:
        state.free(firing, replica)
    elif not step.answers:
        spoken(state, group, step, firing, replica)
    elif answered(state, group, step, firing, replica, again):
        return finish(group, step)
    return {}


def _note_value(state: State, group: GroupState, step: NodeStep, replica: str) -> None:
    """The step's output is there, and it has read its inputs."""
    group.made[step.name] = replica
    group.readers[step.name] = len(step.readers)
    if not step.readers:
        state.free(Firing(step.name, group.ordinal), replica)
    for name in step.groups:
        group.readers[name] -= 1
        if not group.readers[name]:
            state.free(Firing(name, group.ordinal), group.made[name])


def _drop(state: State, group: GroupState, firing: Firing) -> None:
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


def _leave(state: State, group: GroupState) -> None:
    """Free what a lost group holds, once nobody works on it any more."""
    if not group.working:
        state.ledger.leaving.pop(group.ordinal, None)
        _release(state, group)


def _release(state: State, group: GroupState) -> None:
    for talk in group.talks.values():
        for made, holder in talk.made.items():
            state.free(made, holder)
    for name, count in group.readers.items():
        if count:
            state.free(Firing(name, group.ordinal), group.made[name])
