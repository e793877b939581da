"""The line chart: well-formed XML, one line per name, and points at the right heights."""

from importlib import import_module
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def spread(low: float, median: float, high: float) -> dict[str, float]:
    return {"min": low, "median": median, "max": high}


def test_a_chart_has_a_line_per_name_and_a_point_per_place() -> None:
    lines = {"a < b": [spread(0, 0.5, 1)] * 3, "c": [spread(0.2, 0.2, 0.2)] * 3}
    text = import_module("chart").line_chart(lines, ["0", "1", "2"], "title & more", "lag", ("base", 0.25))
    root = ElementTree.fromstring(text)
    assert len(root.findall(f"{SVG}polyline")) == 2
    assert len(root.findall(f"{SVG}circle")) == 6
    assert {"a < b", "c", "title & more", "lag", "base 0.25"} <= {node.text for node in root.iter(f"{SVG}text")}


def test_a_better_value_stands_higher_and_all_are_inside() -> None:
    chart = import_module("chart")
    text = chart.line_chart({"a": [spread(0, 0, 0), spread(1, 1, 1)]}, ["0", "1"], "", "", ("base", 0.5))
    low, high = (float(c.attrib["cy"]) for c in ElementTree.fromstring(text).findall(f"{SVG}circle"))
    assert 0 < high < low < chart.HEIGHT
