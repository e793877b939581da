"""A time axis with round ticks, and the colours of a drawing. Pure; shared by the text and the SVG drawing."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

COLORS = ("#4C78A8", "#F2A541", "#5BA05B", "#B279A2", "#59B3AE", "#E4655F", "#9C8465", "#8A8FD8")
"""By order of appearance in the legend; told apart by the colour-blind for the first four."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Seconds from `start` to `end`; ticks are seconds after `start`, labels their texts with the unit."""

    start: float
    end: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def fraction(self, time: float) -> float:
        """Where a time lies, 0 at the start and 1 at the end."""
        return (time - self.start) / self.seconds


def make_axis(start: float, end: float, num_ticks: int) -> Axis:
    """An axis with about `num_ticks` ticks at 1, 2 or 5 times a power of ten."""
    seconds = max(end - start, 1e-9)
    rough = seconds / max(num_ticks, 1)
    power = 10.0 ** floor(log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    ticks = [i * step for i in range(ceil(seconds / step + 1e-9)) if i * step <= seconds]
    unit, name = (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")
    labels = [f"{tick * unit:.10g} {name}" for tick in ticks]
    return Axis(start, start + seconds, tuple(ticks), tuple(labels))


def colors(names: Sequence[str]) -> dict[str, str]:
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}


def rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def lighter(color: str, share: float) -> str:
    """The colour mixed with `share` of white."""
    return "#" + "".join(f"{round(c + (255 - c) * share):02X}" for c in rgb(color))


def ink(color: str) -> str:
    """Black or white, whichever can be read on a colour (relative luminance of WCAG, without its gamma)."""
    red, green, blue = rgb(color)
    return "#16191D" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 135 else "#FFFFFF"
