"""Admission: which version of the weights a group needs, when it may start, and which versions are sent where.

A group is opened when it can be admitted soon, and started on a replica whose live weights are new enough. A channel
sends only versions that some step may fire with: any version for a per-group step, versions u - lag … u for a
per-update step of update u. While a version is being sent, later ones may be skipped.
"""

import heapq
from collections.abc import Sequence

from penstock.graph.ir import Firing
from penstock.runtime.schedule.compile import Channel, NodeStep
from penstock.runtime.schedule.events import Publish, Send, Swap
from penstock.runtime.schedule.state import GroupState, State

# How many batches the sources read before their groups can be admitted, so that admission finds them ready.
AHEAD = 1

# Versions -------------------------------------------------------------------------------------------------


def needed_version(ordinal: int, lag: int, batch: int = 1) -> int:
    """The oldest version that may be used for a group, or for update `ordinal` where `batch` is 1.

    ordinal: the number of groups before it that are not known to be dropped. So the group is for update ordinal //
    batch at the latest, and the version stays new enough when a group before it is dropped.
    lag: how many updates old the version may be at that update.
    """
    return max(0, ordinal // batch - lag)


def admitted_groups(version: int, lag: int, batch: int) -> int:
    """How many groups may be started with `version`; also the first group that needs a newer one (`needed_version`)."""
    return (version + lag + 1) * batch


def pinned_version(state: State, ordinal: int) -> int:
    """The version that a group must use where versions are pinned."""
    needed = needed_version(state.ledger.before(ordinal), state.tables.max_lag, state.rules.batch)
    # A resumed run has no version older than its start, and cannot make one.
    return max(state.rules.start, needed)


def needs_past_version(state: State, ordinal: int) -> bool:
    """True if a pinned group needs a version that a run resumed at the current update could not make again."""
    return state.pinned and state.tables.lagged and pinned_version(state, ordinal) < state.update


# Groups ---------------------------------------------------------------------------------------------------


def open_groups(state: State) -> None:
    """Open the groups that can be admitted now or soon, and queue them for the sources."""
    if (state.stopping and not state.lacks_groups) or not state.tables.sources:
        return
    soon = admitted_groups(state.update + AHEAD, state.tables.max_lag, state.rules.batch)
    limit = min(soon, state.total)
    while state.ledger.before(state.ledger.next) < limit:
        group = state.ledger.open()
        for step in state.tables.sources:
            heapq.heappush(state.ready[step.name], group.ordinal)


def start_groups(state: State, steps: Sequence[NodeStep]) -> None:
    """Start the groups that may start `steps`, in ordinal order. A group that may not start holds back those after it.
    Exception: a group that has already begun the step may need newer weights than they do, so it is passed over."""
    for step in steps:
        queue, waiting = state.ready[step.name], list[int]()
        while queue:
            group = state.ledger.groups.get(queue[0])
            if group is not None and not group.again:
                ordinal = group.ordinal
                replica = _choose(state, step, ordinal)
                if replica is None and step.name not in group.deadlines:
                    break
                if replica is None:
                    waiting.append(heapq.heappop(queue))
                    continue
                if step.weights and state.rules.order == "ready":
                    _read_weights(state, group, step, replica)
                group.working += 1
                update = state.slot(ordinal) if step.delays else 0
                state.fire(step, state.firing(step, ordinal), replica, (ordinal,), update)
            # Started, or lost: a lost group is not removed from the queues when it is lost.
            heapq.heappop(queue)
        for ordinal in waiting:
            heapq.heappush(queue, ordinal)


def _read_weights(state: State, group: GroupState, step: NodeStep, replica: str) -> None:
    """Note the place of a group that reads its first weights, and its deadline from the first weights of a step."""
    group.place = state.place(group.ordinal)
    last = min(state.live(channel, replica) + lag for channel, lag in step.weights)
    group.deadlines.setdefault(step.name, last)


def offer(state: State, ordinal: int, made: dict[str, str], steps: Sequence[NodeStep]) -> None:
    """Queue a group for the steps whose last inputs were the new outputs of `steps`."""
    begins = state.tables.begins
    for reader in begins[steps[0].name] if len(steps) == 1 else dict.fromkeys(r for s in steps for r in begins[s.name]):
        if made.keys() >= set(reader.waits):
            heapq.heappush(state.ready[reader.name], ordinal)


def _choose(state: State, step: NodeStep, ordinal: int) -> str | None:
    """The replica on which a group may start `step`: the admissible one with most free capacity, the first of equals;
    for a step with state the first replica of its pool. None if the group may not start."""
    before, admitted = state.place(ordinal), state.total
    for channel, lag in step.weights:
        # A quick refusal for most groups: not even the replica with the newest weights could start them.
        admitted = min(admitted, admitted_groups(state.channels[channel].newest, lag, state.rules.batch))
    if before >= admitted:
        return None
    if any(state.version(carried) < needed_version(state.slot(ordinal), lag) for carried, lag in step.delays):
        return None
    if step.stateful:
        # Its state sees the groups one by one, in order.
        in_work = any(f.node == step.name for f in state.running)
        if in_work or ordinal != state.first_unfired(step):
            return None
    rests = state.checkpoint is not None and (state.stopping or step.stateful) and not state.lacks_groups
    # State must not change while it is copied, and nothing new begins before the run's end. But a resumed run could not
    # make the versions that some pinned groups need: these groups go on, and the checkpoint waits for them.
    if rests and (state.held or not needs_past_version(state, ordinal)):
        return None
    replicas = state.present[step.pool]
    if step.source:
        return replicas[0].name if replicas else None
    if step.stateful:
        able = state.room(replicas[0]) > 0 and _fresh(state, step, ordinal, before, replicas[0].name)
        return replicas[0].name if able else None
    replica = state.queues[step.pool].first(lambda replica: _fresh(state, step, ordinal, before, replica))
    if replica is not None and any(state.channels[channel].behind for channel, _ in step.weights):
        # While other replicas of the pool wait for weights, a replica takes no more than its share of the groups that
        # may start. Else the first replica with new weights would fill up and leave nothing to the others.
        waiting = min(admitted - state.ledger.before(ordinal), len(state.ready[step.name]))
        if state.load[replica] * (len(replicas) - 1) >= waiting:
            return None
    return replica


def _fresh(state: State, step: NodeStep, ordinal: int, before: int, replica: str) -> bool:
    """True if the live weights of `replica` are new enough for a group, and not older than those it began the step
    with."""
    begun = state.ledger.groups[ordinal].deadlines.get(step.name, 0)
    for channel, lag in step.weights:
        receiver = state.channels[channel].receivers[replica]
        if receiver.live < max(needed_version(before, lag, state.rules.batch), begun - lag):
            return False
        if state.pinned and (receiver.swapping or receiver.live != pinned_version(state, ordinal)):
            return False
    return not step.fixed or state.has_fixed(step, replica)


# Weights ---------------------------------------------------------------------------------------------------


def publish_weights(state: State, channels: tuple[Channel, ...]) -> None:
    """Publish the newest version on the `channels` that lack it and have a reader for it."""
    # Not between two updates while a checkpoint is due: the checkpoint would have to wait for the copy.
    if state.checkpoint is not None and not state.begun():
        return
    for channel in channels:
        sent, version = state.channels[channel.name], state.version(channel.carried)
        # An update in work reuses the version's memory for the next one (donation).
        donated = channel.carried in state.tables.makers and state.donates(channel.carried, version)
        if donated or state.room(channel.source) <= 0:
            continue
        if sent.may_publish(version) and _is_read(state, channel, version):
            sent.publishing = True
            state.weigh(channel.source.name, 1)
            state.ask(Publish(channel.name, version, channel.source.name))


def _is_read(state: State, channel: Channel, version: int) -> bool:
    """True if a later firing may use `version`."""
    end = state.rules.end
    if version > state.rules.start:
        return version < end and version == _next_sent(state, channel, version, channel.every)
    # The version that a run starts with is for its first updates, whatever the channel's period, and in a resumed run
    # also for steps off the critical path that are behind.
    if channel.carried not in state.tables.makers:
        fixed = [step for step in state.tables.steps.values() if channel.name in step.fixed]
        return any((state.next_update(step) if step.per_update else version) < end for step in fixed)
    readers = [step for step, _ in state.tables.weight_readers[channel.name] if step.off_path]
    behind = any(state.off_path[step.name] < min(version + 1, end) for step in readers)
    return behind or (version < end and version == _next_sent(state, channel, version, 1))


def _next_sent(state: State, channel: Channel, version: int, every: int) -> int:
    """The first version from `version` on that is a multiple of `every` and that a step may fire with; the run's end
    if there is none."""
    readers = state.tables.weight_readers[channel.name]
    return min((_next_read(state, step, lag, version, every) for step, lag in readers), default=state.rules.end)


def _next_read(state: State, step: NodeStep, lag: int, version: int, every: int) -> int:
    """The same for one step. It fires with versions up to `lag` older than an update at which it is due. A per-group
    step is due at every update."""
    end = state.rules.end
    while True:
        due = step.due(version)
        if step.per_update:
            due = max(due, state.next_update(step))
            # A firing in work has its weights already.
            due = step.due(due + 1) if Firing(step.name, due) in state.running else due
        if due >= end:
            return end
        if version >= needed_version(due, lag) and version % every == 0:
            return version
        version = max(version + 1, needed_version(due, lag))
        version += -version % every


def reclaimable(state: State, name: str) -> bool:
    """True if the version that channel `name` could publish now may be overwritten: it is not being copied, and no
    reader still needs it."""
    sent, channel = state.channels[name], state.tables.channels[name]
    if sent.publishing:
        return False
    # Every update up to `last` must find a version that is new enough: the next one to be sent comes after it.
    last = _next_sent(state, channel, state.update + 1, channel.every) - 1
    for reader, lag in state.tables.weight_readers[name]:
        replicas = state.present[reader.pool]
        if reader.per_update:
            due = last - (last + 1) % reader.every
            served = due < state.next_update(reader) or sent.holds(needed_version(due, lag), replicas[0].name)
        elif sent.history:
            # A replica that joins later may need it, too.
            served = sent.published >= state.update
        elif state.pinned:
            served = all(sent.holds(state.update, replica.name) for replica in replicas)
        else:
            able = replicas[:1] if reader.stateful else replicas
            served = last == state.update or any(sent.holds(needed_version(last, lag), r.name) for r in able)
        if not served:
            return False
    return True


def move_weights(state: State) -> None:
    """Send the published versions to replicas whose second buffer is free; swap in the versions that have arrived."""
    for name, channel in state.channels.items():
        if channel.history:
            _move_needed(state, name)
            continue
        together = tuple(channel.to_send())
        for replica in together:
            channel.send(replica, channel.published)
            source = state.tables.channels[name].source.name
            state.ask(Send(name, channel.published, source, replica, together if len(together) > 1 else ()))
        for replica in channel.to_swap():
            version = channel.receivers[replica].staged
            if _may_swap(state, name, replica, version):
                channel.swap(replica)
                state.sort(replica)
                state.ask(Swap(name, version, replica))


def _move_needed(state: State, name: str) -> None:
    """The same for a channel with history. A replica gets the version that the first unstarted group needs, even one
    older than its own; or else the next version ahead of time."""
    channel, steps = state.channels[name], [step for step, _ in state.tables.weight_readers[name]]
    firsts = [ordinal for ordinal in map(state.first_unfired, steps) if state.ledger.before(ordinal) < state.total]
    needed = min((pinned_version(state, ordinal) for ordinal in firsts), default=None)
    working = {r for f, r in state.running.items() if any(f.node == step.name for step in steps)}
    replicas = [r.name for r in state.present[state.tables.channels[name].pool]]
    served = any(
        needed in (r.live, r.coming if r.sending else r.staged) for r in map(channel.receivers.__getitem__, replicas)
    )
    for replica in replicas:
        receiver = channel.receivers[replica]
        live, staged = receiver.live, receiver.staged
        if receiver.sending or receiver.swapping:
            continue
        if staged != live and (staged > live if needed is None else staged == needed or live < staged < needed):
            if replica not in working:
                channel.swap(replica)
                state.sort(replica)
                state.ask(Swap(name, staged, replica))
            continue
        there = needed is not None and needed <= channel.published and needed not in (live, staged)
        # One idle replica goes back to an older version for all of them.
        if there and needed is not None and (needed > live or not (served or replica in working)):
            version, served = needed, True
        elif channel.published == live + 1 != staged and (needed is None or needed < channel.published):
            version = channel.published
        else:
            continue
        channel.send(replica, version)
        state.ask(Send(name, version, state.tables.channels[name].source.name, replica))


def _may_swap(state: State, channel: str, replica: str, version: int) -> bool:
    """True if no step needs the live version of `replica`. With free versions, groups take newer weights at any
    time."""
    for step, _ in state.tables.weight_readers[channel]:
        if step.per_update:
            # It reads no version newer than its update, or in a resumed run than the start.
            here = replica == state.tables.by_pool[step.pool][0].name
            update = state.next_update(step)
            if here and (version > max(update, state.rules.start) or Firing(step.name, update) in state.running):
                return False
        elif state.pinned:
            # A group reads exactly its version: a swap during its firing would mix two.
            if any(f.node == step.name and r == replica for f, r in state.running.items()):
                return False
            ordinal = state.first_unfired(step)
            needed = state.ledger.before(ordinal) < state.total
            if needed and pinned_version(state, ordinal) <= state.live(channel, replica):
                return False
    return True
