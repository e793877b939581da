"""The scheduler: `handle(event) -> list[Command]`. No clock, no socket, no thread, no log; same events, same commands.

Events are sorted out here. `admission` decides which groups may start and which weights move, `transitions` what
becomes of groups, updates and checkpoints. `state` and `channel` have the state that they move.

Invariants, checked after each event of the tests by `tests/runtime/schedule/checker.py`:
1.  A firing is in work on at most one replica, and done at most once in a run.
2.  A replica has at most `capacity` firings in work (sources are free of charge).
3.  Group g starts on a replica only while its live version is at least needed_version(before(g), lag, batch) for each
    lagged edge; with pinned versions only while it is just that, or the start. A per-update step of update u
    reads a version in u - lag … u (in a run resumed after u: … start), and no swap happens under it.
4.  Update u consumes the next `batch` kept groups in ordinal order, once, after update u - 1. It begins when all of
    them are finished, but for the parts of a step that accumulates. In order "ready" they are the finished ones of the
    earliest deadlines, taken as soon as all that are left can be consumed by theirs. A checkpoint falls between two
    updates and is copied before the next one begins; it is complete when all ranks have written it, and one is written
    at a time. A step with every=k takes part where u + 1 is a multiple of k.
5.  The version of a carried value that changes is the number of updates that are over for it, whether they made a
    next value or left it as it was; no reader of version u is in work while the update that donates it is, and no
    version goes while a reader to come needs it.
6.  No group past the last update starts: before(g) < end * batch.
7.  A value is freed once, after its last reader, and never read afterwards; a lost group's when nobody works on it.
8.  While anything is left to do, something is in work (no deadlock), unless a checkpoint, failure or stop ended it
    (a failure of a node not before the checkpoint that is being written is whole), or filters dropped `drops` batches'
    worth of groups between two updates, or firings failed so often.
9.  With free versions, no per-group firing waits that may start, but for one that a replica leaves to others which
    wait for weights on their way (it takes as many as are left for each of them); nor does a step off the critical
    path, unless a checkpoint is due.
10. A channel publishes only versions that a step to come may fire with, and with every=m only multiples of m but for
    the version that the run starts with.
11. A step off the critical path (it reads nothing but weights, and no step reads it) fires at each update that is due,
    in order, once that update has come; nothing waits for it but the end of the run, the versions that it needs, and,
    if it has state and is in work, a checkpoint.
12. Two steps that alternate on a group take turns 0, 1, … in order, the one that speaks before the one that answers.
    What a turn has made is freed when the next one has spoken; what the last one has made is the group's, committed
    once if it was not turn 0, and only then read by others.
13. A group that reads a delayed value starts when its version is at least needed_version(before(g), lag, batch), and is
    told the update that it is for: before(g) // batch.
14. A per-group firing that has paused goes on in segment 1, 2, … on any replica, from what the segment before has left.
    That is freed when the segment that reads it is over.
15. A step that accumulates fires in segments 0, 1, … for the parts of its update's batch: the n-th on the n-th groups
    taken, in order "strict" once all up to these are finished. Only the last one waits for what other steps do with the
    update, and makes the next version; a checkpoint may fall before it, and has nothing of the parts.
16. A replica that is absent is asked for nothing. When one is lost, each group that it worked on, or kept something of
    that is still to be read, begins again at its sources, under its ordinal, when nothing is in work on it: all that
    was made of it is freed. But an update that has read its groups goes on with them; one of which no step could read
    them gives them back, and one of which another step has read them waits until they are made again. Each group has
    one fate all the same. A checkpoint of which a part was lost is made again.
17. With pinned versions and replicas that may be lost, one may go back to an older version: that of the first group
    which has not started, if no other replica has it. The sender keeps what groups of the current update may need.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.runtime.schedule import admission, transitions
from penstock.runtime.schedule.compile import NodeStep, Rules, Tables, check_rules
from penstock.runtime.schedule.events import (
    Abort,
    Answer,
    Arrived,
    Begin,
    Checkpoint,
    Command,
    Copied,
    Done,
    Event,
    Failed,
    Published,
    ReplicaJoined,
    ReplicaLost,
    Saved,
    Unread,
    ranks_of,
)
from penstock.runtime.schedule.state import State, UnawaitedError


class Scheduler(State):
    """One run of one graph. `saved` is the state of a checkpoint to continue from; `live` are versions that replicas
    hold already.

    `complete` is the state of the newest complete checkpoint, {} where there is none yet: a final checkpoint with no
    more in it is not written. With None every checkpoint is written, as in logs that do not say. `absent` are replicas
    that are not there, and `lives` how often each has been lost before.

    Raises ValueError for rules that cannot work with the graph.
    """

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        saved: Mapping[str, Any] | None = None,
        live: Mapping[tuple[str, str], int] | None = None,
        complete: Mapping[str, Any] | None = None,
        absent: Collection[str] = (),
        lives: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        check_rules(tables, rules)
        super().__init__(tables, rules, live or {}, absent, lives)
        self.complete = complete
        if saved is not None:
            transitions.restore(self, saved)

    def handle(self, event: Event) -> list[Command]:
        """The commands that follow from an event. Raises UnawaitedError for an answer that was not asked for.

        The way of a group's answer: `_hear`, `_fired`, `transitions.group_done` (which may complete a batch), then
        `admission.start_groups` for the steps that it lets start, each with a `State.fire`.
        """
        self.out, self.asked = [], []
        if self.ended:
            self._outlive(event)
            return self.out
        stirred = self._hear(event)
        if stirred is None and not self.ended:
            transitions.end_updates(self)
        self.say_freed()
        if not self.ended:
            if stirred is None:
                self._dispatch()
            elif stirred:
                admission.start_groups(self, stirred)
                self._swap_pinned()
        # In order "ready": a group that has read weights may be overtaken by more than before.
        if self.rules.order == "ready" and not self.ended and transitions.assemble(self):
            self._dispatch()
        return self.out

    def _hear(self, event: Event) -> Sequence[NodeStep] | None:
        """Move the state by an event. Returns the steps that may start because of it; None for a look at everything."""
        match event:
            case Begin():
                return None
            case Checkpoint():
                # A final one turns one that is under way into the last; nothing turns a final one back.
                self.checkpoint = event if self.checkpoint is None or event.final else self.checkpoint
                return None
            case Abort():
                self.finish("failed", event.error)
                return None
            case ReplicaLost():
                if event.replica in self.absent or self.tables.fixed_pools[self.tables.pool_of[event.replica]]:
                    raise UnawaitedError(f"scheduler: a replica that cannot be lost: {event}")
                transitions.lose_replica(self, event.replica, event.reason)
                return None
            case ReplicaJoined():
                if event.replica not in self.absent:
                    raise UnawaitedError(f"scheduler: a replica that is there: {event}")
                transitions.join_replica(self, event.replica)
                return None
            case Copied():
                if not all((event.replica, rank) in self.copying for rank in ranks_of(event)):
                    raise UnawaitedError(f"scheduler: an answer that nobody awaits: {event}")
                return None if self._copied(event) else ()
        last = self.answered(event)
        if isinstance(event, Done | Failed):
            return self._fired(event, last)
        if isinstance(event, Saved):
            # One that has written its part at once has copied it, too.
            stirred = self._copied(event)
            if any(isinstance(awaited, Saved) for awaited in self.answers):
                return None if stirred else ()
            transitions.commit(self)
            return None
        if not last:
            return ()
        steps: Sequence[NodeStep] = ()
        channel, pool = self.channels[event.channel], self.tables.pool_of[event.replica]
        if isinstance(event, Published):
            self.weigh(event.replica, -1)
            channel.publish(event.version)
            return None
        if isinstance(event, Arrived):
            channel.arrive(event.replica, event.version)
            settled = not channel.owed
        else:
            channel.swapped(event.replica, event.version)
            self.sort(event.replica)
            steps, settled = self.tables.group_steps[pool], not self.answers
        if channel.history or settled or self.tables.update_steps[pool] or self.checkpoint is not None:
            return None
        # Of a thousand replicas this concerns one, and there nothing but its weights and its groups.
        admission.move_weights(self)
        return steps

    def _copied(self, event: Copied | Saved) -> bool:
        """Ranks have copied their parts of the checkpoint; true if all have, so that the run goes on."""
        return any(transitions.copied(self, event.replica, rank) for rank in ranks_of(event))

    def _outlive(self, event: Event) -> None:
        """The run has failed, and ends when the checkpoint that is being written is whole. Nothing else is heard."""
        if self.finished:
            return
        if isinstance(event, Abort):
            self.finish("failed", self.failing)
        elif isinstance(event, Answer) and self.answered(event) and isinstance(event, Saved):
            if not any(isinstance(awaited, Saved) for awaited in self.answers):
                transitions.commit(self)
        elif isinstance(event, ReplicaLost | ReplicaJoined):
            self._hear(event)
        elif isinstance(event, Copied):
            raise UnawaitedError(f"scheduler: an answer that nobody awaits: {event}")

    def _fired(self, event: Done | Failed, last: bool) -> Sequence[NodeStep] | None:
        """A rank, perhaps the `last` one, has answered for a firing. Any may have failed, or dropped its group."""
        firing, replica = event.firing, event.replica
        step = self.tables.steps[firing.node]
        if isinstance(event, Unread):
            self.unread.setdefault(firing.node, event.error)
            self.verdicts[firing].add("unread")
        elif isinstance(event, Failed):
            # An update cannot be taken back, and a state may have changed before it failed.
            hopeless = step.per_update or step.stateful
            # What a group that begins again has left may not be there to be read.
            counts = hopeless or not self.ledger.find(firing.index).again
            spent = self.tries.get(firing, 0) >= self.rules.retries and self.rules.on_failure == "stop"
            if counts and (hopeless or spent):
                self.fail(event.error)
                return None
            self.verdicts[firing].add("failed")
            self.raised = event.error
        elif event.dropped or event.again or event.paused:
            self.verdicts[firing] |= {name for name in ("dropped", "again", "paused") if getattr(event, name)}
        elif step.per_update:
            self.verdicts[firing].add("done")
        # A firing is over when all its ranks have answered: a retry must not meet the rest of the try that failed.
        if not last:
            return ()
        verdicts = self.verdicts.pop(firing, ())
        del self.running[firing]
        if not step.source:
            self.weigh(replica, -1)
        if "unread" in verdicts:
            transitions.take_back(self, verdicts)
        elif step.per_update:
            transitions.update_done(self, step, firing, replica)
            if self.unread:
                transitions.make_again(self)
        elif "failed" in verdicts:
            transitions.group_failed(self, firing, replica, verdicts)
        else:
            return transitions.group_done(self, step, firing, replica, verdicts)
        return None

    def _dispatch(self) -> None:
        """Apply every rule. One pass is enough: what starts here enables nothing before it answers, but for a swap."""
        transitions.assemble(self)
        admission.move_weights(self)
        for pool, steps in self.tables.update_steps.items():
            admission.publish_weights(self, self.tables.sends[pool])
            transitions.start_updates(self, steps)
        admission.open_groups(self)
        for group_steps in self.tables.group_steps.values():
            admission.start_groups(self, group_steps)
        self._swap_pinned()
        if self.checkpoint is not None:
            transitions.save(self)
        elif not self.answers and min([self.update, *self.off_path.values()]) >= self.rules.end:
            self.finish("done")

    def _swap_pinned(self) -> None:
        # The group that just started, or ended, may have been the last to need a live version.
        if self.pinned:
            admission.move_weights(self)
