"""The scheduler: `handle(event) -> list[Command]`. No clock, no socket, no thread, no log; same events, same commands.

What is heard is sorted out here. `admission` decides which groups may start and which weights move,
`transitions` what becomes of groups, updates and checkpoints. `channel` has the state of each weight channel.

Invariants, checked after each event of the tests by `tests/runtime/schedule/invariants.py`:
1.  A firing is in work on at most one replica, and done at most once in a run.
2.  A replica has at most `capacity` firings in work (sources are free of charge).
3.  Group g starts on a replica only while its live version is at least needed_version(before(g), lag, batch) for each
    lagged edge; with pinned versions only while it is just that, or the start. A per-update step of update u
    reads a version in u - lag … u (in a run resumed after u: … start), and no swap happens under it.
4.  Update u consumes the next `batch` kept groups in ordinal order, once, after update u - 1. It begins when all of
    them are finished, and a cut falls between two updates. A step with every=k takes part where u + 1 is a multiple
    of k.
5.  The version of a carried value that changes is the number of updates that are over for it, whether they made a
    next value or left it as it was; no reader of version u is in work while the update that donates it is, and no
    version goes while a reader to come needs it.
6.  No group past the last update starts: before(g) < end * batch.
7.  A value is freed once, after its last reader, and never read afterwards; a lost group's when nobody works on it.
8.  While anything is left to do, something is in work (no deadlock), unless a checkpoint, failure or stop ended it,
    or filters dropped `drops` batches' worth of groups between two updates, or firings failed so often.
9.  With free versions, no per-group firing waits that may start, but for one that a replica leaves to others which
    wait for weights on their way (it takes as many as are left for each of them); a step that trails never does,
    but for a cut.
10. A channel publishes only versions that a step to come may fire with, and with every=m only multiples of m but for
    the version that the run starts with.
11. A step that trails (it reads nothing but weights, and nobody reads it) fires at each update that is due, in order,
    once that update has come; nothing waits for it but the end of the run, the versions that it needs, and, if it
    has state and is in work, a cut.
12. Two steps that alternate on a group take turns 0, 1, … in order, the one that speaks before the one that answers.
    What a turn has made is freed when the next one has spoken; what the last one has made is the group's, settled
    once if it was not turn 0, and only then read by others.
13. A group that reads a delayed value starts when its version is at least needed_version(before(g), lag, batch), and is
    told the update that it is for: before(g) // batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.schedule import admission, transitions
from penstock.runtime.schedule.compile import NodeStep, Rules, Tables, check_rules
from penstock.runtime.schedule.events import (
    Abort,
    Arrived,
    Begin,
    Checkpoint,
    Command,
    Done,
    Event,
    Failed,
    Published,
    Saved,
    Swapped,
)
from penstock.runtime.schedule.state import Key, State


class Scheduler(State):
    """One run of one graph. `cut` continues a checkpoint; `live` are versions replicas hold already.

    `complete` is the cut of the newest complete checkpoint, {} where there is none yet: a final cut with no more in it
    is not written. With None every cut is written, as in logs that do not say.

    Raises ValueError for rules that cannot work with the graph.
    """

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        cut: Mapping[str, Any] | None = None,
        live: Mapping[tuple[str, str], int] | None = None,
        complete: Mapping[str, Any] | None = None,
    ) -> None:
        check_rules(tables, rules)
        super().__init__(tables, rules, live or {})
        self.complete = complete
        if cut is not None:
            transitions.restore(self, cut)

    def handle(self, event: Event) -> list[Command]:
        """The commands that follow from an event. Raises ValueError for an answer nobody asked for."""
        if self.finished:
            return []
        self.out = []
        stirred = self._hear(event)
        if stirred is None and not self.finished:
            transitions.end_updates(self)
        self.say_freed()
        if not self.finished:
            if stirred is None:
                self._dispatch()
            elif stirred:
                admission.start_groups(self, stirred)
                self._swap_pinned()
        return self.out

    def awaited(self) -> Mapping[Key, set[int]]:
        """What ranks were asked and have not answered."""
        return self.answers

    # What is heard: each returns the steps that may start because of it, None for a look at everything -------

    def _hear(self, event: Event) -> Sequence[NodeStep] | None:
        match event:
            case Done():
                return self._done(event)
            case Published(channel, version, replica, rank):
                if not self.answered(("publish", channel, version, replica), rank):
                    return ()
                admission.weights_published(self, channel, version, replica)
            case Arrived() | Swapped():
                return self._weights(event)
            case Failed():
                return self._failure(event)
            case Checkpoint():
                self.cutting = event if self.cutting is None or event.final else self.cutting
            case Saved():
                return self._saved(event)
            case Abort():
                self.finish("failed", event.error)
            case Begin():
                pass
        return None

    def _done(self, event: Done) -> Sequence[NodeStep] | None:
        firing = event.firing
        last = self.answered(("fire", firing, event.replica), event.rank)
        if event.dropped:
            self.dropped.add(firing)
        if event.again:
            self.again.add(firing)
        return self._over(firing, event.replica) if last else ()

    def _failure(self, event: Failed) -> Sequence[NodeStep] | None:
        """Stop at once, or wait for the other ranks' answers and then try again or give the group up."""
        firing = event.firing
        last = self.answered(("fire", firing, event.replica), event.rank)
        step = self.tables.steps[firing.node]
        hopeless = step.per_update or step.stateful
        if hopeless or (self.tries.get(firing, 0) >= self.rules.retries and self.rules.on_failure == "stop"):
            self.finish("failed", event.error)
            return None
        self.failed.add(firing)
        self.raised = event.error
        return self._over(firing, event.replica) if last else ()

    def _over(self, firing: Firing, replica: str) -> Sequence[NodeStep] | None:
        """All ranks have answered for a firing. Any of them may have failed, or dropped its group."""
        failed, dropped, again = (_take(of, firing) for of in (self.failed, self.dropped, self.again))
        del self.running[firing]
        step = self.tables.steps[firing.node]
        if not step.source:
            self.weigh(replica, -1)
        if step.per_update:
            transitions.update_done(self, step, firing, replica)
        elif failed:
            transitions.group_failed(self, firing, replica)
        else:
            return transitions.group_done(self, step, firing, replica, dropped=dropped, again=again)
        return None

    def _weights(self, event: Arrived | Swapped) -> Sequence[NodeStep] | None:
        kind = "send" if isinstance(event, Arrived) else "swap"
        if not self.answered((kind, event.channel, event.version, event.replica), event.rank):
            return ()
        steps: Sequence[NodeStep] = ()
        way, pool = self.ways[event.channel], self.tables.pool_of[event.replica]
        if isinstance(event, Arrived):
            way.arrive(event.replica, event.version)
            last = not way.owes
        else:
            way.swapped(event.replica, event.version)
            self.sort(event.replica)
            steps, last = self.tables.group_steps[pool], not self.answers
        if last or self.tables.update_steps[pool] or self.cutting is not None:
            return None
        # Of a thousand replicas this concerns one, and there nothing but its weights and its groups.
        admission.move_weights(self)
        return steps

    def _saved(self, event: Saved) -> Sequence[NodeStep] | None:
        last = self.answered(("save", event.update, event.replica), event.rank)
        if not last or any(key[0] == "save" for key in self.answers):
            return ()
        transitions.commit(self)
        return None

    # What is done about it --------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Apply every rule. One pass is enough: what starts here enables nothing before it answers, but for a swap."""
        transitions.assemble(self)
        admission.move_weights(self)
        for pool, steps in self.tables.update_steps.items():
            admission.publish_weights(self, self.tables.sends[pool])
            transitions.start_updates(self, steps)
        admission.open_groups(self)
        for step_list in self.tables.group_steps.values():
            admission.start_groups(self, step_list)
        self._swap_pinned()
        if self.cutting is not None:
            transitions.save(self)
        elif not self.answers and min([self.update, *self.trailing.values()]) >= self.rules.end:
            self.finish("done")

    def _swap_pinned(self) -> None:
        """The group that just started, or ended, may have been the last to need a live version."""
        if self.pinned:
            admission.move_weights(self)


def _take(verdicts: set[Firing], firing: Firing) -> bool:
    """Whether a firing is among them; then no longer."""
    if not verdicts or firing not in verdicts:
        return False
    verdicts.remove(firing)
    return True
