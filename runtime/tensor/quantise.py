"""Conversion of weights to and from a wire format (see `wire_format`): `Converter` converts on the sender, and
`Restorer` restores floats on a receiver.

A scale is the largest magnitude of its row or block divided by the format's limit. An element is the value divided by
the scale, rounded to the nearest, ties to even. So an element depends only on its value and scale: once the ranks that
share a row or a block have agreed on its largest magnitude, the results of their regions are bit-equal to those of one
rank with the whole tensor. Work is done in strips that are small enough for a core's cache.

A reader needs its own dtype at every step, and a step must not wait for a conversion. So floats are restored when a
version arrives, in a double buffer that is swapped with the shadow. That takes two more copies of the tensors whose
dtype changes: int8 in a bfloat16 run takes 2 · (1 + 2) bytes per weight rather than 2 · 2. A reader that computes in
the wire's format (`broadcast(…, precision=…)`) needs no conversion, and takes 2 · 1.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.runtime.tensor.buffers import Device, DoubleBuffer, Shards
from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.layout import Layout, Region, TensorLayout
from penstock.runtime.tensor.wire_format import FORMATS, SCALE, Format, cut_through

_STRIP = 1 << 19  # elements: 2 MiB as float32
_TINY = torch.finfo(torch.float32).tiny  # the smallest scale: smaller ones may be subnormal
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Returns, on each rank, the element-wise maximum of the tensors of all ranks: float32 of the same shape.
Agree = Callable[[Tensor], Tensor]


class ConversionError(ValueError):
    """Weights that the wire format cannot represent. The text names tensor and row."""


class Converter:
    """Converts one rank's shards of the layout `source` to those of `wire`, which `wire_format.converted` made."""

    def __init__(self, source: Layout, wire: Layout, rank: int) -> None:
        self._rank = rank
        formats = {(format.dtype, bool(format.block)): format for format in FORMATS.values()}
        self._formats: dict[str, Format] = {}
        for t in source.tensors:
            scale = wire.by_name.get(t.name + SCALE)
            if scale is not None and wire.by_name[t.name].dtype != t.dtype:
                self._formats[t.name] = formats[wire.by_name[t.name].dtype, len(scale.shape) == 2]
        self._tensors = [t for t in source.tensors if t.held_by(rank)]
        cut: dict[int, bool] = {}
        self._agreed: list[TensorLayout] = []
        for t, index in zip(source.tensors, source.signatures[1], strict=True):
            if t.name in self._formats:
                if index not in cut:
                    cut[index] = cut_through(t.held, t.shape, self._formats[t.name])
                # Decided by the layout alone, so equal on all ranks: either all of them call `agree`, or none.
                self._agreed += [t] if cut[index] else []

    def convert(self, tensors: Mapping[str, Tensor], out: Shards, agree: Agree | None = None) -> None:
        """Write the rank's regions of all tensors into `out`, allocated for the wire layout.

        `agree` is called once, by every rank of the layout, if any row or block is split; it may be None if none is.
        Raises `ConversionError`, on all ranks that share the faulty row or block.
        """
        maxima = {
            t.name: absmax(tensors[t.name], t.held_by(self._rank)[0], self._formats[t.name])
            for t in self._tensors
            if t.name in self._formats
        }
        if self._agreed:
            if agree is None:
                raise ValueError(f"given no `agree`, needed one: ranks share scales of {self._agreed[0].name}")
            self._agree(maxima, agree)
        for t in self._tensors:
            region = t.held_by(self._rank)[0]
            if t.name not in maxima:
                cast(t.name, tensors[t.name], out[t.name].tensor, region)
                continue
            format, scale = self._formats[t.name], out[t.name + SCALE].tensor
            scale.copy_(scales(t.name, maxima[t.name], region, format))
            quantise(tensors[t.name], region, scale, format, out[t.name].tensor)

    def _agree(self, maxima: dict[str, Tensor], agree: Agree) -> None:
        """Call `agree` once for all tensors. A rank without a shard of one has zeros there, which change no maximum."""
        shapes = [self._formats[t.name].scale_shape(t.shape) for t in self._agreed]
        device = next((own.device for own in maxima.values()), torch.device("cpu"))
        flat = torch.zeros(sum(map(math.prod, shapes)), device=device)

        def own_places(flat: Tensor) -> dict[str, Tensor]:
            """The view of this rank's part of each agreed tensor's maxima."""
            parts = zip(self._agreed, shapes, torch.split(flat, [*map(math.prod, shapes)]), strict=True)
            return {
                t.name: part.view(shape)[
                    self._formats[t.name].scales(t.held_by(self._rank)[0]).slices(Region.whole(shape))
                ]
                for t, shape, part in parts
                if t.name in maxima
            }

        for name, place in own_places(flat).items():
            place.copy_(maxima[name])
        maxima.update(own_places(agree(flat)))


def absmax(matrix: Tensor, region: Region, format: Format) -> Tensor:
    """The largest magnitudes in the rows or blocks of `region`, whose elements are `matrix`; inf if any is not finite.
    float32, of the shape of `format.scales(region)`.
    """
    rows, columns = matrix.shape
    shape = format.scales(region).shape
    if not matrix.numel():
        return torch.zeros(shape, device=matrix.device)
    # Without the sign bit, floats are ordered like the integers of the same bits, with NaN as the largest. Comparing
    # integers is several times faster, and no NaN is lost.
    kind = _BITS[matrix.dtype.itemsize]
    mask = torch.iinfo(kind).max
    if not format.block:
        step = max(1, _STRIP // columns)
        found = torch.cat([(matrix[r : r + step].view(kind) & mask).amax(1) for r in range(0, rows, step)])
    else:
        lead = region.start[1] % format.block
        # First along the columns: the contiguous rows of maxima are then reduced to blocks at once.
        by_column = torch.zeros(shape[0], shape[1] * format.block, dtype=kind, device=matrix.device)
        for index, span in enumerate(_block_rows(region, format.block)):
            by_column[index, lead : lead + columns] = (matrix[span].view(kind) & mask).amax(0)
        found = by_column.view(*shape, format.block).amax(2)
    return found.view(matrix.dtype).float().nan_to_num_(nan=math.inf, posinf=math.inf)


def scales(name: str, maxima: Tensor, region: Region, format: Format) -> Tensor:
    """The scales of a region from the agreed largest magnitudes. Raises `ConversionError` if one is not finite."""
    bad = (~torch.isfinite(maxima)).nonzero().tolist()
    if bad:
        block = format.block or 1
        first = [(index + start) * block for index, start in zip(bad[0], format.scales(region).start, strict=True)]
        where = f"row {first[0]}" if not format.block else "the {0} × {0} block at row {1}, column {2}"
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        where = where.format(block, *first)
        raise ConversionError(f"{name}: {where}{more} has inf or NaN in it; a {format.dtype} wire needs finite weights")
    # Divide by a tensor: dividing by a Python number, a GPU and a CPU may differ in the last bit.
    return (maxima / maxima.new_tensor(format.limit)).clamp_(min=_TINY)


def quantise(matrix: Tensor, region: Region, scale: Tensor, format: Format, out: Tensor | None = None) -> Tensor:
    """The elements of `region`, which are in `matrix`, divided by their scales; they saturate at the format's limit."""
    out = torch.empty(matrix.shape, dtype=DTYPES[format.dtype], device=matrix.device) if out is None else out
    for span, factor in _strips(matrix, region, scale, format):
        quotient = torch.div(matrix[span], factor)
        if not out.is_floating_point():
            # A conversion to a float format rounds; one to an integer truncates.
            quotient.round_()
        out[span] = quotient.clamp_(-format.limit, format.limit)
    return out


def dequantise(elements: Tensor, region: Region, scale: Tensor, format: Format, out: Tensor) -> Tensor:
    """The elements of `region` times their scales, as floats, for a receiver that computes in these."""
    for span, factor in _strips(elements, region, scale, format):
        out[span] = elements[span].float().mul_(factor)
    return out


def cast(name: str, tensor: Tensor, out: Tensor, region: Region) -> None:
    """Copy with conversion. Raises `ConversionError` if a finite number is too large for the dtype of `out`."""
    out.copy_(tensor)
    if out.dtype == tensor.dtype or not out.is_floating_point() or not tensor.is_floating_point():
        return
    if torch.finfo(out.dtype).max < torch.finfo(tensor.dtype).max:
        bad = (torch.isinf(out) & torch.isfinite(tensor)).nonzero()
        if len(bad):
            where = f"row {bad[0][0].item() + region.start[0]}" if tensor.dim() else "its value"
            largest = torch.finfo(out.dtype).max
            raise ConversionError(f"{name}: {where} has a number beyond {largest:g}, the largest of {out.dtype}")


def _strips(matrix: Tensor, region: Region, scale: Tensor, format: Format) -> Iterator[tuple[slice, Tensor]]:
    """Spans of rows, each with its scales, which broadcast over it."""
    rows, columns = matrix.shape
    if not matrix.numel():
        return
    if format.block:
        lead = region.start[1] % format.block
        for index, span in enumerate(_block_rows(region, format.block)):
            yield span, scale[index].repeat_interleave(format.block)[lead : lead + columns]
    else:
        step = max(1, _STRIP // columns)
        for row in range(0, rows, step):
            yield slice(row, row + step), scale[row : row + step, None]


def _block_rows(region: Region, block: int) -> Iterator[slice]:
    """The spans of rows of a region that lie in one row of blocks, counted from the region's first row."""
    start, stop = region.start[0], region.stop[0]
    for first in range(start // block * block, stop, block):
        yield slice(max(first, start) - start, min(first + block, stop) - start)


class Restorer:
    """Converts a rank's shards of `wired`, which is `layout` in the format `wire`, back to the dtypes of `layout`.
    `fused` tensors lie next to each other, as in `DoubleBuffer`."""

    def __init__(
        self,
        layout: Layout,
        wired: Layout,
        wire: str,
        rank: int,
        device: Device,
        fused: Sequence[Sequence[str]] = (),
    ) -> None:
        changed = [t for t in layout.tensors if wired.by_name[t.name].dtype != t.dtype]
        self._format = FORMATS.get(wire)
        self._names = [t.name for t in layout.tensors if t.held_by(rank)]
        self._arena = DoubleBuffer(Layout(tuple(changed)), rank, device, fused=fused)

    def fill(self, arrived: Shards) -> None:
        """Restore the floats of a shadow; those of the live version do not change."""
        for name, part in self._arena.shadow.items():
            # A wire format of floats has no scales.
            if self._format is None:
                part.tensor.copy_(arrived[name].tensor)
            else:
                scale = arrived[name + SCALE].tensor
                dequantise(arrived[name].tensor, part.region, scale, self._format, part.tensor)

    def swap(self, live: Shards) -> Mapping[str, Tensor]:
        """Swap, and return the tensors for readers. `live` is what was the shadow in `fill`."""
        self._arena.swap()
        floats = self._arena.live
        return {name: (floats[name] if name in floats else live[name]).tensor for name in self._names}
