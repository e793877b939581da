"""What must hold once all commands are said: something is in work, what nobody reads is freed, nothing waits that may
start."""

from penstock.graph.ir import Firing

from .facts import Facts
from .history import History


class Rest(History):
    """Looks at the books between two events."""

    def _quiet(self) -> None:
        self._true(bool(self.awaited), 8, "nothing is in work: deadlock")
        self._true(not self.doomed, 8, f"the run goes on; {self.drops} groups are dropped")
        self._true(not self.unsettled, 12, f"not settled: {self.unsettled}")
        idle = [v for v in self.books.values if self._over(v)]
        self._true(not idle and not self.debris, 7, f"not freed: {idle} {self.debris}")
        for channel, arenas in self.arenas.items():
            for replica, held in arenas.items():
                waits = held.shadow > held.live and not held.swapping and not self._reads_live(channel, replica)
                self._true(not waits, 9, f"version {held.shadow} could go live on {replica}")
        if self.cutting:
            free = self.rules.versions == "free"
            self._true(not free or self.cut is not None or self._moving(), 9, "the cut could be written")
            return
        for facts in self.facts.values():
            if facts.trails:
                self._true(not self._could_trail(facts), 9, f"{facts.name} could start")
            elif not facts.per_update and self.rules.versions == "free":
                for ordinal in [g for g, fate in self.books.fates.items() if fate == "pending"]:
                    self._true(not self._could_start(facts, ordinal), 9, f"{facts.name}[{ordinal}] could start")

    def _over(self, value: Firing) -> bool:
        """Should a value have been freed?"""
        if self.facts[value.node].per_update:
            done = value.index < self.books.update or not self.facts[value.node].readers
            return done and not self._needed(value)
        lost = self.books.fates[value.index] != "pending"
        working = any(
            f.index == value.index and f.node in self.facts and not self.facts[f.node].per_update for f in self.running
        )
        return not self._needed(value) and not (lost and working)

    def _reads_live(self, channel: str, replica: str) -> bool:
        """Does a step of this update read what is live, or a pinned group to come?"""
        arenas = self.arenas[channel][replica]
        for facts in self.facts.values():
            for lag in [lag for c, lag in facts.weights if c == channel]:
                running = any(f.node == facts.name and w.replica == replica for f, w in self.running.items())
                if facts.per_update:
                    here = replica == self._replicas(facts)[0].name
                    if here and (running or arenas.shadow > max(self._next(facts), self.start)):
                        return True
                elif self.rules.versions == "pinned":
                    to_come = (g for g in range(self.total - self.earlier) if self._to_come(facts, g))
                    pins = (self.before(g) // self.rules.batch - lag for g in to_come)
                    if running or any(max(0, pin) <= arenas.live for pin in pins):
                        return True
        return False

    def _to_come(self, facts: Facts, ordinal: int) -> bool:
        """Has a group still to start on a node, or perhaps a turn of it?"""
        alive = self.books.fates.get(ordinal, "pending") == "pending"
        done = ordinal in self.books.made and facts.name in self.books.made[ordinal]
        return alive and not done if facts.turns else self._to_start(facts, ordinal)

    def _to_start(self, facts: Facts, ordinal: int) -> bool:
        if self.books.fates.get(ordinal, "pending") != "pending":
            return False
        return facts.name not in self.books.made[ordinal] and not self._working(facts.name, ordinal)

    def _could_trail(self, facts: Facts) -> bool:
        """Is there room, and the right version, for a step that no update waits for?"""
        update, replica = self._next(facts), self._replicas(facts)[0]
        if update > self.books.update or update >= self.rules.end or self._working(facts.name):
            return False
        if any(self.arenas[channel][replica.name].live < self.start for channel in facts.fixed):
            return False
        held = [(self.arenas[channel][replica.name], lag) for channel, lag in facts.weights]
        has = all(self._fits(a.live, update, lag) and not a.swapping for a, lag in held)
        return has and self._load(replica.name) < replica.capacity

    def _could_start(self, facts: Facts, ordinal: int) -> bool:
        """May a group start on some replica, which does not leave it to others?"""
        if not self._ready(facts, ordinal):
            return False
        able = [r for r in self._replicas(facts) if self._admitted(facts, ordinal, r.name)]
        if facts.source:
            return bool(able)
        return any(self._load(r.name) < r.capacity and not self._leaves(facts, r.name) for r in able)

    def _leaves(self, facts: Facts, replica: str) -> bool:
        """Has a replica its share of a node's groups, while others wait for weights that are on their way?"""
        names = [r.name for r in self._replicas(facts)]
        arenas = [(channel, self.arenas[channel]) for channel, _ in facts.weights]
        if not any(held[name].live < self.published.get(channel, -1) for channel, held in arenas for name in names):
            return False
        groups = [g for g, fate in self.books.fates.items() if fate == "pending" and self._ready(facts, g)]
        waiting = sum(any(self._admitted(facts, g, name) for name in names) for g in groups)
        return self._load(replica) * (len(names) - 1) >= waiting

    def _ready(self, facts: Facts, ordinal: int) -> bool:
        """Has a group all that a node reads of it, and still to start there?"""
        made = self.books.made[ordinal]
        if facts.name in made or not facts.waits <= made.keys() or not self._its_turn(facts, ordinal):
            return False
        if not self._to_start(facts, ordinal) or self.before(ordinal) >= self.total:
            return False
        if facts.stateful and self._working(facts.name):
            return False
        if facts.stateful:
            ahead = (g for g, fate in self.books.fates.items() if g < ordinal and fate == "pending")
            if any(facts.name not in self.books.made[g] for g in ahead):
                return False
        return True

    def _its_turn(self, facts: Facts, ordinal: int) -> bool:
        """In a bounded cycle: is it this node's half of the group's turn?"""
        if not facts.turns:
            return True
        return self.talks[facts.hears or facts.name, ordinal].spoken == bool(facts.hears)

    def _admitted(self, facts: Facts, ordinal: int, replica: str) -> bool:
        """Are the weights and the delayed values that a group reads new enough, and, pinned, as old as they must be?"""
        before, batch = self.before(ordinal), self.rules.batch
        if any(self.arenas[channel][replica].live < self.start for channel in facts.fixed):
            return False
        if any(self._version(carried) < before // batch - lag for carried, lag in facts.delays):
            return False
        for channel, lag in facts.weights:
            arenas = self.arenas[channel][replica]
            if arenas.live < 0 or before >= (arenas.live + lag + 1) * batch:
                return False
            if self.rules.versions == "pinned" and (arenas.live != max(0, before // batch - lag) or arenas.swapping):
                return False
        return True
