"""Few trainers, many replicas: the first replicas receive from the trainers, the others from a replica. Pure.

All replicas have one layout. If the trainers sent to each of n replicas, the busiest of them would send n times its
part of one replica, while a replica's rank receives its own part only. So the trainers feed as many *heads* as keep
them no busier than a receiver, and each head starts a chain of replicas. A rank forwards to the same rank of the next
replica, one message while the one after it arrives: with chains of d replicas the last one is complete after the time
of its own bytes and of d - 1 messages more, or tensors where several trainers' ranks send parts of one (`parcel` makes
the messages, `relay` moves them).
"""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.runtime.tensor.box import Box
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.plan import Plan

SLACK = 1.05
"""How much more than a receiver a trainer may have to do, before another hop is the better way."""


class Link(NamedTuple):
    """From whom a replica receives: another replica, or the trainers if `source` is None."""

    source: int | None
    destination: int


def chain(plan: Plan, replicas: int) -> tuple[Link, ...]:
    """The links that bring one version to all replicas, by destination; `plan` is that from the trainers to one of
    them. A replica forwards to one other at most, and its source has a smaller number.
    """
    if replicas < 1:
        raise ValueError(f"given {replicas} replicas, needed at least 1")
    out, into = max(plan.bytes_out, default=0), max(plan.bytes_in, default=0)
    heads = num_heads(out, into, replicas)
    return tuple(Link(None if k < heads else k - heads, k) for k in range(replicas))


def num_heads(out: int, into: int, replicas: int) -> int:
    """How many replicas the trainers feed, if the busiest of them sends `out` bytes to each, and a replica's busiest
    rank receives `into`.
    """
    return max(1, min(replicas, int(SLACK * into / out))) if out else replicas


def forwards(held: Mapping[str, Box], rank: int) -> tuple[Copy, ...]:
    """What a rank sends to the same rank of the next replica: all that it holds, in the order in which it holds it.
    That one receives just this.
    """
    return tuple(Copy(name, rank, rank, box) for name, box in held.items() if box.size)
