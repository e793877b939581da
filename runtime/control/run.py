"""A run from its first stage to its last, with any driver: evaluate, train, save, evaluate.

The controller and the in-process driver feed answers and carry out orders; the `Session` decides what comes next. No
clock, no socket: time is passed in.

A `Session` is the run, a `Stage` one graph being run. The stage has the scheduler, the references that travel with
orders, and the times at which answers were asked for; it tells the recorder what happened.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import structs

from penstock.graph.ir import Firing, Graph
from penstock.runtime.control.checkpoint_interval import WRITE_CPU_S, CheckpointInterval
from penstock.runtime.control.failure import MENDABLE, Failure, FailureCode, Verdict
from penstock.runtime.control.messages import Manifest, Order, Result, agent_peer, rank_peer
from penstock.runtime.control.rank_setup import input_reads
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import (
    Abort,
    Answer,
    Begin,
    Checkpoint,
    Command,
    Commit,
    CommitTurn,
    Done,
    Event,
    Failed,
    Finish,
    Fire,
    Free,
    Question,
    ReplicaJoined,
    ReplicaLost,
    Save,
    Saved,
    Send,
    kept_as,
)
from penstock.runtime.schedule.idle_causes import States
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.state import UnawaitedError
from penstock.runtime.tensor.shm import ObjectRef

# The order for each replica's ranks.
Orders = dict[str, Order]
Handle = tuple[Firing, str, ObjectRef]

# Most answered questions that stay in `Stage.asked` while an older one is unanswered.
MOST_ANSWERED = 1000


class Outbox:
    """Collects the commands for each replica's ranks, and what they need with them: the manifests of the newest
    `kept_versions` of each channel, with the layout for replicas that do not have it yet. `lives` are the scheduler's.

    One object for all stages of a run, since the processes stay and remember layouts. All shards of a checkpoint are
    asked for at once, and go into one folder, `checkpoint`, beside those that are `kept`.
    """

    def __init__(self, kept_versions: int = 1) -> None:
        self.layouts: dict[str, str] = {}
        self.checkpoint = ""
        self.kept: tuple[str, ...] = ()
        self.lives: Mapping[str, int] = {}
        self._kept_versions = kept_versions
        self._manifests: defaultdict[str, list[Manifest]] = defaultdict(list)
        self._told: set[tuple[str, str]] = set()
        self._drafts: defaultdict[str, tuple[list[Command], list[Handle], list[Manifest]]]
        self._drafts = defaultdict(lambda: ([], [], []))

    def add(self, replica: str, command: Command, handles: Sequence[Handle] = ()) -> None:
        """Add a command. `handles` are those of a firing's inputs that the replica may not have itself."""
        commands, known, manifests = self._drafts[replica]
        commands.append(command)
        known += handles
        if isinstance(command, Send) and command.replica == replica:
            manifests.append(self.tell(command.channel, command.version, replica))

    def take(self) -> Orders:
        """The orders since the last call."""
        orders = {}
        for replica, (commands, handles, manifests) in self._drafts.items():
            together = _taken_together(commands)
            if commands:
                lives = self._lives_in(commands)
                orders[replica] = Order(
                    tuple(commands), tuple(handles), self.checkpoint, self.kept, tuple(manifests), lives, together
                )
        self._drafts.clear()
        self.checkpoint, self.kept = "", ()
        return orders

    def note(self, manifest: Manifest) -> None:
        """Keep the manifest of a published version."""
        if manifest.layout:
            self.layouts[manifest.channel] = manifest.layout
        others = [one for one in self._manifests[manifest.channel] if one.version != manifest.version]
        self._manifests[manifest.channel] = [*others, manifest][-self._kept_versions :]

    def tell(self, channel: str, version: int, replica: str) -> Manifest:
        """The manifest of a version for `replica`, which is about to receive it."""
        known = (channel, replica) in self._told
        self._told.add((channel, replica))
        manifest = next(one for one in self._manifests[channel] if one.version == version)
        return structs.replace(manifest, layout="" if known else self.layouts[channel])

    def forget(self, replica: str) -> None:
        """A replica is lost: drop its commands and what was to be sent to it. Its successor has no layouts yet."""
        self._drafts.pop(replica, None)
        for commands, _, _ in self._drafts.values():
            commands[:] = [one for one in commands if not (isinstance(one, Send) and one.replica == replica)]
        self._told = {(channel, known) for channel, known in self._told if known != replica}

    def _lives_in(self, commands: Sequence[Command]) -> dict[str, int]:
        """How often replicas that are sent weights have been lost, for those that have."""
        sent = [command.replica for command in commands if isinstance(command, Send)]
        return {replica: self.lives[replica] for replica in sent if self.lives.get(replica)}


def _taken_together(commands: list[Command]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The sets of replicas that are sent weights together, by channel. They are removed from the commands."""
    found: defaultdict[str, dict[tuple[str, ...], None]] = defaultdict(dict)
    for place, command in enumerate(commands):
        if isinstance(command, Send) and command.together:
            found[command.channel][command.together] = None
            commands[place] = structs.replace(command, together=())
    return {channel: tuple(names) for channel, names in found.items()}


class Stage:
    """One graph being run. `outbox` gets its commands. `asked` has the awaited answers, the oldest first, and some that
    have come: for each the command, and when it was given, on a clock that stops while this process is suspended.
    """

    def __init__(
        self,
        origin: SegmentOrigin,
        recorder: RunRecorder,
        flags: RunOptions,
        outbox: Outbox,
        handles: Mapping[tuple[Firing, str], ObjectRef] | None = None,
        suspended_s: float = 0.0,
    ) -> None:
        self.name, self.plan = origin.stage, origin.plan
        self.recorder, self.flags, self.outbox = recorder, flags, outbox
        self.tables = Tables(origin.graph, origin.plan)
        self.reads = {node.name: input_reads(origin.graph, node) for node in origin.graph.nodes if node.fires}
        self.scheduler = origin.scheduler(self.tables)
        self.states = States(self.scheduler)
        outbox.lives = self.scheduler.lives
        self.finish: Finish | None = None
        self.asked: dict[Answer, tuple[Question, float]] = {}
        self._suspended_s = suspended_s
        self.handles: dict[Firing, dict[str, ObjectRef]] = defaultdict(dict)
        for (firing, output), handle in (handles or {}).items():
            self.handles[firing][output] = handle

    def feed(self, event: Event, now: float, result: Result | None = None) -> None:
        """Handle an event of the driver (begin, checkpoint, abort), or that of a rank's `result`. Raises
        UnawaitedError, and changes nothing, for an answer that was not asked for."""
        commands = self.scheduler.handle(event)
        if isinstance(event, ReplicaLost):
            self.outbox.forget(event.replica)
        # The report of an aborted run shows what replicas were doing at that time.
        states = {} if isinstance(event, Abort) else self.states.changed()
        if result is not None and isinstance(event, Done) and result.outputs:
            self.handles[kept_as(event.firing, paused=event.paused)].update(result.outputs)
        if result is not None and result.manifest is not None:
            self.outbox.note(result.manifest)
        self.recorder.step(now, event, commands, states, result)
        for command in commands:
            self._order(command)
        for key, question in self.scheduler.asked:
            self.asked.pop(key, None)  # a retry goes to the end of the order
            self.asked[key] = question, now - self._suspended_s

    def live(self) -> dict[tuple[str, str], int]:
        """The live versions of replicas, with which the next stage starts."""
        channels = self.scheduler.channels.items()
        return {(name, r): state.live for name, channel in channels for r, state in channel.receivers.items()}

    def overdue(self, now: float, deadline: float, doing: Mapping[str, str], suspended_s: float = 0.0) -> str | None:
        """The answer that has been awaited for longer than `deadline` seconds, and the ranks that owe it; None if none.

        A rank may be `doing` another firing of the same order, which delays this one. `suspended_s` is the seconds for
        which this process itself was suspended so far; they do not count.
        """
        self._suspended_s = suspended_s
        awaited = self.scheduler.answers
        while (key := next(iter(self.asked), None)) is not None and key not in awaited:
            del self.asked[key]
        if len(self.asked) > 2 * len(awaited) + MOST_ANSWERED:  # rare enough to cost nothing
            self.asked = {key: asked for key, asked in self.asked.items() if key in awaited}
        if key is None:
            return None
        command, since = self.asked[key]
        waited = now - suspended_s - since
        if waited <= deadline:
            return None
        what, replica, ranks = _words(command), command.replica, sorted(awaited[key])
        if isinstance(command, Send):
            what += f" from {self._sender(command)}"
        names = ", ".join(self.plan.spelled(replica, rank) for rank in ranks)
        said = {rank: doing.get(rank_peer(replica, rank), "") for rank in ranks}
        at = "".join(f"; {replica} rank {rank} is at {word}" for rank, word in said.items() if word)
        return f"no answer from {names} for {waited:.0f} s (deadline {deadline:.0f} s): {what}{at}"

    def awaited(self) -> list[Question]:
        """The commands that are not answered yet."""
        return [self.asked[key][0] for key in self.scheduler.answers]

    def moving(self, replica: str) -> str:
        """The weights that are on their way from a replica or to it; "" for none."""
        found = []
        for send in self.awaited():
            if not isinstance(send, Send):
                continue
            sender, live = self._sender(send), self.scheduler.channels[send.channel].receivers[send.replica].live
            if replica in (sender, send.replica):
                version = f"version {send.version} of {send.channel}"
                found.append(f"{version} from {sender} to {send.replica}, which has {live}")
        return f"moving {' and '.join(found)}" if found else ""

    def _sender(self, send: Send) -> str:
        """The replica that sends weights; in a chain it is not always the one that published them."""
        from penstock.runtime.control.routes import Routes  # imports numpy, which only failures need

        routes = Routes(self.tables.channels[send.channel], self.flags.transport, self.flags.delta)
        routes.settle(json.loads(self.outbox.layouts[send.channel]))
        return routes.source(send.replica, send.together) or send.source

    def _order(self, command: Command) -> None:
        match command:
            case Finish():
                self.finish = command
                return
            case Commit():
                self.recorder.commit(command)
                return
            case Save():
                if not self.outbox.checkpoint:
                    self.outbox.checkpoint = self.recorder.begin_checkpoint(command.update, self.scheduler.saving)
                    self.outbox.kept = self.recorder.kept
            case Send() if command.source != command.replica:
                self.outbox.add(command.source, command)
            case Free():
                for firing in command.firings:
                    self.handles.pop(firing, None)
                if command.replica in self.scheduler.absent:
                    return
            case CommitTurn(firing):
                if firing in self.handles:
                    self.handles[firing._replace(turn=0)] = self.handles.pop(firing)
        self.outbox.add(command.replica, command, self._inputs(command) if isinstance(command, Fire) else ())

    def _inputs(self, fire: Fire) -> list[Handle]:
        """The handles of a firing's inputs. Inputs that its replica made itself have none."""
        made = self.handles.get(fire.firing, {}) if fire.firing.segment else {}  # its paused value
        return [(fire.firing, output, handle) for output, handle in made.items()] + [
            (firing, read.output, handle)
            for read in self.reads.get(fire.firing.node, ())
            for firing in read.firings(fire.firing, fire.groups)
            if (handle := self.handles.get(firing, {}).get(read.output)) is not None
        ]


def _words(command: Question) -> str:
    """A command without its replica: "fire generate[3]", "send policy>generator 2"."""
    fields = structs.astuple(command)[: 1 if isinstance(command, Fire | Save) else 2]
    return " ".join([type(command).__name__.lower(), *map(str, fields)])


# The part of the grace period that is left for processes to end: one second, or a quarter of a short period.
LAST_S, LAST_SHARE = 1.0, 0.25


class Session:
    """`running` until the last stage has finished; then `status` is "done", "stopped" or "failed"."""

    def __init__(self, config: RunConfig, recorder: RunRecorder, cut: Mapping[str, Any] | None = None) -> None:
        self.config, self.recorder, self.cut = config, recorder, cut
        self.start = cut["update"] if cut else 0
        self.suspended_s = 0.0  # seconds for which the driver itself was suspended so far, set by the driver
        self.status, self.error = "running", ""
        self.failure: Failure | None = None  # the one that ended the run
        self.verdict = Verdict()
        self.stage: Stage | None = None
        self.stopping: float | None = None
        self.preempted = False  # a cluster manager asked for the stop
        self._stop_by = math.inf
        self.why = "stopped by the user"
        self.doing: Mapping[str, str] = {}  # what ranks are working on, by their peer names
        evaluate = config.evaluation is not None
        again = evaluate and config.flags.updates > 0  # else nothing has changed
        self._stages = ["before"] * (evaluate and not cut) + ["train", "save"] + ["after"] * again
        self._live: dict[tuple[str, str], int] = {}
        self._handles: Mapping[tuple[Firing, str], ObjectRef] = {}
        self._outbox = Outbox(config.kept_versions)
        self._absent: tuple[str, ...] = ()
        self._lives: Mapping[str, int] = {}
        self._interval = CheckpointInterval(config.flags.checkpoint_every, self.start)
        self._waits = False
        self._told_writing = False

    @property
    def running(self) -> bool:
        return self.status == "running"

    @property
    def _ending(self) -> bool:
        """True if the run will certainly fail, or its stage has finished; only the reason may still change."""
        return self.verdict.certain or (self.stage is not None and self.stage.finish is not None)

    # What drivers call ------------------------------------------------------------------------------------

    def begin(self, now: float, handles: Mapping[tuple[Firing, str], ObjectRef], absent: Collection[str] = ()) -> None:
        """Begin the first stage: all ranks are ready but those of `absent` replicas. `handles` name the values that
        they restored from a checkpoint."""
        self._handles, self._absent = handles, tuple(sorted(absent))
        self._next_stage(now)

    def take(self) -> Orders:
        """The orders for replicas since the last call."""
        return self._outbox.take()

    def answer(self, result: Result, now: float) -> None:
        """Handle a rank's answer. Raises UnawaitedError for one that was not asked for."""
        if self.stage is None:
            raise UnawaitedError(f"{type(result.event).__name__} before the first stage")
        # While the run is ending, answers change nothing any more.
        if not self._ending:
            self._feed(result.event, now, result)

    def stop(self, now: float, why: str = "") -> None:
        """The user asks for the end of the run: with a checkpoint if ranks have copied their shards in time; then its
        writing is waited for. `why` is the reason if the user did not ask directly."""
        if self.stopping is not None or not self.running or self._ending:
            return
        self.stopping, self.why = now, why or self.why
        self._stop_by = now + _budget(self.config.flags.grace)
        if self.stage is None or self.stage.name in ("before", "after"):
            self._finish(now, "stopped", self.why)
        elif self.stage.name == "train":  # otherwise the final checkpoint is being written already
            self._feed(Checkpoint(final=True), now)

    def preempt(self, now: float, why: str, grace: float) -> None:
        """A cluster manager ends all processes, or some, in `grace` seconds: as `stop`, but with a checkpoint only if
        it is complete by then. Of several such calls the earliest deadline counts."""
        self.preempted = self.preempted or (self.running and self.stopping is None)
        self.stop(now, why)
        if self.preempted:
            self._stop_by = min(self._stop_by, now + _budget(grace))

    def leave(self, host: str, grace: float, now: float) -> None:
        """A host is taken away in `grace` seconds: if it has ranks, stop the run, to be restarted on other hosts."""
        replicas = self.config.plan.replicas
        lost = [f"{r.name} rank {n}" for r in replicas for n, rank in enumerate(r.ranks) if rank.host == host]
        if lost and self.running:
            why = f"host {host} with {', '.join(lost)} is preempted in {grace:g} s"
            self.recorder.note(f"{why}: the run stops, with a checkpoint if it can be had in time", "warning")
            self.preempt(now, f"preempted: {why}", grace)

    def watch(self, now: float, suspended_s: float = 0.0) -> None:
        """Check the deadlines of a stop and of answers. `suspended_s` as for `Stage.overdue`."""
        self.suspended_s = suspended_s
        if self.stage is None or not self.running or self._ending:
            return
        self.recorder.tick(now)
        if self.stopping is not None and self.stage.scheduler.writing is not None:
            self._tell_writing(self.stage)
            if not self.preempted:
                self._stop_by = now + _budget(self.config.flags.grace)
        if now > self._stop_by:
            awaited = [f"{_words(c).partition(' ')[2]} on {c.replica}" for c in self.stage.awaited()]
            awaiting = f": still in work were {', '.join(awaited)}" if awaited else ""
            waited = self._stop_by - self.stopping if self.stopping is not None else 0.0
            self._finish(now, "stopped", f"{self.why}: no checkpoint within {waited:g} s{awaiting}")
        elif overdue := self.stage.overdue(now, self.config.flags.deadline, self.doing, suspended_s):
            failing = self.stage.scheduler.failing
            self.fail(Failure(FailureCode.NODE, failing) if failing else Failure(FailureCode.OVERDUE, overdue), now)

    @property
    def absent(self) -> frozenset[str]:
        """The replicas that are lost or have not come yet."""
        return frozenset(self._absent if self.stage is None else self.stage.scheduler.absent)

    def life(self, replica: str) -> int:
        """How often a replica has been lost."""
        return (self._lives if self.stage is None else self.stage.scheduler.lives).get(replica, 0)

    def lose(self, replica: str, reason: str, now: float) -> None:
        """A replica that may be lost has been lost: go on without it."""
        self.verdict.forgive(replica)
        if self.running and not self._ending:
            self._feed(ReplicaLost(replica, reason), now)

    def join(self, replica: str, now: float) -> None:
        """An absent replica has come."""
        if self.running and not self._ending:
            self._feed(ReplicaJoined(replica), now)

    def fail(self, failure: Failure, now: float) -> None:
        """Report why the run cannot go on. `decide` ends it."""
        self.verdict.report(failure, now, self.suspended_s)

    def decide(self, now: float, heard: Callable[[str], float] = lambda peer: math.inf) -> None:
        """End the run with the failure that explains those reported, unless a better cause may still come.

        Drivers call it once per turn. `heard` gives the time of a peer's last sign of life.
        """
        failure = self.verdict.failure and self.verdict.final(now, heard, self.suspended_s)
        if failure is None or not self.running:
            return
        # The log must have the end of the stage, or a replay would wait for it.
        if self.stage is not None and self.stage.finish is None:
            self.stage.feed(Abort(failure.text), now)
        if self.preempted and failure.code in MENDABLE:  # the cluster manager ended processes earlier than announced
            self._finish(now, "stopped", f"{self.why}, before a checkpoint was made: {failure.text}")
            return
        self.failure = failure
        self._finish(now, "failed", failure.text)

    def moving(self, replica: str) -> str:
        """The weights that are on their way from a replica or to it; "" for none."""
        return self.stage.moving(replica) if self.stage else ""

    # From stage to stage ----------------------------------------------------------------------------------

    def _feed(self, event: Event, now: float, result: Result | None = None) -> None:
        """Hand an event to the stage. If that ends the stage, end the run or begin the next stage."""
        stage = self.stage
        assert stage is not None
        stage.feed(event, now, result)
        self._time_checkpoint(stage, now, result)
        if stage.finish is None:
            self._checkpoint_if_due(stage, now)
        elif stage.finish.status == "failed":
            unread = (result is not None and result.unread) or stage.scheduler.unread
            # A host may be gone: one of the replica that failed, or the one with the value that could not be read.
            suspects: list[str] = []
            if isinstance(event, Failed) and len(self.config.plan.replica(event.replica).ranks) > 1:
                suspects.append(event.replica)
            if result is not None and result.unread and result.unread[0] not in stage.scheduler.absent:
                suspects.append(result.unread[0])
            hosts = dict.fromkeys(host for name in suspects for host in self.config.plan.replica(name).hosts)
            agents = tuple(map(agent_peer, hosts))
            code = FailureCode.TRANSFER if unread else FailureCode.NODE
            self.fail(Failure(code, stage.finish.error, agents, doubtful=bool(agents)), now)
        elif stage.finish.status == "stopped" and (stage.name == "train" or self.stopping is not None):
            self._finish(now, "stopped", self.why)
        else:
            self._live = stage.live()
            self._absent, self._lives = tuple(sorted(stage.scheduler.absent)), stage.scheduler.lives
            self.recorder.close_stage(stage.name)
            self._next_stage(now)

    def _checkpoint_if_due(self, stage: Stage, now: float) -> None:
        scheduler = stage.scheduler
        if stage.name != "train" or scheduler.ended:
            return
        # Ask for a later update: the next one may begin with the event that ends this one, which would be too late.
        update = scheduler.update + scheduler.committed()
        due = self._interval.due(update, scheduler.writing is not None, now)
        if due and update < self.config.flags.updates and scheduler.checkpoint is None:
            self._interval.asked(update, now)
            stage.feed(Checkpoint(), now)
            self._time_checkpoint(stage, now, None)

    def _time_checkpoint(self, stage: Stage, now: float, result: Result | None) -> None:
        """Measure the cost of a checkpoint for the interval. Tell the user if a failed run still writes one."""
        scheduler = stage.scheduler
        # No update begins until all ranks have copied their shards.
        waits = scheduler.checkpoint is not None and not scheduler.begun()
        if waits and not self._waits:
            self._interval.began(scheduler.update, now)
        elif self._waits and not waits:
            self._interval.copied(now)
        self._waits = waits
        if result is not None and isinstance(result.event, Saved):
            self._interval.wrote(result.metrics.get(WRITE_CPU_S, 0.0))
        if scheduler.failing and not scheduler.finished:
            self._tell_writing(stage)

    def _tell_writing(self, stage: Stage) -> None:
        """Tell the user, once, that the run ends when its checkpoint is written."""
        if not self._told_writing:
            self._told_writing = True
            self.recorder.tell_writing(json.loads(stage.scheduler.saving)["update"], self.config.flags.deadline)

    def _next_stage(self, now: float) -> None:
        if not self._stages:
            self._finish(now, "done", "")
            return
        name = self._stages.pop(0)
        graph, rules, cut = self._stage(name)
        # The newest complete checkpoint: that of the last stage's scheduler, or the one that was restored.
        complete = (self.cut or {}) if name == "train" or self.stage is None else self.stage.scheduler.complete
        origin = SegmentOrigin(
            name, graph, self.config.plan, rules, cut, self._live, complete, self._absent, self._lives
        )
        self.recorder.open_stage(origin, now)
        handles = self._handles if name == "train" else {}
        self.stage = Stage(origin, self.recorder, self.config.flags, self._outbox, handles, self.suspended_s)
        if name == "train":
            # A run's group counts are those of training; evaluations have their own.
            self.recorder.ledger = self.stage.scheduler.ledger
        self._feed(Checkpoint(final=True) if name == "save" else Begin(), now)

    def _stage(self, name: str) -> tuple[Graph, Rules, Mapping[str, Any] | None]:
        updates = self.config.flags.updates
        if name == "train":
            return self.config.graph, self.config.rules(self.start), self.cut
        if name == "save":
            assert self.stage is not None
            # Through JSON, to look as if read from a file: tuples become lists.
            cut = {"update": updates, **self.stage.scheduler.ledger.to_json()}
            return self.config.graph, self.config.rules(updates), json.loads(json.dumps(cut))
        assert self.config.evaluation is not None
        # One update's worth of held-out groups, with the current policy.
        version = self.start if name == "before" else updates
        rules = Rules(self.config.flags.eval_groups, version + 1, version, lost_replica=self.config.flags.lost_replica)
        return self.config.evaluation, rules, None

    def _finish(self, now: float, status: str, error: str) -> None:
        if self.running:
            self.status, self.error = status, error
            cause = self.failure.code if self.failure else "preempted" if self.preempted and status == "stopped" else ""
            self.recorder.finish(now, status, error, cause, self.failure.host if self.failure else "")


def _budget(grace: float) -> float:
    """The part of the grace period, in seconds, that is left for a checkpoint."""
    return max(0.0, grace - min(LAST_S, LAST_SHARE * grace))
