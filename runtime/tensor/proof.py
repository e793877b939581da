"""Whether the tensors that a replica's ranks hold between them are those that were sent.

Each rank computes the partial sums (see `digest`) of the boxes it holds, and sums over the ranks give the digests. Of
elements that several ranks hold only one's may be counted. So boxes are cut until no two overlap (scales of blocks that
several ranks touch do), and dealt into *covers*: a cover takes each distinct box of a tensor from one rank. The sender
hashes the first cover; a receiver all of them, since each copy of a box goes live.

Modes: "full" hashes every tensor. "sampled" hashes one tensor in eight, chosen by a hash of its name and the version,
and at least one: a fault in any other tensor goes live; one that stays is found within some 30 versions (a chance of
one in fifty that it is not). "off" hashes nothing: the version and the number of bytes are still compared.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from penstock.runtime.tensor.arena import Fill, Part, Parts
from penstock.runtime.tensor.box import Box
from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.cover import Regions, atoms
from penstock.runtime.tensor.digest import ProofError, finish, partial
from penstock.runtime.tensor.layout import Layout

Mode = Literal["full", "sampled", "off"]
Add = Callable[[Tensor], Tensor]
"""The sum of an int64 tensor over the ranks of a replica, mod 2^64, on each of them."""

MODES: tuple[Mode, ...] = get_args(Mode)
_ONE_IN = 8


def alone(sums: Tensor) -> Tensor:
    """`Add` for a replica of one rank."""
    return sums


def chosen(mode: Mode, version: int, names: Sequence[str]) -> tuple[str, ...]:
    """The tensors that are hashed in this version."""
    if mode == "full":
        return tuple(names)
    if mode == "off" or not names:
        return ()
    drawn = {name: _draw(version, name) for name in names}
    first = min(drawn, key=lambda name: (drawn[name], name))
    return tuple(name for name in names if name == first or drawn[name] % _ONE_IN == 0)


class Prover:
    """One rank's part in the proofs of what its replica holds of `layout`; `add` sums over the replica's ranks."""

    def __init__(self, layout: Layout, rank: int, add: Add) -> None:
        self._layout = layout
        self._rank = rank
        self._add = add
        boxes = [atoms(held, shape) for shape, _, held in layout.signatures[0]]
        own = [[k for k, ranks in enumerate(found.ranks) if rank in ranks] for found in boxes]
        self._boxes: dict[str, Regions] = {}
        self._own: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
        mine = [[(found.box(k), found.ranks[k]) for k in held] for found, held in zip(boxes, own, strict=True)]
        for t, index in zip(layout.tensors, layout.signatures[1], strict=True):
            self._boxes[t.name], self._own[t.name] = boxes[index], mine[index]
        self._covers = max((len(ranks) for found in boxes for ranks in found.ranks), default=1)

    def digests(self, parts: Parts, names: Sequence[str], fill: Fill | None = None) -> dict[str, int]:
        """The digests of these tensors by the first cover. Every rank of the replica must ask for the same.
        `fill` provides the elements of those that this rank hashes, right before they are read.
        """
        return {name: values[0] for name, values in self._digests(parts, names, 1, fill).items()}

    def check(self, parts: Parts, sent: Mapping[str, int], version: int, sides: str) -> None:
        """Raise `ProofError` with every tensor of `sent` of which a rank holds something else, on every rank of the
        replica. `sides` says who sent and who received.
        """
        unknown = sent.keys() - self._layout.by_name.keys()
        if unknown:
            raise ProofError(f"version {version} ({sides}): digests of unknown tensors: {', '.join(sorted(unknown))}")
        found = self._digests(parts, list(sent), self._covers)
        wrong = {
            name: cover
            for name, values in found.items()
            for cover, value in reversed(list(enumerate(values)))
            if value != sent[name]
        }
        if wrong:
            lines = [
                f"  {name}: sent {sent[name]:016x}, received {found[name][cover]:016x} {self._where(name, cover)}"
                for name, cover in sorted(wrong.items())
            ]
            head = f"version {version} ({sides}): {len(wrong)} of {len(sent)} tensors differ"
            raise ProofError("\n".join([head, *lines]))

    def _digests(
        self, parts: Parts, names: Sequence[str], covers: int, fill: Fill | None = None
    ) -> dict[str, list[int]]:
        own = [self._sums(name, parts.get(name), covers, fill) for name in names]
        sums = torch.tensor(own, dtype=torch.int64)
        totals = self._add(sums.view(len(names), covers)).tolist() if names else []
        return {name: [self._finished(name, total) for total in own] for name, own in zip(names, totals, strict=True)}

    def _sums(self, name: str, part: Part | None, covers: int, fill: Fill | None) -> list[int]:
        """This rank's sum for each cover, as int64."""
        totals = [0] * covers
        if part is None:
            return totals
        shape = self._layout.by_name[name].shape
        for box, ranks in self._own[name]:
            counted = [cover for cover in range(covers) if _member(name, ranks, cover) == self._rank]
            if not counted:
                continue
            if fill is not None and box != part.box:
                fill(name, 1, 0, 1)
                fill = None
            own_fill = None if fill is None else functools.partial(fill, name)
            total = partial(part.cut(box), name, shape, box, own_fill)
            for cover in counted:
                totals[cover] += total
        return [_signed(total) for total in totals]

    def _finished(self, name: str, total: int) -> int:
        tensor = self._layout.by_name[name]
        return finish(total, name, DTYPES[tensor.dtype], tensor.shape)

    def _where(self, name: str, cover: int) -> str:
        ranks = sorted({_member(name, ranks, cover) for ranks in self._boxes[name].ranks})
        return f"by rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _member(name: str, ranks: Sequence[int], cover: int) -> int:
    """The rank whose copy of a box a cover takes. Tensors start at different ranks, to share the work."""
    return ranks[(cover + _draw(0, name)) % len(ranks)]


def _signed(total: int) -> int:
    """Mod 2^64, as int64."""
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total


def _draw(version: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{version}\n{name}".encode(), digest_size=8).digest(), "little")
