"""A witness of the scheduler: it judges commands by books of its own, and fails on a broken invariant.

The numbers in the messages are those of the list on top of `scheduler.py`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Command, Commit, Event, Finish, Fire, Free, Save, Send, Swap

from .books import Books, Work
from .facts import Facts


class Checker(Books):
    """Call `see` after each `handle`."""

    def see(self, event: Event, commands: Iterable[Command]) -> None:
        """Note an event and judge the commands that followed it, in their order."""
        self._hear(event)
        for command in commands:
            assert self.finish is None, f"{command} after {self.finish}"
            getattr(self, f"_{type(command).__name__.lower()}")(command)
        if self.finish is None:
            self._quiet()

    def _fire(self, command: Fire) -> None:
        firing, replica = command.firing, command.replica
        facts = self.facts.get(firing.node)
        self._ask(("fire", firing, replica))
        self._true(firing not in self.running, 1, f"{firing} is in work already")
        self._true((firing, replica) not in self.debris, 7, f"{firing} is tried again before its debris is freed")
        if facts is None:
            self._publish(firing, replica)
        elif facts.per_update:
            self._update(facts, command)
        else:
            self._group(facts, command)
        self.running[firing] = Work(replica)
        self._true(self._load(replica) <= self.replicas[replica].capacity, 2, f"{replica} is over its capacity")

    def _group(self, facts: Facts, command: Fire) -> None:
        ordinal, name = command.firing.index, facts.name
        if facts.source:
            self.books.fates.setdefault(ordinal, "pending")
        self._true(self.pool_of[command.replica] == facts.pool, 1, f"{command.firing} runs on {command.replica}")
        self._true(command.groups == (ordinal,), 1, f"{command.firing} is given the groups {command.groups}")
        self._true(self.books.fates.get(ordinal) == "pending", 1, f"{command.firing}: {self.books.fates.get(ordinal)}")
        self._true(name not in self.books.made[ordinal], 1, f"{command.firing} is done already")
        self._true(not (self.final and self.rules.versions == "free"), 8, f"{command.firing} after a final checkpoint")
        for read in facts.groups:
            self._true(Firing(read, ordinal) in self.books.values, 7, f"{command.firing} reads {read}, not there")
        self._true(self.before(ordinal) < self.total, 6, f"{command.firing} is past the last update")
        self._true(not facts.stateful or self._in_turn(facts, ordinal), 1, f"{command.firing} is out of turn")
        for channel, _ in facts.weights:
            self.books.versions[ordinal, name, channel] = self.arenas[channel][command.replica].live
        self._true(self._admitted(facts, ordinal, command.replica), 3, f"{command.firing} is not admissible")

    def _admitted(self, facts: Facts, ordinal: int, replica: str) -> bool:
        before, batch = self.before(ordinal), self.rules.batch
        if any(self.arenas[channel][replica].live < self.start for channel in facts.fixed):
            return False
        for channel, lag in facts.weights:
            arenas = self.arenas[channel][replica]
            if arenas.live < 0 or before >= (arenas.live + lag + 1) * batch:
                return False
            if self.rules.versions == "pinned" and (arenas.live != max(0, before // batch - lag) or arenas.swapping):
                return False
        return True

    def _in_turn(self, facts: Facts, ordinal: int) -> bool:
        """A node with state takes the groups one by one, in order, and rests while a cut is due, unless it must not.

        Pinned groups whose version the resumed run could not make again are finished before the cut.
        """
        lag = max((lag for f in self.facts.values() for _, lag in f.weights), default=0)
        pin = max(0, self.before(ordinal) // self.rules.batch - lag)
        perishing = self.rules.versions == "pinned" and pin < self.books.update and self.cut is None
        alone = not any(f.node == facts.name for f in self.running) and (perishing or not self.cutting)
        passed = all(
            facts.name in self.books.made[g] for g in range(ordinal) if self.books.fates.get(g, "pending") == "pending"
        )
        newest = self.books.stateful.get(facts.name, -1) < ordinal
        self.books.stateful[facts.name] = ordinal
        return alone and passed and newest

    def _update(self, facts: Facts, command: Fire) -> None:
        firing, update = command.firing, self.books.update
        fits = firing.index == update == self.applied[facts.name] and update < self.rules.end
        self._true(fits, 4, f"{firing} while update {update} is in work")
        self._true(self.pool_of[command.replica] == facts.pool, 1, f"{firing} runs on {command.replica}")
        self._true(not self.cutting or self._begun(), 4, f"{firing} begins an update while a cut is due")
        if facts.groups:
            self.batch = self._next_batch()
            self._true(command.groups == self.batch, 4, f"{firing} takes {command.groups}, next are {self.batch}")
            for ordinal in self.batch:
                for read in facts.groups:
                    self._true(Firing(read, ordinal) in self.books.values, 7, f"{firing} reads {read}[{ordinal}]")
        for read in facts.updates:
            self._true(Firing(read, update) in self.books.values, 7, f"{firing} reads {read}, which is not there")
        for channel, lag in facts.weights:
            live = self.arenas[channel][command.replica].live
            self._true(not self.arenas[channel][command.replica].swapping, 3, f"{firing} starts during a swap")
            fits = update - lag <= live <= update and (self.rules.versions == "free" or live == max(0, update - lag))
            self._true(fits, 3, f"{firing} reads version {live} of {channel}, lag {lag}")
        self._carried(facts, firing)

    def _carried(self, facts: Facts, firing: Firing) -> None:
        """No one reads the version that this update donates, and this firing reads none that is being donated."""
        for carried in facts.makes:
            for other in self.facts.values():
                reads = carried in other.carried and other.name != facts.name
                done = self.applied.get(other.name, 0) > firing.index
                self._true(not reads or done, 5, f"{firing} donates {carried} before {other.name} has read it")
            publishing = any(f.node.startswith(f"{carried}>") for f in self.running)
            self._true(not publishing, 5, f"{firing} donates {carried} while it is being published")
        for carried in facts.carried:
            makers = [f.name for f in self.facts.values() if carried in f.makes]
            version = self.applied[makers[0]]
            self._true(version == firing.index, 5, f"{firing} reads version {version} of {carried}")

    def _next_batch(self) -> tuple[int, ...]:
        """The groups that the current update must take; all of them have been through every group node."""
        nodes = {n for n, f in self.facts.items() if not f.per_update}
        kept = sorted(g for g, fate in self.books.fates.items() if fate == "pending")[: self.rules.batch]
        late = [g for g in kept if set(self.books.made[g]) != nodes]
        self._true(
            not late and len(kept) == self.rules.batch, 4, f"update {self.books.update} lacks {late or 'groups'}"
        )
        return tuple(kept)

    def _publish(self, firing: Firing, replica: str) -> None:
        carried = firing.node.split(">")[0]
        maker = next((f.name for f in self.facts.values() if carried in f.makes), None)
        version = self.start if maker is None else self.applied[maker]
        self._true(firing.index == version, 5, f"{firing} is published while {carried} has version {version}")
        self._true(version > self.published.get(firing.node, -1), 5, f"{firing} is published again")
        donated = maker is not None and Firing(maker, version) in self.running
        self._true(not donated, 5, f"{firing} is published while it is being donated")
        unsent = any(
            a.sending or a.shadow < self.published.get(firing.node, -1) for a in self.arenas[firing.node].values()
        )
        self._true(not unsent, 5, f"{firing} is published over a snapshot that is still to be sent")
        self._true(self.cut is None, 5, f"{firing} is published while the cut is being written")

    def _send(self, command: Send) -> None:
        arenas = self.arenas[command.channel][command.replica]
        self._ask(("send", (command.channel, command.version), command.replica))
        free = arenas.shadow == arenas.live and not arenas.sending and not arenas.swapping
        self._true(free, 5, f"{command}: the shadow is taken")
        newest = self.published.get(command.channel, -1)
        self._true(command.version == newest > arenas.shadow, 5, f"{command}: version {newest} is published")
        arenas.sending = True

    def _swap(self, command: Swap) -> None:
        channel, replica = command.channel, command.replica
        arenas = self.arenas[channel][replica]
        self._ask(("swap", (channel, command.version), replica))
        ready = command.version == arenas.shadow > arenas.live and not arenas.sending and not arenas.swapping
        self._true(ready, 5, f"{command}: the shadow holds {arenas.shadow}, live is {arenas.live}")
        for firing, work in self.running.items():
            reads = channel in {c for c, _ in self.facts[firing.node].weights} if firing.node in self.facts else False
            fixed = self.rules.versions == "pinned" or (reads and self.facts[firing.node].per_update)
            self._true(not (reads and fixed and work.replica == replica), 3, f"{command} under {firing}")
        arenas.swapping = True

    def _free(self, command: Free) -> None:
        for firing in command.firings:
            if (firing, command.replica) in self.debris:
                self.debris.remove((firing, command.replica))
                continue
            self._true(self.books.values.get(firing) == command.replica, 7, f"{firing} is freed, not held there")
            self._true(not self._needed(firing), 7, f"{firing} is freed before its last reader")
            del self.books.values[firing]

    # Cuts and the end -------------------------------------------------------------------------------------

    def _save(self, command: Save) -> None:
        self._ask(("save", command.update, command.replica))
        self._true(not self._moving(), 4, f"{command}: something that moves state is in work")
        self._true(command.update == self.books.update, 4, f"{command}: update {self.books.update} is next")
        pending = {g for g, fate in self.books.fates.items() if fate == "pending"}
        needed = {
            f for f, r in self.books.values.items() if r == command.replica and f.index in pending and self._to_read(f)
        }
        self._true(set(command.firings) == needed, 7, f"{command}: needed {needed}")
        if self.cut is None:
            self.cut = deepcopy(self.books)
            self.cut.values = {}
        self.cut.values.update(dict.fromkeys(command.firings, command.replica))

    def _commit(self, command: Commit) -> None:
        assert self.cut is not None
        self._true(
            not any(key[0] == "save" for key in self.awaited), 4, "a cut is committed before all parts are written"
        )
        told = json.loads(command.cut)
        made = {g: dict(m) for g, m in self.cut.made.items() if self.cut.fates.get(g) == "pending"}
        agrees = told["update"] == command.update == self.cut.update
        self._true(agrees and {g: m for g, m, _ in told["groups"]} == made, 4, f"the cut says {told}, known {self.cut}")
        counts = {fate: list(self.cut.fates.values()).count(fate) for fate in ("consumed", "dropped", "failed")}
        self._true(told["fates"] == counts, 4, f"the cut says {told['fates']}, known {counts}")
        self.cut.made = defaultdict(dict, made)
        self.committed, self.cut, self.cutting = self.cut, None, False

    def _finish(self, command: Finish) -> None:
        self.finish = command
        if command.status == "done":
            fates = list(self.books.fates.values())
            self._true(self.books.update == self.rules.end, 8, f"done at update {self.books.update}")
            self._true(
                "pending" not in fates and fates.count("consumed") == self.total - self.earlier,
                4,
                f"fates at the end: {fates}",
            )
            self._true(not self.awaited and not self.running, 8, f"done while {self.awaited} is awaited")
            self._true(not self.books.values and not self.debris, 7, f"never freed: {self.books.values}")
        if command.status == "stopped":
            self._true(self.final and self.committed is not None, 8, "stopped without a cut")

    def _quiet(self) -> None:
        """After the commands: something is in work, what nobody reads is freed, and what may start has started."""
        self._true(bool(self.awaited), 8, "nothing is in work: deadlock")
        idle = [v for v in self.books.values if self._over(v)]
        self._true(not idle and not self.debris, 7, f"not freed: {idle} {self.debris}")
        for channel, arenas in self.arenas.items():
            for replica, held in arenas.items():
                waits = held.shadow > held.live and not held.swapping and not self._reads_live(channel, replica)
                self._true(not waits, 9, f"version {held.shadow} could go live on {replica}")
        if self.rules.versions == "pinned":
            return
        self._true(not self.cutting or self.cut is not None or self._moving(), 9, "the cut could be written")
        if self.cutting:
            return
        for facts in self.facts.values():
            if facts.per_update:
                continue
            for ordinal in [g for g, fate in self.books.fates.items() if fate == "pending"]:
                self._true(not self._could_start(facts, ordinal), 9, f"{facts.name}[{ordinal}] could start")

    def _reads_live(self, channel: str, replica: str) -> bool:
        """Does a step of this update read what is live, or a pinned group to come?"""
        arenas = self.arenas[channel][replica]
        for facts in self.facts.values():
            for lag in [lag for c, lag in facts.weights if c == channel]:
                running = any(f.node == facts.name and w.replica == replica for f, w in self.running.items())
                first = next(p for p in self.plan.pools if p.name == facts.pool).replicas[0].name
                if facts.per_update:
                    if replica == first and (running or arenas.shadow > self.applied[facts.name]):
                        return True
                elif self.rules.versions == "pinned":
                    to_come = (g for g in range(self.total - self.earlier) if self._to_start(facts, g))
                    pins = (self.before(g) // self.rules.batch - lag for g in to_come)
                    if running or any(max(0, pin) <= arenas.live for pin in pins):
                        return True
        return False

    def _could_start(self, facts: Facts, ordinal: int) -> bool:
        if facts.name in self.books.made[ordinal] or Firing(facts.name, ordinal) in self.running:
            return False
        if facts.groups - set(self.books.made[ordinal]) or self.before(ordinal) >= self.total:
            return False
        if facts.stateful and any(f.node == facts.name for f in self.running):
            return False
        if facts.stateful:
            ahead = (g for g, fate in self.books.fates.items() if g < ordinal and fate == "pending")
            if any(facts.name not in self.books.made[g] for g in ahead):
                return False
        replicas = next(p for p in self.plan.pools if p.name == facts.pool).replicas
        return any(
            (facts.source or self._load(r.name) < r.capacity) and self._admitted(facts, ordinal, r.name)
            for r in replicas[: 1 if facts.stateful else None]
        )
