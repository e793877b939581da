"""Digests of weights: `digest` of whole tensors, and `Checksums`, which verifies that the tensors that a replica's
ranks hold together are those that were sent.

**The digest** of a logical tensor has 64 bits, and is the same however the tensor is sharded. The whole tensor is a
matrix of bytes (int8): a row is the last dimension, with as many before it as make it 1 KiB long, and a tile is 8192
bytes of a row. With small odd or even pseudo-random numbers a_i and b_i for the places in a tile, odd 64-bit numbers t
for tiles, c odd and e even, and a key k made of the tensor's name, dtype and shape,

    digest = k + (k | 1) * sum over tiles q of t_q * (c * sum over i of a_i * x_qi + e * sum over i of b_i * x_qi)

mod 2^64. This is linear in the elements: a rank that holds a region computes the sum over its elements, as if all
others were zero, and the sums of disjoint regions add up. The two inner sums are exact in 32 bits, so they are two
products with int8 matrices, which CPUs compute at the speed of their caches. Other devices, whose int8 products need
other shapes, sum (c * a_i + e * b_i) * x_qi directly in 64 bits, which is the same number mod 2^64. On CPUs that add
pairs of products in 16 bits, a and b are split into halves and remainders, whose products do not overflow there.

Sums stay on the device of the weights until all are computed: one vector, and one copy to the host. A GPU is not
synchronised before that.

A changed byte always changes the sum (a_i, c and t are odd). The vectors (a_i, b_i) of a tile have different
directions, so two changed bytes always change an inner sum. Two swapped elements, or two swapped rows, are missed with
a probability near 2^-30. The digest finds faults; it does not protect against forgery.

**The check of a replica.** Each rank computes the partial sums of its regions; their sums over the ranks give the
digests. Each element must be counted once, although several ranks may hold it. So regions are split until no two
overlap, and assigned to *covers*: a cover takes each distinct region of a tensor from one rank. The sender hashes the
first cover; a receiver hashes all covers, since every copy of a region goes live.

Modes: "full" hashes every tensor. "sampled" hashes one tensor in eight, chosen by a hash of its name and the version,
and at least one. A fault in another tensor goes live; a lasting fault is found within about 30 versions (it is missed
with a chance of one in fifty). "off" hashes nothing; the version and the number of bytes are still compared.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Fill, Shard, Shards
from penstock.runtime.tensor.codec import DTYPES, NAMES
from penstock.runtime.tensor.layout import Layout, Region
from penstock.runtime.tensor.reshard import DistinctRegions, disjoint_regions

_TILE = 8192  # bytes: there are not many more directions of small vectors
_ROW = 1024  # fewest bytes of a row for which a product is efficient
_CHUNK = 2 << 20  # bytes: small enough for a CPU to read them a second time from its caches, and for few calls
_LARGE_CHUNK = 4 << 20  # the same for a GPU, whose caches hold the 32 MiB of products of a chunk
_MASK = (1 << 64) - 1

# `fill(rows, first, last)` writes the rows first to last of a shard, seen as a matrix of `rows` rows.
DigestFill = Callable[[int, int, int], None]


class ChecksumError(RuntimeError):
    """What arrived is not what was sent: a fault of the peer, the network or this side. Never use such weights."""


class _Rows(NamedTuple):
    """The rows `start` to `stop` in each of the row dimensions of a tensor, whose sizes are `shape`."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


class _Run(NamedTuple):
    """Bytes `matrix` [P, W] that begin `first` bytes into the P rows `rows` of the whole tensor."""

    matrix: Tensor
    rows: _Rows
    first: int

    @property
    def is_long(self) -> bool:
        """True if rows are so few and long that it is faster to treat their tiles as rows."""
        return len(self.matrix) < self.matrix.shape[1] // _TILE


def digest(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each whole tensor; all are on one device."""
    sums = [partial(tensor, tensor.shape, Region.whole(tensor.shape)) for tensor in tensors.values()]
    return {
        name: finish(total, name, tensor.dtype, tensor.shape)
        for (name, tensor), total in zip(tensors.items(), _to_host(sums), strict=True)
    }


def partial(tensor: Tensor, shape: Sequence[int], region: Region, fill: DigestFill | None = None) -> Tensor:
    """The sum over the elements of `region`, which `tensor` holds, of a logical tensor of `shape`: an int64 scalar,
    mod 2^64, on the tensor's device.

    `fill` is called for all rows of the tensor, in order, just before they are read: the bytes that it copies are then
    still in a core's cache, so that reading them costs little.
    """
    if not region.size:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    depth = _row_dims(tuple(shape), tensor.dtype.itemsize)
    tiles = -(-math.prod(shape[depth:]) * tensor.dtype.itemsize // _TILE)
    runs = list(_runs(tensor, tuple(shape), region, depth))
    if fill is not None and (len(runs) > 1 or runs[0].is_long):
        fill(1, 0, 1)
        fill = None
    sums: list[Tensor] = []
    for run in runs:
        if run.is_long:
            numbers = _row_numbers(run.rows).tolist()
            for row, number in zip(run.matrix, numbers, strict=True):
                sums += _long_sums(row, number * tiles * _TILE + run.first)
        else:
            sums += _run_sums(run, tiles, fill)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def finish(total: int, name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The digest from the sum of the partial sums of regions that cover the tensor once."""
    key = _key(name, dtype, shape)
    return (key + (key | 1) * total) & _MASK


def _to_host(sums: Sequence[Tensor]) -> list[int]:
    """Scalars of one device, by a single copy, which is the only synchronisation."""
    return torch.stack(tuple(sums)).tolist() if sums else []


def _key(name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    text = f"{name}\n{NAMES[dtype]}\n{','.join(map(str, shape))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _row_dims(shape: tuple[int, ...], itemsize: int) -> int:
    """The first dimension that lies within a row."""
    depth = max(0, len(shape) - 1)
    # Products of short rows have more overhead than work.
    while depth and math.prod(shape[depth:]) * itemsize < _ROW:
        depth -= 1
    return depth


def _runs(tensor: Tensor, shape: tuple[int, ...], region: Region, depth: int) -> Iterator[_Run]:
    """The region as runs of its rows: one run, or several if the region has several pieces of a row."""
    rows = _Rows(shape[:depth], region.start[:depth], region.stop[:depth])
    height = math.prod(region.shape[:depth])
    cut = depth  # the last dimension that the region does not have whole
    for dim in range(depth, len(shape)):
        if (region.start[dim], region.stop[dim]) != (0, shape[dim]):
            cut = dim
    inner = math.prod(shape[cut + 1 :])
    width = (math.prod(region.shape[cut:])) * tensor.dtype.itemsize
    outer = (range(a, b) for a, b in zip(region.start[depth:cut], region.stop[depth:cut], strict=True))
    for index in itertools.product(*outer):
        piece, first = tensor, (region.start[cut] if shape else 0) * inner
        for dim, at in enumerate(index, depth):
            piece = piece.select(depth, at - region.start[dim])
            first += at * math.prod(shape[dim + 1 :])
        yield _Run(_bytes(piece, height, width), rows, first * tensor.dtype.itemsize)


def _bytes(piece: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] int8, a view if possible."""
    flat = piece.reshape(rows, width // piece.dtype.itemsize)
    return (flat if flat.stride(1) == 1 else flat.contiguous()).view(torch.int8)


def _row_numbers(rows: _Rows) -> Tensor:
    numbers = torch.zeros(1, dtype=torch.int64)
    for size, a, b in zip(*rows, strict=True):
        numbers = (numbers[:, None] * size + torch.arange(a, b)).view(-1)
    return numbers


@lru_cache(maxsize=1024)
def _row_factors(rows: _Rows, tiles: int, tile: int, device: torch.device) -> Tensor:
    """t of one tile of each row, times the factor of each inner sum: [N, P]. Cached, since tensors of one shape share
    it, and each sync needs it.
    """
    factors = (_mix(_row_numbers(rows) * tiles + tile) | 1) * _places(device).factors[:, None]
    # A copy from the host is complete on return, so that any thread's GPU stream may read it.
    return factors.to(device)


def _run_sums(run: _Run, tiles: int, fill: DigestFill | None) -> list[Tensor]:
    """The sums over a run, one per tile of its rows; `tiles` is the number of tiles of a row."""
    matrix, rows, first = run
    (height, width), device = matrix.shape, matrix.device
    last = first + width
    edges = [
        (tile, max(first, tile * _TILE), min(last, (tile + 1) * _TILE))
        for tile in range(first // _TILE, -(-last // _TILE))
    ]
    vectors, factors = _places(device)
    tables = [
        tuple(vector[start - tile * _TILE : stop - tile * _TILE] for vector in vectors) for tile, start, stop in edges
    ]
    products, inner = len(vectors), len(factors)
    product, kind = (_int_product, torch.int32) if vectors[0].dtype == torch.int8 else (_wide_product, torch.int64)
    sums = torch.empty(len(edges), products, height, inner // products, dtype=kind, device=device)
    # On a CPU the second product reads a chunk from the caches.
    step = max(1, (_CHUNK if device.type == "cpu" else _LARGE_CHUNK) // width)
    places = [[torch.split(each, step) for each in own] for own in sums]
    for number, chunk in enumerate(torch.split(matrix, step)):
        if fill is not None:
            fill(height, number * step, number * step + len(chunk))
        for own, table, (_, start, stop) in zip(places, tables, edges, strict=True):
            part = chunk if len(edges) == 1 else chunk[:, start - first : stop - first]
            for vector, each in zip(table, own, strict=True):
                product(part, vector, each[number])
    of_rows = (_row_factors(rows, tiles, tile, device) for tile, _, _ in edges)
    return [(own.transpose(1, 2).reshape(inner, -1) * each).sum() for own, each in zip(sums, of_rows, strict=True)]


def _long_sums(row: Tensor, first: int) -> list[Tensor]:
    """The sums over one row from byte `first` on, with its tiles as rows."""
    head = min(-first % _TILE, len(row))
    whole = (len(row) - head) // _TILE
    end = head + whole * _TILE
    tile = (first + head) // _TILE
    sums: list[Tensor] = []
    if whole:
        rows = _Rows((tile + whole,), (tile,), (tile + whole,))
        sums += _run_sums(_Run(row[head:end].view(whole, _TILE), rows, 0), 1, None)
    for a, b in ((0, head), (end, len(row))):
        if a < b:
            tile, place = divmod(first + a, _TILE)
            sums += _run_sums(_Run(row[None, a:b], _Rows((tile + 1,), (tile,), (tile + 1,)), place), 1, None)
    return sums


def _int_product(part: Tensor, vector: Tensor, out: Tensor) -> None:
    """[P, W] int8 times [W, N] int8, exactly, into [P, N] int32."""
    torch._int_mm(part, vector, out=out)


def _wide_product(part: Tensor, vector: Tensor, out: Tensor) -> None:
    """[P, W] int8 times [W, 1] int64, mod 2^64, into [P, 1]."""
    torch.sum(part * vector.view(-1), 1, keepdim=True, out=out)


class _Places(NamedTuple):
    """`vectors` multiply the bytes of a tile: each [_TILE, ·], together [_TILE, N]. `factors` multiply the N sums; they
    are on the host."""

    vectors: tuple[Tensor, ...]
    factors: Tensor


@lru_cache
def _places(device: torch.device) -> _Places:
    if device.type != "cpu":
        return wide_places(device)
    # A CPU without tiles (AMX) multiplies by one vector at 1.6 times the speed of two, although it then reads its
    # caches twice. With tiles, two vectors cost as much as one.
    narrow = narrow_places(together=torch.cpu._is_amx_tile_supported())
    if are_exact(narrow):
        return narrow
    # Without the VNNI instructions, oneDNN adds pairs of products in 16 bits.
    halved = halved_places()
    return halved if are_exact(halved) else wide_places(device)


def are_exact(places: _Places) -> bool:
    """True if this CPU's products with these int8 vectors are exact, tested on rows of the largest bytes."""
    rows = torch.tensor([127, -128], dtype=torch.int8).repeat(16)[:, None].expand(32, _TILE).contiguous()
    return all(
        torch.equal(torch._int_mm(rows, vector).long(), rows[:, :1] * vector.long().sum(0)) for vector in places.vectors
    )


def narrow_places(*, together: bool) -> _Places:
    """a and b as int8, as two vectors or, with `together`, one matrix; factors c and e."""
    both = _directions()
    columns = (both,) if together else (both[:, :1].contiguous(), both[:, 1:].contiguous())
    return _Places(columns, torch.tensor([_C, _E]))


def halved_places() -> _Places:
    """a and b as 2 * h + l, where |h| is at most 64 and l is 0 or 1; factors 2 * c, 2 * e, c and e."""
    both, factors = _directions(), torch.tensor([_C, _E])
    return _Places((torch.cat([both >> 1, both & 1], 1),), torch.cat([2 * factors, factors]))


def wide_places(device: torch.device) -> _Places:
    """c * a + e * b as int64; factor 1."""
    wide = (_directions() * torch.tensor([_C, _E])).sum(1, keepdim=True)
    return _Places((wide.to(device),), torch.ones(1, dtype=torch.int64))


def _directions() -> Tensor:
    """a and b, [_TILE, 2] int8: distinct fractions b / a in lowest terms, in an arbitrary order."""
    pairs = torch.tensor([(a, b) for a in range(1, 128, 2) for b in range(-127, 128) if math.gcd(a, b) == 1])
    return pairs[_mix(torch.arange(len(pairs))).argsort()[:_TILE]].to(torch.int8).contiguous()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), on int64 with logical shifts."""
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    """`value` mod 2^64, as int64."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


_C = _signed(0xD6E8FEB86659FD93)
_E = _signed(0xA0761D6478BD6428)


Mode = Literal["full", "sampled", "off"]
# Returns, on each rank of a replica, the sum of an int64 tensor over its ranks, mod 2^64.
Add = Callable[[Tensor], Tensor]

MODES: tuple[Mode, ...] = get_args(Mode)
_ONE_IN = 8


def alone(sums: Tensor) -> Tensor:
    """`Add` for a replica of one rank."""
    return sums


def hashed_tensors(mode: Mode, version: int, names: Sequence[str]) -> tuple[str, ...]:
    """The tensors that are hashed in this version."""
    if mode == "full":
        return tuple(names)
    if mode == "off" or not names:
        return ()
    drawn = {name: _draw(version, name) for name in names}
    # At least one: otherwise nothing of the version would be verified.
    first = min(drawn, key=lambda name: (drawn[name], name))
    return tuple(name for name in names if name == first or drawn[name] % _ONE_IN == 0)


class Checksums:
    """One rank's part in the digests of what its replica holds of `layout`; `add` sums over the replica's ranks.
    Without it the rank holds everything, and computes the digests alone."""

    def __init__(self, layout: Layout, rank: int, add: Add | None) -> None:
        if add is None:
            layout, rank, add = layout.replicated(1), 0, alone
        self._layout = layout
        self._rank = rank
        self._add = add
        regions = [disjoint_regions(held, shape) for shape, _, held in layout.signatures[0]]
        own = [[k for k, ranks in enumerate(found.ranks) if rank in ranks] for found in regions]
        self._regions: dict[str, DistinctRegions] = {}
        self._own: dict[str, list[tuple[Region, tuple[int, ...]]]] = {}
        mine = [[(found.region(k), found.ranks[k]) for k in held] for found, held in zip(regions, own, strict=True)]
        for t, index in zip(layout.tensors, layout.signatures[1], strict=True):
            self._regions[t.name], self._own[t.name] = regions[index], mine[index]
        self._covers = max((len(ranks) for found in regions for ranks in found.ranks), default=1)

    def digests(self, parts: Shards, names: Sequence[str], fill: Fill | None = None) -> dict[str, int]:
        """The digests of these tensors by the first cover. Every rank of the replica must ask for the same tensors.
        `fill` writes the elements that this rank hashes, just before they are read.
        """
        return {name: values[0] for name, values in self._digests(parts, names, 1, fill).items()}

    def check(self, parts: Shards, sent: Mapping[str, int], version: int, sides: str) -> None:
        """Raise `ChecksumError`, on every rank of the replica, with the tensors whose digests differ from `sent` on any
        rank. `sides` names sender and receiver.
        """
        unknown = sent.keys() - self._layout.by_name.keys()
        if unknown:
            raise ChecksumError(
                f"version {version} ({sides}): digests of unknown tensors: {', '.join(sorted(unknown))}"
            )
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
            raise ChecksumError("\n".join([head, *lines]))

    def _digests(
        self, parts: Shards, names: Sequence[str], covers: int, fill: Fill | None = None
    ) -> dict[str, list[int]]:
        own = [
            (index, counted, total)
            for index, name in enumerate(names)
            for counted, total in self._sums(name, parts.get(name), covers, fill)
        ]
        sums = [[0] * covers for _ in names]
        for (index, counted, _), total in zip(own, _to_host([total for _, _, total in own]), strict=True):
            for cover in counted:
                sums[index][cover] = _signed(sums[index][cover] + total)
        totals = self._add(torch.tensor(sums, dtype=torch.int64).view(len(names), covers)).tolist() if names else []
        known = [self._layout.by_name[name] for name in names]
        return {
            t.name: [finish(total, t.name, DTYPES[t.dtype], t.shape) for total in each]
            for t, each in zip(known, totals, strict=True)
        }

    def _sums(
        self, name: str, part: Shard | None, covers: int, fill: Fill | None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """The sum of each region that this rank counts, with the covers in which it does."""
        shape = self._layout.by_name[name].shape
        if part is None:
            return
        for region, ranks in self._own[name]:
            # In each cover, one rank counts a replicated region: counting it twice would give another sum.
            counted = [cover for cover in range(covers) if _member(name, ranks, cover) == self._rank]
            if not counted:
                continue
            # A shard that is hashed in pieces is filled at once, since pieces share rows.
            if fill is not None and region != part.region:
                fill(name, 1, 0, 1)
                fill = None
            own_fill = None if fill is None else functools.partial(fill, name)
            yield counted, partial(part.cut(region), shape, region, own_fill)

    def _where(self, name: str, cover: int) -> str:
        ranks = sorted({_member(name, ranks, cover) for ranks in self._regions[name].ranks})
        return f"by rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _member(name: str, ranks: Sequence[int], cover: int) -> int:
    """The rank whose copy of a region a cover takes."""
    # Tensors start at different ranks, so that ranks with equal regions share the work of the first cover.
    return ranks[(cover + _draw(0, name)) % len(ranks)]


def _draw(version: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{version}\n{name}".encode(), digest_size=8).digest(), "little")
