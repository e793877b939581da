"""What travelled turned back into the dtypes that its readers compute in, on the receiver.

A reader needs its own dtype at every step, and the step must not wait for it. So floats are made when a version
arrives, beside the shadow, and change places with it. In memory that is two more copies of what changed its dtype on
the way: int8 in a bfloat16 run takes 2 · (1 + 2) bytes per weight rather than 2 · 2.
"""

from collections.abc import Mapping

from torch import Tensor

from penstock.runtime.tensor.arena import Arena, Device, Parts
from penstock.runtime.tensor.convert import FORMATS, SCALE
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.quantise import dequantise


class Restorer:
    """Turns what a rank holds of `wired`, made of `layout` for the format `wire`, back into the dtypes of `layout`."""

    def __init__(self, layout: Layout, wired: Layout, wire: str, rank: int, device: Device) -> None:
        changed = [t for t in layout.tensors if wired.by_name[t.name].dtype != t.dtype]
        self._format = FORMATS.get(wire)
        self._names = [t.name for t in layout.tensors if t.held_by(rank)]
        self._arena = Arena(Layout(tuple(changed)), rank, device)

    def fill(self, arrived: Parts) -> None:
        """Make the floats of a shadow; those of the live version stay as they are."""
        for name, part in self._arena.shadow.items():
            if self._format is None:
                part.tensor.copy_(arrived[name].tensor)
            else:
                scale = arrived[name + SCALE].tensor
                dequantise(arrived[name].tensor, part.box, scale, self._format, part.tensor)

    def swap(self, live: Parts) -> Mapping[str, Tensor]:
        """The tensors that readers see, once `live` is what was filled from."""
        self._arena.swap()
        floats = self._arena.live
        return {name: (floats[name] if name in floats else live[name]).tensor for name in self._names}
