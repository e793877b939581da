"""A small schedule, drawn as text, as a picture and as a trace."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from penstock.runtime.record.timeline import Bar
from penstock.runtime.record.trace_formats import COLORS, chrome_trace, gantt_svg, gantt_text, ink, make_axis

BARS = [
    Bar("generator/0", "generate", 0, 0.00, 0.05, version=0),
    Bar("generator/0", "generate", 1, 0.05, 0.10, version=0),
    Bar("generator/1", "generate", 2, 0.00, 0.10, version=0),
    Bar("scorer/0", "score", 0, 0.05, 0.06, detail="<exact & quick>"),
    Bar("trainer/0", "learn", 0, 0.10, 0.18, "update", 0),
    Bar("trainer/0", "broadcast", 1, 0.18, 0.20, "publish", 1),
]


def test_text_draws_each_replica_to_scale() -> None:
    lines = gantt_text(BARS, width=53).splitlines()
    assert lines == [
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


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("color", [False, True])
def test_text_stays_within_its_width(width: int, color: bool) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", gantt_text(BARS, width, color))
    assert max(map(len, text.splitlines())) <= width


def test_colours_are_switched_off_at_the_end_of_each_line() -> None:
    for line in gantt_text(BARS, 80, color=True).splitlines():
        escapes = re.findall(r"\x1b\[[0-9;]*m", line)
        assert not escapes or escapes[-1] == "\x1b[0m"


def test_a_lane_with_many_bars_at_once_is_drawn_by_their_number() -> None:
    bars = [Bar("generator/0", "generate", i, 0.0, 1.0 if i < 4 else 0.5) for i in range(8)]
    text = gantt_text(bars, width=34)
    assert text.splitlines()[2] == "generator/0  " + "█" * 10 + "▄" * 10
    assert "firings at once: generator/0 up to 8" in text


def test_nothing_to_draw_is_said() -> None:
    assert gantt_text([]) == "nothing happened"


def test_svg_is_well_formed_and_has_a_bar_for_each_bar() -> None:
    root = ElementTree.fromstring(gantt_svg(BARS, "one < two"))
    space = {"s": "http://www.w3.org/2000/svg"}
    groups = root.findall("s:g", space)
    assert len(groups) == len(BARS)
    tooltips = [group.findtext("s:title", "", space) for group in groups]
    assert any("<exact & quick>" in tip for tip in tooltips)
    texts = [text.text for text in root.findall("s:text", space)]
    assert {"one < two", "generator/1", "trainer/0", "0 ms", "v1"} <= set(texts)


def test_an_svgs_style_is_of_that_picture_alone() -> None:
    """In a notebook there are others in the same document."""
    style = gantt_svg(BARS).partition("<style>")[2].partition("</style>")[0]
    style = style.replace("@media (prefers-color-scheme:dark){", "")
    selectors = [rule.partition("{")[0].strip() for rule in style.split("}") if "{" in rule]
    assert len(selectors) > 8
    assert all(selector.startswith(".gantt ") for selector in selectors)


def test_svg_bars_are_to_scale() -> None:
    root = ElementTree.fromstring(gantt_svg(BARS))
    boxes = [group[1].attrib for group in root.findall("{http://www.w3.org/2000/svg}g")]
    widths = [float(box["width"]) for box in boxes]
    assert widths[0] == pytest.approx(widths[1], abs=0.02)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)


def test_trace_loads_with_times_in_microseconds() -> None:
    trace = json.loads(json.dumps(chrome_trace(BARS)))
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == len(BARS)
    learn = next(e for e in complete if e["name"] == "learn[0]")
    assert (learn["ts"], learn["dur"], learn["args"]) == (100000.0, 80000.0, {"index": 0, "version": 0})
    processes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {"generator", "scorer", "trainer"}
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"generator/0", "generator/1", "scorer/0", "trainer/0"}


def test_events_of_a_trace_thread_do_not_overlap() -> None:
    bars = [Bar("generator/0", "generate", i, i * 0.1, i * 0.1 + 0.35) for i in range(9)]
    events = [e for e in chrome_trace(bars)["traceEvents"] if e["ph"] == "X"]
    threads = {e["tid"] for e in events}
    assert len(threads) == 4
    for thread in threads:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in pairwise(times))


@pytest.mark.parametrize("seconds", [3e-6, 0.004, 0.7, 1.999, 2.0, 59.0, 86400.0])
def test_an_axis_has_round_ticks_within_its_span(seconds: float) -> None:
    axis = make_axis(5.0, 5.0 + seconds, 8)
    assert 3 <= len(axis.ticks) <= 10
    assert axis.ticks[-1] <= seconds * 1.0001
    assert all(re.fullmatch(r"\d+(\.\d+)? (s|ms|µs)", label) for label in axis.labels)


def test_labels_can_be_read_on_every_colour() -> None:
    assert {ink(color) for color in COLORS} <= {"#16191D", "#FFFFFF"}
    assert ink("#000000") == "#FFFFFF"
    assert ink("#FFFFFF") == "#16191D"
