"""One rank's end of a bridge between two replicas: what every transport over it needs, and nothing about tensors."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch._C._distributed_c10d import Work

from penstock.runtime.tensor.digest import ProofError
from penstock.runtime.tensor.group import Group
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.transport import TransportError

Side = Literal["source", "destination"]
HEADER = "the header"


@dataclass(frozen=True)
class Ends:
    """Who is on a bridge: source ranks come first in its group."""

    channel: str
    sources: int
    destinations: int

    def place(self, side: Side, rank: int) -> int:
        """The rank in the group."""
        return rank if side == "source" else self.sources + rank

    def name(self, place: int) -> str:
        return f"source rank {place}" if place < self.sources else f"destination rank {place - self.sources}"


class Crossing:
    """The group of a bridge as one rank of one side sees it. After a fault it stays broken: make a new bridge."""

    def __init__(self, ends: Ends, side: Side, group: Group) -> None:
        self.ends = ends
        self._side = side
        self._group: Group | None = group
        self._fault = ""

    def group(self, version: int) -> Group:
        """The group, for one sync."""
        if self._group is None or self._fault:
            reason = self._fault or "closed"
            raise TransportError(f"{self.ends.channel}: version {version}: the bridge is broken: {reason}")
        return self._group

    def close(self) -> None:
        self._group = None

    def by_peer(self, copies: Sequence[Copy]) -> dict[int, tuple[Copy, ...]]:
        """Peers by their place in the group, in the order of the plan, each with its copies."""
        found: dict[int, list[Copy]] = {}
        for copy in copies:
            peer = self.ends.sources + copy.destination if self._side == "source" else copy.source
            found.setdefault(peer, []).append(copy)
        return {peer: tuple(own) for peer, own in found.items()}

    def wait(self, work: Work, version: int, peer: int, what: str) -> None:
        """Until a message is there, or the deadline."""
        with self.naming(version, peer, what):
            self.group(version).wait(work)

    def match(self, given: torch.Tensor, needed: torch.Tensor, names: Sequence[str], peer: int) -> None:
        """Both sides must mean the same sync: the proof would find a stale or partial version too, but could not say
        what it is.
        """
        if given.tolist() != needed.tolist():
            facts = [dict(zip(names, header.tolist(), strict=True)) for header in (given, needed)]
            self._fault = f"{self.ends.name(peer)} sent {facts[0]}, needed {facts[1]}"
            raise ProofError(f"{self.ends.channel}: {self._fault}")

    @contextmanager
    def naming(self, version: int, peer: int, what: str) -> Iterator[None]:
        """Errors of the process group say neither what was moved nor whose fault it is."""
        started = time.monotonic()
        try:
            yield
        except TransportError:
            raise
        except RuntimeError as error:
            verb = "to" if self._side == "source" else "from"
            after = f"after {time.monotonic() - started:.1f} s"
            self._fault = f"version {version}: {what} {verb} {self.ends.name(peer)} failed {after}: {first_line(error)}"
            raise TransportError(f"{self.ends.channel}: {self._fault}") from error


def named(copies: Sequence[Copy]) -> str:
    """The copies of a message, in short."""
    more = f" and {len(copies) - 1} more tensors" if len(copies) > 1 else ""
    return f"{copies[0].tensor} {copies[0].box}{more}"


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
