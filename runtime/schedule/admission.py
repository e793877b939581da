"""Admission: which version of the weights a group needs, when it may start, and how versions get to where they are
needed.

A group is opened when it can be admitted soon, and started on a replica whose live weights are new enough. A channel
sends the versions that some step may fire with: a per-group step with any, a per-update one of update u with those in
u - lag … u. Those in between stay where they are, and versions may be skipped while an earlier one is on its way.
"""

import heapq
from collections.abc import Sequence

from penstock.graph.ir import Firing
from penstock.runtime.schedule.compile import Channel, NodeStep
from penstock.runtime.schedule.events import Publish, Send, Swap
from penstock.runtime.schedule.state import State

AHEAD = 1
"""Sources are read up to this many batches before they can be admitted, so that admission finds them ready."""

# Versions -------------------------------------------------------------------------------------------------


def needed_version(ordinal: int, lag: int, batch: int = 1) -> int:
    """The oldest version that may be used for a group, or for update `ordinal` where `batch` is 1.

    ordinal: the number of groups before it that are not known to be dropped: so the group is for update ordinal //
    batch at the latest, and what is found stays right when a group before it is dropped.
    lag: how many updates old the version may be then.
    """
    return max(0, ordinal // batch - lag)


def admitted_groups(version: int, lag: int, batch: int) -> int:
    """How many groups may be started with `version`: the first that needs a newer one, by `needed_version`."""
    return (version + lag + 1) * batch


def pinned_version(state: State, ordinal: int) -> int:
    """The version that a group must use where versions are pinned. A resumed run has none older than its start."""
    needed = needed_version(state.ledger.before(ordinal), state.tables.max_lag, state.rules.batch)
    return max(state.rules.start, needed)


def needs_past_version(state: State, ordinal: int) -> bool:
    """Pinned: does the group need a version that a run resumed at the current update could not make again?"""
    return state.pinned and bool(state.tables.lagged) and pinned_version(state, ordinal) < state.update


# Groups ---------------------------------------------------------------------------------------------------


def open_groups(state: State) -> None:
    """Open the groups that can be admitted now or soon, and have sources read for them."""
    if state.stopping or not state.tables.sources:
        return
    soon = admitted_groups(state.update + AHEAD, state.tables.max_lag, state.rules.batch)
    limit = min(soon, state.total)
    while state.ledger.before(state.ledger.next) < limit:
        group = state.ledger.open()
        for step in state.tables.sources:
            heapq.heappush(state.ready[step.name], group.ordinal)


def start_groups(state: State, steps: Sequence[NodeStep]) -> None:
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


def offer(state: State, ordinal: int, made: dict[str, str], steps: Sequence[NodeStep]) -> None:
    """Put a group in the queues of the steps that the new outputs of `steps` were the last inputs of."""
    begins = state.tables.begins
    for reader in begins[steps[0].name] if len(steps) == 1 else dict.fromkeys(r for s in steps for r in begins[s.name]):
        if made.keys() >= set(reader.waits):
            heapq.heappush(state.ready[reader.name], ordinal)


def _choose(state: State, step: NodeStep, ordinal: int) -> str | None:
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


def _admitted(state: State, step: NodeStep) -> int:
    """Groups before this many are needed, and may start on the replica with the newest weights if `step` reads any."""
    admitted = state.total
    for channel, lag in step.weights:
        admitted = min(admitted, admitted_groups(state.ways[channel].newest, lag, state.rules.batch))
    return admitted


def _leaves_some(state: State, step: NodeStep, admitted: int, replica: str) -> bool:
    """While others of the pool wait for weights that are on their way, a replica takes no more than its share of what
    may start: else the first to have them would take whatever it has room for, and the others find nothing to do."""
    for channel, _ in step.weights:
        if state.ways[channel].awaited:
            waiting = min(admitted, len(state.ready[step.name]))
            return state.load[replica] * (len(state.tables.by_pool[step.pool]) - 1) < waiting
    return True


def _may_go_on(state: State, step: NodeStep, ordinal: int) -> bool:
    """May `step` start on a needed group at all? What it reads delayed is made, and while the state is saved those with
    state rest; these see the groups one by one, in order."""
    if any(state.version(carried) < needed_version(state.slot(ordinal), lag) for carried, lag in step.delays):
        return False
    if step.stateful and not (ordinal == state.first_unfired(step) and state.idle(step)):
        return False
    if state.cutting is None:
        return True
    resting = state.stopping or step.stateful
    return not resting or (not state.saving and needs_past_version(state, ordinal))


def _fresh(state: State, step: NodeStep, ordinal: int, before: int, replica: str) -> bool:
    """Are the live weights of `replica` new enough for a group?"""
    for channel, lag in step.weights:
        receiver = state.ways[channel].receivers[replica]
        if receiver.live < needed_version(before, lag, state.rules.batch):
            return False
        if state.pinned and (receiver.swapping or receiver.live != pinned_version(state, ordinal)):
            return False
    return not step.fixed or state.has_fixed(step, replica)


# Weights ---------------------------------------------------------------------------------------------------


def publish_weights(state: State, channels: tuple[Channel, ...]) -> None:
    """Snapshot what a receiver lacks and somebody reads, unless it is being donated."""
    if state.cutting is not None and not state.begun():
        return
    for channel in channels:
        way, version = state.ways[channel.name], state.version(channel.carried)
        maker = state.tables.makers.get(channel.carried)
        donated = maker is not None and Firing(maker, version) in state.running
        if donated or state.room(channel.source) <= 0:
            continue
        if way.may_publish(version) and _is_read(state, channel, version):
            way.publishing = True
            source = channel.source.name
            state.weigh(source, 1)
            state.ask(Publish(channel.name, version, source), ("publish", channel.name, version, source), source)


def weights_published(state: State, channel: str, version: int, replica: str) -> None:
    """All ranks of `replica` have copied `version` aside."""
    state.weigh(replica, -1)
    state.ways[channel].publish(version)


def _is_read(state: State, channel: Channel, version: int) -> bool:
    """May a step to come fire with a version? The one that a run starts with is for its first updates, whatever the
    channel's period, and in a resumed run for steps that trail and are behind, too."""
    end = state.rules.end
    if version > state.rules.start:
        return version < end and version == _next_sent(state, channel, version, channel.every)
    if channel.carried not in state.tables.makers:
        fixed = [step for step in state.tables.steps.values() if channel.name in step.fixed]
        return any((state.next_update(step) if step.per_update else version) < end for step in fixed)
    readers = [step for step, _ in state.tables.weight_readers[channel.name] if step.trails]
    behind = any(state.trailing[step.name] < min(version + 1, end) for step in readers)
    return behind or (version < end and version == _next_sent(state, channel, version, 1))


def _next_sent(state: State, channel: Channel, version: int, every: int) -> int:
    """The first version from `version` on that is a multiple of `every` and that a step may fire with; a run's last
    one if there is none."""
    readers = state.tables.weight_readers[channel.name]
    return min((_next_read(state, step, lag, version, every) for step, lag in readers), default=state.rules.end)


def _next_read(state: State, step: NodeStep, lag: int, version: int, every: int) -> int:
    """The same for one step. It fires with versions up to `lag` before an update at which it is due; one per group is
    due at each."""
    end = state.rules.end
    while (due := _due(state, step, version)) < end:
        if version >= needed_version(due, lag) and version % every == 0:
            return version
        version = max(version + 1, needed_version(due, lag))
        version += -version % every
    return end


def _due(state: State, step: NodeStep, update: int) -> int:
    """The first update from `update` on that a step is still to begin."""
    due = step.due(update)
    if step.per_update:
        due = max(due, state.next_update(step))
        due = step.due(due + 1) if Firing(step.name, due) in state.running else due
    return due


def reclaimable(state: State, name: str) -> bool:
    """May the version that a channel could publish now go? Not while it is read, nor while a reader needs it: every
    update before the one that makes the next version to be sent must find one that is new enough."""
    way, channel = state.ways[name], state.tables.channels[name]
    if way.publishing:
        return False
    last = _next_sent(state, channel, state.update + 1, channel.every) - 1
    for reader, lag in state.tables.weight_readers[name]:
        replicas = state.tables.by_pool[reader.pool]
        if reader.per_update:
            due = last - (last + 1) % reader.every
            served = due < state.next_update(reader) or way.holds(needed_version(due, lag), replicas[0].name)
        elif state.pinned:
            served = all(way.holds(state.update, replica.name) for replica in replicas)
        else:
            able = replicas[:1] if reader.stateful else replicas
            served = last == state.update or any(way.holds(needed_version(last, lag), replica.name) for replica in able)
        if not served:
            return False
    return True


def move_weights(state: State) -> None:
    """Send to where the shadow is free; swap in what has arrived."""
    for name, way in state.ways.items():
        free = tuple(way.to_send())
        for replica in free:
            way.send(replica)
            source = state.tables.channels[name].source.name
            send = Send(name, way.published, source, replica, free if len(free) > 1 else ())
            state.ask(send, ("send", name, way.published, replica), replica)
        for replica in way.to_swap():
            version = way.receivers[replica].shadow
            if _may_swap(state, name, replica, version):
                way.swap(replica)
                state.sort(replica)
                state.ask(Swap(name, version, replica), ("swap", name, version, replica), replica)


def _may_swap(state: State, channel: str, replica: str, version: int) -> bool:
    """Does nobody need what is live on `replica`? A step of update u reads no version newer than u, or than the first
    one of a run that was resumed since; pinned groups read exactly theirs, and a swap under them would mix two. Free
    groups are glad of newer weights at any time."""
    for step, _ in state.tables.weight_readers[channel]:
        if step.per_update:
            here = replica == state.tables.by_pool[step.pool][0].name
            update = state.next_update(step)
            if here and (version > max(update, state.rules.start) or Firing(step.name, update) in state.running):
                return False
        elif state.pinned:
            if any(f.node == step.name and r == replica for f, r in state.running.items()):
                return False
            ordinal = state.first_unfired(step)
            needed = state.ledger.before(ordinal) < state.total
            if needed and pinned_version(state, ordinal) <= state.live(channel, replica):
                return False
    return True
