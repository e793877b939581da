"""Few trainers, many replicas: the first replicas receive from the trainers, the others from a replica. Pure.

All replicas have one layout. If the trainers sent to each of n replicas, the busiest of them would send n times its
part of one replica, while a replica's rank receives its own part only. So the trainers feed as many *heads* as keep
them no busier than a receiver, and each head starts a chain of replicas. A rank forwards to the same rank of the next
replica, one bucket while the one after it arrives: with chains of d replicas the last one is complete after the time
of its own bytes and d - 1 buckets more.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.runtime.tensor.box import Box
from penstock.runtime.tensor.layout import ITEMSIZE, Copy, Layout
from penstock.runtime.tensor.plan import BUCKET, Plan

SLACK = 1.05
"""How much more than a receiver a trainer may have to do, before another hop is the better way."""

Bucket = tuple[tuple[str, Box], ...]
"""Boxes of tensors that a rank passes on together."""


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
    heads = max(1, min(replicas, int(SLACK * into / out))) if out else replicas
    return tuple(Link(None if k < heads else k - heads, k) for k in range(replicas))


def buckets(layout: Layout, rank: int, nbytes: int = BUCKET) -> tuple[Bucket, ...]:
    """All that a rank of a replica holds, in the order of the layout, as buckets of at most `nbytes` bytes; larger
    boxes are cut into slabs. One that cannot be cut so far is a bucket by itself.
    """
    found: list[Bucket] = []
    filling: list[tuple[str, Box]] = []
    filled = 0
    for name, slab, size in _slabs(layout, rank, nbytes):
        if filling and filled + size > nbytes:
            found.append(tuple(filling))
            filling, filled = [], 0
        filling.append((name, slab))
        filled += size
    return (*found, tuple(filling)) if filling else tuple(found)


def forwards(own: Sequence[Bucket], rank: int) -> tuple[tuple[Copy, ...], ...]:
    """What a rank sends to the same rank of the next replica, bucket by bucket; that one receives just this."""
    return tuple(tuple(Copy(name, rank, rank, box) for name, box in bucket) for bucket in own)


def by_bucket(copies: Sequence[Copy], own: Sequence[Bucket]) -> tuple[tuple[Copy, ...], ...]:
    """The copies to one destination rank, cut where its buckets are, bucket by bucket. Whichever side computes it, and
    from whichever of the copies, a bucket is complete when its own copies have been received.
    """
    of_tensor: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_tensor[copy.tensor].append(copy)
    return tuple(
        tuple(
            Copy(name, copy.source, copy.destination, common)
            for name, box in bucket
            for copy in of_tensor[name]
            if (common := copy.box & box).size
        )
        for bucket in own
    )


def _slabs(layout: Layout, rank: int, nbytes: int) -> Iterator[tuple[str, Box, int]]:
    """What a rank holds, with its bytes, cut where it is larger than a bucket."""
    for t in layout.tensors:
        for box in t.held_by(rank):
            parts = -(-box.size * ITEMSIZE[t.dtype] // nbytes)
            for slab in box.cut(parts):
                yield t.name, slab, slab.size * ITEMSIZE[t.dtype]
