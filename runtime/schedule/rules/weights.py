"""Weights on their way: published by the pool that holds them, sent, swapped in. Versions in between may be skipped."""

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Send, Swap
from penstock.runtime.schedule.state import State
from penstock.runtime.schedule.tables import Channel


def publish(state: State, channels: tuple[Channel, ...]) -> None:
    """Snapshot what is news to a receiver, unless it is being donated. The last version has no reader left, but in a
    run resumed after it, where steps that trail may still be behind."""
    if state.cutting is not None and not state.begun():
        return
    behind = any(update < state.rules.end for update in state.trailing.values())
    for channel in channels:
        way, version = state.ways[channel.name], state.version(channel.carried)
        maker = state.tables.makers.get(channel.carried)
        donated = maker is not None and Firing(maker, version) in state.running
        if donated or state.room(channel.source) <= 0:
            continue
        first = version == state.rules.start
        if (version >= state.rules.end and not (first and behind)) or (version % channel.every and not first):
            continue
        if way.may_publish(version):
            way.publishing = True
            state.fire(Firing(channel.name, version), channel.source.name)


def spare(state: State, name: str) -> bool:
    """May the version that a channel could publish now go? Not while it is read, nor while a reader needs it: every
    update before the one that makes the next version to be sent must find one that is new enough."""
    way, every = state.ways[name], state.tables.channels[name].every
    if way.publishing:
        return False
    last = min(state.update - state.update % every + every, state.rules.end) - 1
    for reader, lag in state.tables.weight_readers[name]:
        replicas = state.tables.by_pool[reader.pool]
        if reader.per_update:
            due = last - (last + 1) % reader.every
            served = due < state.next_update(reader) or way.holds(max(due - lag, 0), replicas[0].name)
        elif state.pinned:
            served = all(way.holds(state.update, replica.name) for replica in replicas)
        else:
            able = replicas[:1] if reader.stateful else replicas
            served = last == state.update or any(way.holds(max(last - lag, 0), replica.name) for replica in able)
        if not served:
            return False
    return True


def move(state: State) -> None:
    """Send to where the shadow is free; swap in what has arrived."""
    for name, way in state.ways.items():
        for replica in way.to_send():
            way.receivers[replica].sending = True
            source = state.tables.channels[name].source.name
            send = Send(name, way.published, source, replica)
            state.ask(send, ("send", name, way.published, replica), replica)
        for replica, receiver in way.receivers.items():
            if receiver.swappable and _may_swap(state, name, replica, receiver.shadow):
                receiver.swapping = True
                swap = Swap(name, receiver.shadow, replica)
                state.ask(swap, ("swap", name, receiver.shadow, replica), replica)


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
            if needed and state.pin(ordinal) <= state.live(channel, replica):
                return False
    return True
