"""Small charts say in words what they show; schedules are compact columns; a long run's page is small."""

import base64
import json
import re
import zlib
from math import nan
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.report.charts import Figure, curves, histogram, number, percent, thinned
from penstock.runtime.report.follow import Work
from penstock.runtime.report.page import render
from penstock.runtime.report.schedule_data import Chart, Row, Strip, encode, thin
from penstock.runtime.report.write import write_report

from .runs import simulated_run


def drawn(figure: Figure) -> str:
    return render("_chart.svg.j2", figure=figure)


def test_a_curve_has_a_label_a_table_and_points_to_read_off() -> None:
    figure = curves("Loss", ["loss"], [(0.0, 1.0), (1.0, 0.5), (2.0, nan), (3.0, 0.25)])
    assert figure.said == "loss from 1 to 0.25, between 0.25 and 1"
    assert all(part in drawn(figure) for part in ('role="img"', "Loss: loss from 1 to 0.25"))
    assert figure.rows[2] == ("2", "–")
    assert "NaN" not in figure.points
    assert "null" in figure.points


def test_a_long_chart_keeps_its_ends_and_the_extremes_of_each_of_its_curves() -> None:
    points = [(float(i), 1.0, float(i == 4321), float(-(i == 77))) for i in range(10_000)]
    kept = thinned(points, 200)
    assert len(kept) <= 202
    assert {points[0], points[4321], points[77], points[-1]} <= set(kept)


def test_a_count_stays_until_it_changes() -> None:
    """Depths of queues are steps: nothing lies between 16 and 0."""
    points = [(0.0, 16.0), (1.0, 0.0)]
    sloped, stepped = (drawn(curves("Depth", ["groups"], points, steps=way)) for way in (False, True))
    line = re.compile(r'points="(.*?)"')
    (first, last), (begin, corner, end) = (line.search(svg)[1].split() for svg in (sloped, stepped))  # type: ignore[index]
    assert (first, last) == (begin, end)
    assert corner == f"{end.split(',')[0]},{begin.split(',')[1]}"


def test_a_curve_of_one_point_and_of_equal_values_is_drawn() -> None:
    assert "<circle" in drawn(curves("One", ["y"], [(0.0, 3.0)]))
    same = drawn(curves("<b>", ["<b>"], [(0.0, 0.0), (1.0, 0.0)]))
    assert "nan" not in same
    assert "<b>" not in same


def test_a_few_updates_have_whole_numbers_below_them() -> None:
    below = [re.findall(r'y="159.0"[^>]*>([\d.]+)</text>', drawn(curves("Loss", ["loss"], points))) for points in (
        [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)], [(0.0, 0.0), (1.5, 0.0), (3.0, 0.0)])]  # fmt: skip
    assert below == [["0", "1", "2", "3"], ["0", "0.5", "1", "1.5", "2", "2.5", "3"]]


def test_a_histogram_marks_its_bound_and_names_each_bar() -> None:
    figure = histogram("Lag", {0: 25.0, 1: 75.0}, "lag", "groups", (2, "bound: lag 2"))
    assert "bound: lag 2" in drawn(figure)
    assert figure.said == "lag 0: 25 %, lag 1: 75 %"
    assert "<title>lag 1: 75 groups</title>" in drawn(figure)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (3.0, 0.123456, nan, 1e9)] == ["3", "0.1235", "–", "1e+09"]
    assert [percent(v) for v in (0.0, 0.0123, 0.5)] == ["0 %", "1.2 %", "50 %"]


def work(index: int, start: int, end: int, node: str = "n", version: int = 0) -> Work:
    return Work("p/0", node, index, start * 1000, end * 1000, "group", version, cause=("m[#] was done", index + 5))


def decoded(chart: Chart, most: int = 10_000) -> Any:
    text, _ = encode(chart, most)
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_differences_add_up_to_the_bars() -> None:
    items = [work(4, 10, 30), work(2, 20, 25), work(9, 40, 41)]
    data = decoded(Chart([Row("p/0", "p", Strip(items))], [(0, 41_000)], end=41_000))
    columns = data["rows"][0]["real"]["main"]
    starts = [sum(columns["s"][: i + 1]) for i in range(3)]
    indices = [sum(columns["i"][: i + 1]) for i in range(3)]
    assert (starts, indices, columns["d"]) == ([10, 20, 40], [4, 2, 9], [20, 5, 1])
    assert columns["x"] == [5, 5, 5]
    assert columns["k"] == [0, 1, 0]
    assert (data["names"], data["causes"], data["ends"], data["end"]) == (
        [["n", "group"]], ["m[#] was done"], [[0, 41]], 41)  # fmt: skip


def test_a_long_run_is_merged_in_its_middle_by_node_and_version() -> None:
    items = [work(i, 10 * i, 10 * i + 8, version=i // 50) for i in range(3000)]
    strip = Strip(list(items))
    assert thin([strip], 3000) == 0
    gone = thin([strip], 300)
    assert len(strip.work) + gone == sum(getattr(w, "count", 1) for w in strip.work) == 3000
    assert len(strip.work) < 300
    assert (strip.work[0].index, max(w.end for w in strip.work)) == (0, items[-1].end)


def test_a_lanes_room_and_tracks_do_not_depend_on_the_evaluation_or_the_side() -> None:
    program = [work(i, i, i + 10) for i in range(4)]
    evaluation = [work(i, 100, 200, node="evaluate.n") for i in range(50)]
    predicted = Strip([work(0, 0, 10), work(1, 5, 15), work(2, 6, 16)])
    rows = [
        Row("p/0", "p", Strip(program), room=6),
        Row("p/0", "p", Strip(program + evaluation), room=6),
        Row("p/0", "p", Strip([work(0, 0, 10)]), predicted),
    ]
    found = [(row["room"], row["tracks"]) for row in decoded(Chart(rows, []))["rows"]]
    assert found == [(6, [4, 0]), (6, [4, 50]), (3, [3, 0])]


@pytest.mark.slow
def test_a_thousand_updates_are_a_page_of_less_than_two_megabytes(tmp_path: Path) -> None:
    made = simulated_run(tmp_path / "run", updates=1000, batch=32, generators=2)
    report = write_report(made.folder, tmp_path / "report.html", limit_s=1.0)
    assert len(report.facts.training[0].followed.ends) == 1000
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
