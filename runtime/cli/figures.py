"""Numbers as a display shows them. Pure."""

from collections.abc import Sequence
from itertools import pairwise

SPARKS = "▁▂▃▄▅▆▇█"


def figure(value: float | None, digits: int = 3) -> str:
    """Three significant digits or so, without an exponent where one can do without."""
    if value is None:
        return "-"
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def many(value: float | None) -> str:
    """A rate or count with k and M."""
    if value is None:
        return "-"
    for factor, unit in ((1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """1.234 s, 12.3 ms."""
    return f"{figure(value, 4)} s" if value >= 1 else f"{figure(value * 1e3)} ms"


def clock(seconds: float) -> str:
    """45.2 s, 2:03 min, 1:02:03 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, averaged into at most `width` columns, between their least and their largest."""
    if not values:
        return ""
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)
