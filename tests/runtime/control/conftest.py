"""A listening server for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .sockets import Bench, bench


@pytest.fixture
def endpoint() -> str:
    """The address where `b` listens: a Unix socket by default; tests override it by a parameter."""
    return ""


@pytest.fixture
def b(tmp_path: Path, endpoint: str) -> Iterator[Bench]:
    with bench(tmp_path, endpoint) as made:
        yield made
