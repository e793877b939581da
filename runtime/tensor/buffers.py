"""Where weights lie on both sides of a sync: flat buffers, allocated once, with a view for each tensor.

The receiver's `DoubleBuffer` has two: one is live, the other, the shadow, is filled meanwhile; a swap exchanges them.
The sender's `WeightSnapshot` has one, so that the optimizer never changes what is being read. `in_background` runs a
transfer in a thread of its own.
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
# Zeroed memory of this many bytes, as a uint8 tensor, all of it touched.
Allocate = Callable[[int], Tensor]
T = TypeVar("T")
# `fill(name, rows, first, last)` copies rows first to last of a part, seen as so many rows.
Fill = Callable[[str, int, int, int], None]


class Shard(NamedTuple):
    """What a rank holds of a logical tensor: the elements of `region`, in `tensor` of the region's shape."""

    region: Region
    tensor: Tensor

    def cut(self, region: Region) -> Tensor:
        """The view of the elements of `region`, which must lie in this part."""
        return self.tensor[region.slices(self.region)]


Shards = dict[str, Shard]
# Writes what travels of a rank's tensors.
Convert = Callable[[Mapping[str, Tensor], Shards], None]


class DoubleBuffer:
    """What one rank of a receiving replica holds of `layout`, twice: `live`, and the `shadow` that a sync fills.

    Both lie in one piece of memory, which `memory` may take from where others can write it. Tensors that are `fused`
    lie one after the other there (see `Fusing`).
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
        # In one piece: what others map is then one segment for each rank.
        buffer = memory(2 * nbytes) if memory is not None else touched(2 * nbytes, device)
        self.live = shards_of(layout, rank, buffer[:nbytes], fused)
        self.shadow = shards_of(layout, rank, buffer[nbytes:], fused)

    def swap(self) -> None:
        """Exchange the two: nothing is copied. What was live is written over by the next sync."""
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
        """Copy, and hash with `digests`; its result. The tensors must be those that the rank holds of the source;
        empty ones may be there too. What `convert` writes is hashed afterwards; without it, `digests` asks for each
        piece of the copy when it is about to read it.
        """
        # FSDP2 leaves empty parts where a rank has none: they are in no layout.
        tensors = {name: t.detach() for name, t in tensors.items() if t.numel() or name in self._needed}
        wrong = [
            f"  {name}: given {_shape(tensors, name)}, needed {self._needed.get(name, 'nothing')}"
            for name in sorted(tensors.keys() | self._needed.keys())
            if name not in self._needed or _shape(tensors, name) != self._needed[name]
        ]
        if wrong:
            raise LayoutError("\n".join([f"version {version}: the weights' tensors changed", *wrong]))
        self.version = -1  # torn until all are copied
        with torch.no_grad():
            if convert is not None:
                convert(tensors, self.parts)
            result = self._copied(tensors, digests) if convert is None else digests(None)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # it is read from other streams
        self.version = version
        return result

    def _copied(self, tensors: Mapping[str, Tensor], digests: Callable[[Fill | None], T]) -> T:
        sources: dict[str, Tensor] = {}

        def fill(name: str, rows: int, first: int, last: int) -> None:
            if name not in sources:
                sources[name] = tensors[name].contiguous()
            target, source = (t.view(rows, -1)[first:last] for t in (self.parts[name].tensor, sources[name]))
            # Not memmove, which is faster and writes past the caches: the copy is read again at once.
            target.copy_(source)

        result = digests(fill)
        # What no digest has asked for, in the modes that hash a few tensors or none.
        for name in self.parts.keys() - sources.keys():
            copy_elements(self.parts[name].tensor, tensors[name])
        return result


def allocate(layout: Layout, rank: int, device: Device) -> Shards:
    """Zeroed memory for all that `rank` holds of `layout`, as views; one region of a tensor per rank."""
    return shards_of(layout, rank, touched(held_bytes(layout, rank), device))


def held_bytes(layout: Layout, rank: int, fused: Sequence[Sequence[str]] = ()) -> int:
    """The bytes of a buffer for all that `rank` holds of `layout`."""
    return _places(layout, rank, fused)[1]


def shards_of(layout: Layout, rank: int, buffer: Tensor, fused: Sequence[Sequence[str]] = ()) -> Shards:
    """All that `rank` holds of `layout`, as views of a buffer of `held_bytes`; one region of a tensor per rank."""
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
                # Kernels read a tensor by lines: after one of an odd size the next begins a line of its own.
                end += sizes[name] if sizes[name] % LINE == 0 else aligned(sizes[name])
        end = aligned(end)
    return places, end


def aligned(nbytes: int) -> int:
    """Up to the next multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def touched(nbytes: int, device: Device) -> Tensor:
    """Memory written at once: a page's first touch costs many times the copy into it, and would be paid in a sync."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).zero_()


def _held(layout: Layout, rank: int) -> Iterator[tuple[TensorLayout, Region, int]]:
    """What the rank holds of each tensor, and its bytes."""
    for t in layout.tensors:
        regions = t.held_by(rank)
        if len(regions) > 1:
            raise LayoutError(f"{t.name}: rank {rank} holds {len(regions)} regions, needed one")
        for region in regions:
            yield t, region, region.size * DTYPES[t.dtype].itemsize


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | str:
    return tensors[name].shape if name in tensors else "nothing"


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one shape, converting; as bytes, which is faster, between equal ones on a CPU."""
    as_bytes = target.is_cpu and source.is_cpu and target.dtype == source.dtype
    if as_bytes and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


# What a background transfer calls once, in its own thread: with its result, or with the error that ended it.
Done = Callable[[T | Exception], None]


def in_background(name: str, work: Callable[[], T], done: Done[T]) -> None:
    """Begin `work`; an exception of it is its result."""

    def run() -> None:
        try:
            result: T | Exception = work()
        except Exception as error:
            result = error
        done(result)

    # A daemon: a peer's deadline must not hold up an interpreter that is told to end.
    threading.Thread(target=run, name=name, daemon=True).start()
