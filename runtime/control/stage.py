"""One graph being run: the scheduler with what its drivers share, whether ranks are processes or not.

A driver feeds results and gets orders for replicas; the stage keeps the handles that travel with them, the times at
which answers were asked for, and tells the recorder what happened. Time is passed in.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.control.messages import Manifest, Order, Result, rank_peer
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.schedule.events import (
    Command,
    Commit,
    Done,
    Event,
    Finish,
    Fire,
    Free,
    Publish,
    Published,
    Save,
    Send,
    Settle,
    Swap,
)
from penstock.runtime.schedule.ledger import Ledger
from penstock.runtime.schedule.replay import Origin
from penstock.runtime.schedule.tables import compile_tables
from penstock.runtime.tensor.handle import Handle

Orders = dict[str, Order]
"""What each replica's ranks are to do, in order."""


class Recorder(Protocol):
    """What a stage tells about itself as it goes."""

    def open_stage(self, origin: Origin, now: float) -> None: ...
    def step(self, now: float, event: Event, commands: list[Command]) -> None: ...
    def result(self, now: float, result: Result) -> None: ...
    def open_cut(self, update: int) -> str: ...
    def commit(self, commit: Commit) -> None: ...
    def state(self, now: float, replica: str, state: str) -> None: ...
    def follow(self, ledger: Ledger) -> None: ...
    def close_stage(self, name: str) -> None: ...
    def tick(self, now: float) -> None: ...
    def finish(self, now: float, status: str, error: str) -> None: ...


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


class Stage:
    def __init__(
        self,
        origin: Origin,
        recorder: Recorder,
        flags: RunOptions,
        handles: Mapping[tuple[Firing, str], Handle] | None = None,
        manifests: Manifests | None = None,
    ) -> None:
        self.name, self.graph, self.plan = origin.stage, origin.graph, origin.plan
        self.recorder, self.flags = recorder, flags
        self.tables = compile_tables(origin.graph, origin.plan)
        self.scheduler = origin.scheduler(self.tables)
        self.finish: Finish | None = None
        self.asked: dict[tuple[Any, ...], tuple[Command, float]] = {}
        self._held_up = 0.0
        self.handles: dict[Firing, dict[str, Handle]] = defaultdict(dict)
        for (firing, output), handle in (handles or {}).items():
            self.handles[firing][output] = handle
        self.manifests = manifests or Manifests()

    def feed(self, event: Event, now: float) -> Orders:
        """An event of the driver's own: begin, checkpoint, abort."""
        commands = self.scheduler.handle(event)
        self.recorder.step(now, event, commands)
        return self._route(commands, now)

    def answer(self, result: Result, now: float) -> Orders:
        """A rank's answer. Raises UnawaitedError, and changes nothing, for one that was not asked for."""
        event = result.event
        commands = self.scheduler.handle(event)
        if isinstance(event, Done) and result.outputs:
            self.handles[event.firing].update(result.outputs)
        if isinstance(event, Published) and result.manifest is not None:
            self.manifests.note(result.manifest)
        self.recorder.result(now, result)
        self.recorder.step(now, event, commands)
        return self._route(commands, now)

    def live(self) -> dict[tuple[str, str], int]:
        """The versions that replicas hold: what the next stage starts from."""
        ways = self.scheduler.ways.items()
        return {(name, r): state.live for name, way in ways for r, state in way.receivers.items()}

    def overdue(self, now: float, deadline: float, doing: Mapping[str, str], held_up: float = 0.0) -> str | None:
        """What has been awaited for longer than `deadline` seconds, and from whom; None if nothing has.

        What a rank is `doing` may be another firing of the same order, which keeps it from this one. `held_up` are the
        seconds that this process itself was stopped so far; they count for nobody.
        """
        awaited = self.scheduler.awaited()
        self.asked = {key: self.asked[key] for key in awaited}
        if more := held_up - self._held_up:
            self._held_up = held_up
            self.asked = {key: (command, min(now, since + more)) for key, (command, since) in self.asked.items()}
        for key, ranks in awaited.items():
            command, since = self.asked[key]
            waited = now - since
            if waited > deadline:
                what, replica = f"{key[0]} {' '.join(map(str, key[1:-1]))}", key[-1]
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
        for key in self.scheduler.awaited():
            send = self.asked[key][0]
            if not isinstance(send, Send):
                continue
            sender, live = self._sender(send), self.scheduler.ways[send.channel].receivers[send.replica].live
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
        handles: dict[str, list[tuple[Firing, str, Handle]]] = defaultdict(list)
        manifests: dict[str, list[Manifest]] = defaultdict(list)
        # All parts of a cut are asked for at once, and go into one folder.
        cut = next((self.recorder.open_cut(c.update) for c in commands if isinstance(c, Save)), "")
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
                case Settle(firing):
                    if firing in self.handles:
                        self.handles[firing._replace(turn=0)] = self.handles.pop(firing)
            batches[command.replica].append(command)
            if (key := _key(command)) is not None:
                self.asked[key] = command, now
        return {
            replica: Order(tuple(items), tuple(handles[replica]), cut, tuple(manifests[replica]))
            for replica, items in batches.items()
        }

    def _inputs(self, fire: Fire) -> list[tuple[Firing, str, Handle]]:
        """The handles of a firing's inputs; those that its replica made itself are used without one."""
        if fire.firing.node not in self.graph:
            return []
        node, found = self.graph[fire.firing.node], []
        for item in node.inputs:
            name, turn = item.ref.node, self.graph.turn_read(node, item, fire.firing.turn)
            step = self.tables.steps.get(name)
            if step is None or turn is None:
                continue
            indices = [fire.firing.index] if step.per_update else fire.groups
            firings = [Firing(name, index, turn) for index in indices]
            for firing in firings:
                handle = self.handles.get(firing, {}).get(item.ref.output)
                if handle is not None:
                    found.append((firing, item.ref.output, handle))
        return found


def _key(command: Command) -> tuple[Any, ...] | None:
    """The scheduler's name for the answers to a command; None for one that nobody answers."""
    match command:
        case Fire(firing, replica):
            return ("fire", firing, replica)
        case Publish(channel, version, replica):
            return ("publish", channel, version, replica)
        case Send(channel, version, _, replica):
            return ("send", channel, version, replica)
        case Swap(channel, version, replica):
            return ("swap", channel, version, replica)
        case Save(update, replica):
            return ("save", update, replica)
    return None
