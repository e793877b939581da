"""A replica passes weights on to the next one of a chain while they arrive (`reshard.chain` makes the chain).
A rank receives from the trainers, or from the same rank of the previous replica. A second thread sends each message to
the same rank of the next replica as soon as it has arrived. Digests are not checked before that: each replica checks
what it gets.

Each hop is a link of its own. If the incoming transfer fails, the outgoing link is closed, so that the next replica
learns it at once. If the next replica fails, the incoming transfer is not affected.
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

# Opens a link, or returns the open one. Called in the thread that waits for the other side.
Open = Callable[[], MessageTransport]


class Arrivals:
    """The arrived regions of one version: added by the thread that receives, awaited by the one that passes them on.

    Regions are disjoint. Waiting has no deadline of its own: the receiving thread has one for each message, and calls
    `end`. `failed`: it ended too early.
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
        """Wait until all of these have arrived. Wait only once for each. Raises TransportError if one will not come."""
        with self._changed:
            for copy in copies:
                self._changed.wait_for(lambda: self._over or self._has(copy))  # noqa: B023 - called here
                if not self._has(copy):
                    raise TransportError(f"{copy.tensor} {copy.region} has not arrived, and is not passed on")
                known = self._regions[copy.tensor]
                # Forget the awaited region, which keeps the sums in `_has` short for large tensors.
                self._regions[copy.tensor] = [region for region in known if (region & copy.region).size < region.size]

    def _has(self, copy: Copy) -> bool:
        return sum((region & copy.region).size for region in self._regions[copy.tensor]) == copy.region.size


class ChainForwarder:
    """One rank's part in the chain of a channel. The forwarding thread calls `failed` with an error that ends it.

    `passed_on` is the number of versions that were passed on.
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
        """As `Transport.receive`. It waits until the last version was passed on, so that it does not overwrite it."""
        self._over.wait()  # ends in time: each of its messages has a deadline
        if not self._own:
            self._own = forwards({name: part.region for name, part in parts.items()}, self._rank)
        arrivals = Arrivals()
        if leg.downstream is not None:
            self._over.clear()
            # Send in the stream of the receiving thread: the data that it has put in place is complete there.
            device = next((part.tensor.device for part in parts.values()), torch.device("cpu"))
            work = partial(self._pass_on, leg.downstream, version, parts, arrivals, current_stream(device), device)
            in_background(f"pass {self._channel} {version} on", work, partial(self._passed, arrivals))
        # Replicas of one layout send each other whole regions; from the trainers the plan's copies come.
        wanted = self._own if leg.linked else copies
        try:
            nbytes = leg.upstream().receive(version, wanted, parts, arrivals.add)
        except BaseException:
            # The next replica must learn now, not at its deadline, that no more will come.
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
            raise error.with_traceback(None) from None  # messages in its frames would keep the connection open

    def _passed(self, arrivals: Arrivals, moved: int | Exception) -> None:
        if not isinstance(moved, Exception):
            self.passed_on += 1
        elif not arrivals.failed:
            self._failed(moved)
        self._over.set()


@dataclass(frozen=True)
class ChainHop:
    """How a version comes to a rank and where it goes next, for the rank's `WeightReceiver`. `linked`: it comes from
    another replica, which has the same layout, and not from the trainers.
    """

    relay: ChainForwarder
    upstream: Open
    downstream: Open | None
    linked: bool

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        return self.relay.receive(self, version, copies, parts)
