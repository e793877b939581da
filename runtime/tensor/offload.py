"""Keeps state that is not needed between two updates on the host, so that others can use its device memory.

An offloaded tensor is the same object with the same values: its data lie in a host buffer with those of others (pinned,
for a GPU), and their device memory is freed. Each move runs in the background, on a GPU in its own stream.

    state.leave(tensors)  # after an update
    state.fence()         # before others take the memory: it is free
    state.come_back()     # when the next update is due, and others have given the memory back
    state.fence()         # before it computes
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import aligned, held_bytes, in_background, shards_of, touched
from penstock.runtime.tensor.codec import NAMES
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.streams import SideStream, current_stream, fence, on_stream

# The bytes of a block of host memory. Torch takes pinned memory by powers of two: for all of tens of gigabytes at once
# that may be nearly twice as much, for blocks of nearly this size it is little more.
BLOCK = 4 << 30


class OffloadError(RuntimeError):
    """A move that is not possible now, that failed, or that did not end in time. No data is lost."""


class Offload:
    """Named tensors of one device, either there or on the host, and the moves between the two.

    They may be read at any time, but must not be written during a move. `where` changes when a move ends; a move that
    fails leaves all of them where they were. `moves` counts the successful moves, `nbytes` is what the last one copied,
    `waited_s` the seconds spent in `fence`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.where: Literal["device", "host"] = "device"
        self.moves, self.waited_s = 0, 0.0
        self.fault: OffloadError | None = None
        self._tensors: dict[str, Tensor] = {}
        self._layout: Layout | None = None
        self._host: dict[str, Tensor] = {}
        self._device = torch.device("cpu")
        self._over: threading.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def leave(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin the move to the host, after all work queued on the caller's stream so far."""
        self._require("device")
        self._tensors = dict(tensors)
        self._device = next((tensor.device for tensor in tensors.values()), self._device)
        self._begin()

    def come_back(self) -> None:
        """Begin the move back, into newly allocated device memory."""
        self._require("host")
        self._begin()

    def fence(self, timeout: float = 60.0) -> None:
        """Wait until the current move is over, if there is one. Raises `OffloadError` after `timeout` seconds, or if
        the move failed.
        """
        if self._over is None:
            return
        started = time.monotonic()
        ended = self._over.wait(timeout)
        self.waited_s += time.monotonic() - started
        if not ended:
            raise OffloadError(f"{self._move_words()}: not there after {timeout:g} s")
        self._over = None
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def _require(self, where: str) -> None:
        if self.where != where or self._over is not None:
            moving = ", moving" if self._over is not None else ""
            given = f"on the {self.where}{moving}"
            raise OffloadError(f"{self.name}: move from the {where}: given {given}, needed on the {where}")

    def _move_words(self) -> str:
        target = "host" if self.where == "device" else "device"
        return f"{self.name}: {len(self._tensors)} tensors, {self.nbytes} bytes, to the {target}"

    def _begin(self) -> None:
        callers = current_stream(self._device)
        over = self._over = threading.Event()

        def end(result: Exception | None) -> None:
            if result is None:
                self.where = "host" if self.where == "device" else "device"
                self.moves += 1
            else:
                self.fault = OffloadError(f"{self._move_words()}: {result}")
                self.fault.__cause__ = result
            over.set()

        in_background(f"move {self.name}", partial(self._move, callers), end)

    def _move(self, callers: Any) -> None:
        """Copy all tensors to the other side, and use them there."""
        leaving = self.where == "device"
        with on_stream(callers, self._device):  # the new memory belongs to the caller's stream
            target = (
                self._room()
                if leaving
                else {n: torch.empty_like(t, device=self._device) for n, t in self._tensors.items()}
            )
            # After the allocation: what has this memory until then may still be queued on that stream.
            free = fence(self._device)
        # In parallel with later computation.
        with SideStream(self._device).detached(free):
            for name, tensor in self._tensors.items():
                target[name].copy_(tensor.detach(), non_blocking=True)
            fence(self._device).synchronize()
        for name, tensor in self._tensors.items():
            # Keep the tensor object: optimizers and modules hold references to it.
            tensor.data = target[name]
        if leaving:
            give_back()

    def _room(self) -> dict[str, Tensor]:
        """Host memory for each tensor, touched or pinned; allocated when the tensors are first seen."""
        layout = Layout.whole((key, tuple(t.shape), NAMES[t.dtype]) for key, t in self._tensors.items())
        # Kept: touched or pinned pages are slow to allocate, and the state rarely changes its shape.
        if layout != self._layout:
            self._host = {}
            for names in host_blocks({key: t.nbytes for key, t in self._tensors.items()}):
                block = Layout(tuple(layout.by_name[name] for name in names))
                nbytes, on_gpu = held_bytes(block, 0), self._device.type == "cuda"
                buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if on_gpu else touched(nbytes, "cpu")
                self._host |= {name: shard.tensor for name, shard in shards_of(block, 0, buffer).items()}
            self._layout = layout  # last: where there is no memory for one block, all are asked for again
        return {key: self._host[key] if key in self._host else torch.empty_like(t) for key, t in self._tensors.items()}


def host_blocks(sizes: Mapping[str, int], most: int = BLOCK) -> list[list[str]]:
    """The tensors of each block, of so many bytes: each tensor goes into the first block that has room for it, of at
    most `most` bytes. A larger one is a block by itself."""
    blocks, room = list[list[str]](), list[int]()
    for name, nbytes in sizes.items():
        place = next((number for number, left in enumerate(room) if left >= aligned(nbytes)), len(blocks))
        if place == len(blocks):
            blocks.append([])
            room.append(most)
        blocks[place].append(name)
        room[place] -= aligned(nbytes)
    return blocks


def give_back() -> None:
    """Free the unused memory in torch's cache, so that other processes can use it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
