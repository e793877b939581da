"""The code that README.md and the pages show: it traces, has no faults except those that it shall show, and runs."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph import check, load, trace
from penstock.runtime.record.metrics import read_rows

from .pages import ROOT, UPDATES, Folder, commands, files, run, run_tests, written

README = ROOT / "README.md"
FAULTY = {
    "faulty.py:faulty": [
        "generate: input 'behaviour'",
        "generate: input 'behaviour'",
        "generate: option 'samples'",
        "group_advantage: output 'out'",
        "aipo_update: input 'advantage'",
    ],
    "misused.py:filter_by_lambda": ["keep: option 'when'"],
    "misused.py:starving": ["broadcast: weights too seldom for their lag"],
    "misused.py:slow_group": ["score.every(2)"],
    "misused.py:updated_twice": ["aipo_update: output 'out'", "aipo_update_2 updates a value"],
    "misused.py:delayed_elsewhere": ["choose reads delay in pool 'generator'"],
    "misused.py:unbounded": ["generate: turns"],
    "lacking.py:lacking": [
        "group_advantage",
        "policy_update: option 'average'",
        "policy_update: option 'kl'",
        "policy_update: loss capped",
        "policy_update: loss capped: option 'cap'",
    ],
}
"""The programs that are shown for their faults, with what is wrong in each, in the order of the lines."""
RUN = {
    "my_algorithm": "loss",
    "topr": "loss",
    "priced": "cost",
    "reinforce": "baseline",
    "scaled": "loss",
    "with_judge": "loss",
    "filtered": "loss",
    "anchored": "average_distance",
    "by_width": "unseen",
    "second_chance": "loss",
    "talking": "answered",
    "often": "replayed",
    "mixed": "spread_loss",
    "taught": "teacher_tokens",
    "credited": "loss",
    "chase": "aipo_update_2.loss",
    "warmed": "lr",
    "careful": "lr",
    "my_dapo": "loss",
}
"""The programs without a fault, each with a figure that its last update has."""
OPTIONS: dict[str, dict[str, Any]] = {"anchored": {"move": 2, "look": 2}}
NO_RUN = {"my_dapo"}
"""Those that are run elsewhere: this one drops all groups of an untrained model (test_guide.py)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    with written(tmp_path_factory.mktemp("user")) as found:
        yield found


def test_the_readme_shows_an_algorithm_in_under_30_lines() -> None:
    text = files()["my_file.py"]
    assert len(text.strip().splitlines()) < 30
    assert "@node" in text


def test_the_guide_shows_a_new_loss_in_at_most_15_lines() -> None:
    functions = {f.name: f for f in ast.parse(files()["my_loss.py"]).body if isinstance(f, ast.FunctionDef)}
    loss = functions["tapered"]
    assert loss.end_lineno is not None
    assert loss.end_lineno - loss.lineno < 15
    assert "loss=tapered" in ast.unparse(functions["topr"])


def test_every_program_that_is_shown_without_a_fault_has_none(folder: Folder) -> None:
    assert set(folder.programs) == RUN.keys() | {name.rpartition(":")[2] for name in FAULTY}
    for name in RUN:
        assert not check(trace(folder.programs[name]), batch=8)


def test_the_pages_show_what_check_says_of_each_faulty_program(folder: Folder) -> None:
    assert commands("check") == FAULTY.keys()
    for path, wanted in FAULTY.items():
        faults = folder.faults(path)
        assert [fault.what for fault in faults] == wanted
        source = path.partition(":")[0]
        assert all(fault.where.startswith(f"{folder.path / source}:") for fault in faults)


@pytest.mark.slow
def test_the_commands_of_the_readme_work(folder: Folder) -> None:
    """Only commands that start no processes: other tests run programs."""
    lines = re.findall(r"(?m)^    (penstock (?:check|simulate|plan|show) [^#\n]*?)(?: +#.*)?$", README.read_text())
    assert len(lines) > 1
    for line in lines:
        words = [sys.executable, "-m", "penstock.runtime.cli.main", *line.split()[1:]]
        subprocess.run(words, cwd=folder.path, check=True, capture_output=True, timeout=120)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(RUN.keys() - NO_RUN))
def test_the_algorithms_run(folder: Folder, tmp_path: Path, name: str) -> None:
    summary = run(folder.programs[name], tmp_path / "run", **OPTIONS.get(name, {}))
    assert (summary["status"], summary["updates"]) == ("done", UPDATES), summary["error"]
    assert RUN[name] in read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (summary.get("accuracy_after") is not None) == (folder.programs[name].evaluation is not None)


def test_the_loss_of_the_guide_is_the_papers(folder: Folder) -> None:
    """The gradient: −A for a good response, −min(Π π / μ, 1) · A for a bad one (arXiv 2503.14286)."""
    from penstock.nodes.learn.losses import Sampled

    module: Any = load("my_loss.py:tapered")
    behaviour_P = torch.tensor([-1.0, -2.0, -1.0, -1.0, -3.0, -1.0])
    logprobs_P = torch.tensor([-0.5, -1.0, -2.0, -0.5, -1.0, -0.9], requires_grad=True)
    advantages_P, response_P = torch.tensor([1.0, 1.0, -0.5, -0.5, -2.0, -2.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    sampled = Sampled(advantages_P, torch.full((6,), 2), response_P, response_P, {"behaviour": behaviour_P})
    module(logprobs_P, sampled).sum().backward()
    bad = torch.tensor(-0.5).exp()
    wanted_P = -advantages_P * torch.stack([torch.ones(()), torch.ones(()), bad, bad, torch.ones(()), torch.ones(())])
    torch.testing.assert_close(logprobs_P.grad, wanted_P)


def test_the_tests_of_the_guide_pass(folder: Folder) -> None:
    tests = ["test_length.py"]
    assert sum(map(run_tests, tests)) == 3


def test_the_edge_type_of_the_guide_joins_by_rows(folder: Folder) -> None:
    verdicts: Any = load("verdicts.py:Verdicts")
    one = verdicts(torch.ones(1), ("sure",))
    both = verdicts.concat([one, verdicts(torch.zeros(2), ("no", "unsure"))])
    assert (both.sure_N.tolist(), both.words) == ([1.0, 0.0, 0.0], ("sure", "no", "unsure"))
