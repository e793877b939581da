"""A run from its first stage to its last, whoever drives it: evaluate, train, save, evaluate.

The controller and the in-process driver feed answers and carry out orders; what comes when is decided here. No
clock, no socket: time is passed in.

One graph being run: the scheduler with what its drivers share, whether ranks are processes or not.

A driver feeds results and gets orders for replicas; the stage keeps the handles that travel with them, the times at
which answers were asked for, and tells the recorder what happened. Time is passed in.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from penstock.graph.ir import Firing, Graph
from penstock.runtime.control.failure import Failure, FailureCode, Verdict
from penstock.runtime.control.messages import Manifest, Order, Result, rank_peer
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
    Finish,
    Fire,
    Free,
    Published,
    Question,
    Save,
    Send,
    answer,
)
from penstock.runtime.schedule.idle_causes import step
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.state import UnawaitedError
from penstock.runtime.tensor.shm import ObjectRef

# What each replica's ranks are to do, in order.
Orders = dict[str, Order]


class Manifests:
    """The newest manifest of each channel, with the layout for replicas that have not been told it.

    One object for all stages of a run: the processes stay, and remember the layouts that they were told.
    """

    def __init__(self) -> None:
        self.layouts: dict[str, str] = {}
        self._newest: dict[str, Manifest] = {}
        self._told: set[tuple[str, str]] = set()

    def note(self, manifest: Manifest) -> None:
        """A version is published; only the newest one of a channel is ever sent."""
        if manifest.layout:
            self.layouts[manifest.channel] = manifest.layout
        self._newest[manifest.channel] = manifest

    def tell(self, channel: str, replica: str) -> Manifest:
        """What `replica` has to know of the newest version, which it is about to receive."""
        known = (channel, replica) in self._told
        self._told.add((channel, replica))
        return structs.replace(self._newest[channel], layout="" if known else self.layouts[channel])


# Seconds at most between two looks at what is awaited, after which what was answered is forgotten.
LOOK_S = 10.0


class Stage:
    def __init__(
        self,
        origin: SegmentOrigin,
        recorder: RunRecorder,
        flags: RunOptions,
        handles: Mapping[tuple[Firing, str], ObjectRef] | None = None,
        manifests: Manifests | None = None,
    ) -> None:
        self.name, self.graph, self.plan = origin.stage, origin.graph, origin.plan
        self.recorder, self.flags = recorder, flags
        self.tables = Tables(origin.graph, origin.plan)
        self.reads = {node.name: input_reads(origin.graph, node) for node in origin.graph.nodes if node.fires}
        self.scheduler = origin.scheduler(self.tables)
        self.finish: Finish | None = None
        self.asked: dict[Answer, tuple[Question, float]] = {}
        self._held_up = self._look_at = 0.0
        self.handles: dict[Firing, dict[str, ObjectRef]] = defaultdict(dict)
        for (firing, output), handle in (handles or {}).items():
            self.handles[firing][output] = handle
        self.manifests = manifests or Manifests()

    def feed(self, event: Event, now: float) -> Orders:
        """An event of the driver's own: begin, checkpoint, abort."""
        commands, states = step(self.scheduler, event)
        # What replicas were at when a run was aborted is what is said of its end.
        self.recorder.step(now, event, commands, {} if isinstance(event, Abort) else states)
        return self._route(commands, now)

    def answer(self, result: Result, now: float) -> Orders:
        """A rank's answer. Raises UnawaitedError, and changes nothing, for one that was not asked for."""
        event = result.event
        commands, states = step(self.scheduler, event)
        if isinstance(event, Done) and result.outputs:
            self.handles[event.firing].update(result.outputs)
        if isinstance(event, Published) and result.manifest is not None:
            self.manifests.note(result.manifest)
        self.recorder.step(now, event, commands, states, result)
        return self._route(commands, now)

    def live(self) -> dict[tuple[str, str], int]:
        """The versions that replicas hold: what the next stage starts from."""
        channels = self.scheduler.channels.items()
        return {(name, r): state.live for name, channel in channels for r, state in channel.receivers.items()}

    def overdue(self, now: float, deadline: float, doing: Mapping[str, str], held_up: float = 0.0) -> str | None:
        """What has been awaited for longer than `deadline` seconds, and from whom; None if nothing has.

        What a rank is `doing` may be another firing of the same order, which keeps it from this one. `held_up` are the
        seconds that this process itself was stopped so far; they count for nobody.
        """
        if now < self._look_at and held_up == self._held_up:
            return None
        awaited = self.scheduler.answers
        self.asked = {key: self.asked[key] for key in awaited}
        if more := held_up - self._held_up:
            self._held_up = held_up
            self.asked = {key: (command, min(now, since + more)) for key, (command, since) in self.asked.items()}
        # What is asked from now on is due later than all that is awaited already.
        self._look_at = min([now + LOOK_S, *(since + deadline for _, since in self.asked.values())])
        for key, ranks in awaited.items():
            command, since = self.asked[key]
            waited = now - since
            if waited > deadline:
                what, replica = _words(command), command.replica
                if isinstance(command, Send):
                    what += f" from {self._sender(command)}"
                names = ", ".join(self.plan.spelled(replica, rank) for rank in sorted(ranks))
                said = {rank: doing.get(rank_peer(replica, rank), "") for rank in sorted(ranks)}
                at = "".join(f"; {replica} rank {rank} is at {word}" for rank, word in said.items() if word)
                return f"no answer from {names} for {waited:.0f} s (deadline {deadline:.0f} s): {what}{at}"
        return None

    def moving(self, replica: str) -> str:
        """The weights that are on their way from a replica or to it; "" for none."""
        found = []
        for key in self.scheduler.answers:
            send = self.asked[key][0]
            if not isinstance(send, Send):
                continue
            sender, live = self._sender(send), self.scheduler.channels[send.channel].receivers[send.replica].live
            if replica in (sender, send.replica):
                version = f"version {send.version} of {send.channel}"
                found.append(f"{version} from {sender} to {send.replica}, which has {live}")
        return f"moving {' and '.join(found)}" if found else ""

    def _sender(self, send: Send) -> str:
        """The replica from which weights come, which in a chain is not always the one that published them."""
        from penstock.runtime.control.routes import Routes  # numpy, for what goes wrong alone

        routes = Routes(self.tables.channels[send.channel], self.flags.transport, self.flags.delta)
        routes.settle(json.loads(self.manifests.layouts[send.channel]))
        return routes.source(send.replica, send.together) or send.source

    def _route(self, commands: list[Command], now: float) -> Orders:
        batches: dict[str, list[Command]] = defaultdict(list)
        handles: dict[str, list[tuple[Firing, str, ObjectRef]]] = defaultdict(list)
        manifests: dict[str, list[Manifest]] = defaultdict(list)
        # All parts of a cut are asked for at once, and go into one folder.
        cut = next((self.recorder.begin_checkpoint(c.update) for c in commands if isinstance(c, Save)), "")
        for command in commands:
            match command:
                case Finish():
                    self.finish = command
                    continue
                case Commit():
                    self.recorder.commit(command)
                    continue
                case Fire():
                    handles[command.replica] += self._inputs(command)
                case Send():
                    manifests[command.replica].append(self.manifests.tell(command.channel, command.replica))
                    if command.source != command.replica:
                        batches[command.source].append(command)
                case Free():
                    for firing in command.firings:
                        self.handles.pop(firing, None)
                case CommitTurn(firing):
                    if firing in self.handles:
                        self.handles[firing._replace(turn=0)] = self.handles.pop(firing)
            batches[command.replica].append(command)
            if isinstance(command, Question):
                self.asked[answer(command)] = command, now
        return {
            replica: Order(tuple(items), tuple(handles[replica]), cut, tuple(manifests[replica]))
            for replica, items in batches.items()
        }

    def _inputs(self, fire: Fire) -> list[tuple[Firing, str, ObjectRef]]:
        """The handles of a firing's inputs; those that its replica made itself are used without one."""
        return [
            (firing, read.output, handle)
            for read in self.reads.get(fire.firing.node, ())
            for firing in read.firings(fire.firing, fire.groups)
            if (handle := self.handles.get(firing, {}).get(read.output)) is not None
        ]


def _words(command: Question) -> str:
    """A command without its replica: "fire generate[3]", "send policy>generator 2"."""
    fields = structs.astuple(command)[: 1 if isinstance(command, Fire | Save) else 2]
    return " ".join([type(command).__name__.lower(), *map(str, fields)])


# Seconds from the user's wish to stop until a checkpoint is given up.
STOP_BUDGET = 3.5

# Seconds between two checkpoints where the user did not say how many updates: what a crash may cost.
CHECKPOINT_S = 120.0


class Session:
    """`running` until the last stage has finished; then `status` is "done", "stopped" or "failed"."""

    def __init__(self, config: RunConfig, recorder: RunRecorder, cut: Mapping[str, Any] | None = None) -> None:
        self.config, self.recorder, self.cut = config, recorder, cut
        self.start = cut["update"] if cut else 0
        self.status, self.error = "running", ""
        self.failure: Failure | None = None  # that ended the run
        self.verdict = Verdict()
        self.stage: Stage | None = None
        self.stopping: float | None = None
        self.why = "stopped by the user"
        self.doing: Mapping[str, str] = {}  # what ranks say they are at, by their names as peers
        self._stages = self._plan_stages()
        self._live: dict[tuple[str, str], int] = {}
        self._handles: Mapping[tuple[Firing, str], ObjectRef] = {}
        self._manifests = Manifests()
        self._saved_at = self.start
        self._saved_time: float | None = None

    def _plan_stages(self) -> list[str]:
        evaluate = self.config.evaluation is not None
        before = ["before"] if evaluate and not self.cut else []
        return [*before, "train", "save", *(["after"] if evaluate else [])]

    @property
    def running(self) -> bool:
        return self.status == "running"

    # What drivers call ------------------------------------------------------------------------------------

    def begin(self, now: float, handles: Mapping[tuple[Firing, str], ObjectRef]) -> Orders:
        """All ranks are ready; `handles` name the values that they restored from a checkpoint."""
        self._handles = handles
        return self._next_stage(now)

    def answer(self, result: Result, now: float) -> Orders:
        """A rank's answer. Raises UnawaitedError for one that was not asked for."""
        if self.stage is None:
            raise UnawaitedError(f"{type(result.event).__name__} before the first stage")
        if self.verdict.certain:
            return {}
        return self._after(self.stage.answer(result, now), now)

    def stop(self, now: float, why: str = "") -> Orders:
        """The user wants the run to end: with a checkpoint if it can be had in time. `why` if it was not said so."""
        if self.stopping is not None or not self.running or self.verdict.certain:
            return {}
        self.stopping, self.why = now, why or self.why
        if self.stage is not None and self.stage.name == "save":
            return {}  # the cut that is being written is the one wanted
        if self.stage is None or self.stage.name != "train":
            return self._finish(now, "stopped", self.why)
        return self._after(self.stage.feed(Checkpoint(final=True), now), now)

    def watch(self, now: float, held_up: float = 0.0) -> Orders:
        """Look at deadlines: the stop's, the answers', the next checkpoint's. `held_up`: as the stage's."""
        if self.stage is None or not self.running or self.verdict.certain:
            return {}
        self.recorder.tick(now)
        if self.stopping is not None and now - self.stopping > STOP_BUDGET:
            return self._finish(now, "stopped", f"no checkpoint within {STOP_BUDGET} s{self._awaited()}")
        if overdue := self.stage.overdue(now, self.config.flags.deadline, self.doing, held_up):
            self.fail(Failure(FailureCode.OVERDUE, overdue), now)
        return {}

    def fail(self, failure: Failure, now: float) -> None:
        """A detector reports why the run cannot go on. `decide` ends it."""
        self.verdict.report(failure, now)

    def decide(self, now: float, heard: Callable[[str], float] = lambda peer: math.inf) -> None:
        """End the run with the failure that explains those reported, unless a better cause may still come.

        Drivers call it once per turn. `heard` gives the time of a peer's last sign of life.
        """
        failure = self.verdict.final(now, heard)
        if failure is None or not self.running:
            return
        self.failure = failure
        if self.stage is not None and self.stage.finish is None:
            self.stage.feed(Abort(failure.text), now)
        self._finish(now, "failed", failure.text)

    def moving(self, replica: str) -> str:
        """The weights that are on their way from a replica or to it; "" for none."""
        return self.stage.moving(replica) if self.stage else ""

    def _awaited(self) -> str:
        """Who has not answered yet, and to what."""
        asked = [self.stage.asked[key][0] for key in self.stage.scheduler.answers] if self.stage else []
        names = [f"{_words(command).partition(' ')[2]} on {command.replica}" for command in asked]
        return f": still in work were {', '.join(names)}" if names else ""

    # From stage to stage ----------------------------------------------------------------------------------

    def _after(self, orders: Orders, now: float) -> Orders:
        stage = self.stage
        assert stage is not None
        if stage.finish is None:
            return _merge(orders, self._checkpoint_if_due(stage, now))
        if stage.finish.status == "failed":
            self.fail(Failure(FailureCode.NODE, stage.finish.error), now)
            return {}
        if stage.finish.status == "stopped" and (stage.name == "train" or self.stopping is not None):
            return self._finish(now, "stopped", self.why)
        self._live = stage.live()
        self.recorder.close_stage(stage.name)
        return _merge(orders, self._next_stage(now))

    def _checkpoint_if_due(self, stage: Stage, now: float) -> Orders:
        every, update = self.config.flags.checkpoint_every, stage.scheduler.update
        if self._saved_time is None:
            self._saved_time = now
        late = now - self._saved_time >= CHECKPOINT_S and update > self._saved_at
        due = stage.name == "train" and (update - self._saved_at >= every if every else late)
        if not due or update >= self.config.flags.updates or stage.scheduler.checkpoint is not None:
            return {}
        self._saved_time = now
        self._saved_at = update
        return stage.feed(Checkpoint(), now)

    def _next_stage(self, now: float) -> Orders:
        if not self._stages:
            return self._finish(now, "done", "")
        name = self._stages.pop(0)
        graph, rules, cut = self._stage(name)
        # The checkpoint that there is, by the same scheduler that made it, or by the file that it was restored from.
        complete = (self.cut or {}) if name == "train" or self.stage is None else self.stage.scheduler.complete
        origin = SegmentOrigin(name, graph, self.config.plan, rules, cut, self._live, complete)
        self.recorder.open_stage(origin, now)
        handles = self._handles if name == "train" else {}
        self.stage = Stage(origin, self.recorder, self.config.flags, handles, self._manifests)
        if name == "train":
            self.recorder.ledger = self.stage.scheduler.ledger
        first = Checkpoint(final=True) if name == "save" else Begin()
        return self._after(self.stage.feed(first, now), now)

    def _stage(self, name: str) -> tuple[Graph, Rules, Mapping[str, Any] | None]:
        updates = self.config.flags.updates
        if name == "train":
            return self.config.graph, self.config.rules(self.start), self.cut
        if name == "save":
            assert self.stage is not None
            cut = {"update": updates, **self.stage.scheduler.ledger.to_json()}
            return self.config.graph, self.config.rules(updates), json.loads(json.dumps(cut))
        assert self.config.evaluation is not None
        version = self.start if name == "before" else updates
        return self.config.evaluation, self.config.evaluation_rules(version), None

    def _finish(self, now: float, status: str, error: str) -> Orders:
        if self.running:
            self.status, self.error = status, error
            self.recorder.finish(now, status, error, self.failure.code if self.failure else "")
        return {}


def _merge(first: Orders, second: Orders) -> Orders:
    """Both orders, the first one's commands first."""
    merged = dict(first)
    for replica, order in second.items():
        earlier = merged.get(replica, Order((), ()))
        merged[replica] = Order(
            earlier.commands + order.commands,
            earlier.handles + order.handles,
            earlier.checkpoint or order.checkpoint,
            earlier.manifests + order.manifests,
        )
    return merged
