"""State that nothing computes with between two updates, kept on the host while its device memory serves others.

A tensor that is away is the same object with the same values: its data lie in a piece of host memory (pinned, for a
GPU) that has room for all of them, and the memory that they had on the device is given back. Each way is in the
background, on a GPU in a stream of its own.

    state.leave(tensors)  # after an update
    state.fence()         # before others take the memory: it is free
    state.come_back()     # when the next update is due, and others have given the memory back
    state.fence()         # before it computes
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import held_bytes, in_background, shards_of, touched
from penstock.runtime.tensor.codec import NAMES
from penstock.runtime.tensor.layout import Layout


class OffloadError(RuntimeError):
    """A move that does not follow from those before it, that failed, or that has not ended in time. Nothing is lost."""


class Offload:
    """Named tensors of one device, there or on the host, and the way between the two.

    They may be read at any time, and not written while they move. `where` changes when a move ends; one that fails
    leaves all of them where they were. `moves` counts those that have ended well, `nbytes` is what the last one copied,
    `waited_s` the seconds spent in `fence`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.where: Literal["device", "host"] = "device"
        self.moves, self.waited_s = 0, 0.0
        self.fault: OffloadError | None = None
        self._tensors: dict[str, Tensor] = {}
        self._layout: Layout | None = None
        self._host = torch.empty(0, dtype=torch.uint8)
        self._device = torch.device("cpu")
        self._over: threading.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def leave(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin the way to the host, after all that the caller's stream has been given so far."""
        self._require("device")
        self._tensors = dict(tensors)
        self._device = next((tensor.device for tensor in tensors.values()), self._device)
        self._begin()

    def come_back(self) -> None:
        """Begin the way back, into memory of the device that is taken anew."""
        self._require("host")
        self._begin()

    def fence(self, timeout: float = 60.0) -> None:
        """Wait until the move is over, if there is one. Raises `OffloadError` after `timeout` seconds, or with what
        made it fail.
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
        callers = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
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

    def _move(self, callers: torch.cuda.Stream | None) -> None:
        """Copy all of them to the other side, and let them lie there."""
        leaving = self.where == "device"
        with torch.cuda.stream(callers):  # whose memory it is
            target = (
                self._room()
                if leaving
                else {n: torch.empty_like(t, device=self._device) for n, t in self._tensors.items()}
            )
        # Beside what the device computes, but not before what the caller's stream has been given.
        aside: torch.cuda.Stream | None = None
        if callers is not None:
            aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            aside.wait_stream(callers)
        with torch.cuda.stream(aside):
            for name, tensor in self._tensors.items():
                target[name].copy_(tensor.detach(), non_blocking=True)
        if aside is not None:
            aside.synchronize()
        for name, tensor in self._tensors.items():
            # The same object: optimizers and modules hold references to it.
            tensor.data = target[name]
        if leaving:
            give_back()

    def _room(self) -> dict[str, Tensor]:
        """Host memory for each tensor, taken when they are first seen: pages that have been touched, or are pinned."""
        layout = Layout.whole((key, tuple(t.shape), NAMES[t.dtype]) for key, t in self._tensors.items())
        # Touched or pinned pages are slow to get, and the state rarely changes its shape.
        if layout != self._layout:
            nbytes, on_gpu = held_bytes(layout, 0), self._device.type == "cuda"
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if on_gpu else touched(nbytes, "cpu")
            self._layout = layout
        views = shards_of(layout, 0, self._host)
        return {key: views[key].tensor if key in views else torch.empty_like(t) for key, t in self._tensors.items()}


def give_back() -> None:
    """Let other processes have the memory of GPUs that nothing here uses any more."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
