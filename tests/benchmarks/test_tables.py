"""Tables that are computed, not measured: the stored results equal what the code computes today."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .conftest import FOLDER


def leaves(figures: Any, place: str = "") -> dict[str, Any]:
    """The scalar values of a table by their paths."""
    parts = figures.items() if isinstance(figures, dict) else enumerate(figures) if isinstance(figures, list) else None
    if parts is None:
        return {place: figures}
    return {at: value for key, part in parts for at, value in leaves(part, f"{place}/{key}").items()}


@pytest.mark.parametrize("name", ["outside", "sync_table", "theory"])
def test_a_computed_table_is_as_its_script_computes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, found = import_module(name), {}
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(script, "publish", lambda _, figures, keep: found.update(figures))
    script.main()
    kept = json.loads((Path(FOLDER) / "results" / f"{name}.json").read_text())
    # Values have two digits; floating-point differences between processors may change the last one.
    wanted = {
        at: pytest.approx(value, rel=0.005, abs=0.011) if isinstance(value, float) else value
        for at, value in leaves({key: kept[key] for key in found}).items()
    }
    assert leaves(found) == wanted
    assert kept.keys() - found.keys() == {"benchmark", "date", "commit", "machine"}
