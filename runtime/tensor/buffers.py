"""The memory of weights on both sides of a sync: flat buffers, allocated once, with a view for each tensor.

The receiver's `DoubleBuffer` has two: one is live, while a sync fills the other, the shadow; a swap exchanges them. The
sender's `WeightSnapshot` has one, so that the optimizer never changes data that is being read. `in_background` runs a
transfer in its own thread.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.layout import Layout, LayoutError, Region, TensorLayout

ALIGN = 512  # bytes: what CUDA's own allocator gives, and eight cache lines
LINE = 64  # bytes: a cache line

Device = str | torch.device
# Returns zeroed memory of this many bytes, as a uint8 tensor, with all its pages touched.
Allocate = Callable[[int], Tensor]
T = TypeVar("T")
# `fill(name, rows, first, last)` copies the rows first to last of a shard, seen as a matrix of `rows` rows.
Fill = Callable[[str, int, int, int], None]


class Shard(NamedTuple):
    """A rank's shard of a logical tensor: the elements of `region`, in `tensor` of the region's shape."""

    region: Region
    tensor: Tensor

    def cut(self, region: Region) -> Tensor:
        """The view of the elements of `region`, which must lie in this shard."""
        return self.tensor[region.slices(self.region)]


Shards = dict[str, Shard]
# Converts a rank's tensors to the wire format.
Convert = Callable[[Mapping[str, Tensor], Shards], None]


class DoubleBuffer:
    """Two buffers for the shards of one rank of a receiving replica: `live`, and the `shadow` that a sync fills.

    Both lie in one piece of memory, which `memory` may allocate where other processes can write. `fused` tensors lie
    next to each other in it (see `Fusing`).
    """

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        device: Device = "cpu",
        memory: Allocate | None = None,
        fused: Sequence[Sequence[str]] = (),
    ) -> None:
        self.layout = layout
        nbytes = held_bytes(layout, rank, fused)
        # In one piece: other processes then map one segment per rank.
        buffer = memory(2 * nbytes) if memory is not None else touched(2 * nbytes, device)
        self.live = shards_of(layout, rank, buffer[:nbytes], fused)
        self.shadow = shards_of(layout, rank, buffer[nbytes:], fused)

    def swap(self) -> None:
        """Exchange the two, without a copy. The next sync overwrites what was live."""
        self.live, self.shadow = self.shadow, self.live


class WeightSnapshot:
    """A copy of a sending rank's tensors as of one version, in the dtypes of `wire`, the layout that travels."""

    def __init__(self, source: Layout, wire: Layout, rank: int, device: Device) -> None:
        self.version = -1
        self._device = torch.device(device)
        self.parts = allocate(wire, rank, device)
        self._needed = {t.name: torch.Size(region.shape) for t, region, _ in _held(source, rank)}

    def take(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        digests: Callable[[Fill | None], T],
        convert: Convert | None = None,
    ) -> T:
        """Copy the tensors, hash the copy with `digests`, and return its result. The tensors must be those that the
        rank holds of the source layout; others may be there if they are empty. With `convert`, the copy is hashed after
        it is written; without, `digests` asks for each piece of the copy just before it reads it.
        """
        # FSDP2 has empty tensors where a rank has no shard: they are in no layout.
        tensors = {name: t.detach() for name, t in tensors.items() if t.numel() or name in self._needed}
        wrong = [
            f"  {name}: given {_shape(tensors, name)}, needed {self._needed.get(name, 'nothing')}"
            for name in sorted(tensors.keys() | self._needed.keys())
            if name not in self._needed or _shape(tensors, name) != self._needed[name]
        ]
        if wrong:
            raise LayoutError("\n".join([f"version {version}: the weights' tensors changed", *wrong]))
        self.version = -1  # invalid until all are copied
        with torch.no_grad():
            if convert is not None:
                convert(tensors, self.parts)
            result = self._copied(tensors, digests) if convert is None else digests(None)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # other streams will read it
        self.version = version
        return result

    def _copied(self, tensors: Mapping[str, Tensor], digests: Callable[[Fill | None], T]) -> T:
        sources: dict[str, Tensor] = {}

        def fill(name: str, rows: int, first: int, last: int) -> None:
            if name not in sources:
                sources[name] = tensors[name].contiguous()
            target, source = (t.view(rows, -1)[first:last] for t in (self.parts[name].tensor, sources[name]))
            # Not memmove, which is faster but bypasses the caches: the copy is read again at once.
            target.copy_(source)

        result = digests(fill)
        # Copy the tensors for which no digest has asked, in the modes that hash a few tensors or none.
        for name in self.parts.keys() - sources.keys():
            copy_elements(self.parts[name].tensor, tensors[name])
        return result


def allocate(layout: Layout, rank: int, device: Device) -> Shards:
    """The shards that `rank` holds of `layout`, in new zeroed memory; one region per tensor."""
    return shards_of(layout, rank, touched(held_bytes(layout, rank), device))


def held_bytes(layout: Layout, rank: int, fused: Sequence[Sequence[str]] = ()) -> int:
    """The bytes of a buffer for the shards that `rank` holds of `layout`."""
    return _places(layout, rank, fused)[1]


def shards_of(layout: Layout, rank: int, buffer: Tensor, fused: Sequence[Sequence[str]] = ()) -> Shards:
    """The shards that `rank` holds of `layout`, as views of a buffer of `held_bytes`; one region per tensor."""
    places, parts = _places(layout, rank, fused)[0], Shards()
    for t, region, nbytes in _held(layout, rank):
        start = places[t.name]
        parts[t.name] = Shard(region, buffer[start : start + nbytes].view(DTYPES[t.dtype]).view(region.shape))
    return parts


def _places(layout: Layout, rank: int, fused: Sequence[Sequence[str]]) -> tuple[dict[str, int], int]:
    """The first byte of each tensor, and the bytes of all."""
    sizes = {t.name: nbytes for t, _, nbytes in _held(layout, rank)}
    together = {name: names for names in fused for name in names}
    places, end = dict[str, int](), 0
    for first in sizes:
        for name in together.get(first, (first,)):
            if name in sizes and name not in places:
                places[name] = end
                # Kernels read whole cache lines: if a tensor's size is no multiple of one, align the next tensor.
                end += sizes[name] if sizes[name] % LINE == 0 else aligned(sizes[name])
        end = aligned(end)
    return places, end


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def touched(nbytes: int, device: Device) -> Tensor:
    """New memory, zeroed now: the first touch of a page costs many times a copy into it, and would slow down a sync."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).zero_()


def _held(layout: Layout, rank: int) -> Iterator[tuple[TensorLayout, Region, int]]:
    """Each tensor of which the rank holds a region, with the region and its bytes."""
    for t in layout.tensors:
        regions = t.held_by(rank)
        if len(regions) > 1:
            raise LayoutError(f"{t.name}: rank {rank} holds {len(regions)} regions, needed one")
        for region in regions:
            yield t, region, region.size * DTYPES[t.dtype].itemsize


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | str:
    return tensors[name].shape if name in tensors else "nothing"


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one shape, with conversion; equal dtypes on a CPU as bytes, which is faster."""
    as_bytes = target.is_cpu and source.is_cpu and target.dtype == source.dtype
    if as_bytes and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


# Called once by a background transfer, in its own thread, with its result or the error that ended it.
Done = Callable[[T | Exception], None]


def in_background(name: str, work: Callable[[], T], done: Done[T]) -> None:
    """Run `work` in a thread, and call `done` with its result or exception."""

    def run() -> None:
        try:
            result: T | Exception = work()
        except Exception as error:
            result = error
        done(result)

    # A daemon thread: waiting for a peer must not delay the end of the process.
    threading.Thread(target=run, name=name, daemon=True).start()
