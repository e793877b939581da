"""GPU streams on which weights are copied, packed, hashed and sent, in parallel with computation.

Kernels of one stream run in order; kernels of different streams do not wait for each other. In the trainer's stream, a
transfer would wait for all earlier work, and later work would wait for the transfer. A `SideStream` is a stream of its
own, with the highest priority. Events order it with other streams only where data passes between them: `beside` for
work of the computing thread itself, `apart` for work of another thread. On a CPU, where all work is done when a call
returns, the same code uses torch's CPU streams, which do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The work queued on a stream up to some time; others can wait for it.
Fence = Any
_HIGHEST = -1


class SideStream:
    """A stream of `device`. Any number of threads may use it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: Any = None  # made at its first use: a process that only plans has no device

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Run the block's work in this stream: after all work queued on the current stream so far, and before all work
        that is queued there later.
        """
        current = current_stream(self._device)
        with self.detached(fence(self._device)):
            try:
                yield
            finally:
                current.wait_event(fence(self._device))

    @contextmanager
    def detached(self, after: Fence | None = None) -> Iterator[None]:
        """Run the block's work, of this thread, in this stream, after the work of the fence `after`."""
        if self._stream is None:
            with on_device(self._device):
                self._stream = streams_of(self._device).Stream(priority=_HIGHEST)
        if after is not None:
            self._stream.wait_event(after)
        with on_stream(self._stream, self._device):
            yield


def streams_of(device: torch.device) -> Any:
    """The module with the streams and events of a device: `torch.cuda`, or `torch.cpu`, where they do nothing."""
    return torch.get_device_module(device)


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread queues its work."""
    return streams_of(device).current_stream(device)


def fence(device: torch.device) -> Fence:
    """A fence for the work queued on this thread's stream so far."""
    event = streams_of(device).Event()
    event.record(current_stream(device))
    return event


def is_lost(device: torch.device) -> bool:
    """True if a kernel or the GPU has failed, so that every further driver call of this process fails. Other processes,
    and new ones, may still use the GPU."""
    if device.type == "cpu":
        return False
    try:
        current_stream(device).query()
    except RuntimeError:
        return True
    return False


@contextmanager
def on_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """In the block, this thread queues its work on a stream of `device`, which is its current device."""
    with on_device(device), streams_of(device).stream(stream):
        yield


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` this thread's current device in the block: a new thread's is the first GPU, not its rank's."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield
