"""Figures for papers: a schedule, and the curves of a run. Calling them needs the extra `figures` (matplotlib).

Both give a matplotlib Figure that no window knows of: `figure.savefig("schedule.pdf")`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.record.axis import colors, lighter
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows
from penstock.runtime.record.timeline import Bar, boundaries, excerpt, lanes, names, span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = (
    ("reward_mean", "reward"),
    ("loss", "loss"),
    ("response_length", "tokens of a response"),
    ("lag_mean", "lag"),
    ("ratio_mean", "importance ratio"),
    ("time_s", "seconds of an update"),
)
"""Columns of `metrics.jsonl` that are drawn where a run has them, and what they are called."""


def schedule_figure(bars: Sequence[Bar], updates: int = 6, replicas: int = 8, width: float = 7.0) -> "Figure":
    """A schedule's first updates, and of each pool the first replicas: a lane for each replica, a colour for each node,
    lighter for odd versions, and a line where an update ends. `width` is in inches.

    Raises ImportError without matplotlib, ValueError without bars.
    """
    figure = _figure()
    shown = excerpt(bars, updates, replicas)
    if not shown:
        raise ValueError("schedule: given no bars, needed one or more")
    found, legend, (begin, end) = lanes(shown), names(shown), span(shown)
    palette = colors(legend)
    figure.set_size_inches(width, 0.9 + 0.32 * len(found))
    axes = figure.subplots()
    for row, lane in enumerate(found):
        height = 0.8 / len(lane.tracks)
        for number, track in enumerate(lane.tracks):
            places = [(bar.start - begin, bar.seconds) for bar in track]
            shades = [lighter(palette[b.name], 0.28) if (b.version or 0) % 2 else palette[b.name] for b in track]
            axes.broken_barh(places, (row - 0.4 + number * height, height), facecolors=shades, linewidth=0)
    for _, time in boundaries(shown):
        axes.axvline(time - begin, color="#6B7480", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(found)), [lane.name for lane in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, end - begin)
    axes.set_xlabel("seconds")
    handles = [axes.barh(0, 0, color=palette[name], label=name) for name in legend]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize="small")
    return figure


def curves_figure(run_folder: str | Path, width: float = 7.0) -> "Figure":
    """The curves of a run, by update: those of `CURVES` that its `metrics.jsonl` has.

    Raises ImportError without matplotlib, FileNotFoundError for what is no run folder, ValueError for a run without
    rows.
    """
    figure = _figure()
    metrics = RunFolder(Path(run_folder)).metrics
    if not metrics.is_file():
        raise FileNotFoundError(f"{run_folder}: given no metrics.jsonl, needed the folder of a run")
    rows = read_rows(metrics)
    drawn = [(column, title) for column, title in CURVES if any(column in row for row in rows)]
    if not drawn:
        raise ValueError(f"{metrics}: given {len(rows)} rows, needed one or more with {CURVES[0][0]}")
    lines = -(-len(drawn) // 2)
    figure.set_size_inches(width, 1.9 * lines)
    panels = figure.subplots(lines, 2, squeeze=False, sharex=True)
    for axes, (column, title) in zip(panels.flat, drawn, strict=False):
        points = [(row["update"], row[column]) for row in rows if row.get(column) is not None]
        axes.plot([update for update, _ in points], [value for _, value in points], color="#4C78A8", linewidth=1)
        axes.set_title(title, fontsize="small")
    for axes in panels.flat[len(drawn) :]:
        axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("update")
    return figure


def _figure() -> "Figure":
    """One that belongs to no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib, which the extra has: pip install 'penstock[figures]'") from error
    return Figure(layout="constrained")
