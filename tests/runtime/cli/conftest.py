"""Verbs in this process: the child that traces costs seconds, and has tests of its own."""

import json
from collections.abc import Sequence

import pytest

from penstock.runtime.cli import check, run, show, simulate
from penstock.runtime.cli.trace_child import answer
from penstock.runtime.cli.traced import Traced, understand


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are traced in this process."""

    def trace(verb: str, argv: Sequence[str]) -> Traced:
        return understand(verb, json.loads(json.dumps(answer(verb, argv[0], argv[1:]))))

    for module in (check, run, show, simulate):
        monkeypatch.setattr(module, "trace_program", trace)
