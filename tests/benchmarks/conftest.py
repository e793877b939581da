"""The benchmarks are scripts that import each other from their own folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="session", autouse=True)
def scripts() -> Iterator[None]:
    """Put the scripts' folder on the path, as when a script is run."""
    sys.path.insert(0, FOLDER)
    yield
    sys.path.remove(FOLDER)
