"""A rank's checkpoint shard: copied between two updates, written in the background, restored by a resume.

`Checkpointing.save` copies what the rank holds into host memory and answers `Copied`; training then goes on. A thread
writes the copy, and `answers` returns `Saved` when it is on the disk. `answers` also raises the thread's exceptions, in
the rank's own loop. A rank without a thread (all in one process), or without room for the copy on its host, writes at
once and answers `Saved` only.

The scheduler allows one checkpoint at a time to be written, so the next one reuses the memory of the copy.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic, thread_time

from penstock.graph.ir import Firing
from penstock.graph.machine import free_memory
from penstock.runtime.control.checkpoint_interval import WRITE_CPU_S
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.rank_state import HeldValues, Instances
from penstock.runtime.record.checkpoints import remove_others, update_of
from penstock.runtime.schedule.events import Copied, Saved
from penstock.runtime.tensor.checkpoint import (
    CheckpointShard,
    HostBuffers,
    copy_shard,
    layout_of,
    value_name,
)
from penstock.runtime.tensor.shm import ObjectRef

# The share of the free memory of a host, or of its container if that has less, that copies may take.
FREE_SHARE = 0.8


class Checkpointing:
    """Saves what `held` and `values` have. The writing thread calls `wake` when it is done; None for a rank without
    such a thread. `warn` is called once if the host has no room for a copy."""

    def __init__(
        self,
        held: Instances,
        values: HeldValues,
        wake: Callable[[], None] | None,
        warn: Callable[[str], object],
    ) -> None:
        self._held, self._values, self._wake, self._warn = held, values, wake, warn
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._written: Result | None = None
        self._warned = False

    def save(self, order: Order, update: int, firings: Iterable[Firing]) -> Result:
        """Copy this rank's shard of the checkpoint before `update`: carried values, states, and the outputs of
        `firings`. The order has the name of the folder for all shards. Raises OSError or StateError if it cannot be
        written."""
        assert self._thread is None, "one checkpoint is written at a time"
        held, setup, began = self._held, self._held.setup, monotonic()
        states = {name: node.state for name, node in held.nodes.items() if node.node.stateful}
        earlier = {f"{name}@{v}": held.history.of(name, v) for name, v in held.history.before(update)}
        copy = copy_shard(
            setup.folder / "checkpoints" / order.checkpoint,
            setup.replica,
            setup.rank,
            len(setup.plan.replica(setup.replica).ranks),
            held.carried,
            states,
            self._values.of(firings),
            earlier,
            setup.run,
            self._buffers_for,
        )
        saved, stay = Saved(update, setup.replica, setup.rank), {order.checkpoint, *order.kept}

        def write() -> None:
            remove_others(setup.folder / "checkpoints", setup.run, stay)
            copy.write()

        if self._wake is None or not copy.apart:
            write()
            return Result(saved, began=began, ended=monotonic())
        self._thread = threading.Thread(target=self._write, args=(write, saved, self._wake), daemon=True)
        self._thread.start()
        return Result(Copied(update, setup.replica, setup.rank), began=began, ended=monotonic())

    def answers(self) -> list[Result]:
        """Return `Saved`, once, when the shard is written. Raises what the thread has raised."""
        if self._thread is None or (self._written is None and self._failure is None):
            return []
        self._thread.join()  # its only remaining work is to call `wake`
        self._thread = None
        if self._failure is not None:
            raise self._failure
        written, self._written = self._written, None
        return [] if written is None else [written]

    def _write(self, write: Callable[[], None], saved: Saved, wake: Callable[[], None]) -> None:
        began, busy = monotonic(), thread_time()
        try:
            write()
            self._written = Result(saved, {}, {WRITE_CPU_S: thread_time() - busy}, began, monotonic())
        except BaseException as error:  # `answers` raises it in the rank's loop
            self._failure = error
        finally:
            wake()

    def _buffers_for(self, needed: int) -> HostBuffers | None:
        """Memory for copies of `needed` bytes, if this rank writes in the background and its host has room for as many
        bytes for each rank of this replica on it; else None."""
        if self._wake is None:
            return None
        setup = self._held.setup
        ranks = setup.plan.replica(setup.replica).ranks
        beside = sum(rank.host == ranks[setup.rank].host for rank in ranks)
        missing = beside * (needed - self._buffers.nbytes)
        if missing <= FREE_SHARE * (free := free_memory()):
            return self._buffers
        if not self._warned:
            self._warned = True
            of = f"{beside} rank{'s' * (beside > 1)} of {setup.replica}"
            given = f"given {free >> 20} MiB free, needed {FREE_SHARE:.0%} of them to hold the copies of {of}"
            self._warn(f"training waits while checkpoints are written: {given}, {missing >> 20} MiB")
        return None


def restore(folder: Path, held: Instances, values: HeldValues) -> list[tuple[Firing, str, ObjectRef]]:
    """Restore this rank's shard of a checkpoint. Return the object references of the values that others read."""
    setup, update = held.setup, update_of(folder.name)
    part = CheckpointShard(folder, setup.replica, setup.rank, setup.run)
    for name, value in held.carried.items():
        value.restore(*part.carried(name, layout_of(value)))
        held.history.note(name, update, value)
    for name, version in held.history.before(update):
        value = held.make(name)
        value.restore(*part.carried(f"{name}@{version}", layout_of(value)))
        held.history.note(name, version, value)
    for name, node in held.nodes.items():
        if node.node.stateful:
            node.state = part.value(f"state/{name}", type(node.state))
    restored = []
    for firing, output in part.made:
        value = part.value(value_name(firing, output), setup.declared(firing, output))
        restored += [(firing, name, handle) for name, handle in values.keep(firing, {output: value}).items()]
    return restored
