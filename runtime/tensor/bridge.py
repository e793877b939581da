"""Two replicas joined by a process group of their own, point to point: no other rank waits for it.

The death of a replica breaks its own bridge only. A bridge that failed once stays broken: a new one is made in
milliseconds. How weights cross it is settled when it opens (`ways`): put straight into the receivers' memory where
every rank is on one host and can do that, be it shared memory or a GPU's, as messages otherwise: of all bytes, or, with
`delta`, of what changed.
"""

import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch._C._distributed_c10d import Store

from penstock.runtime.control.endpoints import LOOPBACK
from penstock.runtime.tensor.crossing import Crossing, Ends, first_line
from penstock.runtime.tensor.crossing import Side as Side
from penstock.runtime.tensor.cuda_ipc import OpenedMemory
from penstock.runtime.tensor.differences import DeltaTransport
from penstock.runtime.tensor.group import AbsentError, open_group
from penstock.runtime.tensor.memory import Exported, MappedMemory
from penstock.runtime.tensor.messages import MessageTransport
from penstock.runtime.tensor.put import PutTransport
from penstock.runtime.tensor.transport import Transport, TransportError
from penstock.runtime.tensor.ways import CHOICES, Choice, agree, can_go

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True)
class Bridge:
    """Where two replicas meet: at `store`, which all ranks of both share, and which no other group has used. `address`
    is where this rank's host is reached by the others: it listens there.

    `timeout` bounds, in seconds, making the bridge and each wait for a peer. With `delta` n, messages say what changed,
    and at least each n-th sync is full; for gloo. Writing the receivers' memory gains nothing by it, and goes on as it
    is. `way` asks for one of the ways of `ways`, with gloo; a bridge whose ranks cannot all go it does not open.
    """

    channel: str
    store: Store
    sources: int = 1
    destinations: int = 1
    timeout: float = 60.0
    backend: Backend = "gloo"
    address: str = LOOPBACK
    delta: int = 0
    way: Choice = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"{self.channel}: given backend {self.backend!r}, needed one of {', '.join(BACKENDS)}")
        if self.delta < 0 or (self.delta and self.backend != "gloo"):
            needed = "0 or more" if self.delta < 0 else "0, or gloo"
            raise ValueError(f"{self.channel}: given delta={self.delta} over {self.backend}, needed {needed}")
        needed_ways = CHOICES if self.backend == "gloo" else ("auto", "messages")
        if self.way not in needed_ways:
            given = f"way {self.way!r} over {self.backend}"
            raise ValueError(f"{self.channel}: given {given}, needed one of {', '.join(needed_ways)}")

    def open(
        self, side: Side, rank: int = 0, memory: Exported | None = None, device: torch.device | str = "cpu"
    ) -> Transport:
        """Join as one rank of one side; blocks until all ranks of both have. `memory` is where a destination's arena
        lies, which must be there already; a source gives none, but the `device` of its weights.
        """
        ends = Ends(self.channel, self.sources, self.destinations)
        started = time.monotonic()
        try:
            group = open_group(
                self.store,
                ends.place(side, rank),
                self.sources + self.destinations,
                timeout=self.timeout,
                backend=self.backend,
                address=self.address,
            )
        except RuntimeError as error:
            ranks = f"{self.sources} source and {self.destinations} destination ranks"
            after = f"after {time.monotonic() - started:.1f} s of {self.timeout} s"
            text = f"{self.channel}: {side} rank {rank}: the bridge of {ranks} is not complete {after}"
            absent = [*map(ends.name, error.ranks)] if isinstance(error, AbsentError) else []
            why = f"not there: {', '.join(absent)}" if absent else first_line(error)
            raise TransportError(f"{text}: {why}") from error
        crossing = Crossing(ends, side, group)
        if self.backend == "gloo":
            way = agree(crossing, group, ends.place(side, rank), can_go(side, memory, device), self.way)
            if way is not None:
                mapped = OpenedMemory(self.timeout) if way == "cuda_ipc" else MappedMemory()
                return PutTransport(crossing, memory, mapped)
        return DeltaTransport(crossing, self.delta) if self.delta else MessageTransport(crossing)
