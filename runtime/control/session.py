"""A run from its first stage to its last, whoever drives it: evaluate, train, save, evaluate.

The controller and the in-process driver feed answers and carry out orders; what comes when is decided here. No
clock, no socket: time is passed in.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.graph.ir import Firing, Graph
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.stage import Manifests, Orders, Recorder, Stage
from penstock.runtime.schedule.events import Abort, Begin, Checkpoint
from penstock.runtime.schedule.replay import Origin
from penstock.runtime.schedule.state import UnawaitedError
from penstock.runtime.schedule.tables import Rules
from penstock.runtime.tensor.handle import Handle

STOP_BUDGET = 3.5
"""Seconds from the user's wish to stop until a checkpoint is given up."""

CHECKPOINT_S = 120.0
"""Seconds between two checkpoints where the user did not say how many updates: what a crash may cost."""


class Session:
    """`running` until the last stage has finished; then `status` is "done", "stopped" or "failed"."""

    def __init__(self, config: RunConfig, recorder: Recorder, cut: Mapping[str, Any] | None = None) -> None:
        self.config, self.recorder, self.cut = config, recorder, cut
        self.start = cut["update"] if cut else 0
        self.status, self.error = "running", ""
        self.stage: Stage | None = None
        self.stopping: float | None = None
        self.why = "stopped by the user"
        self.doing: Mapping[str, str] = {}  # what ranks say they are at, by their names as peers
        self._stages = self._plan_stages()
        self._live: dict[tuple[str, str], int] = {}
        self._handles: Mapping[tuple[Firing, str], Handle] = {}
        self._manifests = Manifests()
        self._saved_at = self.start
        self._saved_time: float | None = None
        self._states: dict[str, str] = {}

    def _plan_stages(self) -> list[str]:
        evaluate = self.config.evaluation is not None
        before = ["before"] if evaluate and not self.cut else []
        return [*before, "train", "save", *(["after"] if evaluate else [])]

    @property
    def running(self) -> bool:
        return self.status == "running"

    # What drivers call ------------------------------------------------------------------------------------

    def begin(self, now: float, handles: Mapping[tuple[Firing, str], Handle]) -> Orders:
        """All ranks are ready; `handles` name the values that they restored from a checkpoint."""
        self._handles = handles
        return self._next_stage(now)

    def answer(self, result: Result, now: float) -> Orders:
        """A rank's answer. Raises UnawaitedError for one that was not asked for."""
        if self.stage is None:
            raise UnawaitedError(f"{type(result.event).__name__} before the first stage")
        return self._after(self.stage.answer(result, now), now)

    def stop(self, now: float, why: str = "") -> Orders:
        """The user wants the run to end: with a checkpoint if it can be had in time. `why` if it was not said so."""
        if self.stopping is not None or not self.running:
            return {}
        self.stopping, self.why = now, why or self.why
        if self.stage is not None and self.stage.name == "save":
            return {}  # the cut that is being written is the one wanted
        if self.stage is None or self.stage.name != "train":
            return self._finish(now, "stopped", self.why)
        return self._after(self.stage.feed(Checkpoint(final=True), now), now)

    def watch(self, now: float, held_up: float = 0.0) -> Orders:
        """Look at deadlines: the stop's, the answers', the next checkpoint's. `held_up`: as the stage's."""
        if self.stage is None or not self.running:
            return {}
        self.recorder.tick(now)
        if self.stopping is not None and now - self.stopping > STOP_BUDGET:
            return self._finish(now, "stopped", f"no checkpoint within {STOP_BUDGET} s{self._awaited()}")
        overdue = self.stage.overdue(now, self.config.flags.deadline, self.doing, held_up)
        return self.abort(overdue, now) if overdue else {}

    def abort(self, error: str, now: float) -> Orders:
        """A peer's fault ends the run."""
        if self.stage is not None and self.stage.finish is None:
            self.stage.feed(Abort(error), now)
        return self._finish(now, "failed", error)

    def moving(self, replica: str) -> str:
        """The weights that are on their way from a replica or to it; "" for none."""
        return self.stage.moving(replica) if self.stage else ""

    def _awaited(self) -> str:
        """Who has not answered yet, and to what."""
        asked = self.stage.scheduler.awaited() if self.stage else {}
        names = [f"{' '.join(map(str, what))} on {replica}" for _, *what, replica in asked]
        return f": still in work were {', '.join(names)}" if names else ""

    # From stage to stage ----------------------------------------------------------------------------------

    def _after(self, orders: Orders, now: float) -> Orders:
        stage = self.stage
        assert stage is not None
        self._note_states(stage, now)
        if stage.finish is None:
            return _merge(orders, self._checkpoint_if_due(stage, now))
        if stage.finish.status == "failed":
            return self._finish(now, "failed", stage.finish.error)
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
        if not due or update >= self.config.flags.updates or stage.scheduler.cutting is not None:
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
        origin = Origin(name, graph, self.config.plan, rules, cut, self._live, complete)
        self.recorder.open_stage(origin, now)
        handles = self._handles if name == "train" else {}
        self.stage = Stage(origin, self.recorder, self.config.flags, handles, self._manifests)
        if name == "train":
            self.recorder.follow(self.stage.scheduler.ledger)
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

    def _note_states(self, stage: Stage, now: float) -> None:
        """Tell the recorder when a replica turns busy, or idle for another cause."""
        scheduler = stage.scheduler
        for replica, load in scheduler.load.items():
            state = "busy" if load else scheduler.cause(replica)
            if self._states.get(replica) != state:
                self._states[replica] = state
                self.recorder.state(now, replica, state)

    def _finish(self, now: float, status: str, error: str) -> Orders:
        if self.running:
            self.status, self.error = status, error
            self.recorder.finish(now, status, error)
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
