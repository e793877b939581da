"""Fixtures that run verbs in this process: starting the tracing child takes seconds, and it has its own tests."""

import json
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest

from penstock.runtime.cli import launching, tracing
from penstock.runtime.cli.children import answered
from penstock.runtime.cli.main import main
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.signals import DONE
from penstock.runtime.record.folder import RunFolder

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Say = Callable[..., str]
Facts = Callable[..., Any]
Refuse = Callable[..., tuple[int, str]]

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
def here(monkeypatch: Patch) -> None:
    """Trace programs and try inputs in this process."""

    def ask(function: str, *arguments: Any, **_: object) -> Any:
        found = json.loads(json.dumps(answered(resolve_name(function), *json.loads(json.dumps(arguments)))))
        if found and "error" in found:
            raise CommandError(found["error"], found["status"])
        return found

    monkeypatch.setattr(tracing, "ask_child", ask)


@pytest.fixture
def refuse(here: None, capsys: Output) -> Refuse:
    """Run a command that is refused; return its exit status and its error text with white space collapsed."""

    def call(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as leaving:
            main([*map(str, words)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return int(leaving.value.code or 0), " ".join(captured.err.split())

    return call


@pytest.fixture
def say(here: None, capsys: Output) -> Say:
    """Run a command that succeeds; return what it prints."""

    def call(*words: object) -> str:
        with pytest.raises(SystemExit) as leaving:
            main([*map(str, words)])
        captured = capsys.readouterr()
        assert leaving.value.code == 0, captured.err
        return captured.out

    return call


@pytest.fixture
def facts(say: Say) -> Facts:
    """Run a command with --json; return the last line of its output, decoded."""
    return lambda *words: json.loads(say(*words, "--json").splitlines()[-1])


class Processes:
    """Stands in for the launcher: records its arguments, and reports prepared lines."""

    def __init__(self) -> None:
        self.status, self.lines = DONE, [{"kind": "stage", "stage": "train"}]
        self.summary: dict[str, Any] | None = SUMMARY
        self.configs: list[RunConfig] = []
        self.files: dict[str, str] = {}
        self.last: Callable[[RunFolder], object] = bool

    def __call__(
        self,
        folder: RunFolder,
        cluster: Cluster,
        tell: Any,
        enrolled: Any = None,
        early: Any = None,
        stop_request: Any = None,
    ) -> int:
        self.configs.append(RunConfig.load(folder))
        for name, text in self.files.items():
            (folder.path / name).write_text(text)
        for line in self.lines:
            tell(line)
        if self.summary is not None:
            folder.write_json("summary.json", self.summary)
        self.last(folder)
        return self.status


@pytest.fixture
def processes(monkeypatch: Patch, here: None) -> Processes:
    made = Processes()
    monkeypatch.setattr(launching, "launch", made)
    return made
