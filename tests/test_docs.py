"""The pages of the documentation: links lead somewhere, named tests exist, generated parts are as generated."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pages
def test_tests_that_are_named_exist(page: Path) -> None:
    missing = []
    for name in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", page.read_text()):
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.exists() or (test and not re.search(rf"(?m)^def {test}\(", file.read_text())):
            missing.append(name)
    assert not missing


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in code type. What a row of the promises calls open, and what has not been measured, may be missing."""
    written = re.sub(r"(?ms)<!-- begin .*?<!-- end .*?-->", "", page.read_text())
    text = "\n".join(line for line in written.splitlines() if "**open**" not in line)
    folders = "graph|nodes|runtime|programs|docs"
    names = re.findall(rf"`(?:python )?((?:{folders})/[\w/]+\.\w+)`", text)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_generated_parts_are_as_generated() -> None:
    command = [sys.executable, "docs/make.py", "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr


@pages
def test_lines_of_text_are_not_longer_than_the_editor(page: Path) -> None:
    """120 columns, but for tables, links, code and what is generated."""
    text = re.sub(r"(?ms)^```.*?^```$|<!-- begin .*?<!-- end .*?-->", "", page.read_text())
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "!["))]
    assert [line for line in prose if len(line) > 120] == []
