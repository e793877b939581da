"""Verbs in this process: the child that traces costs seconds, and has tests of its own."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.graph.ir import Graph
from penstock.runtime.cli import launching, run, tracing
from penstock.runtime.cli.children import answer, wrong
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.control.launcher import DONE
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.folder import RunFolder

WALL_S = 12.3
SUMMARY = {
    "status": "done",
    "accuracy_before": 0.382,
    "accuracy_after": 0.934,
    "updates": 60,
    "groups": 1920,
    "wall_s": WALL_S,
    "command_s": 31.25,
    "error": "",
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are traced, and inputs tried, in this process."""

    def ask(verb: str, argv: Sequence[str], meanwhile: Sequence[str]) -> Any:
        return json.loads(json.dumps(answer(verb, argv[0], argv[1:])))

    def require(graphs: Sequence[Graph], flags: RunOptions) -> None:
        if said := wrong(graphs, flags):
            raise CommandError(said)

    monkeypatch.setattr(tracing, "ask_child", ask)
    monkeypatch.setattr(run, "require_inputs", require)


class Processes:
    """Stand for the launcher: what it was given, and what it says."""

    def __init__(self) -> None:
        self.status, self.lines = DONE, [{"kind": "stage", "stage": "train"}]
        self.summary: dict[str, Any] | None = SUMMARY
        self.configs: list[RunConfig] = []
        self.files: dict[str, str] = {}

    def __call__(self, folder: RunFolder, cluster: Cluster, tell: Any) -> int:
        self.configs.append(RunConfig.load(folder))
        for name, text in self.files.items():
            (folder.path / name).write_text(text)
        for line in self.lines:
            tell(line)
        if self.summary is not None:
            folder.write_json("summary.json", self.summary)
        return self.status


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, here: None) -> Processes:
    made = Processes()
    monkeypatch.setattr(launching, "launch", made)
    return made
