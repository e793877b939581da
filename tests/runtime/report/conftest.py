"""A run shared by all tests of the report, and a browser to open pages in."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .runs import Made, simulated_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Eight updates at lag 1 with two generators of two ranks each."""
    path = tmp_path_factory.mktemp("runs") / "made"
    return simulated_run(path, updates=8, batch=6, lag=1, generators=2, ranks=2)


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    """Debian's Chromium, headless."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
