import pytest

from penstock.runtime.cli.display import clock, figure, many, percent, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.81234, "0.812"), (-0.0023, "-0.0023"), (12345.6, "12346"), (1.5e-7, "1.50e-07")],
)
def test_a_figure_has_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_units() -> None:
    assert (percent(0.9341), percent(None)) == ("93.4 %", "-")
    assert (many(12), many(12_345), many(3_456_789), many(None)) == ("12", "12.3 k", "3.46 M", "-")
    assert (clock(45.24), clock(123), clock(3723)) == ("45.2 s", "2:03 min", "1:02:03 h")


def test_a_sparkline_runs_from_the_least_to_the_largest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 5, 8) == "▁" * 5
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([], 30) == ""
