"""State transitions of groups, updates, replicas and checkpoints, and the release of the values made for them.

*Groups* are finished, consumed, dropped or failed. A group's values are freed after their last reader, or, if the group
is lost, when no firing is in work on it any more.

*Turns*: two steps alternate on one group, the only bounded cycle without a lag. They begin when the inputs of both are
there. The step that speaks fires for turn 0 as any step does. When it is done, the step that answers fires for that
turn, and either asks for another turn or ends them. The outputs of a turn stay until the next turn has read them. The
outputs of the last turn are the group's, as if it had been the only one.

*Segments* are pieces of one firing. A per-group step that has paused goes on from its output so far, on any replica
with free capacity. The output of the last segment is kept as if it had been the only one.

*Updates* consume a batch each. A step on the critical path fires at the current update, a step off it at its own pace.
A step that accumulates fires in parts, each as soon as its groups are taken. Its last part follows the rules of an
undivided firing.

*Replicas* may be lost, with their work and their values. Groups that lose a value begin again from their sources, once
nothing is in work on them. Their values on other replicas are of no use: with free versions a second response differs
from the first. An update that has read its groups goes on with them. If it could not read a lost value, it has not
begun, and gives its groups back. But if another step of the update has read them, the update keeps them, and they must
be made again with equal bits (pinned versions).

*Checkpoints* fall between two updates, when no firing that changes state is in work. Every rank then copies its part
aside. Groups are admitted meanwhile; they are later than the checkpoint and not in it. When all ranks have copied, the
run goes on, and the parts are written in the background. One checkpoint is written at a time; the next one waits. A
resumed run starts again what was in work: a group in its turns at the first turn, a step off the critical path at its
last update, with the oldest version that exists then, the checkpoint's.
"""

import heapq
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.schedule.admission import needed_version, needs_past_version, offer, reclaimable
from penstock.runtime.schedule.compile import NodeStep
from penstock.runtime.schedule.events import Commit, CommitTurn, Save, Saved, kept_as
from penstock.runtime.schedule.state import GroupState, State, TurnState

# Groups ---------------------------------------------------------------------------------------------------


def group_done(
    state: State, step: NodeStep, firing: Firing, replica: str, verdicts: Collection[str]
) -> Sequence[NodeStep] | None:
    """Handle the end of a per-group firing, with the `verdicts` "dropped", "again" or "paused" of some rank. Returns
    the steps that may start because of it; None if any step may."""
    group = state.ledger.find(firing.index)
    group.working -= 1
    if state.tries:
        state.tries.pop(firing, None)
    if firing.segment:
        state.free(*group.paused.pop(step.name))
    if group.again:
        state.free(kept_as(firing, paused="paused" in verdicts), replica)
        _begin_again(state, group)
        return None
    if "paused" in verdicts:
        return _pause(state, group, step, firing, replica)
    firing = kept_as(firing, paused=False)
    made = {step.name: replica}
    if step.turns:
        made = _take_turn(state, group, step, firing, replica, again="again" in verdicts)
    for name, holder in made.items():
        maker = state.tables.steps[name]
        group.made[name] = holder
        group.readers[name] = len(maker.readers)
        if not maker.readers:
            state.free(Firing(name, group.ordinal), holder)
        for read in maker.groups:
            group.readers[read] -= 1
            if not group.readers[read]:
                state.free(Firing(read, group.ordinal), group.made[read])
    if group.ordinal in state.ledger.leaving:
        _leave(state, group)
        return None
    if "dropped" in verdicts:
        _drop(state, group, firing)
        return None
    if not made:
        return None
    offer(state, group.ordinal, group.made, [state.tables.steps[name] for name in made])
    complete = False
    if len(group.made) == state.tables.num_group_steps:
        state.ledger.finish(group)
        complete = assemble(state) or group.ordinal in state.remaking
        state.remaking.discard(group.ordinal)
    # By far the most common case: only the step's readers may start, and groups that waited for its capacity.
    quiet = step.private and not step.turns and not complete and state.checkpoint is None
    return state.tables.stirs[step.name] if quiet else None


def _pause(state: State, group: GroupState, step: NodeStep, firing: Firing, replica: str) -> Sequence[NodeStep] | None:
    """Handle a firing that has paused: its group waits for free capacity again, ahead of all later ones."""
    group.paused[step.name] = kept_as(firing, paused=True), replica
    if group.ordinal in state.ledger.leaving:
        _leave(state, group)
        return None
    state.passed[step.name] = min(state.passed[step.name], group.ordinal)
    heapq.heappush(state.ready[step.name], group.ordinal)
    return state.tables.stirs[step.name] if step.private and state.checkpoint is None else None


def _take_turn(
    state: State, group: GroupState, step: NodeStep, firing: Firing, replica: str, *, again: bool
) -> dict[str, str]:
    """Handle the end of a step's turn in a bounded cycle. After the last turn, returns the cycle's outputs, each with
    the replica that holds it; else nothing."""
    if group.ordinal in state.ledger.leaving:
        state.free(firing, replica)
        return {}
    if not step.answers:
        # This step has read the turn before. The answering step may still need its own output of that turn.
        turns = group.turns.setdefault(step.name, TurnState())
        answering = state.tables.steps[step.partner]
        for made in list(turns.made):
            if not (answering.recalls and made.node == answering.name):
                state.free(made, turns.made.pop(made))
        turns.made[firing] = replica
        heapq.heappush(state.ready[step.partner], group.ordinal)
        return {}
    turns = group.turns[step.partner]
    for made in [made for made in turns.made if made.node == step.name]:  # what it recalled
        state.free(made, turns.made.pop(made))
    turns.made[firing] = replica
    if again and turns.turn + 1 < step.turns:
        turns.turn += 1
        heapq.heappush(state.ready[step.partner], group.ordinal)
        return {}
    if firing.turn > 0:
        # Free first: the recalled output of turn 0 has the name that the last turn's output gets now.
        state.say_freed()
        state.out += [CommitTurn(made, holder) for made, holder in turns.made.items()]
    del group.turns[step.partner]
    return {made.node: holder for made, holder in turns.made.items()}


def group_failed(state: State, firing: Firing, replica: str, verdicts: Collection[str]) -> None:
    """Handle a per-group firing that failed on some of its ranks: try again, or give the group up."""
    group = state.ledger.find(firing.index)
    group.working -= 1
    state.free(kept_as(firing, paused="paused" in verdicts), replica)
    tries = state.tries.pop(firing, 0) + 1
    state.failures += 1
    updates = 1 + state.tables.max_lag
    # At least as many as the tries of one group: a lower limit would make the retries useless.
    limit = max(state.rules.failures * state.rules.batch * updates, state.rules.retries + 1)
    if state.failures >= limit:
        waiting = state.update + state.whole
        given = f"given {state.failures} failed firings of groups for update {waiting}"
        each = f"--failures {state.rules.failures}"
        each += f" for each of {updates} updates under way" * (updates > 1)
        needed = f"needed an update before {state.rules.failures * updates} batches of them have failed ({each})"
        state.fail(f"{given}; {needed}. The last failure was {state.raised}")
    elif group.ordinal in state.ledger.leaving:
        _leave(state, group)
    elif group.again:
        _begin_again(state, group)
    elif tries > state.rules.retries:
        _leave(state, state.ledger.lose(group.ordinal, "failed"))
    else:
        state.tries[firing] = tries
        state.ledger.retried += 1
        state.passed[firing.node] = min(state.passed[firing.node], firing.index)
        heapq.heappush(state.ready[firing.node], firing.index)


def _drop(state: State, group: GroupState, firing: Firing) -> None:
    """Drop a group for a filter. The run ends if filters drop too many."""
    if state.pinned:
        state.fail(f"{firing} dropped its group: given --versions pinned; needed --versions free for a filter")
        return
    _leave(state, state.ledger.lose(group.ordinal, "dropped"))
    state.drops += 1
    # Groups of this many updates are under way at once, and any of them may be dropped.
    updates = 1 + state.tables.max_lag
    if state.drops >= state.rules.drops * state.rules.batch * updates:
        kept = state.ledger.finished - len(state.taken)
        waiting = state.update + state.whole
        where = f" (written at {place})" if (place := state.tables.steps[firing.node].where) else ""
        given = f"{state.drops} groups dropped for update {waiting}, the last by {firing}{where}, and {kept} kept"
        needed = f"{state.rules.batch} kept ones before {state.rules.drops * updates} batches are dropped"
        state.fail(f"given {given}; needed {needed} (--drops of a run), or a filter that keeps more")


def _leave(state: State, group: GroupState) -> None:
    """Free the values of a lost group, once no firing is in work on it."""
    if not group.working:
        state.ledger.leaving.pop(group.ordinal, None)
        _release(state, group)


def _release(state: State, group: GroupState) -> None:
    """Free the values that a group still holds."""
    for turns in group.turns.values():
        for made, holder in turns.made.items():
            state.free(made, holder)
    for made, holder in group.paused.values():
        state.free(made, holder)
    for name, count in group.readers.items():
        if count:
            state.free(Firing(name, group.ordinal), group.made[name])


# Replicas -------------------------------------------------------------------------------------------------

# How many losses are allowed between two updates, for each replica of the pools that can lose any.
LOSSES = 3


def lose_replica(state: State, replica: str, reason: str) -> None:
    """Handle the loss of a replica: its open commands are forgotten, and its groups begin again."""
    pool = state.tables.pool_of[replica]
    state.absent.add(replica)
    state.count_present(replica)
    state.lives[replica] += 1
    state.queues[pool].remove(replica)
    state.load[replica] = 0
    lost = [key for key in state.answers if key.replica == replica]
    for key in lost:
        del state.answers[key]
    for channel in state.channels.values():
        if replica in channel.receivers:
            channel.lose(replica)
    hit = set[int]()
    for firing in [firing for firing, where in state.running.items() if where == replica]:
        del state.running[firing]
        state.verdicts.pop(firing, None)
        group = state.ledger.find(firing.index)
        group.working -= 1
        if firing.index in state.ledger.leaving:
            _leave(state, group)
        else:
            hit.add(firing.index)
    hit |= {group.ordinal for group in state.ledger.groups.values() if replica in _holders(group)}
    steps = state.tables.steps
    given = any(steps[f.node].per_update and steps[f.node].groups for f in state.running)
    if given or any(steps[name].groups for name in state.done):
        kept = hit & set(state.taken) - state.remaking
        state.lacking |= kept
        hit -= kept
    elif hit & set(state.taken):
        _give_back(state)
    for ordinal in sorted(hit):
        _lose_values(state, state.ledger.groups[ordinal])
    if any(isinstance(key, Saved) for key in lost):
        state.spoiled = True
        for entry in [entry for entry in state.copying if entry[0] == replica]:
            state.copying.discard(entry)
        if not state.copying:
            _all_copied(state)
        if not any(isinstance(key, Saved) for key in state.answers):
            commit(state)
    _require_versions(state, hit, f"the loss of {replica} ({reason})")
    state.losses += 1
    most = LOSSES * sum(len(state.tables.by_pool[p]) for p, why in state.tables.fixed_pools.items() if not why)
    if state.losses > most and not state.ended:
        given_text = f"given {state.losses} losses of replicas for update {state.update}"
        state.fail(f"{given_text}, needed at most {most} before it ends. The last was that of {replica}: {reason}")


def join_replica(state: State, replica: str) -> None:
    """Add a replica that has joined, without weights or values: it is sent weights, and takes groups."""
    pool = state.tables.pool_of[replica]
    state.absent.discard(replica)
    state.count_present(replica)
    state.queues[pool].add(state.tables.replicas[replica])
    for name, channel in state.tables.channels.items():
        if channel.pool == pool:
            state.channels[name].join(replica)
    state.sort(replica)


def retry_unread(state: State, verdicts: Collection[str]) -> None:
    """Handle a firing of an update that could not begin, since values that it reads are lost: it will fire again."""
    if "done" in verdicts:
        given = "given an update that some ranks have done, and others could not read"
        state.fail(f"{given}; needed all of them or none. One said {_first(state.unread)}")
    else:
        make_again(state)


def make_again(state: State) -> None:
    """Make the groups again that the update in work could not read, once no step that reads groups is in work."""
    readers = [name for name in state.tables.critical if state.tables.steps[name].groups]
    if any(firing.node in readers for firing in state.running):
        return
    lost, over = state.lacking & set(state.taken), [name for name in readers if name in state.done]
    if not lost:
        state.fail(_first(state.unread))
        return
    if over and not state.pinned:
        given = f"given groups that {', '.join(over)} has read and {', '.join(state.unread)} could not"
        needed = f"needed equal ones, which --versions pinned makes again. It said {_first(state.unread)}"
        state.fail(f"{given}; {needed}")
        return
    if over:
        state.remaking |= lost
    else:
        _give_back(state)
    for ordinal in sorted(lost):
        _lose_values(state, state.ledger.groups[ordinal])
    _require_versions(state, lost, f"values that {', '.join(state.unread)} could not read")
    state.lacking.clear()
    state.unread.clear()


def _first(errors: Mapping[str, str]) -> str:
    return next(iter(errors.values()))


def _give_back(state: State) -> None:
    """Undo the taking of groups by the current update."""
    if state.rules.order == "strict":
        state.ledger.give_back(state.taken)
    state.taken = ()


def _require_versions(state: State, ordinals: Collection[int], given: str) -> None:
    """Fail the run if it cannot make these groups again. `given` says what was lost."""
    past = [ordinal for ordinal in sorted(ordinals) if _is_past(state, ordinal)]
    if past and not state.ended:
        version = needed_version(state.ledger.before(past[0]), state.tables.max_lag, state.rules.batch)
        needed = f"needed version {version} to make it again, older than the checkpoint that has it: resume"
        state.fail(f"given {given}, and with it of group {past[0]}; {needed}")


def _is_past(state: State, ordinal: int) -> bool:
    """True if a pinned group was made with a version older than this run's start, which it cannot make."""
    needed = needed_version(state.ledger.before(ordinal), state.tables.max_lag, state.rules.batch)
    return state.pinned and state.tables.lagged and needed < state.rules.start


def holders_of_past(state: State) -> set[str]:
    """The replicas that hold values of groups which this resumed run cannot make again."""
    return {
        each for group in state.ledger.groups.values() if _is_past(state, group.ordinal) for each in _holders(group)
    }


def _holders(group: GroupState) -> set[str]:
    """The replicas that hold a value of the group which is still to be read."""
    found = {holder for name, holder in group.made.items() if group.readers[name]}
    found |= {holder for turns in group.turns.values() for holder in turns.made.values()}
    return found | {holder for _, holder in group.paused.values()}


def _lose_values(state: State, group: GroupState) -> None:
    """Mark a group of which a value is lost or will not be made: nothing starts on it until it begins again."""
    group.again = True
    state.ledger.finished -= group.finished
    group.finished = False
    for queue in state.ready.values():
        if group.ordinal in queue:
            queue.remove(group.ordinal)
            heapq.heapify(queue)
    _begin_again(state, group)


def _begin_again(state: State, group: GroupState) -> None:
    """Begin a group again at its sources, once nothing is in work on it. It keeps its ordinal and so its random
    keys."""
    if group.working:
        return
    _release(state, group)
    group.again = False
    for held in (group.made, group.readers, group.turns, group.paused):
        held.clear()
    for firing in [firing for firing in state.tries if firing.index == group.ordinal]:
        del state.tries[firing]
    for name in state.passed:
        state.passed[name] = min(state.passed[name], group.ordinal)
    for step in state.tables.sources:
        heapq.heappush(state.ready[step.name], group.ordinal)


# Updates --------------------------------------------------------------------------------------------------


def assemble(state: State) -> bool:
    """Take finished groups for the current update: its batch at once, or in pieces where a step accumulates. True if
    some were taken."""
    if not state.tables.takes_groups or state.update >= state.rules.end:
        return False
    batch, ledger, before = state.rules.batch, state.ledger, state.taken
    piece = state.tables.piece or batch
    while len(state.taken) < batch:
        if state.rules.order == "ready":
            found = ledger.take_ready(piece, batch, state.update, state.deadline, state.taken)
        else:
            found = ledger.take(piece)
        if found is None:
            break
        state.taken += found
    return state.taken != before


def start_updates(state: State, steps: tuple[NodeStep, ...]) -> None:
    """Start the steps of a pool that are due and have their inputs."""
    in_flight = state.checkpoint is None or state.begun()
    # An update begins only with its whole batch, so that an update that has begun can always be finished.
    current = in_flight and (state.whole or not state.tables.takes_groups)
    for step in steps:
        part, parts = state.parts.get(step.name, 0), state.num_parts(step)
        firing, replica = Firing(step.name, state.next_update(step), segment=part), state.tables.by_pool[step.pool][0]
        groups = state.taken
        if step.accumulate:
            groups = groups[part * step.accumulate :][: step.accumulate]
        due = firing.index <= state.update and firing.index < state.rules.end and firing not in state.running
        if not due or step.name in state.unread or state.room(replica) <= 0:
            continue
        if step.off_path:
            # While a checkpoint is due, it starts only to release versions that the checkpoint waits for.
            ready = in_flight or not (state.held or drained(state))
        elif part < parts - 1:
            # A part that is not the last changes nothing that another step reads.
            ready = in_flight and len(groups) == step.accumulate
        else:
            ready = current and all(state.over(name) for name in (*step.updates, *step.after))
            ready = ready and all(reclaimable(state, channel) for channel in step.publishes)
        for channel, lag in step.weights:
            receiver = state.channels[channel].receivers[replica.name]
            # The live version must be new enough, and not about to change.
            ready = ready and receiver.live >= needed_version(firing.index, lag) and not receiver.swapping
        if ready and state.has_fixed(step, replica.name):
            state.fire(step, firing, replica.name, groups if step.groups else ())


def update_done(state: State, step: NodeStep, firing: Firing, replica: str) -> None:
    """Handle the end of a per-update firing. The result of a part that is not the last stays in its node."""
    if firing.segment < state.num_parts(step) - 1:
        state.parts[step.name] = firing.segment + 1
        return
    state.parts.pop(step.name, None)
    firing = kept_as(firing, paused=False)
    if step.readers:
        state.between[firing] = replica
    elif not step.makes:
        state.free(firing, replica)
    if step.off_path:
        state.off_path[step.name] = step.due(firing.index + 1)
    else:
        state.done.add(step.name)


def end_updates(state: State) -> None:
    """Consume the batch of an update that is over, and free what its steps made for each other."""
    # Several may be over at once: an update at which no step is due is over when its batch is there.
    while _is_over(state):
        for group in state.ledger.consume(state.taken) if state.taken else ():
            _release(state, group)
        for made, holder in state.between.items():
            state.free(made, holder)
        state.between.clear()
        state.done.clear()
        state.update, state.taken = state.update + 1, ()
        state.drops = state.failures = state.losses = 0
        state.lacking.clear()


def _is_over(state: State) -> bool:
    """True if all due steps are done, and the versions of carried values without a due step are reclaimable."""
    if state.update >= state.rules.end or not all(map(state.over, state.tables.critical)):
        return False
    if state.checkpoint is not None and not state.begun():
        return False
    assemble(state)
    if state.tables.takes_groups and not state.whole:
        return False
    left = [state.tables.steps[name] for name in state.tables.critical if name not in state.done]
    return all(reclaimable(state, channel) for step in left for channel in step.publishes)


# Checkpoints ----------------------------------------------------------------------------------------------


def save(state: State) -> None:
    """Have every replica copy and write its part of the checkpoint, once no firing that changes state is in work."""
    if state.saving or state.begun() or any(channel.publishing for channel in state.channels.values()):
        return
    if any(state.tables.steps[f.node].stateful for f in state.running) or not drained(state):
        return
    saved = {"update": state.update, **state.ledger.to_json(), "trailing": state.off_path}
    # A final checkpoint that adds nothing to the newest complete one would only delay the stop.
    if state.stopping and state.complete and _work_in(state, saved) == _work_in(state, state.complete):
        state.checkpoint = None
        state.finish("stopped")
        return
    state.saving = json.dumps(saved, sort_keys=True)
    values: dict[str, list[Firing]] = {r: [] for r in state.tables.replicas if r not in state.absent}
    for group in state.ledger.groups.values():
        for name, replica in group.made.items():
            if group.readers[name] and not group.again:
                values[replica].append(Firing(name, group.ordinal))
    for replica, firings in values.items():
        state.ask(Save(state.update, replica, tuple(firings)))
        state.copying |= {(replica, rank) for rank in range(len(state.tables.replicas[replica].ranks))}


def copied(state: State, replica: str, rank: int) -> bool:
    """Note that a rank has copied its part of the checkpoint. True if all have, so that the run goes on."""
    state.copying.discard((replica, rank))
    if state.copying or state.writing is not None:
        return False
    _all_copied(state)
    return True


def _all_copied(state: State) -> None:
    if state.writing is None:
        state.writing = state.checkpoint
        if not state.stopping:
            state.checkpoint = None


def commit(state: State) -> None:
    """Handle a checkpoint whose parts are all written."""
    saved, final = json.loads(state.saving), state.writing is not None and state.writing.final
    if state.spoiled:
        # A part was lost: the checkpoint is due again.
        state.checkpoint = state.checkpoint or state.writing
        state.saving, state.writing, state.spoiled = "", None, False
        if state.failing:
            state.finish("failed", state.failing)
        return
    state.out.append(Commit(saved["update"], state.saving))
    if state.complete is not None:
        state.complete = saved
    state.saving, state.writing = "", None
    if state.failing:
        state.finish("failed", state.failing)
    elif final:
        state.checkpoint = None
        state.finish("stopped")


def _work_in(state: State, saved: Mapping[str, Any]) -> Any:
    """The work that a run resuming from a saved state need not do again."""
    # Sources are read again, so a group that was only opened or read does not count.
    made = {
        ordinal: {n: r for n, r in made.items() if not state.tables.steps[n].source}
        for ordinal, made, _ in saved["groups"]
    }
    return saved["update"], saved["fates"], saved.get("trailing", {}), {g: names for g, names in made.items() if names}


def drained(state: State) -> bool:
    """True unless a pinned group must still read a version that a run resumed here could not make again."""
    readers = [step for step in state.tables.steps.values() if step.weights and not step.per_update]
    return not state.pinned or all(
        (step.name in group.made and not group.again) or not needs_past_version(state, group.ordinal)
        for group in state.ledger.groups.values()
        for step in readers
    )


def restore(state: State, saved: Mapping[str, Any]) -> None:
    """Continue from the state in a `Commit`. Raises ValueError for the state of another graph or plan."""
    for ordinal, made, readers in saved["groups"]:
        odd = {*made, *readers} - state.tables.steps.keys() | set(made.values()) - state.tables.replicas.keys()
        if odd or made.keys() != readers.keys() or ordinal >= saved["next"]:
            told = f"group {ordinal} of {saved['next']}, made by {made} and read {readers} times"
            raise ValueError(f"checkpoint: given {told}")
    pending = {str(ordinal): made for ordinal, made, _ in saved["groups"]}
    for name, read in saved.get("reading", {}).items():
        if not read["deadlines"].keys() <= pending.get(name, {}).keys():
            raise ValueError(f"checkpoint: given deadlines of group {name}, {read}, needed those of values that it has")
    if odd := saved.get("trailing", {}).keys() - state.tables.steps.keys():
        raise ValueError(f"checkpoint: given {', '.join(sorted(odd))}, which the graph does not have")
    state.ledger.restore(saved)
    state.off_path.update(saved.get("trailing", {}))
    for group in state.ledger.groups.values():
        if _holders(group) & state.absent:
            if _is_past(state, group.ordinal):
                given = f"group {group.ordinal} of a replica that is not there"
                raise ValueError(f"checkpoint: given {given}, needed its values")
            _release(state, group)
            group.made.clear()
            group.readers.clear()
    for ordinal, group in state.ledger.groups.items():
        if len(group.made) == state.tables.num_group_steps:
            state.ledger.finish(group)
        for step in state.tables.steps.values():
            # No checkpoint has the turns of a group: they begin again, with the step that speaks.
            waiting = not step.per_update and not step.answers and step.name not in group.made
            if waiting and all(name in group.made for name in step.waits):
                heapq.heappush(state.ready[step.name], ordinal)
