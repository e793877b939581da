"""The proof of a sync: 64 bits per logical tensor, the same however the tensor is cut up.

The elements of the whole tensor, in row-major order, are bytes; eight of them are a word w_i (little-endian, as
int64), and 1024 words a tile. With odd pseudo-random numbers a, b (for the places in a tile) and t (for tiles), and a
key k made of the tensor's name, dtype and shape,

    digest = k + (k | 1) * sum over tiles q of t_q * (sum over i of a_i * w_qi + b_i * (w_qi >> 32))      mod 2^64

which is linear in the elements: a rank that holds a box computes the sum over the elements of its box, as if all
others were zero, and the sums of disjoint boxes add up. One changed word always changes the sum (all factors are odd);
any other change is missed with probability near 2^-48. It finds faults; it is no defence against forgery.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from penstock.runtime.tensor.codec import NAMES
from penstock.runtime.tensor.layout import Box

_TILE = 1024  # words: the tables stay in a core's first cache
_CHUNK = 32 * _TILE  # words hashed by one call of each kernel: 256 KiB, and no larger temporary
_MASK = (1 << 64) - 1
_FIRST_TILES = 1 << 14  # those of the first 128 MiB of a tensor: their t are kept


class ProofError(RuntimeError):
    """What arrived is not what was sent. The peer's fault, or the wire's, or ours: never to be trained on."""


def digest(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each tensor, whole."""
    return {
        name: finish(partial(tensor, name, tensor.shape, Box.whole(tensor.shape)), tensor, name, tensor.shape)
        for name, tensor in tensors.items()
    }


def partial(tensor: Tensor, name: str, shape: Sequence[int], box: Box) -> int:
    """The sum over the elements of `box`, which `tensor` holds, of the logical tensor `name` of `shape`."""
    total = sum(_range_sum(flat, first) for flat, first in _ranges(tensor, shape, box))
    return total * (_key(name, tensor.dtype, shape) | 1) & _MASK


def finish(total: int, tensor: Tensor, name: str, shape: Sequence[int]) -> int:
    """The digest from the sum of the partial sums of boxes that cover the tensor once. `tensor` gives the dtype."""
    return (total + _key(name, tensor.dtype, shape)) & _MASK


def compare(version: int, sent: Mapping[str, int], received: Mapping[str, int], sides: str = "") -> None:
    """Raise `ProofError` with every tensor whose digests differ. `sides` says who sent and who received."""
    wrong = [
        f"  {name}: sent {_hex(sent.get(name))}, received {_hex(received.get(name))}"
        for name in sorted(sent.keys() | received.keys())
        if sent.get(name) != received.get(name)
    ]
    if wrong:
        head = f"version {version}{f' ({sides})' if sides else ''}: {len(wrong)} of {len(sent)} tensors differ"
        raise ProofError("\n".join([head, *wrong]))


def _hex(value: int | None) -> str:
    return "nothing" if value is None else f"{value:016x}"


def _key(name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    text = f"{name}\n{NAMES[dtype]}\n{','.join(map(str, shape))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _ranges(tensor: Tensor, shape: Sequence[int], box: Box) -> Iterator[tuple[Tensor, int]]:
    """`tensor` as flat runs, each with its first element's index in the whole tensor. Short runs of a matrix come
    as whole rows with zeros where others hold the elements: a few large calls instead of one per row.
    """
    if not box.size:
        return
    inner = math.prod(shape[1:])
    if len(shape) < 2 or Box(box.start[1:], box.stop[1:]) == Box.whole(shape[1:]):
        yield tensor.reshape(-1), (box.start[0] if shape else 0) * inner
    elif len(shape) == 2 and inner <= _CHUNK:
        rows = max(1, _CHUNK // inner)
        for row in range(0, len(tensor), rows):
            part = tensor[row : row + rows]
            spread = part.new_zeros((len(part), inner))
            spread[:, box.start[1] : box.stop[1]] = part
            yield spread.reshape(-1), (box.start[0] + row) * inner
    else:
        rest = Box(box.start[1:], box.stop[1:])
        for row, part in enumerate(tensor, box.start[0]):
            for flat, first in _ranges(part, shape[1:], rest):
                yield flat, row * inner + first


def _range_sum(flat: Tensor, first: int) -> int:
    """The sum over a run of elements, the first of which is element `first` of the whole tensor."""
    flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    per_word = 8 // flat.dtype.itemsize
    first_tile = first // (_TILE * per_word)
    low, high = _place_factors(flat.device)
    spare = torch.empty(0, dtype=torch.int64, device=flat.device)
    sums = []
    position, end = first, first + len(flat)
    while position < end:
        start = position // (_TILE * per_word) * _TILE  # of the tile, in words
        stop = min((start + _CHUNK) * per_word, end)
        words = _words(flat[position - first : stop - first], position - start * per_word, per_word)
        spare = spare if spare.shape == words.shape else torch.empty_like(words)
        sums.append(_dot(words, low).add_(_dot(torch.bitwise_right_shift(words, 32, out=spare), high)))
        position = stop
    tile_sums = torch.cat(sums)
    return int((tile_sums * _tile_factors(first_tile, len(tile_sums), flat.device)).sum())


def _words(part: Tensor, lead: int, per_word: int) -> Tensor:
    """The tiles that hold `part` from element `lead` on, as [tiles, _TILE] int64: a view where it can be one."""
    tile = _TILE * per_word
    aligned = part.storage_offset() % per_word == 0 and part.data_ptr() % 8 == 0
    if lead or len(part) % tile or not aligned:
        padded = part.new_zeros(-(-(lead + len(part)) // tile) * tile)
        padded[lead : lead + len(part)] = part
        part = padded
    return part.view(torch.int64).view(-1, _TILE)


def _dot(words: Tensor, table: Tensor) -> Tensor:
    # mv reads the words once and writes nothing; CUDA has it for floats only.
    return words.mv(table) if words.device.type == "cpu" else (words * table).sum(1)


@cache
def _place_factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """a and b, [_TILE] each."""
    odd = _mix(torch.arange(-2 * _TILE, 0, device=device)) | 1
    return odd[:_TILE], odd[_TILE:]


def _tile_factors(first: int, count: int, device: torch.device) -> Tensor:
    """t of `count` tiles from tile `first` on."""
    if first + count <= _FIRST_TILES:
        return _first_tile_factors(device)[first : first + count]
    return _mix(torch.arange(first, first + count, device=device)) | 1


@cache
def _first_tile_factors(device: torch.device) -> Tensor:
    return _mix(torch.arange(_FIRST_TILES, device=device)) | 1


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), on int64 with logical shifts."""
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
