"""Runs for benchmarks: finished jobs are not repeated, and a worker that ends early is reported."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

WORKER = """
import sys
sys.path.insert(0, {folder!r})
from here import serve
serve(lambda job: {{**job, "square": job["n"] ** 2}} if job["n"] >= 0 else sys.exit(3))
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(folder=str(Path(__file__).resolve().parents[2] / "benchmarks")))
    return [str(script)]


def here() -> Any:
    return import_module("here")


@pytest.mark.slow
def test_results_come_in_the_order_of_the_jobs_and_are_not_made_twice(tmp_path: Path, worker: list[str]) -> None:
    kept = tmp_path / "runs.jsonl"
    kept.write_text('{"n": 2, "square": "kept"}\n{"n": 1, "squ')
    jobs = [{"n": n} for n in range(4)]
    assert [r["square"] for r in here().spread_out(jobs, worker, 2, kept)] == [0, 1, "kept", 9]
    assert here().spread_out(jobs, ["no such worker"], 2, kept)[3] == {"n": 3, "square": 9}


@pytest.mark.slow
def test_a_worker_that_ends_is_told_and_its_fellows_results_stay(tmp_path: Path, worker: list[str]) -> None:
    kept = tmp_path / "runs.jsonl"
    with pytest.raises(RuntimeError, match=r"the worker ended at \{'n': -1\}"):
        here().spread_out([{"n": 1}, {"n": -1}], worker, 1, kept)
    assert here().read_lines(kept) == [{"n": 1, "square": 1}]
