"""Two replicas joined by a process group of their own, point to point: no other rank waits for it.

The death of a replica breaks its own bridge only. A bridge that failed once stays broken: a new one is made in
milliseconds. How weights cross it is settled when it opens: put into the receivers' shared memory where every rank is
on one host and all receivers' memory is shared, as messages otherwise: of all bytes, or, with `delta`, of what changed.
"""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from penstock.runtime.tensor.crossing import Crossing, Ends, first_line
from penstock.runtime.tensor.crossing import Side as Side
from penstock.runtime.tensor.differences import DeltaTransport
from penstock.runtime.tensor.group import Group, open_group
from penstock.runtime.tensor.memory import SharedMemory
from penstock.runtime.tensor.messages import MessageTransport
from penstock.runtime.tensor.put import PutTransport
from penstock.runtime.tensor.segments import SHM
from penstock.runtime.tensor.transport import Transport, TransportError

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_AGREE = 1 << 20  # the tag of the messages that settle the way: no sync uses it


@dataclass(frozen=True)
class Bridge:
    """Where two replicas meet: `path` is a file that both can write and that no earlier attempt has used.

    `timeout` bounds, in seconds, making the bridge and each wait for a peer. With `delta` n, messages say what changed,
    and at least each n-th sync is full; for gloo. Shared memory gains nothing by it, and goes on as it is.
    """

    channel: str
    path: Path
    sources: int = 1
    destinations: int = 1
    timeout: float = 60.0
    backend: Backend = "gloo"
    interface: str = "lo"
    delta: int = 0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"{self.channel}: given backend {self.backend!r}, needed one of {', '.join(BACKENDS)}")
        if self.delta < 0 or (self.delta and self.backend != "gloo"):
            needed = "0 or more" if self.delta < 0 else "0, or gloo"
            raise ValueError(f"{self.channel}: given delta={self.delta} over {self.backend}, needed {needed}")

    def open(self, side: Side, rank: int = 0, memory: SharedMemory | None = None) -> Transport:
        """Join as one rank of one side; blocks until all ranks of both have. `memory` is where a destination's arena
        lies, which must be there already; a source gives none.
        """
        ends = Ends(self.channel, self.sources, self.destinations)
        started = time.monotonic()
        try:
            group = open_group(
                self.path,
                ends.place(side, rank),
                self.sources + self.destinations,
                timeout=self.timeout,
                backend=self.backend,
                interface=self.interface,
            )
        except RuntimeError as error:
            ranks = f"{self.sources} source and {self.destinations} destination ranks"
            after = f"after {time.monotonic() - started:.1f} s of {self.timeout} s"
            text = f"{self.channel}: {side} rank {rank}: the bridge of {ranks} is not complete {after}"
            raise TransportError(f"{text}: {first_line(error)}") from error
        crossing = Crossing(ends, side, group)
        wanted = side == "source" or (memory is not None and memory.shared)
        if self.backend == "gloo" and _all_agree(crossing, group, ends.place(side, rank), wanted):
            return PutTransport(crossing, self.path, memory)
        return DeltaTransport(crossing, self.path, self.delta) if self.delta else MessageTransport(crossing, self.path)


def _all_agree(crossing: Crossing, group: Group, place: int, wanted: bool) -> bool:
    """Whether every rank wants shared memory and is on the first one's host; on all ranks the same."""
    size = crossing.ends.sources + crossing.ends.destinations
    own = torch.tensor([_host(), int(wanted)])
    verdict = torch.zeros(1, dtype=torch.int64)
    if place:
        crossing.wait(group.send(own, 0, _AGREE), -1, 0, "the way")
        crossing.wait(group.receive(verdict, 0, _AGREE), -1, 0, "the way")
        return bool(verdict)
    answers = [torch.empty_like(own) for _ in range(1, size)]
    for peer, work in enumerate([group.receive(answer, k, _AGREE) for k, answer in enumerate(answers, 1)], 1):
        crossing.wait(work, -1, peer, "the way")
    verdict.fill_(int(all(answer.tolist() == [own[0].item(), 1] for answer in (own, *answers))))
    for peer, work in enumerate([group.send(verdict, k, _AGREE) for k in range(1, size)], 1):
        crossing.wait(work, -1, peer, "the way")
    return bool(verdict)


def _host() -> int:
    """Equal for processes that see the same shared memory: of one boot, and with one `/dev/shm` mounted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        facts = f"{boot}\n{os.stat(SHM).st_dev}"
    except OSError:
        facts = f"alone\n{os.getpid()}\n{os.urandom(8).hex()}"
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "little")
