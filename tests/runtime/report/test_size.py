"""A long run's page stays small."""

from pathlib import Path

import pytest

from penstock.runtime.report.write import write_report

from .runs import simulated_run


@pytest.mark.slow
def test_a_thousand_updates_are_a_page_of_less_than_two_megabytes(tmp_path: Path) -> None:
    made = simulated_run(tmp_path / "run", updates=1000, batch=32, generators=2)
    report = write_report(made.folder, tmp_path / "report.html", limit_s=1.0)
    assert len(report.facts.training[0].followed.ends) == 1000
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
