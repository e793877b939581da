"""Books of a run kept up with what is heard of it: which firings are done, what they made, which updates are over."""

from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Abort, Arrived, Checkpoint, Done, Event, Failed, Published, Saved, Swapped

from .books import Books, Work
from .facts import Facts


class History(Books):
    """Notes events. Nothing is judged here but that groups are consumed with the versions that they may have."""

    def _hear(self, event: Event) -> None:
        match event:
            case Done(firing, replica, rank, dropped, again):
                self._answer(("fire", firing, replica), rank)
                self.running[firing].dropped |= dropped
                self.running[firing].again |= again
                self._settle_work(firing)
            case Failed(firing, replica, rank):
                self.doomed |= self._hopeless(firing)
                self._answer(("fire", firing, replica), rank)
                self.running[firing].failed = True
                self._settle_work(firing)
            case Published(channel, version, replica, rank):
                if self._answer(("publish", (channel, version), replica), rank):
                    del self.running[Firing(channel, version)]
                    self.published[channel] = version
            case Arrived(channel, version, replica, rank):
                if self._answer(("send", (channel, version), replica), rank):
                    arenas = self.arenas[channel][replica]
                    arenas.sending, arenas.shadow = False, version
            case Swapped(channel, version, replica, rank):
                if self._answer(("swap", (channel, version), replica), rank):
                    arenas = self.arenas[channel][replica]
                    arenas.swapping, arenas.live = False, version
            case Saved(update, replica, rank):
                self._answer(("save", update, replica), rank)
            case Checkpoint(final):
                self.cutting, self.final = True, self.final or final
            case Abort():
                self.doomed = True
        self._end_updates()

    def _ask(self, key: tuple[str, Any, str]) -> None:
        self._true(key not in self.awaited, 1, f"{key} asked twice")
        self.awaited[key] = set(range(len(self.replicas[key[-1]].ranks)))

    def _answer(self, key: tuple[str, Any, str], rank: int) -> bool:
        self.awaited[key].remove(rank)
        if self.awaited[key]:
            return False
        del self.awaited[key]
        return True

    def _settle_work(self, firing: Firing) -> None:
        work = self.running[firing]
        if ("fire", firing, work.replica) in self.awaited:
            return
        del self.running[firing]
        facts = self.facts[firing.node]
        if facts.per_update:
            self._update_done(facts, firing, work)
        else:
            self._group_done(firing, work)

    def _hopeless(self, firing: Firing) -> bool:
        """Must the run end because of a failure?"""
        facts = self.facts[firing.node]
        exhausted = self.attempts[firing] >= self.rules.retries and self.rules.on_failure == "stop"
        return facts.per_update or facts.stateful or exhausted

    def _group_done(self, firing: Firing, work: Work) -> None:
        alive = self.books.fates[firing.index] == "pending"
        if work.failed:
            self.debris.add((firing, work.replica))
            self.attempts[firing] += 1
            self.failures += 1
            bound = max(self._under_way(self.rules.failures), self.rules.retries + 1)
            self.doomed |= self.failures >= bound
            if alive and self.attempts[firing] > self.rules.retries and self.rules.on_failure == "replace":
                self.books.fates[firing.index] = "failed"
            return
        self.books.values[firing] = work.replica
        if not self.facts[firing.node].turns:
            self.books.made[firing.index][firing.node] = work.replica
        elif alive:
            self._turn_done(self.facts[firing.node], firing, work.again)
        if alive and work.dropped:
            self.books.fates[firing.index] = "dropped"
            self.drops += 1
            self.doomed |= self.rules.versions == "pinned" or self.drops >= self._under_way(self.rules.drops)

    def _under_way(self, batches: int) -> int:
        """So many batches' groups, for each update that may be under way."""
        updates = 1 + max((lag for facts in self.facts.values() for _, lag in facts.weights), default=0)
        return batches * self.rules.batch * updates

    def _turn_done(self, facts: Facts, firing: Firing, again: bool) -> None:
        """Half a turn is done; after the last one, what both nodes made is the group's."""
        talk = self.talks[facts.hears or facts.name, firing.index]
        if facts.heard_by:
            talk.spoken = True
        elif again and talk.turn + 1 < facts.turns:
            talk.turn, talk.spoken = talk.turn + 1, False
        else:
            for name in (facts.hears, facts.name):
                last = Firing(name, firing.index, talk.turn)
                self.books.made[firing.index][name] = self.books.values[last]
                if talk.turn:
                    self.unsettled[last] = self.books.values[last]

    def _update_done(self, facts: Facts, firing: Firing, work: Work) -> None:
        if work.failed:
            return
        if facts.readers or not facts.makes:
            self.books.values[firing] = work.replica
        if facts.trails:
            self.books.trailed[facts.name].append(firing.index)
        else:
            self.applied[firing.node] += 1

    def _end_updates(self) -> None:
        """Whatever updates are over: the steps that are due are done, and no version is lost that is still needed."""
        while self.books.update < self.rules.end and not any(map(self._due, self.applied)):
            if (self.cutting and not self._begun()) or (self.takes_groups and not self._batch_ready()):
                return
            kept = [c for c in self.beats if (maker := self._maker(c)) and not self.facts[maker].due(self.books.update)]
            if not all(map(self._spare, kept)):
                return
            for ordinal in self.batch or ():
                self._consumed(ordinal)
            self.books.update, self.batch, self.drops, self.failures = self.books.update + 1, None, 0, 0
            self.applied = dict.fromkeys(self.applied, self.books.update)

    def _due(self, name: str) -> bool:
        """Has the step still to fire at the current update?"""
        return self.facts[name].due(self.books.update) and self.applied[name] == self.books.update

    def _batch_ready(self) -> bool:
        nodes = {n for n, f in self.facts.items() if not f.per_update}
        if self.batch is None:
            kept = sorted(g for g, fate in self.books.fates.items() if fate == "pending")[: self.rules.batch]
            if len(kept) == self.rules.batch and all(set(self.books.made[g]) == nodes for g in kept):
                self.batch = tuple(kept)
        return self.batch is not None

    def _consumed(self, ordinal: int) -> None:
        update = self.books.update
        self.books.fates[ordinal] = "consumed"
        self.books.consumed[ordinal] = update
        for node, facts in self.facts.items():
            for channel, lag in () if facts.per_update else facts.weights:
                used = {v for (o, n, c, _), v in self.books.versions.items() if (o, n, c) == (ordinal, node, channel)}
                fits = used and update - lag <= min(used) <= max(used) <= update
                self._true(bool(fits), 3, f"group {ordinal} of update {update}: {node} used {used}, lag {lag}")
                if self.rules.versions == "pinned":
                    self._true(used == {max(0, update - lag)}, 3, f"group {ordinal}: {used} for update {update}")
