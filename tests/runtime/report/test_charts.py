"""Small charts say in words what they show, and stay small."""

import re
from math import nan

from penstock.runtime.report.charts import curves, histogram, number, percent, thinned


def test_a_curve_has_a_label_a_table_and_points_to_read_off() -> None:
    figure = curves("Loss", ["loss"], [(0.0, 1.0), (1.0, 0.5), (2.0, nan), (3.0, 0.25)])
    assert figure.said == "loss from 1 to 0.25, between 0.25 and 1"
    assert 'role="img"' in figure.svg
    assert "Loss: loss from 1 to 0.25" in figure.svg
    assert figure.rows[2] == ("2", "–")
    assert "NaN" not in figure.points
    assert "null" in figure.points


def test_a_long_curve_keeps_its_ends_and_its_extremes() -> None:
    points = [(float(i), float(i % 100)) for i in range(10_000)]
    points[4321] = (4321.0, 1e6)
    kept = thinned(points, 200)
    assert len(kept) <= 202
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert (4321.0, 1e6) in kept


def test_a_long_chart_keeps_the_extremes_of_each_of_its_curves() -> None:
    points = [(float(i), 1.0, float(i == 4321), float(-(i == 77))) for i in range(10_000)]
    kept = thinned(points, 200)
    assert len(kept) <= 202
    assert {points[4321], points[77]} <= set(kept)


def test_a_count_stays_until_it_changes() -> None:
    """Depths of queues are steps: nothing lies between 16 and 0."""
    points = [(0.0, 16.0), (1.0, 0.0)]
    sloped, stepped = (curves("Depth", ["groups"], points, steps=way).svg for way in (False, True))
    line = re.compile(r'points="(.*?)"')
    (first, last), (begin, corner, end) = (line.search(svg)[1].split() for svg in (sloped, stepped))  # type: ignore[index]
    assert (first, last) == (begin, end)
    assert corner == f"{end.split(',')[0]},{begin.split(',')[1]}"


def test_a_curve_of_one_point_and_of_equal_values_is_drawn() -> None:
    assert "<circle" in curves("One", ["y"], [(0.0, 3.0)]).svg
    assert "nan" not in curves("Same", ["y"], [(0.0, 0.0), (1.0, 0.0)]).svg


def test_a_few_updates_have_whole_numbers_below_them() -> None:
    below = [re.findall(r'y="159.0"[^>]*>([\d.]+)</text>', curves("Loss", ["loss"], points).svg) for points in (
        [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)], [(0.0, 0.0), (1.5, 0.0), (3.0, 0.0)])]  # fmt: skip
    assert below == [["0", "1", "2", "3"], ["0", "0.5", "1", "1.5", "2", "2.5", "3"]]


def test_a_histogram_marks_its_bound_and_names_each_bar() -> None:
    figure = histogram("Lag", [(0, 25.0), (1, 75.0)], "lag", "groups", (2, "bound: lag 2"))
    assert "bound: lag 2" in figure.svg
    assert figure.said == "lag 0: 25 %, lag 1: 75 %"
    assert "<title>lag 1: 75 groups</title>" in figure.svg


def test_text_in_a_chart_is_escaped() -> None:
    assert "<b>" not in curves("<b>", ["<b>"], [(0.0, 1.0), (1.0, 2.0)]).svg


def test_numbers_are_short() -> None:
    assert [number(v) for v in (3.0, 0.123456, nan, 1e9)] == ["3", "0.1235", "–", "1e+09"]
    assert [percent(v) for v in (0.0, 0.0123, 0.5)] == ["0 %", "1.2 %", "50 %"]
