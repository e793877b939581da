"""A replica that passes weights on to the next one of a chain while they arrive (`reshard.chain` says which).
A rank receives from the trainers, or from the same rank of the replica before, and a second thread sends
each message to the same rank of the replica after it as soon as the bytes are there. They are not checked yet: each
replica checks what it gets.

Each hop is a link of its own. If what comes in ends early, so does what goes out: the link is given up, and the next
replica learns it at once. If the next replica fails, what came in is whole all the same.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.runtime.tensor.buffers import Shards, in_background
from penstock.runtime.tensor.layout import Copy, Region
from penstock.runtime.tensor.process_group import TransportError
from penstock.runtime.tensor.reshard import forwards
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.streams import current_stream, on_stream

# Opens a link, or gives the one that is open: for the thread that waits for the other side.
Open = Callable[[], MessageTransport]


class Arrivals:
    """What of one version has arrived: told by the thread that receives, awaited by the one that passes it on.

    Regions come disjoint. Waiting has no deadline of its own: the thread that receives has one for each message,
    and calls `end`. `failed`: it ended too early.
    """

    def __init__(self) -> None:
        self.failed = False
        self._over = False
        self._regions: dict[str, list[Region]] = defaultdict(list)
        self._changed = threading.Condition()

    def add(self, copies: Sequence[Copy]) -> None:
        with self._changed:
            for copy in copies:
                self._regions[copy.tensor].append(copy.region)
            self._changed.notify_all()

    def end(self, *, failed: bool) -> None:
        """Nothing more will arrive."""
        with self._changed:
            self.failed, self._over = failed, True
            self._changed.notify_all()

    def wait(self, copies: Sequence[Copy]) -> None:
        """Until all of these have arrived. Each region is awaited once. Raises TransportError if it will not come."""
        with self._changed:
            for copy in copies:
                self._changed.wait_for(lambda: self._over or self._has(copy))  # noqa: B023 - called here
                if not self._has(copy):
                    raise TransportError(f"{copy.tensor} {copy.region} has not arrived, and is not passed on")
                known = self._regions[copy.tensor]
                # Each region is awaited once: forgetting it keeps the sums short for large tensors.
                self._regions[copy.tensor] = [region for region in known if (region & copy.region).size < region.size]

    def _has(self, copy: Copy) -> bool:
        return sum((region & copy.region).size for region in self._regions[copy.tensor]) == copy.region.size


class ChainForwarder:
    """One rank's end of a channel. `failed` is told what ended the passing on of a version, in that thread.

    `passed_on` are the versions that went on from here.
    """

    def __init__(self, channel: str, rank: int, failed: Callable[[Exception], object]) -> None:
        self._channel = channel
        self._rank = rank
        self._failed = failed
        self.passed_on = 0
        self._own: tuple[Copy, ...] = ()
        self._over = threading.Event()
        self._over.set()

    def receive(self, leg: "ChainHop", version: int, copies: Sequence[Copy], parts: Shards) -> int:
        """As a `Transport`. Versions are passed on one after the other, so that none is written over meanwhile."""
        self._over.wait()  # each message of it has a deadline
        if not self._own:
            self._own = forwards({name: part.region for name, part in parts.items()}, self._rank)
        arrivals = Arrivals()
        if leg.downstream is not None:
            self._over.clear()
            # In the stream of the thread that receives: what it has put in its place is there for what comes after it.
            device = next((part.tensor.device for part in parts.values()), torch.device("cpu"))
            work = partial(self._pass_on, leg.downstream, version, parts, arrivals, current_stream(device), device)
            in_background(f"pass {self._channel} {version} on", work, partial(self._passed, arrivals))
        # Links between replicas of one layout carry whole regions; the trainers' plan has its own.
        wanted = self._own if leg.linked else copies
        try:
            nbytes = leg.upstream().receive(version, wanted, parts, arrivals.add)
        except BaseException:
            # The next replica waits for what will not come: it must learn it now, not at its deadline.
            arrivals.end(failed=True)
            raise
        arrivals.end(failed=False)
        return nbytes

    def _pass_on(
        self, downstream: Open, version: int, parts: Shards, arrivals: Arrivals, stream: Any, device: torch.device
    ) -> int:
        link = downstream()
        try:
            with on_stream(stream, device):
                return link.send(version, self._own, parts, arrivals.wait)
        except RuntimeError as error:
            link.close()
            raise error.with_traceback(None) from None  # its frames have messages, which keep the connection open

    def _passed(self, arrivals: Arrivals, moved: int | Exception) -> None:
        if not isinstance(moved, Exception):
            self.passed_on += 1
        elif not arrivals.failed:
            self._failed(moved)
        self._over.set()


@dataclass(frozen=True)
class ChainHop:
    """How a version comes to a rank and whither it goes on, for the rank's `WeightReceiver`. `linked`: it comes from a
    replica, where it lies as it does here, and not from the trainers.
    """

    relay: ChainForwarder
    upstream: Open
    downstream: Open | None
    linked: bool

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        return self.relay.receive(self, version, copies, parts)
