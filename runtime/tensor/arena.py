"""Where weights lie on both sides of a sync: flat buffers, allocated once, with a view for each tensor.

The receiver's `Arena` has two: one is live, the other, the shadow, is filled meanwhile; a swap exchanges them. The
sender's `Snapshot` has one, so that the optimizer never changes what is being read.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.layout import Box, Layout, LayoutError, TensorLayout

_ALIGN = 512  # bytes: what CUDA's own allocator gives, and eight cache lines

Device = str | torch.device


class Part(NamedTuple):
    """What a rank holds of a logical tensor: the elements of `box`, in `tensor` of the box's shape."""

    box: Box
    tensor: Tensor

    def cut(self, box: Box) -> Tensor:
        """The view of the elements of `box`, which must lie in this part."""
        return self.tensor[box.slices(self.box)]


Parts = dict[str, Part]


class Arena:
    """What one rank of a receiving replica holds of `layout`, twice: `live`, and the `shadow` that a sync fills."""

    def __init__(self, layout: Layout, rank: int = 0, device: Device = "cpu") -> None:
        self.layout = layout
        self.live = allocate(layout, rank, device)
        self.shadow = allocate(layout, rank, device)

    def swap(self) -> None:
        """Exchange the two: nothing is copied. What was live is written over by the next sync."""
        self.live, self.shadow = self.shadow, self.live


class Snapshot:
    """A copy of a sending rank's tensors as of one version, in the dtypes of `layout`: those of the wire."""

    def __init__(self, layout: Layout, rank: int = 0, device: Device = "cpu") -> None:
        self.version = -1
        self.parts = allocate(layout, rank, device)

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy, converting. The tensors must be those of the layout."""
        wrong = [
            f"  {name}: given {_shape(tensors, name)}, needed {part.tensor.shape if part else 'nothing'}"
            for name in sorted(tensors.keys() | self.parts.keys())
            if (part := self.parts.get(name)) is None or _shape(tensors, name) != part.tensor.shape
        ]
        if wrong:
            raise LayoutError("\n".join([f"version {version}: the weights' tensors changed", *wrong]))
        self.version = -1  # torn until all are copied
        with torch.no_grad():
            for name, part in self.parts.items():
                part.tensor.copy_(tensors[name])
        self.version = version


def allocate(layout: Layout, rank: int, device: Device) -> Parts:
    """A zeroed buffer for all that `rank` holds of `layout`, as views; one box of a tensor per rank."""
    held = [(t, _only_box(t, rank)) for t in layout.tensors if t.held_by(rank)]
    sizes = [box.size * DTYPES[t.dtype].itemsize for t, box in held]
    starts, end = [], 0
    for nbytes in sizes:
        starts.append(end)
        end += -(-nbytes // _ALIGN) * _ALIGN
    # Written at once: a page's first touch costs many times the copy into it, and would be paid during a sync.
    buffer = torch.empty(end, dtype=torch.uint8, device=device).zero_()
    return {
        t.name: Part(box, buffer[start : start + nbytes].view(DTYPES[t.dtype]).view(box.shape))
        for (t, box), start, nbytes in zip(held, starts, sizes, strict=True)
    }


def _only_box(tensor: TensorLayout, rank: int) -> Box:
    boxes = tensor.held_by(rank)
    if len(boxes) > 1:
        raise LayoutError(f"{tensor.name}: rank {rank} holds {len(boxes)} boxes, needed one")
    return boxes[0]


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | str:
    return tensors[name].shape if name in tensors else "nothing"
