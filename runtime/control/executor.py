"""Carries out the commands of a rank: runs nodes, keeps their outputs, moves weights, saves checkpoint shards.

One executor per rank, without a socket: the worker drives it with messages, the in-process driver calls it. A node is a
function, a function with state, or a `Stream` that works on several firings at once. An exception of a node becomes a
`Failed` event that says what was raised (see `process.told`). But an `UntrustedError` ends the executor's use.

`rank_state.py` has what a rank holds and how values move; `checkpointing.py` how its checkpoint shard is written and
read. `Offloading` decides what leaves the device between updates.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from time import monotonic
from types import MappingProxyType
from typing import Any

import torch

from penstock.graph.ir import Firing, Node
from penstock.graph.node import Dropped, Filter, Paused, UntrustedError
from penstock.graph.protocols import Cyclic, Fusing, Offloadable, Releasing, Threaded
from penstock.graph.types import EPOCH, Advantages, AnyRewards, Mean, Model, Prefixes, Replies, Rollouts, read_group
from penstock.runtime.control.checkpointing import Checkpointing, restore
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.process import RAISED, told
from penstock.runtime.control.rank_setup import RankSetup
from penstock.runtime.control.rank_state import Held, HeldValues, Instances, Key
from penstock.runtime.control.run_config import EVALUATION
from penstock.runtime.control.weight_channels import LocalChannels
from penstock.runtime.record.samples import sample
from penstock.runtime.schedule.admission import needed_version
from penstock.runtime.schedule.events import (
    Abort,
    Command,
    CommitTurn,
    Done,
    Failed,
    Fire,
    Free,
    Publish,
    Published,
    Save,
    Send,
    Swap,
    Swapped,
    Unread,
    kept_as,
)
from penstock.runtime.tensor.checkpoint import require_savable
from penstock.runtime.tensor.object_store import life_of
from penstock.runtime.tensor.offload import Offload, OffloadError, give_back
from penstock.runtime.tensor.process_group import all_say, first_line
from penstock.runtime.tensor.shm import ObjectRef, ObjectRefError, owner_of
from penstock.runtime.tensor.streams import is_lost

# Fixed workspace sizes: otherwise cuBLAS chooses its order of summation by the free workspace that streams share.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def be_deterministic() -> None:
    """Make PyTorch deterministic in this process; an operation without a deterministic implementation raises
    RuntimeError. Call it before anything uses a GPU: cuBLAS reads its variable once."""
    os.environ.update([WORKSPACE])
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


class GpuLostError(BaseException):
    """A rank has lost its GPU. It ends its process at once, like one that has died: a new process can use the GPU. Not
    an `Exception`, which would only fail a firing."""


class Offloading:
    """Moves the values that updates make off the device between updates, and back before the next one. Does nothing if
    the run does not offload.

    A value that updates change (`Offloadable`) leaves in the background after the update that made it, while the next
    weights are published. The publication is answered only when the value has left, so that the generator has its
    memory. The value comes back when the next update is asked for, while the inputs of that update are fetched. A
    stream (`Releasing`) releases its memory before its last firing is answered.

    Raises ValueError for a rank that must offload but makes no value that can leave.
    """

    def __init__(self, instances: Instances) -> None:
        setup = instances.setup
        self._carried, self._patience, self._releases = instances.carried, setup.patience, setup.offload != "off"
        self._made: dict[str, int] = {}
        self._told: set[str] = set()
        self._makes = {node: tuple(setup.makes.get(node, ())) for node in instances.nodes}
        made = {name: instances.carried[name] for names in self._makes.values() for name in names}
        where = f"{setup.replica} rank {setup.rank}"
        leaving = [name for name, value in made.items() if self._releases and isinstance(value, Offloadable)]
        # With "auto" such a rank keeps everything on the device, without a message.
        if made and not leaving and setup.offload == "on":
            kinds = ", ".join(f"{name}, a {type(value).__name__}" for name, value in made.items())
            raise ValueError(f"--offload on: {where}: given {kinds}, needed a value that can leave its device")
        self._offloads = {name: Offload(f"{name} of {where}") for name in leaving}
        self._read = {
            node: sorted({*(item.carried for item in held.inputs), *self._makes[node]} & self._offloads.keys())
            for node, held in instances.nodes.items()
            if held.node.clock == "update"
        }
        for name in leaving:
            self._leave(name)

    def call(self, firing: Firing) -> None:
        """A node is to fire: begin to bring back the values that it reads."""
        for name in self._read.get(firing.node, ()):
            offload = self._offloads[name]
            offload.fence(self._patience)
            if offload.where == "host":
                offload.come_back()

    def fence(self, node: str = "") -> None:
        """Wait for the values that a node reads, or for all moves. Raises OffloadError if a move failed or was not done
        in time."""
        for name in self._read.get(node, ()) if node else self._offloads:
            self._offloads[name].fence(self._patience)

    def fired(self, firing: Firing) -> None:
        """A node has fired: the values that it read or made may leave, if this update has made them."""
        self._made.update((name, firing.index) for name in self._makes[firing.node])
        for name in self._read.get(firing.node, ()):
            # Until the update has made the next value, a later node of it reads the value again.
            if self._made.get(name, -1) >= firing.index:
                self._leave(name)

    def finished(self, held: Held) -> None:
        """A stream has no work left: release its memory."""
        if self._releases and isinstance(held.state, Releasing):
            held.state.release()
            give_back()

    def faults(self) -> list[str]:
        """Why moves have failed, each once."""
        faults = {name: str(o.fault) for name, o in self._offloads.items() if o.fault and name not in self._told}
        self._told |= faults.keys()
        return list(faults.values())

    def counts(self) -> Counter[str]:
        """The number of moves, the bytes of the last move of each value, and the milliseconds waited for moves."""
        found: Counter[str] = Counter()
        for offload in self._offloads.values():
            found.update(moves=offload.moves, nbytes=offload.nbytes, waited_ms=round(1000 * offload.waited_s))
        return found

    def _leave(self, name: str) -> None:
        value = self._carried[name]
        assert isinstance(value, Offloadable)
        self._offloads[name].leave(value.offloadable())


class Executor:
    """Runs the commands of one rank; `channels` moves weights, and `values` keeps what nodes make.

    `restored` are the references of the values that a checkpoint had. `threads` is the number of threads of an
    operation. `doing` is the command or step in progress; its `str` names it; "" for none. `wake` and `warn` are those
    of `Checkpointing`.
    """

    def __init__(
        self,
        setup: RankSetup,
        channels: LocalChannels,
        values: HeldValues,
        wake: Callable[[], None] | None = None,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.setup, self.channels, self.values = setup, channels, values
        self.held = Instances(setup)
        for held in self.held.streams:
            if isinstance(held.state, Fusing):
                for item in held.inputs:
                    if item.channel:
                        channels.fuse(item.channel, held.state.fused())
        self.checkpoints = Checkpointing(self.held, values, wake, warn)
        # Find state that no checkpoint can hold now, and not after hours, when the first one is due.
        stateful = [held.node for held in self.held.nodes.values() if held.stateful]
        states = {f"node {n.name}, written at {n.where}": self.held.nodes[n.name].state for n in stateful}
        require_savable(states, self.held.carried)
        place = setup.plan.replica(setup.replica).ranks[setup.rank]
        # The threads of an operation synchronise at its end, so one whose core is taken delays all. A carried value's
        # own threads do not.
        carried = self.held.carried.values()
        threaded = not self.held.streams and any(isinstance(each, Threaded) and each.own_threads() for each in carried)
        self.threads = 1 if threaded else place.threads
        self._device = torch.device(place.device)
        self.doing: object = ""
        self._order = Order(())
        self._handles: dict[Key, ObjectRef] = {}
        self.restored: list[tuple[Firing, str, ObjectRef]] = []
        if setup.restore is not None:
            self.restored = restore(setup.restore, self.held, self.values)
        # After the restore, which fills values where they are: on the device.
        self.offloading = Offloading(self.held)

    def carry_out(self, order: Order) -> Iterator[list[Result]]:
        """Carry out the commands in order; yield the immediate answers to each."""
        self._order, self._handles = order, {(firing, output): handle for firing, output, handle in order.handles}
        for command in order.commands:
            self.doing = type(command).__name__
            yield self._do(command)
        self.doing = ""

    def _do(self, command: Command) -> list[Result]:
        """Carry out one command, and return its immediate answers."""
        replica, rank = self.setup.replica, self.setup.rank
        match command:
            case Fire():
                return self._fire(command)
            case Publish(channel, version):
                return [self._publish(channel, version)]
            case Send(channel, version):
                manifests = (one for one in self._order.manifests if (one.channel, one.version) == (channel, version))
                lives = self._order.lives.get(command.replica, 0)
                self.channels.send(self._order.whole(command), next(manifests, None), lives)
                return []
            case Swap(channel, version, _):
                self.channels.swap(channel, version)
                return [Result(Swapped(channel, version, replica, rank))]
            case Free(firings):
                self.values.free(firings)
                return []
            case CommitTurn(firing):
                self.values.commit_turn(firing)
                return []
            case Save(update, _, firings):
                try:
                    self.offloading.fence()
                except OffloadError as error:
                    return [Result(Abort(str(error)))]
                return [self.checkpoints.save(self._order, update, firings)]
        raise TypeError(f"executor: given {type(command).__name__}, needed a command for a rank")

    def busy(self) -> bool:
        """True if a stream has firings to work on."""
        return any(held.submitted for held in self.held.streams)

    def step(self) -> list[Result]:
        """Do one step of each stream that has work. Return the answers of finished firings and of background work."""
        results = [Result(event) for event in self.channels.arrived()]
        results += [Result(Abort(fault)) for fault in self.offloading.faults()]
        self.doing = "Save"  # the next line raises errors of a save
        results += self.checkpoints.answers()
        self.doing = ""
        for held in self.held.streams:
            if held.submitted:
                self.doing = held
                results += self._step(held)
                if not held.submitted:
                    self.offloading.finished(held)
        self.doing = ""
        return results

    def _step(self, held: Held) -> list[Result]:
        """Do one step of a stream. If it raises, all its firings have failed, and it forgets them."""
        try:
            finished = held.state.step()
        except RAISED as error:
            # A stream that raised may have corrupted any of its firings.
            held.state.reset()
            lost, held.submitted = held.submitted, {}
            return [self._failure(firing, began, error) for firing, began in lost.items()]
        return [self._answer(held, firing, result, held.submitted.pop(firing)) for firing, result in finished]

    def _fire(self, command: Fire) -> list[Result]:
        self.doing = firing = command.firing
        began, begun = monotonic(), False
        try:
            if firing.node in self.held.sources:
                source = self.held.sources[firing.node]
                handles = self.values.keep(firing, {"out": read_group(source, firing.index)})
                metrics = {EPOCH: source.epochs(firing.index)} if isinstance(source, Cyclic) else {}
                done = Done(firing, self.setup.replica, self.setup.rank)
                return [Result(done, handles, metrics, began, monotonic())]
            held = self.held.nodes[firing.node]
            # What has left the device comes back while the inputs are fetched.
            self.offloading.call(firing)
            inputs = self._read(held, command)
            begun = True
            if firing.segment and held.stream:
                inputs["paused"] = self.values.get((firing, held.node.outputs[0].name), self._handles)
            if held.stream:
                held.state.submit(firing, inputs)
                held.submitted[firing] = began
                return []
            self.offloading.fence(firing.node)
            part = held.part(command)
            result = held.call(inputs, part)
            if isinstance(held.definition, Filter) and not isinstance(result, Dropped):
                result = tuple(self._inputs(held, command).values())  # anew: the predicate may have changed its own
        except RAISED as error:
            # The error of a NaN gradient does not name its cause.
            if begun and isinstance(error, FloatingPointError):
                # Advantages in another shape than their rollouts, or on another device, must not hide the error.
                with suppress(Exception):
                    for cause in _not_finite(held.node, inputs):
                        error.add_note(cause)
            return [self._failure(firing, began, error, begun=begun)]
        if part is not None and not part.last:
            return [self._taken(held, firing, result, began)]
        answer = self._answer(held, firing, result, began, inputs)
        self.offloading.fired(firing)
        return [answer]

    def _taken(self, held: Held, firing: Firing, result: Any, began: float) -> Result:
        """The answer of an update that has taken a part of its batch and has not made its next value yet."""
        try:
            held.definition.split(result, stateful=held.stateful)
        except Exception as error:
            return self._failure(firing, began, error)
        done = Done(firing, self.setup.replica, self.setup.rank, paused=True)
        return Result(done, {}, {}, began, monotonic())

    def _publish(self, channel: str, version: int) -> Result:
        replica, rank, began = self.setup.replica, self.setup.rank, monotonic()
        self.doing = Firing(channel, version)
        try:
            manifest = self.channels.publish(channel, version, self.held.carried)
            self.offloading.fence()
        except RAISED as error:
            # Not `Failed`: a publication is not a firing, and cannot be retried.
            return Result(Abort(f"{self.doing} on {replica} rank {rank}:\n{told(error)}"))
        return Result(Published(channel, version, replica, rank), {}, {}, began, monotonic(), manifest)

    def _read(self, held: Held, command: Fire) -> dict[str, Any]:
        """Return the inputs of a firing. The ranks of a replica start an update together or not at all: if the update
        reads values that may be lost, and one rank cannot read its inputs, the other ranks raise ObjectRefError."""
        several = len(self.setup.plan.replica(self.setup.replica).ranks) > 1
        # All ranks have the same order, so either all of them or none take part in `all_say`.
        perishable = any(handle.owner in self.setup.perishable for handle in self._handles.values())
        if held.node.clock != "update" or not (several and perishable):
            return self._inputs(held, command)
        inputs: dict[str, Any] = {}
        fault: BaseException | None = None
        try:
            inputs = self._inputs(held, command)
        except RAISED as error:
            fault = error
        ready = all_say(fault is None)
        if fault is not None:
            raise fault
        if not ready:
            raise ObjectRefError("another rank of this replica could not read a value of the update")
        return inputs

    def _inputs(self, held: Held, command: Fire) -> dict[str, Any]:
        """The inputs of a firing: live weights, current or earlier carried values, and outputs of other firings."""
        inputs: dict[str, Any] = {}
        firing, per_update = command.firing, held.node.clock == "update"
        # Exactly one of `channel`, `carried` and `read` says where the input comes from.
        for name, channel, carried, made, lag, read in held.inputs:
            value: Any
            if channel:
                value = self.channels.weights(channel)
            elif lag is not None:
                value = self.held.history.of(carried, needed_version(command.update, lag))
            elif read is None:
                value = self.held.carried[carried]
            elif read.back and not firing.turn:
                continue  # an output of the previous turn, and this is the first turn
            else:
                # Ranks that share the work on a batch read only their rows of it.
                shared = held.scattered and len(self.setup.plan.replica(self.setup.replica).ranks) > 1
                value = self.values.read(read, command, self._handles, scattered=shared)
            if per_update and isinstance(value, Model):
                # The number of updates applied to it. The current one counts if this is its next value (`made`).
                value.version = firing.index + made
            inputs[name] = value
        return inputs

    def _answer(
        self, held: Held, firing: Firing, result: Any, began: float, inputs: Mapping[str, Any] = MappingProxyType({})
    ) -> Result:
        """The answer of a finished firing. What the node returned becomes its state and outputs, if it fits the node's
        declaration. A carried value's next value replaces it; other outputs are kept for their readers."""
        # A stream may return an exception for one firing, while its others go on.
        if isinstance(result, BaseException):
            return self._failure(firing, began, result)
        replica, rank = self.setup.replica, self.setup.rank
        if isinstance(result, Dropped):
            return Result(Done(firing, replica, rank, dropped=True), {}, {}, began, monotonic())
        try:
            if isinstance(result, Paused):
                so_far = {held.node.outputs[0].name: result.value}
                handles = self.values.keep(kept_as(firing, paused=True), so_far)
                return Result(Done(firing, replica, rank, paused=True), handles, {}, began, monotonic())
            state, outputs, metrics = held.definition.split(result, stateful=held.stateful)
            _require_rows(held.node.name, inputs, outputs)
            # Check before the state changes: an output that does not fit must leave the node as it was.
            again = held.answers and not _done_talking(held.node, outputs)
            if held.stateful:
                held.state = state
            made = self.setup.makes.get(held.node.name, {})
            for name, output in made.items():
                self.held.carried[name] = outputs[output]
                self.held.history.note(name, firing.index + 1, outputs[output])
            kept = {name: value for name, value in outputs.items() if name not in made.values()}
            kept_sample = sample(outputs) if self._is_sampled(held, firing) else ""
            handles = self.values.keep(kept_as(firing, paused=False), kept)
        except Exception as error:
            return self._failure(firing, began, error)
        done = Done(firing, replica, rank, again=again)
        counts = {name: value.count for name, value in metrics.items() if isinstance(value, Mean)}
        plain = {name: float(value) for name, value in metrics.items()}
        return Result(done, handles, plain, began, monotonic(), sample=kept_sample, counts=counts)

    def _is_sampled(self, held: Held, firing: Firing) -> bool:
        """True if the outputs of this firing are to be kept as samples. A filter only hands values on."""
        node, chosen = held.node, firing.index % self.setup.batch < self.setup.save_samples
        made = node.clock == "group" and not isinstance(held.definition, Filter)
        return chosen and self.setup.rank == 0 and made and not node.name.startswith(EVALUATION)

    def _require_gpu(self, error: BaseException) -> None:
        """Raise GpuLostError if this process cannot use its GPU any more after an error."""
        if is_lost(self._device):
            given = first_line(error)
            raise GpuLostError(f"{self._device} cannot be used by this process any more: {given}") from error

    def _failure(self, firing: Firing, began: float, error: BaseException, *, begun: bool = True) -> Result:
        """The answer of a firing that raised. `begun`: the node had its inputs. An UntrustedError has none: it
        is raised again, so that the rank answers nothing more."""
        self._require_gpu(error)
        if isinstance(error, UntrustedError):
            raise UntrustedError(f"{self.setup.replica} rank {self.setup.rank}: {error}") from error
        held = self.held.nodes.get(firing.node)
        written = f", written at {held.node.where}" if held is not None and held.node.where else ""
        text = f"{firing} on {self.setup.replica} rank {self.setup.rank}{written}:\n{told(error)}"
        unread = None
        if isinstance(error, ObjectRefError) and error.handle is not None:
            owners = {owner_of(r.name, n): r.name for r in self.setup.plan.replicas for n in range(len(r.ranks))}
            unread = owners[error.handle.owner], life_of(error.handle)
        blind = not begun and held is not None and held.node.clock == "update" and isinstance(error, ObjectRefError)
        failed = (Unread if blind else Failed)(firing, self.setup.replica, self.setup.rank, text)
        return Result(failed, began=began, ended=monotonic(), unread=unread)


def _require_rows(node: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError if a node with responses returned rewards, advantages or replies in a number that matches
    neither the responses nor any rewards, advantages or prefixes that it read. Joined with other groups, they would be
    assigned to the wrong responses."""
    values = (*inputs.values(), *outputs.values())
    rows = {len(value) for value in values if isinstance(value, Rollouts)}
    # Rewards may be for other rows than the responses, as values of vines are for their prefixes.
    others = {len(value) for value in inputs.values() if isinstance(value, AnyRewards | Advantages | Prefixes)}
    for value in outputs.values():
        if isinstance(value, AnyRewards | Advantages | Replies) and rows and (given := len(value)) not in rows | others:
            kind = "advantages" if isinstance(value, Advantages) else "rewards"
            kind = "replies" if isinstance(value, Replies) else kind
            needed = " or ".join(map(str, sorted(rows | others)))
            raise ValueError(f"{node} returned {given} {kind}, needed {needed}, one for each response that it reads")


def _not_finite(node: Node, inputs: Mapping[str, Any]) -> Iterator[str]:
    """For each input of an update with an advantage that is not finite, of a sampled response or token: a text with the
    node that made it, the first such row and its group."""
    rollouts = next((value for value in inputs.values() if isinstance(value, Rollouts)), None)
    for made in node.inputs:
        value: Any = inputs.get(made.name)
        # A term of a loss is rollouts with their advantages.
        is_term = isinstance(value, Rollouts) and hasattr(value, "values_N")
        rows_of = value if is_term else rollouts
        if rows_of is None or not (is_term or (isinstance(value, Advantages) and len(value) == len(rows_of))):
            continue
        values, sampled_NT = value.values_N * 1.0, rows_of.sampled_NT
        wrong = ~(values - values == 0)  # in any array library
        wrong = wrong & (sampled_NT if values.ndim > 1 else sampled_NT.any(1))
        rows = (wrong.any(1) if values.ndim > 1 else wrong).tolist()
        if True in rows:
            row = rows.index(True)
            found = values[row][wrong[row]].tolist()[0] if values.ndim > 1 else values[row].item()
            count = f"{rows.count(True)} of {len(rows)} rows have such ones"
            verb = "was given" if is_term else "made"
            yield f"{made.ref.node} {verb} an advantage of {found} for {rows_of.place(row)}; {count}"


def _done_talking(node: Node, outputs: Mapping[str, Any]) -> bool:
    """True if a node that answers has ended its group's turns. Raises TypeError for an output that does not say."""
    first = outputs[node.outputs[0].name]
    done = getattr(first, "done", None)
    if not isinstance(done, bool):
        given = f"{node.name} returned a {type(first).__name__} whose `done` is {done!r}"
        raise TypeError(f"{given}; needed True or False: is the group's conversation over?")
    return done
