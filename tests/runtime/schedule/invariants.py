"""A witness of the scheduler: it judges commands by books of its own, and fails on a broken invariant.

The numbers in the messages are those of the list on top of `scheduler.py`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import (
    Command,
    Commit,
    CommitTurn,
    Event,
    Finish,
    Fire,
    Free,
    Publish,
    Save,
    Send,
    Swap,
)

from .books import Work
from .facts import Facts
from .rest import Rest


class Checker(Rest):
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
        facts = self.facts[firing.node]
        self._ask(("fire", firing, replica))
        self._true(firing not in self.running, 1, f"{firing} is in work already")
        self._true((firing, replica) not in self.debris, 7, f"{firing} is tried again before its debris is freed")
        if facts.trails:
            self._trail(facts, command)
        elif facts.per_update:
            self._update(facts, command)
        else:
            self._group(facts, command)
        self._work(firing, replica)

    def _work(self, firing: Firing, replica: str) -> None:
        """A replica has one thing more to do."""
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
        self._true(not facts.stateful or self._in_order(facts, ordinal), 1, f"{command.firing} is out of order")
        self._take_turn(facts, command.firing)
        for channel, _ in facts.weights:
            turn = command.firing.turn
            self.books.versions[ordinal, name, channel, turn] = self.arenas[channel][command.replica].live
        self._true(self._admitted(facts, ordinal, command.replica), 3, f"{command.firing} is not admissible")
        slot = self.before(ordinal) // self.rules.batch if facts.delays else 0
        self._true(command.update == slot, 13, f"{command} is for update {slot}")

    def _take_turn(self, facts: Facts, firing: Firing) -> None:
        """The halves of a group's turns come in order, and read what the half and the turn before have made."""
        if not facts.turns:
            self._true(firing.turn == 0, 12, f"{firing} of a node that takes no turns")
            return
        speaks = facts.hears or facts.name
        talk = self.talks[speaks, firing.index]
        fits = firing.turn == talk.turn < facts.turns and self._its_turn(facts, firing.index)
        self._true(fits, 12, f"{firing} while {talk} is due")
        reads = [Firing(speaks, firing.index, firing.turn)]
        if facts.recalls and firing.turn:
            reads.append(firing._replace(turn=firing.turn - 1))
        if facts.heard_by:
            reads = [firing._replace(node=n, turn=firing.turn - 1) for n in (speaks, facts.heard_by) if firing.turn]
        for read in reads:
            self._true(read in self.books.values, 7, f"{firing} reads {read}, which is not there")
        if facts.heard_by and not firing.turn:
            for key in [k for k in self.books.versions if k[:2] == (firing.index, firing.node)]:
                del self.books.versions[key]

    def _in_order(self, facts: Facts, ordinal: int) -> bool:
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
        fits = firing.index == update < self.rules.end and self._due(facts.name)
        self._true(fits, 4, f"{firing} while update {update} is in work")
        self._true(self.pool_of[command.replica] == facts.pool, 1, f"{firing} runs on {command.replica}")
        self._true(not self.cutting or self._begun(), 4, f"{firing} begins an update while a cut is due")
        if facts.groups:
            self._true(self._batch_ready(), 4, f"{firing} lacks groups")
            self._true(command.groups == self.batch, 4, f"{firing} takes {command.groups}, next are {self.batch}")
            for ordinal in command.groups:
                for read in facts.groups:
                    self._true(Firing(read, ordinal) in self.books.values, 7, f"{firing} reads {read}[{ordinal}]")
        for read in facts.updates:
            self._true(Firing(read, update) in self.books.values, 7, f"{firing} reads {read}, which is not there")
        self._has_weights(facts, command)
        self._carried(facts, firing)

    def _trail(self, facts: Facts, command: Fire) -> None:
        """A step that no update waits for: at each update that is due, in order, once that update has begun."""
        firing = command.firing
        fits = firing.index == self._next(facts) <= self.books.update and firing.index < self.rules.end
        self._true(fits, 11, f"{firing}: due at {self._next(facts)}, and update {self.books.update} is in work")
        self._true(self.pool_of[command.replica] == facts.pool, 1, f"{firing} runs on {command.replica}")
        draining = self.rules.versions == "pinned" and self.cut is None
        self._true(not self.cutting or self._begun() or draining, 4, f"{firing} starts while a cut is due")
        self._true(command.groups == (), 11, f"{firing} is given the groups {command.groups}")
        self._has_weights(facts, command)

    def _has_weights(self, facts: Facts, command: Fire) -> None:
        """A per-update step reads versions that are neither too old nor newer than its update."""
        firing = command.firing
        for channel, lag in facts.weights:
            arenas = self.arenas[channel][command.replica]
            self._true(not arenas.swapping, 3, f"{firing} starts during a swap")
            fits = self._fits(arenas.live, firing.index, 0 if self.rules.versions == "pinned" else lag)
            self._true(fits, 3, f"{firing} reads version {arenas.live} of {channel}, lag {lag}")
        for channel in facts.fixed:
            self._true(self.arenas[channel][command.replica].live >= self.start, 3, f"{firing} lacks {channel}")

    def _carried(self, facts: Facts, firing: Firing) -> None:
        """No one reads the version that this update donates, and this firing reads none that is being donated."""
        for carried in facts.makes:
            for other in self.facts.values():
                reads = carried in other.carried and other.name != facts.name
                done = reads and not self._due(other.name)
                self._true(not reads or done, 5, f"{firing} donates {carried} before {other.name} has read it")
            publishing = any(f.node.startswith(f"{carried}>") for f in self.running)
            self._true(not publishing, 5, f"{firing} donates {carried} while it is being published")
            for channel in [c for c in self.beats if c.split(">")[0] == carried]:
                self._true(self._spare(channel), 5, f"{firing} donates a version of {channel} that is still needed")
        for carried in facts.carried:
            makers = [f.name for f in self.facts.values() if carried in f.makes]
            version = self.applied[makers[0]]
            self._true(version == firing.index, 5, f"{firing} reads version {version} of {carried}")

    def _publish(self, command: Publish) -> None:
        """It takes the sender's time, so that it is noted as a firing of the channel."""
        firing, replica = Firing(command.channel, command.version), command.replica
        self._ask(("publish", (command.channel, command.version), replica))
        maker, version = self._maker(firing.node), self._version(firing.node)
        self._true(firing.index == version, 5, f"{firing} is published while version {version} is there")
        on_the_beat = version % self.beats[firing.node] == 0 or version == self.start
        self._true(on_the_beat, 10, f"{firing} is published, at every {self.beats[firing.node]}. update")
        self._true(self._is_read(firing.node, version), 10, f"{firing} is published, and nobody reads it")
        self._true(version > self.published.get(firing.node, -1), 5, f"{firing} is published again")
        donated = maker is not None and Firing(maker, version) in self.running
        self._true(not donated, 5, f"{firing} is published while it is being donated")
        unsent = any(
            a.sending or a.shadow < self.published.get(firing.node, -1) for a in self.arenas[firing.node].values()
        )
        self._true(not unsent, 5, f"{firing} is published over a snapshot that is still to be sent")
        self._true(self.cut is None, 5, f"{firing} is published while the cut is being written")
        self._work(firing, replica)

    def _is_read(self, channel: str, version: int) -> bool:
        """May some node still fire with a version of what a channel carries?"""
        for facts in self.facts.values():
            first = self._next(facts) if facts.per_update else version
            to_come = [u for u in range(first, self.rules.end) if not facts.per_update or facts.due(u)]
            lags = [lag for c, lag in facts.weights if c == channel]
            if any(self._fits(version, u, lag) for lag in lags for u in to_come):
                return True
            if channel in facts.fixed and to_come:
                return True
        return False

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

    def _committurn(self, command: CommitTurn) -> None:
        """The last turn's values are the group's: they are named like those of the first one from now on."""
        firing = command.firing
        held = self.unsettled.pop(firing, "nowhere")
        self._true(held == command.replica == self.books.values.get(firing), 12, f"{command}: held by {held}")
        settled = firing._replace(turn=0)
        self._true(settled not in self.books.values, 12, f"{command} while {settled} is there")
        self.books.values[settled] = self.books.values.pop(firing)

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
        told = json.loads(command.state)
        made = {g: dict(m) for g, m in self.cut.made.items() if self.cut.fates.get(g) == "pending"}
        agrees = told["update"] == command.update == self.cut.update
        self._true(agrees and {g: m for g, m, _ in told["groups"]} == made, 4, f"the cut says {told}, known {self.cut}")
        counts = {fate: list(self.cut.fates.values()).count(fate) for fate in ("consumed", "dropped", "failed")}
        self._true(told["fates"] == counts, 4, f"the cut says {told['fates']}, known {counts}")
        self.cut.made = defaultdict(dict, made)
        trailing = {n: self._next(f, self.cut) for n, f in self.facts.items() if f.trails}
        self._true(told["trailing"] == trailing, 11, f"the cut says {told['trailing']}, known {trailing}")
        self.committed, self.cut, self.cutting = self.cut, None, False
        self._end_updates()

    def _finish(self, command: Finish) -> None:
        self.finish = command
        if command.status == "done":
            fates = list(self.books.fates.values())
            self._true(self.books.update == self.rules.end, 8, f"done at update {self.books.update}")
            self._true(
                "pending" not in fates and fates.count("consumed") == self.takes_groups * (self.total - self.earlier),
                4,
                f"fates at the end: {fates}",
            )
            self._true(not self.awaited and not self.running, 8, f"done while {self.awaited} is awaited")
            self._true(not self.books.values and not self.debris, 7, f"never freed: {self.books.values}")
            for facts in [f for f in self.facts.values() if f.trails]:
                due = [u for u in range(self.rules.start, self.rules.end) if facts.due(u)]
                fired = self.books.trailed[facts.name]
                self._true(fired == due, 11, f"{facts.name} fired at {fired}, due at {due}")
        if command.status == "failed":
            self._true(self.doomed, 8, f"{command} without a cause")
        if command.status == "stopped":
            cut = self.committed is not None or self.resumed  # that of the life before may have all that there is
            self._true(self.final and cut, 8, "stopped without a cut")
