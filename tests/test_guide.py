"""docs/write-an-algorithm.md: its files run, and a run that ends early says what the page shows."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cli.base_model import base_model
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.record.metrics import read_rows

from .gates.running import make_run, run_to_end, summary
from .pages import ROOT, SMALL, Folder, consoles, files, run, run_tests, written

GUIDE = ROOT / "docs" / "write-an-algorithm.md"
SHOWN = consoles(GUIDE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    with written(tmp_path_factory.mktemp("user")) as found:
        yield found


@pytest.fixture(scope="module")
def base() -> str:
    """Return the demo's base model, which is built once and kept in the user's cache."""
    return str(base_model("", lambda line: None))


def test_the_loss_has_at_most_15_lines_and_its_gradient_is_the_formula(folder: Folder) -> None:
    body = ast.parse(files()["dapo_loss.py"]).body
    (loss,) = [item for item in body if isinstance(item, ast.FunctionDef)]
    assert loss.end_lineno is not None
    assert loss.end_lineno - loss.lineno < 15
    assert run_tests("test_dapo_loss.py") == 1


@pytest.mark.timeout(120)
def test_a_model_that_solves_nothing_ends_the_run_as_the_guide_says(folder: Folder, tmp_path: Path) -> None:
    (command,) = [command for command in SHOWN if command.startswith("penstock run")]
    words = dict(re.findall(r"--([\w-]+) (\d+)", command))
    sizes: dict[str, Any] = {name: int(words[name]) for name in ("batch", "drops", "slots", "updates")}
    flags = replace(SMALL, max_tokens=16, eval_groups=0, **sizes)
    ended = run(folder.programs["my_dapo"], tmp_path / "run", flags)
    assert ended["status"] == "failed"
    assert SHOWN[command] == f"penstock: {ended['error']}".replace(str(folder.path), "/home/me")


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_the_algorithm_runs_from_the_demos_base(folder: Folder, tmp_path: Path, base: str, lag: int) -> None:
    flags = RunOptions(updates=3, batch=8, model=base, eval_groups=0, slots=64)
    ended = run(folder.programs["my_dapo"], tmp_path / "run", flags, lag=lag)
    assert (ended["status"], ended["fates"]["consumed"]) == ("done", 24), ended["error"]
    assert ended["fates"]["dropped"] > 0
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["optimizer_steps"] for row in rows] == [2, 2, 2]
    assert all(row["lag_max"] <= lag and 0 < row["reward_mean"] < 1 for row in rows)


@pytest.mark.slow
def test_the_algorithm_runs_in_processes(folder: Folder, tmp_path: Path, base: str) -> None:
    flags = RunOptions(updates=2, batch=4, model=base, eval_groups=0, slots=32)
    path = make_run(tmp_path / "run", f"{folder.path / 'my_dapo.py'}:my_dapo", {"lag": 2}, flags)
    assert summary(run_to_end(path))["fates"]["consumed"] == 8
