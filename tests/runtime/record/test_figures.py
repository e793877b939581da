"""Figures for papers, and that nothing else needs matplotlib."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime.record.metrics import curves_figure, schedule_figure
from penstock.runtime.record.timeline import Bar

BARS = [
    Bar("generator/0", "generate", 0, 0.0, 2.0, "group", 0),
    Bar("generator/0", "generate", 1, 0.5, 3.0, "group", 0),
    Bar("trainer/0", "aipo_update", 0, 3.0, 4.0, "update", 0),
    Bar("generator/0", "generate", 2, 4.0, 5.0, "group", 1),
]


def test_a_schedule_has_a_lane_for_each_replica_and_a_colour_for_each_node(tmp_path: Path) -> None:
    figure = schedule_figure(BARS)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["generator/0", "trainer/0"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["generate", "aipo_update"]
    # Two tracks of the generator, one of the trainer.
    assert len(axes.collections) == 3
    figure.savefig(tmp_path / "schedule.pdf")
    assert (tmp_path / "schedule.pdf").stat().st_size > 1000
    with pytest.raises(ValueError, match="given no bars"):
        schedule_figure([])


def test_curves_are_those_that_the_run_has(tmp_path: Path) -> None:
    rows = [{"update": u, "reward_mean": u / 10, "loss": -u, "lag_mean": 1.0} for u in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = curves_figure(tmp_path)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["reward", "loss", "lag"]
    assert np.array_equal(figure.axes[0].lines[0].get_ydata(), [0.0, 0.1, 0.2, 0.3, 0.4])


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="needed the folder of a run"):
        curves_figure(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="given 0 rows"):
        curves_figure(tmp_path)


def test_importing_does_not_import_matplotlib_and_its_absence_is_said() -> None:
    code = """
import sys
import penstock.runtime.record.metrics as figures
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
try:
    figures.schedule_figure([])
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "figures need matplotlib, which the extra has: pip install 'penstock[figures]'"
