"""Bars on lanes: layout, drawings as text, picture, trace and figure, and the busy and idle time of lanes."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.record.metrics import curves_figure, schedule_figure
from penstock.runtime.record.timeline import (
    Bar,
    Utilisation,
    boundaries,
    lanes,
    microseconds,
    names,
    pool_means,
    pool_of,
    span,
)
from penstock.runtime.record.trace_formats import COLORS, chrome_trace, gantt_svg, gantt_text, ink, make_axis

BARS = [
    Bar("generator/0", "generate", 0, 0.00, 0.05, version=0),
    Bar("generator/0", "generate", 1, 0.05, 0.10, version=0),
    Bar("generator/1", "generate", 2, 0.00, 0.10, version=0),
    Bar("scorer/0", "score", 0, 0.05, 0.06, detail="<exact & quick>"),
    Bar("trainer/0", "learn", 0, 0.10, 0.18, "update", 0),
    Bar("trainer/0", "broadcast", 1, 0.18, 0.20, "publish", 1),
]
OVERLAPPING = [Bar("generator/0", "generate", i, i * 0.1, i * 0.1 + 0.35) for i in range(9)]


def bar(lane: str, start: float, end: float, index: int = 0) -> Bar:
    return Bar(lane, "work", index, start, end)


# Lanes ------------------------------------------------------------------------------------------------------

times = st.floats(0, 1000)
begins = st.tuples(st.sampled_from(["a/0", "a/1", "b/0"]), times, st.floats(0, 10), st.integers(0, 9))


@given(st.lists(begins.map(lambda b: bar(b[0], b[1], b[1] + b[2], b[3]))))
def test_bars_of_one_track_do_not_overlap_and_none_is_lost(bars: list[Bar]) -> None:
    found = lanes(bars)
    assert sum(len(track) for lane in found for track in lane.tracks) == len(bars)
    for lane in found:
        for track in lane.tracks:
            assert {b.lane for b in track} == {lane.name}
            assert all(a.end <= b.start for a, b in pairwise(track))


def test_lanes_are_in_the_order_of_work_and_replicas_together_on_as_few_tracks_as_can_be() -> None:
    sync = [Bar("trainer/0", "publish", 0, 0, 1, "publish"), Bar("policy>generator/0", "send", 0, 0, 1, "send")]
    bars = [*sync, bar("scorer/0", 2, 3), bar("generator/10", 1, 2), bar("generator/2", 3, 4), bar("trainer/0", 5, 6)]
    order = ["generator/2", "generator/10", "scorer/0", "trainer/0", "policy>generator/0"]
    assert [lane.name for lane in lanes(bars)] == order
    (lane,) = lanes([bar("g/0", 0, 2, 0), bar("g/0", 1, 3, 1), bar("g/0", 2, 4, 2)])
    assert [[b.index for b in track] for track in lane.tracks] == [[0, 2], [1]]


def test_an_update_ends_with_its_last_node() -> None:
    updates = [("actor", 0, 0, 2), ("critic", 0, 2, 3), ("actor", 1, 4, 5)]
    bars = [*(Bar("t/0", *given, "update") for given in updates), Bar("g/0", "generate", 7, 0, 9)]
    assert boundaries(bars) == [(0, 3), (1, 5)]
    assert names(bars) == ["generate", "actor", "critic"]
    assert (span(bars), span([])) == ((0, 9), (0.0, 0.0))


# Text -------------------------------------------------------------------------------------------------------


def test_text_draws_each_replica_to_scale() -> None:
    assert gantt_text(BARS, width=53).splitlines() == [
        "             ╷0 ms               ╷100 ms",
        "                                                ┊v1",
        "generator/0  ├───0────┤├───1────┤               ┊",
        "generator/1  ├────────2─────────┤               ┊",
        "scorer/0               ┣┫                       ┊",
        "trainer/0                        ╞═ learn[0] ══╡╟1┄╢",
        "",
        "├─┤ generate  ┣━┫ score  ╞═╡ learn  ╟┄╢ broadcast",
        "┊ end of an update",
    ]
    assert gantt_text([]) == "nothing happened"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("color", [False, True])
def test_text_stays_within_its_width_and_switches_colours_off(width: int, color: bool) -> None:
    for line in gantt_text(BARS, width, color).splitlines():
        escapes = re.findall(r"\x1b\[[0-9;]*m", line)
        assert not escapes or (color and escapes[-1] == "\x1b[0m")
        assert len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width


def test_a_lane_with_many_bars_at_once_is_drawn_by_their_number() -> None:
    text = gantt_text([bar("generator/0", 0.0, 1.0 if i < 4 else 0.5, i) for i in range(8)], width=34)
    assert text.splitlines()[2] == "generator/0  " + "█" * 10 + "▄" * 10
    assert "firings at once: generator/0 up to 8" in text


# Pictures ---------------------------------------------------------------------------------------------------


def test_svg_is_well_formed_and_has_a_bar_to_scale_for_each_bar() -> None:
    svg = gantt_svg(BARS, "one < two")
    root, space = ElementTree.fromstring(svg), {"s": "http://www.w3.org/2000/svg"}
    groups = root.findall("s:g", space)
    assert len(groups) == len(BARS)
    assert any("<exact & quick>" in group.findtext("s:title", "", space) for group in groups)
    texts = {text.text for text in root.findall("s:text", space)}
    assert texts >= {"one < two", "generator/1", "trainer/0", "0 ms", "v1"}
    widths = [float(group[1].attrib["width"]) for group in groups]
    assert widths[0] == pytest.approx(widths[1], abs=0.02)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    # A notebook has several pictures in one document: each style rule must apply to its own picture only.
    style = svg.partition("<style>")[2].partition("</style>")[0].replace("@media (prefers-color-scheme:dark){", "")
    selectors = [rule.partition("{")[0].strip() for rule in style.split("}") if "{" in rule]
    assert len(selectors) > 8
    assert all(selector.startswith(".gantt ") for selector in selectors)


@pytest.mark.parametrize("seconds", [3e-6, 0.004, 0.7, 1.999, 2.0, 59.0, 86400.0])
def test_an_axis_has_round_ticks_within_its_span(seconds: float) -> None:
    axis = make_axis(5.0, 5.0 + seconds, 8)
    assert 3 <= len(axis.ticks) <= 10
    assert axis.ticks[-1] <= seconds * 1.0001
    assert all(re.fullmatch(r"\d+(\.\d+)? (s|ms|µs)", label) for label in axis.labels)


def test_labels_can_be_read_on_every_colour() -> None:
    assert {ink(color) for color in COLORS} <= {"#16191D", "#FFFFFF"}
    assert (ink("#000000"), ink("#FFFFFF")) == ("#FFFFFF", "#16191D")


def test_trace_loads_with_times_in_microseconds_and_threads_without_overlap() -> None:
    events = json.loads(json.dumps(chrome_trace(BARS)))["traceEvents"]
    complete = {e["name"]: e for e in events if e["ph"] == "X"}
    assert len(complete) == len(BARS)
    learn = complete["learn[0]"]
    assert (learn["ts"], learn["dur"], learn["args"]) == (100000.0, 80000.0, {"index": 0, "version": 0})
    for kind, wanted in (("process", {pool_of(b.lane) for b in BARS}), ("thread", {b.lane for b in BARS})):
        assert {e["args"]["name"] for e in events if e["name"] == f"{kind}_name"} == wanted
    events = [e for e in chrome_trace(OVERLAPPING)["traceEvents"] if e["ph"] == "X"]
    threads = {e["tid"] for e in events}
    assert len(threads) == 4
    for thread in threads:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


# Figures for papers -----------------------------------------------------------------------------------------


def test_a_schedule_has_a_lane_for_each_replica_and_a_colour_for_each_node(tmp_path: Path) -> None:
    work = [(0, 0.0, 2.0, "group", 0), (1, 0.5, 3.0, "group", 0), (2, 4.0, 5.0, "group", 1)]
    bars = [Bar("generator/0", "generate", *given) for given in work]  # type: ignore[arg-type]
    figure = schedule_figure([*bars, Bar("trainer/0", "learn", 0, 3.0, 4.0, "update", 0)])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["generator/0", "trainer/0"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["generate", "learn"]
    assert len(axes.collections) == 3  # two tracks of the generator, one of the trainer
    figure.savefig(tmp_path / "schedule.pdf")
    assert (tmp_path / "schedule.pdf").stat().st_size > 1000
    with pytest.raises(ValueError, match="given no bars"):
        schedule_figure([])


def test_curves_are_those_that_the_run_has(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="needed the folder of a run"):
        curves_figure(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="given 0 rows"):
        curves_figure(tmp_path)
    rows = [
        {"update": u, "reward_mean": u / 10, "loss": -u, "lag_mean": 1.0, "time_s": 3.0 * u, "seconds": 3.0}
        for u in range(5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = curves_figure(tmp_path)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["reward", "loss", "lag", "seconds of an update"]
    assert np.array_equal(figure.axes[0].lines[0].get_ydata(), [0.0, 0.1, 0.2, 0.3, 0.4])
    assert np.array_equal(figure.axes[3].lines[0].get_ydata(), [3.0] * 5)


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
    assert "pip install 'penstock[figures]'" in done.stdout


# Utilisation ------------------------------------------------------------------------------------------------

PLACES = ["g/0", "g/1", "g/2", "t/0"]
changes = st.lists(st.tuples(times, st.sampled_from(PLACES), st.sampled_from(["busy", "data", "weights", "joined"])))


@given(changes, st.lists(times, min_size=1))
def test_busy_and_idle_seconds_add_up_to_the_wall_time_exactly(
    given: list[tuple[float, str, str]], takes: list[float]
) -> None:
    account, last = Utilisation(PLACES, 0), 0
    for number, (time, replica, state) in enumerate(sorted([*given, *((time, "", "") for time in takes)])):
        now = microseconds(time)
        account.let(now, lambda _, number=number: f"cause {number % 3}")  # type: ignore[misc]
        if state == "joined":
            account.change(replica, (pool_of(replica),))
        elif replica:
            account.change(replica, state)
        else:
            spent = account.take()
            assert {sum(states.values()) for states in spent.values()} == {now - last}
            assert all(seconds > 0 for states in spent.values() for seconds in states.values())
            assert {sum(map(microseconds, pool.values())) for pool in pool_means(spent).values()} == {now - last}
            last = now


def test_idle_seconds_go_to_their_cause() -> None:
    account = Utilisation(["g/0", "t/0"], 0)
    for time, replica, state in [(10, "g/0", "busy"), (10, "t/0", "data"), (30, "g/0", "weights"), (35, "t/0", "busy")]:
        account.let(time)
        account.change(replica, state)
    account.let(40)
    spent: Mapping[str, Mapping[str, float]] = account.take()
    assert spent["g/0"] == {"start": 10, "busy": 20, "weights": 10}
    assert spent["t/0"] == {"start": 10, "data": 25, "busy": 5}


def test_lanes_of_a_kind_are_in_its_state_while_they_are_with_it() -> None:
    account = Utilisation(["g/0", "g/1"], 0)
    for lane in ("g/0", "g/1"):
        account.change(lane, ("g",))
    account.let(3, lambda lane: "data")
    account.change("g/1", "busy")
    account.let(5, lambda lane: "weights")
    assert account.take() == {"g/0": {"data": 3, "weights": 2}, "g/1": {"data": 3, "busy": 2}}
    account.change("g/1", ("g",))
    account.let(6, lambda lane: "weights")
    assert account.take() == {"g/0": {"weights": 1}, "g/1": {"weights": 1}}


def test_a_pool_counts_the_mean_of_its_replicas() -> None:
    assert pool_means({"g/0": {"busy": 3_000_000}, "g/1": {"data": 3_000_000}}) == {"g": {"busy": 1.5, "data": 1.5}}
