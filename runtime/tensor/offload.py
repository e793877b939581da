"""State that a trainer does not need between two updates, kept on the host while its device memory serves others.

Optimizer moments and master weights lie in one piece of device memory, and a piece of the host's (pinned, for a GPU)
has room for all of it. Each way is one copy, in the background: begin it before the last results of a phase are
fetched, or while the other side's weights are swapped, and fence where the memory is needed.

    state.leave()                       # after the update; goes on in the background
    state.fence(); pool = state.lend()  # the generator's, from here on
    state.come_back()                   # when it has given the memory back
    state.fence()                       # before the next update reads state.tensors
"""

import threading
import time
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from penstock.runtime.tensor.arena import Device, held_bytes, parts_of, touched
from penstock.runtime.tensor.codec import NAMES
from penstock.runtime.tensor.layout import Layout


class OffloadError(RuntimeError):
    """A move that does not follow from those before it, or that has not ended in time. Nothing is lost."""


class Offload:
    """Named tensors, on the `device` or on the host, and the way between the two.

    `tensors` are the same objects for ever, and hold their values while `where` is "device" and nothing moves. They may
    be read, and not written, while they leave. `where` changes in `fence` alone: until then the side they come from
    has all of them.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor], device: Device = "cpu") -> None:
        self.name = name
        self.where: Literal["device", "host"] = "device"
        layout = Layout.whole((key, tuple(t.shape), NAMES[t.dtype]) for key, t in tensors.items())
        self._device = touched(held_bytes(layout, 0), device)
        self._host = torch.empty(self._device.nbytes, dtype=torch.uint8, pin_memory=self._device.is_cuda).zero_()
        views = parts_of(layout, 0, self._device)
        empty = {key: torch.empty_like(t, device=device) for key, t in tensors.items() if key not in views}
        self.tensors = {key: empty[key] if key in empty else views[key].tensor for key in tensors}
        for key, tensor in tensors.items():
            self.tensors[key].copy_(tensor.detach())
        on_gpu = self._device.is_cuda
        self._stream = torch.cuda.Stream(self._device.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._move: threading.Thread | None = None
        self._fault: Exception | None = None

    @property
    def nbytes(self) -> int:
        """What one move copies: the tensors, each rounded up to a multiple of the arenas' alignment."""
        return self._device.nbytes

    def leave(self) -> None:
        """Begin the way to the host, after all that the caller's stream has been given so far."""
        self._begin("device", self._host, self._device)

    def come_back(self) -> None:
        """Begin the way back. Nobody may use the memory that was lent any more."""
        self._begin("host", self._device, self._host)

    def fence(self, timeout: float = 60.0) -> float:
        """Wait until the move is over, if there is one; the seconds waited. Raises `OffloadError` after `timeout`
        seconds, or with the error that ended the move; the tensors are then where they were.
        """
        if self._move is None:
            return 0.0
        started = time.monotonic()
        self._move.join(timeout)
        target = "host" if self.where == "device" else "device"
        given = f"{self.name}: {len(self.tensors)} tensors, {self.nbytes} bytes, to the {target}"
        if self._move.is_alive():
            raise OffloadError(f"{given}: not there after {timeout} s")
        self._move = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise OffloadError(f"{given}: {fault}") from fault
        self.where = "host" if self.where == "device" else "device"
        return time.monotonic() - started

    def lend(self) -> Tensor:
        """The device memory, uint8 of `nbytes`, free for any use until `come_back`."""
        if self.where != "host" or self._move is not None:
            raise OffloadError(f"{self.name}: lend: given {self._state()}, needed on the host")
        return self._device

    def _begin(self, where: str, target: Tensor, source: Tensor) -> None:
        if self.where != where or self._move is not None:
            raise OffloadError(f"{self.name}: move from the {where}: given {self._state()}, needed on the {where}")
        ready = torch.cuda.current_stream(self._device.device).record_event() if self._stream is not None else None

        def work() -> None:
            try:
                self._copy(target, source, ready)
            except Exception as error:
                self._fault = error

        # A daemon: a copy that hangs must not hold up an interpreter that is told to end.
        self._move = threading.Thread(target=work, name=f"move {self.name}", daemon=True)
        self._move.start()

    def _copy(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
        if self._stream is None or ready is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def _state(self) -> str:
        return f"on the {self.where}" + (", moving" if self._move is not None else "")
