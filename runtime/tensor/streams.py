"""Streams of a GPU on which weights are copied, packed, hashed and sent, beside the ones on which it computes.

Kernels of one stream run in the order in which they were given, and those of another are not waited for: in the
stream of the trainer a transfer would begin when everything is through that was given before it, and the trainer would
go on behind it. A `SideStream` has its own, of the highest priority. It is tied to the others by events where data
passes between them, and nowhere else: `beside` for what the thread that computes does itself, `apart` for a thread of
its own. On a CPU, where everything is over when it returns, the same code runs with torch's streams for CPUs, which do
nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# What a stream had been given at some time; others can wait for that.
Fence = Any
_HIGHEST = -1


class SideStream:
    """A stream of `device`. Any number of threads may use it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: Any = None  # made when it is first used: whoever only plans has no device

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is done in here runs in this stream, after all that the current one has been given; what the current one
        is given later comes after it.
        """
        current = current_stream(self._device)
        with self.apart(fence(self._device)):
            try:
                yield
            finally:
                current.wait_event(fence(self._device))

    @contextmanager
    def apart(self, after: Fence | None = None) -> Iterator[None]:
        """What is done in here, by this thread, runs in this stream, and after what `after` stands for."""
        if self._stream is None:
            with on_device(self._device):
                self._stream = streams_of(self._device).Stream(priority=_HIGHEST)
        if after is not None:
            self._stream.wait_event(after)
        with on_stream(self._stream, self._device):
            yield


def streams_of(device: torch.device) -> Any:
    """What has the streams and events of a device: `torch.cuda`, or `torch.cpu`, whose do nothing."""
    return torch.get_device_module(device)


def current_stream(device: torch.device) -> Any:
    """The stream into which this thread gives its work."""
    return streams_of(device).current_stream(device)


def fence(device: torch.device) -> Fence:
    """What this thread's stream has been given so far."""
    event = streams_of(device).Event()
    event.record(current_stream(device))
    return event


@contextmanager
def on_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """This thread gives its work into a stream of `device`, which is its current device meanwhile."""
    with on_device(device), streams_of(device).stream(stream):
        yield


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """A thread's current device is the first one until it says another: that of its rank it has to say."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield
