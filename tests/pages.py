"""The pages' examples and README.md's files, written into one folder as a user has them, and runs of their programs."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from penstock.graph import Fault, GraphError, Program, check, load, trace
from penstock.graph.program import trace_evaluation
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.inprocess import InProcess
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.run import Session
from penstock.runtime.control.run_config import EVALUATION, RunConfig, RunOptions
from penstock.runtime.record.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
UPDATES = 2
SMALL = RunOptions(updates=UPDATES, batch=2, max_tokens=4, eval_groups=4, slots=8, deadline=60.0)
HOME = "/home/me"
"""The folder of these files, as the pages show it."""


def files() -> dict[str, str]:
    """Return, by name, the files of docs/examples and README.md's Python blocks that begin with a file's name."""
    blocks = re.findall(r"(?ms)^```python\n(# (\w+\.py)\n.*?)^```$", (ROOT / "README.md").read_text())
    shown = {name: text for text, name in blocks}
    examples = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "examples").glob("*.py"))}
    assert not shown.keys() & examples.keys(), "two files of one name"
    return {**shown, **examples}


def consoles(page: Path) -> dict[str, str]:
    """Return the output that a page shows of each command, by command."""
    return dict(re.findall(r"(?ms)^```console\n\$ ([^\n]*)\n(.*?)\n```$", page.read_text()))


def commands(verb: str) -> set[str]:
    """Return the programs whose output of `penstock VERB` a page shows."""
    pages = (page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    return {name for page in pages for name in re.findall(rf"(?m)^<!-- begin {verb} (\S+\.py:\S+)", page)}


@dataclass(frozen=True)
class Folder:
    """All files of the pages as a user has them, and their programs by name."""

    path: Path
    programs: dict[str, Program[..., Any]] = field(default_factory=dict)

    def faults(self, path: str) -> list[Fault]:
        """Return what `penstock check PATH` finds."""
        found = load(path)
        assert isinstance(found, Program)
        try:
            return check(trace(found), batch=8)
        except GraphError as error:
            return list(error.faults)


@contextmanager
def written(path: Path) -> Iterator[Folder]:
    """Write the files into the folder `path`, make it the current one, and give torch one thread."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        found = Folder(path)
        texts = files()
        for name, text in texts.items():
            (path / name).write_text(text)
        for name, text in texts.items():
            for function in re.findall(r"(?m)^@program.*\ndef (\w+)", text):
                made = load(f"{name}:{function}")
                assert isinstance(made, Program)
                assert function not in found.programs, "two programs of one name"
                found.programs[function] = made
        torch.set_num_threads(1)
        yield found
        for name in texts:
            sys.modules.pop(name.removesuffix(".py"), None)
    torch.set_num_threads(threads)


def run_tests(name: str) -> int:
    """Call the test functions of one of the written files, and return their number."""
    module = importlib.import_module(name.removesuffix(".py"))
    tests = [function for key, function in vars(module).items() if key.startswith("test_")]
    for test in tests:
        test()
    return len(tests)


def run(program: Program[..., Any], path: Path, flags: RunOptions = SMALL, **options: Any) -> dict[str, Any]:
    """Run a program in this process, and return the run's last line, which is the summary."""
    graph = trace(program, options)
    evaluation = trace_evaluation(program, graph, EVALUATION) if program.evaluation and flags.eval_groups else None
    cluster = Cluster(hosts=(Host(name="local", cores=1),))
    config = RunConfig.make(graph, evaluation, cluster, replace(flags, device="cpu"))
    folder = RunFolder.create(path)
    config.write(folder, {})
    said: list[dict[str, Any]] = []
    session = Session(config, RunRecorder(folder, config, said.append, monotonic()))
    InProcess(config, session, folder.path).run()
    folder.unlock()
    return {"error": session.error, **said[-1]}
