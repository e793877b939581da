"""The code that README.md and docs/write-an-algorithm.md show: it traces, has no fault, and runs."""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from penstock.graph import Program, check, load, trace
from penstock.runtime.control.config import EVALUATION, Flags, RunConfig
from penstock.runtime.control.inprocess import InProcess
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.session import Session
from penstock.runtime.plan.cluster import Cluster, Host
from penstock.runtime.plan.place import place
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "write-an-algorithm.md"
PAGES = (ROOT / "README.md", GUIDE)
FAULTY = "faulty"
UPDATES = 2


def files(page: Path) -> dict[str, str]:
    """The page's Python blocks that begin with a file's name."""
    blocks = re.findall(r"(?ms)^```python\n(# (\w+\.py)\n.*?)^```$", page.read_text())
    return {name: text for text, name in blocks}


@dataclass(frozen=True)
class Folder:
    """All files of the pages as a user has them."""

    path: Path
    programs: dict[str, Program[..., Any]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    path = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        found = Folder(path)
        for page in PAGES:
            for name, text in files(page).items():
                (path / name).write_text(text)
        for name in (name for page in PAGES for name in files(page)):
            for function in re.findall(r"(?m)^@program.*\ndef (\w+)", (path / name).read_text()):
                made = load(f"{name}:{function}")
                assert isinstance(made, Program)
                if function != FAULTY:
                    found.programs[function] = made
        yield found
        for name in (name for page in PAGES for name in files(page)):
            sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(program: Program[..., Any], path: Path) -> dict[str, Any]:
    """A run in this process, as small as it can be; its summary."""
    flags = Flags(updates=UPDATES, batch=2, max_tokens=4, eval_groups=4, slots=8, deadline=60.0)
    graph = trace(program)
    evaluation = trace(program.evaluation, {}, EVALUATION) if program.evaluation else None
    graphs = [graph, *([evaluation] if evaluation else [])]
    plan = place(graphs, Cluster(hosts=(Host(name="local", cores=1),)), slots=flags.slots)
    config = RunConfig(graph, evaluation, plan, flags, "readme")
    folder = RunFolder.create(path)
    config.write(folder, {})
    said: list[dict[str, Any]] = []
    session = Session(config, RunRecorder(folder, config, said.append, monotonic()))
    status = InProcess(config, session, folder.path).run()
    folder.unlock()
    assert status == "done", session.error
    return said[-1]


def test_the_readme_shows_an_algorithm_in_under_30_lines() -> None:
    (text,) = files(ROOT / "README.md").values()
    assert len(text.strip().splitlines()) < 30
    assert "@node" in text


def test_every_program_has_no_fault(folder: Folder) -> None:
    assert set(folder.programs) == {"my_algorithm", "priced", "reinforce", "scaled", "with_judge"}
    for program in folder.programs.values():
        assert not check(trace(program), batch=8)


def test_the_guide_shows_what_check_says(folder: Folder) -> None:
    found: Any = load(f"faulty.py:{FAULTY}")
    faults = check(trace(found), batch=8)
    said = "\n".join([*map(str, faults), f"{len(faults)} faults"]).replace(str(folder.path), "/home/me")
    (shown,) = re.findall(r"(?ms)^\$ penstock check faulty.py:faulty\n(.*?)\n```$", GUIDE.read_text())
    assert shown == said


@pytest.mark.timeout(120)
def test_the_readme_algorithm_runs(folder: Folder, tmp_path: Path) -> None:
    summary = run(folder.programs["my_algorithm"], tmp_path / "run")
    assert (summary["updates"], summary["groups"]) == (UPDATES, 2 * UPDATES)
    assert summary["accuracy_after"] is not None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["priced", "reinforce", "scaled", "with_judge"])
def test_the_algorithms_of_the_guide_run(folder: Folder, tmp_path: Path, name: str) -> None:
    summary = run(folder.programs[name], tmp_path / "run")
    assert summary["updates"] == UPDATES
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    figure = {"priced": "cost", "reinforce": "baseline"}.get(name, "loss")
    assert [figure in row for row in rows] == [True] * UPDATES


def test_the_tests_of_the_guide_pass(folder: Folder) -> None:
    tests = [name for name in files(GUIDE) if name.startswith("test_")]
    assert tests
    for name in tests:
        module = importlib.import_module(name.removesuffix(".py"))
        for function in [f for f in vars(module) if f.startswith("test_")]:
            getattr(module, function)()


def test_the_edge_type_of_the_guide_joins_by_rows(folder: Folder) -> None:
    verdicts: Any = load("verdicts.py:Verdicts")
    one = verdicts(torch.ones(1), ("sure",))
    both = verdicts.concat([one, verdicts(torch.zeros(2), ("no", "unsure"))])
    assert (both.sure_N.tolist(), both.words) == ([1.0, 0.0, 0.0], ("sure", "no", "unsure"))
