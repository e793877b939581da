"""The scheduler: `handle(event) -> list[Command]`. No clock, no socket, no thread, no log; same events, same commands.

Every rule that moves a firing stands in this file; `ledger` keeps the groups' fates, `channel` the weights' ways.

Invariants, checked by `invariants.check` after each event of the tests:
1.  A firing is in work on at most one replica, and done at most once in a run.
2.  A replica has at most `capacity` firings in work (sources are free of charge).
3.  Group g starts on a replica only while before(g) < (live version + lag + 1) * batch for each lagged edge;
    with pinned versions only while live = max(start, before(g) // batch - lag).
4.  Update u consumes the next `batch` kept groups in ordinal order, once, after update u - 1.
5.  The version of a carried value that changes is the number of updates applied to it; no reader of version u is in
    work while the update that donates it is.
6.  No group past the last update starts: before(g) < end * batch.
7.  A value is freed once, after its last reader, and never read afterwards.
8.  While anything is left to do, something is in work (no deadlock), unless a checkpoint, failure or stop ended it.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.schedule.channel import Way
from penstock.runtime.schedule.events import (
    Abort,
    Arrived,
    Begin,
    Checkpoint,
    Command,
    Commit,
    Done,
    Event,
    Failed,
    Finish,
    Fire,
    Free,
    Save,
    Saved,
    Send,
    Swap,
    Swapped,
)
from penstock.runtime.schedule.ledger import Group, Ledger
from penstock.runtime.schedule.tables import Rules, Step, Tables

AHEAD = 1
"""Sources are read up to this many batches before they can be admitted, so that admission finds them ready."""


class Scheduler:
    """The state of one run of one graph. `cut` continues a checkpoint; `live` are versions replicas hold already."""

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        cut: Mapping[str, Any] | None = None,
        live: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self.tables, self.rules = tables, rules
        self.ledger = Ledger()
        self.ready: dict[str, list[int]] = {s: [] for s in tables.steps}
        self.load = dict.fromkeys(tables.replicas, 0)
        self.updates_done = {s.name: rules.start for s in tables.steps.values() if s.per_update}
        self.update = rules.start
        self.batch: tuple[int, ...] | None = None
        self.running: dict[Firing, str] = {}
        self.tries: dict[Firing, int] = {}
        self.cutting: Checkpoint | None = None
        self.saving = False
        self.finished = False
        self.ways = {
            c.name: Way(tuple(r.name for r in c.replicas), {r: v for (n, r), v in (live or {}).items() if n == c.name})
            for c in tables.channels.values()
        }
        self._errors: dict[Firing, str] = {}
        self._answers: dict[tuple[Any, ...], set[int]] = {}
        self._made: dict[Firing, str] = {}
        self._out: list[Command] = []
        self._cut_state = ""
        self._freed: dict[str, list[Firing]] = defaultdict(list)
        self._uses_groups = any(s.groups for s in tables.steps.values() if s.per_update)
        if cut is not None:
            self._restore(cut)

    # What is heard ----------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:
        """The commands that follow from an event. Raises ValueError for an answer nobody asked for."""
        self._out = []
        if self.finished:
            return []
        match event:
            case Done():
                self._done(event)
            case Arrived() | Swapped():
                self._weights(event)
            case Failed():
                self._failed(event)
            case Checkpoint():
                self.cutting = event if self.cutting is None or event.final else self.cutting
            case Saved():
                self._saved(event)
            case Abort():
                self._finish("failed", event.error)
            case Begin():
                pass
        if not self.finished:
            self._dispatch()
        for replica, firings in self._freed.items():
            self._out.append(Free(tuple(firings), replica))
        self._freed.clear()
        return self._out

    def _answered(self, key: tuple[Any, ...], rank: int) -> bool:
        """Note a rank's answer; true when it was the last one awaited."""
        ranks = self._answers.get(key)
        if ranks is None or rank not in ranks:
            raise ValueError(f"scheduler: an answer that nobody awaits: {key}, rank {rank}")
        ranks.remove(rank)
        if ranks:
            return False
        del self._answers[key]
        return True

    def _ask(self, command: Command, key: tuple[Any, ...], replica: str) -> None:
        self._answers[key] = set(range(len(self.tables.replicas[replica].ranks)))
        self._out.append(command)

    def _done(self, event: Done) -> None:
        firing = event.firing
        if not self._answered(("fire", firing, event.replica), event.rank):
            return
        if firing in self._errors:
            self._failed_everywhere(firing, event.replica)
            return
        del self.running[firing]
        self.tries.pop(firing, None)
        step = self.tables.steps.get(firing.node)
        if step is None:
            self.load[event.replica] -= 1
            way = self.ways[firing.node]
            way.publishing, way.published = False, firing.index
            return
        self.load[event.replica] -= not step.source
        if step.per_update:
            self._update_done(step, firing, event.replica)
        else:
            self._group_done(step, firing, event)

    def _group_done(self, step: Step, firing: Firing, event: Done) -> None:
        group = self.ledger.groups.get(firing.index)
        if group is None:
            self._freed[event.replica].append(firing)
            return
        group.made[step.name] = event.replica
        group.readers[step.name] = len(step.readers)
        if not step.readers:
            self._freed[event.replica].append(firing)
        for name in step.groups:
            self._read(group, name)
        if event.dropped:
            self._lose(firing.index, "dropped")
            return
        group.finished = len(group.made) == self.tables.num_group_steps
        self._offer(group, step)

    def _offer(self, group: Group, step: Step) -> None:
        """Put the readers of a step's new output in their queues, once they have all their inputs."""
        for name in step.readers:
            reader = self.tables.steps[name]
            if not reader.per_update and all(g in group.made for g in reader.groups):
                heapq.heappush(self.ready[name], group.ordinal)

    def _read(self, group: Group, name: str) -> None:
        """One reader of a group's value is done; the last one frees it."""
        group.readers[name] -= 1
        if not group.readers[name]:
            self._freed[group.made[name]].append(Firing(name, group.ordinal))

    def _lose(self, ordinal: int, fate: str) -> None:
        group = self.ledger.lose(ordinal, fate)
        for name, count in group.readers.items():
            if count:
                self._freed[group.made[name]].append(Firing(name, ordinal))

    def _update_done(self, step: Step, firing: Firing, replica: str) -> None:
        self.updates_done[step.name] = firing.index + 1
        if any(self.tables.steps[r].per_update for r in step.readers):
            self._made[firing] = replica
        if any(done <= self.update for done in self.updates_done.values()):
            return
        if self.batch is not None:
            for group in self.ledger.consume(self.batch):
                for name, count in group.readers.items():
                    if count:
                        self._freed[group.made[name]].append(Firing(name, group.ordinal))
        for made, holder in self._made.items():
            self._freed[holder].append(made)
        self._made.clear()
        self.update, self.batch = self.update + 1, None

    def _failed(self, event: Failed) -> None:
        """Stop at once, or wait for the other ranks' answers and then try again or give the group up."""
        firing = event.firing
        step = self.tables.steps.get(firing.node)
        hopeless = step is None or step.per_update or step.stateful
        if hopeless or (self.tries.get(firing, 0) >= self.rules.retries and self.rules.on_failure == "stop"):
            self._finish("failed", event.error)
            return
        self._errors[firing] = event.error
        if self._answered(("fire", firing, event.replica), event.rank):
            self._failed_everywhere(firing, event.replica)

    def _failed_everywhere(self, firing: Firing, replica: str) -> None:
        """All ranks have answered for a per-group firing that failed on some of them."""
        del self._errors[firing], self.running[firing]
        self.load[replica] -= not self.tables.steps[firing.node].source
        self._freed[replica].append(firing)
        tries = self.tries.pop(firing, 0) + 1
        if firing.index not in self.ledger.groups:
            return
        if tries > self.rules.retries:
            self._lose(firing.index, "failed")
        else:
            self.tries[firing] = tries
            heapq.heappush(self.ready[firing.node], firing.index)

    def _weights(self, event: Arrived | Swapped) -> None:
        kind = "send" if isinstance(event, Arrived) else "swap"
        if not self._answered((kind, event.channel, event.version, event.replica), event.rank):
            return
        receiver = self.ways[event.channel].receivers[event.replica]
        if isinstance(event, Arrived):
            receiver.sending, receiver.shadow = False, event.version
        else:
            receiver.swapping, receiver.live = False, event.version

    # What is done about it --------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._line_up()
        stopping = self.cutting is not None and self.cutting.final
        self._move_weights()
        for pool, steps in self.tables.update_steps.items():
            self._publish(pool)
            for step in steps:
                self._fire_update(step)
        if not stopping:
            self._read_sources()
        if not stopping or self.rules.versions == "pinned":
            for steps in self.tables.group_steps.values():
                for step in steps:
                    self._fire_groups(step)
        if self.cutting is not None:
            self._cut()
        elif self.update >= self.rules.end and not self.running and self._settled():
            self._finish("done")

    def _line_up(self) -> None:
        """Assemble the batch of the current update when its groups are finished."""
        if self._uses_groups and self.batch is None and self.update < self.rules.end and self.cutting is None:
            self.batch = self.ledger.take(self.rules.batch)

    def _version(self, carried: str) -> int:
        maker = self.tables.makers.get(carried)
        return self.rules.start if maker is None else self.updates_done[maker]

    def _publish(self, pool: str) -> None:
        for channel in self.tables.channels.values():
            if self.tables.pool_of[channel.source.name] != pool or self.cutting is not None:
                continue
            way, version = self.ways[channel.name], self._version(channel.carried)
            source, maker = channel.source, self.tables.makers.get(channel.carried)
            donated = maker is not None and Firing(maker, version) in self.running
            last = maker is not None and version >= self.rules.end > self.rules.start
            if donated or last or self.load[source.name] >= source.capacity or not way.may_publish(version):
                continue
            way.publishing = True
            self._fire(Firing(channel.name, version), source.name)

    def _move_weights(self) -> None:
        for name, way in self.ways.items():
            channel = self.tables.channels[name]
            for replica in way.to_send():
                way.receivers[replica].sending = True
                send = Send(name, way.published, channel.source.name, replica)
                self._ask(send, ("send", name, way.published, replica), replica)
            for replica, receiver in way.receivers.items():
                waiting = receiver.shadow > receiver.live and not receiver.swapping
                if waiting and (self.rules.versions == "free" or self._may_swap(name, replica)):
                    receiver.swapping = True
                    swap = Swap(name, receiver.shadow, replica)
                    self._ask(swap, ("swap", name, receiver.shadow, replica), replica)

    def _may_swap(self, channel: str, replica: str) -> bool:
        """Pinned: nobody works with the live version here, and no group that is still to start needs it."""
        for step in self.tables.steps.values():
            for name, lag in step.weights:
                if name != channel:
                    continue
                if any(f.node == step.name and r == replica for f, r in self.running.items()):
                    return False
                ordinal = self._first_unfired(step)
                needed = self.ledger.before(ordinal) < self.rules.end * self.rules.batch
                if needed and self._pin(ordinal, lag) <= self.ways[name].receivers[replica].live:
                    return False
        return True

    def _first_unfired(self, step: Step) -> int:
        """The lowest ordinal that has not been through `step` nor is in work there."""
        for ordinal, group in self.ledger.groups.items():
            if step.name not in group.made and Firing(step.name, ordinal) not in self.running:
                return ordinal
        return self.ledger.next

    def _pin(self, ordinal: int, lag: int) -> int:
        return max(self.rules.start, self.ledger.before(ordinal) // self.rules.batch - lag)

    def _read_sources(self) -> None:
        """Open groups and read sources for them, a little before they can be admitted."""
        sources = [s for s in self.tables.steps.values() if s.source]
        newest = self.update + (self.tables.max_lag + 1 + AHEAD)
        limit = min(newest, self.rules.end) * self.rules.batch
        while sources and self.ledger.before(self.ledger.next) < limit:
            group = self.ledger.open()
            for step in sources:
                heapq.heappush(self.ready[step.name], group.ordinal)

    def _fire_groups(self, step: Step) -> None:
        queue = self.ready[step.name]
        while queue:
            ordinal = queue[0]
            if ordinal in self.ledger.groups:
                replica = self._choose(step, ordinal)
                if replica is None:
                    return
                self._fire(Firing(step.name, ordinal), replica, (ordinal,))
            heapq.heappop(queue)

    def _choose(self, step: Step, ordinal: int) -> str | None:
        """The admissible replica with most room, the first of equals."""
        if step.stateful and (self.cutting is not None or ordinal != self._first_unfired(step)):
            return None
        best, room = None, 0
        for replica in self.tables.by_pool[step.pool][: 1 if step.stateful else None]:
            name = replica.name
            free = replica.capacity - self.load[name] + step.source
            if free > room and self._admissible(step, ordinal, name):
                best, room = name, free
        if step.stateful and any(f.node == step.name for f in self.running):
            return None
        return best

    def _admissible(self, step: Step, ordinal: int, replica: str) -> bool:
        before = self.ledger.before(ordinal)
        if before >= self.rules.end * self.rules.batch:
            return False
        for channel, lag in step.weights:
            receiver = self.ways[channel].receivers[replica]
            live = receiver.live
            if live < 0 or before >= (live + lag + 1) * self.rules.batch:
                return False
            if self.rules.versions == "pinned":
                pin = self._pin(ordinal, lag)
                if receiver.swapping or live != pin or (self.cutting is not None and pin >= self.update):
                    return False
        return True

    def _fire_update(self, step: Step) -> None:
        update, replica = self.updates_done[step.name], self.tables.by_pool[step.pool][0]
        firing = Firing(step.name, update)
        if self.cutting is not None and update == self.update and not self._begun():
            return
        if update != self.update or update >= self.rules.end or firing in self.running:
            return
        if self.load[replica.name] < replica.capacity and self._has_inputs(step, update):
            self._fire(firing, replica.name, self.batch if step.groups else ())

    def _begun(self) -> bool:
        """Has the current update fired any of its nodes?"""
        done = any(count > self.update for count in self.updates_done.values())
        return done or any(f.node in self.updates_done for f in self.running)

    def _has_inputs(self, step: Step, update: int) -> bool:
        if step.groups and self.batch is None:
            return False
        if any(self.updates_done[name] <= update for name in (*step.updates, *step.after)):
            return False
        for channel in self.tables.channels.values():
            if channel.carried in step.makes:
                way = self.ways[channel.name]
                if way.publishing:
                    return False
                behind = any(r.shadow < update for r in way.receivers.values()) and way.published < update
                if self.rules.versions == "pinned" and behind:
                    return False
        replica = self.tables.by_pool[step.pool][0].name
        return all(self.ways[c].receivers[replica].live >= update - lag for c, lag in step.weights)

    def _fire(self, firing: Firing, replica: str, groups: tuple[int, ...] | None = ()) -> None:
        step = self.tables.steps.get(firing.node)
        self.running[firing] = replica
        self.load[replica] += not (step is not None and step.source)
        self._ask(Fire(firing, replica, groups or ()), ("fire", firing, replica), replica)

    # Checkpoints and the end ------------------------------------------------------------------------------

    def _settled(self) -> bool:
        ways = self.ways.values()
        return not any(r.sending or r.swapping for way in ways for r in way.receivers.values())

    def _cut(self) -> None:
        """Between two updates: have every replica write its part. Later admissions do not change the cut."""
        if self.saving or self._begun() or any(self.tables.steps[f.node].stateful for f in self._steps_running()):
            return
        if any(way.publishing for way in self.ways.values()) or not self._drained():
            return
        self.saving = True
        if self.batch is not None:
            self.ledger.put_back(self.batch)
            self.batch = None
        values: dict[str, list[Firing]] = {r: [] for r in self.tables.replicas}
        for group in self.ledger.groups.values():
            for name, replica in group.made.items():
                if group.readers[name]:
                    values[replica].append(Firing(name, group.ordinal))
        self._cut_state = json.dumps({"update": self.update, **self.ledger.to_json()}, sort_keys=True)
        for replica, firings in values.items():
            self._ask(Save(self.update, replica, tuple(firings)), ("save", self.update, replica), replica)

    def _steps_running(self) -> list[Firing]:
        return [f for f in self.running if f.node in self.tables.steps]

    def _drained(self) -> bool:
        """Pinned versions older than the policy cannot be made again: finish their groups before the cut."""
        if self.rules.versions == "free" or self.cutting is None:
            return True
        return all(
            group.finished or all(self._pin(group.ordinal, lag) >= self.update for lag in self._lags())
            for group in self.ledger.groups.values()
        )

    def _lags(self) -> set[int]:
        return {lag for step in self.tables.steps.values() for _, lag in step.weights}

    def _saved(self, event: Saved) -> None:
        if not self._answered(("save", event.update, event.replica), event.rank):
            return
        if any(key[0] == "save" for key in self._answers):
            return
        assert self.cutting is not None
        final, self.cutting, self.saving = self.cutting.final, None, False
        self._out.append(Commit(event.update, self._cut_state))
        if final:
            self._finish("stopped")

    def _restore(self, cut: Mapping[str, Any]) -> None:
        self.ledger.restore(cut)
        for ordinal, group in self.ledger.groups.items():
            made = group.made
            group.finished = len(made) == self.tables.num_group_steps
            for step in self.tables.steps.values():
                if step.per_update or step.name in made:
                    continue
                if all(name in made for name in step.groups):
                    heapq.heappush(self.ready[step.name], ordinal)

    def cause(self, replica: str) -> str:
        """Why a replica without firings in work is idle: "weights", "data", "saving", "done" or "start"."""
        if self.finished or self.update >= self.rules.end:
            return "done"
        if self.cutting is not None:
            return "saving"
        pool = self.tables.pool_of[replica]
        ways = [w for n, w in self.ways.items() if replica in w.receivers]
        if any(w.receivers[replica].live < 0 for w in ways):
            return "start"
        waiting = any(self.ready[s.name] and s.weights for s in self.tables.group_steps[pool])
        return "weights" if waiting else "data"

    def _finish(self, status: str, error: str = "") -> None:
        self.finished = True
        self._out.append(Finish(status, error))
