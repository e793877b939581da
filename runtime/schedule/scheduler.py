"""The scheduler: `handle(event) -> list[Command]`. No clock, no socket, no thread, no log; same events, same commands.

Events are interpreted here. `admission` decides which groups may start and which weights move, `transitions` what
becomes of groups, updates and checkpoints. `state` and `channel` have the state that they change.

Invariants, checked after each event of the tests by `tests/runtime/schedule/checker.py`:
1.  A firing is in work on at most one replica, and done at most once in a run.
2.  A replica has at most `capacity` firings in work, sources not counted.
3.  Group g starts on a replica only while its live version is at least needed_version(before(g), lag, batch) for each
    lagged edge; with pinned versions only while it equals that, or the start if that is later. A per-update step of
    update u reads a version in u - lag … u (in a run resumed after u: … start), and no swap happens during it.
4.  Update u consumes the next `batch` kept groups in ordinal order, once, after update u - 1. It begins when all of
    them are finished, except for the parts of a step that accumulates. In order "ready" it consumes the finished groups
    with the earliest deadlines, as soon as all others can still meet theirs. A checkpoint falls between two updates and
    is copied before the next one begins. It is complete when all ranks have written it, and one is written at a time.
    A step with every=k takes part where u + 1 is a multiple of k.
5.  The version of a changing carried value is the number of updates that are over for it, whether they made a next
    value or left it as it was. No reader of version u is in work while the update that donates it is, and no version
    is overwritten while a later reader needs it.
6.  No group past the last update starts: before(g) < end * batch.
7.  A value is freed once, after its last reader, and never read afterwards. A lost group's values are freed when
    nothing is in work on it.
8.  While anything is left to do, something is in work (no deadlock), unless a checkpoint, failure or stop ended the
    run, or filters dropped `drops` batches' worth of groups between two updates, or as many firings failed as
    `failures` allows. A failure of a node ends the run only after the checkpoint that is being written is complete.
9.  With free versions, no per-group firing waits that may start. Exception: while other replicas wait for weights, a
    replica takes only its share. A step off the critical path does not wait either, unless a checkpoint is due.
10. A channel publishes only versions that a later firing may use, and with every=m only multiples of m and the version
    that the run starts with.
11. A step off the critical path (it reads only weights, and no step reads it) fires at each update that is due, in
    order, once that update has come. Only three things wait for it: the end of the run, the release of versions that
    it needs, and, if it has state and is in work, a checkpoint.
12. Two steps that alternate on a group take turns 0, 1, … in order, the one that speaks before the one that answers.
    The outputs of a turn are freed when the next turn has spoken. The outputs of the last turn are the group's: they
    are committed once if it was not turn 0, and only then read by other steps.
13. A group that reads a delayed value starts when its version is at least needed_version(before(g), lag, batch), and is
    told the update that it is for: before(g) // batch.
14. A per-group firing that has paused goes on in segment 1, 2, … on any replica, from the output of the segment before.
    That output is freed when the segment that reads it is over.
15. A step that accumulates fires in segments 0, 1, … for the parts of its update's batch: the n-th on the n-th groups
    taken, in order "strict" once all up to these are finished. Only the last segment waits for the other steps of the
    update, and makes the next version. A checkpoint may fall before it, and contains nothing of the parts.
16. An absent replica gets no command. When a replica is lost, each group that it worked on, or of which it held a value
    that is still to be read, begins again at its sources, under its ordinal, when nothing is in work on it; its values
    are freed. But an update that has read its groups goes on with them. If none of its steps could read them, it gives
    them back; if only some could, it waits until they are made again. Each group still has one outcome. A checkpoint
    of which a part was lost is made again.
17. With pinned versions and replicas that may be lost, a replica may go back to an older version: the one that the
    first unstarted group needs, if no other replica has it. The sender keeps the versions that groups of the current
    update may need.
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
    """One run of one graph. `saved` is the state of a checkpoint to continue from; `live` are the versions that
    replicas hold already.

    `complete` is the state of the newest complete checkpoint, {} if there is none yet: a final checkpoint that adds
    nothing to it is not written. With None every checkpoint is written, as for logs that lack this field. `absent` are
    the absent replicas, and `lives` says how often each replica has been lost before.

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
        """Change the state by an event, and return the commands that follow. Raises UnawaitedError for an answer that
        was not asked for.

        The answer for a group passes through `_hear`, `_fired` and `transitions.group_done` (which may complete a
        batch), then `admission.start_groups` for the steps that may start, each with a `State.fire`.
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
        # In order "ready", starting a group may let others overtake it: it has its deadline now.
        if self.rules.order == "ready" and not self.ended and transitions.assemble(self):
            self._dispatch()
        return self.out

    def _hear(self, event: Event) -> Sequence[NodeStep] | None:
        """Change the state by an event. Returns the steps that may start because of it; None if anything may."""
        match event:
            case Begin():
                return None
            case Checkpoint():
                # A final one replaces the one that is due; nothing replaces a final one.
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
            # A rank that writes its part at once sends only `Saved`, which then counts as `Copied`, too.
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
        # This concerns one replica of a thousand, and there only its weights and its groups.
        admission.move_weights(self)
        return steps

    def _copied(self, event: Copied | Saved) -> bool:
        """Note that ranks have copied their parts of the checkpoint. True if all have, so that the run goes on."""
        return any(transitions.copied(self, event.replica, rank) for rank in ranks_of(event))

    def _outlive(self, event: Event) -> None:
        """Handle an event after the run has failed: the run ends when the checkpoint in progress is complete. All
        other events are ignored."""
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
        """Handle a rank's answer for a firing; `last` if no other is awaited. Returns what `_hear` does."""
        firing, replica = event.firing, event.replica
        step = self.tables.steps[firing.node]
        if isinstance(event, Unread):
            self.unread.setdefault(firing.node, event.error)
            self.verdicts[firing].add("unread")
        elif isinstance(event, Failed):
            # An update cannot be undone, and a node's state may have changed before the firing failed.
            hopeless = step.per_update or step.stateful
            # A group that begins again may fail because a value that it reads was lost.
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
        # A firing is over when all its ranks have answered: a retry must not overlap the try that failed.
        if not last:
            return ()
        verdicts = self.verdicts.pop(firing, ())
        del self.running[firing]
        if not step.source:
            self.weigh(replica, -1)
        if "unread" in verdicts:
            transitions.retry_unread(self, verdicts)
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
        """Apply every rule. One pass is enough: a command enables nothing before it is answered. Exception: a start may
        permit a pinned swap."""
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
        # The group that just started or ended may have been the last one to need a live version.
        if self.pinned:
            admission.move_weights(self)
