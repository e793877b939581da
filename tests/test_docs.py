"""README.md and the pages: the links, tests and files that they name exist; generated parts are current; sizes.

`make docs` builds the site in strict mode: it fails for a broken link, anchor or reference of a page, and for a
generated part that is stale.
"""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from penstock.graph.types import COLUMNS
from penstock.nodes.learn.losses import NEEDED

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PROMISES = ROOT / "docs" / "promises.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CODES = re.findall(r"(?m)^\| `([\w-]+)` \| (.+) \| (.+) \|$", (ROOT / "docs" / "check-errors.md").read_text())
"""Code, cause and cure of each fault."""

pages = pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)


def written(page: Path) -> str:
    """Return the page without its generated parts."""
    return re.sub(r"(?ms)^<!-- begin .*?^<!-- end .*?-->\n", "", page.read_text())


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", README.read_text())
    local = [link.partition("#")[0] for link in links if not link.startswith(("http://", "https://"))]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_tests_that_are_promised_exist() -> None:
    """Compare names alone, so that a test may move to another file."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for file in files for name in re.findall(r"(?m)^def (test_\w+)\(", file.read_text())}
    defined |= {file.name for file in files}
    named = re.findall(r"`(test_\w+(?:\.py)?)`", PROMISES.read_text())
    assert len(named) > 100
    assert [name for name in named if name not in defined] == []


@pages
def test_only_the_promises_name_tests(page: Path) -> None:
    if page != PROMISES:
        prose = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
        assert re.findall(r"`(?:tests/\S*)?test_\w+[^`]*`", prose) == []


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    """Check the paths in code type, except in lines that the promises mark **open**."""
    text = "\n".join(line for line in written(page).splitlines() if "**open**" not in line)
    folders = "graph|nodes|runtime|programs|docs|benchmarks|scripts|tests"
    names = re.findall(rf"`(?:python |sh )?((?:{folders})/[\w/]+\.\w+)`", text)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_generated_parts_are_as_generated() -> None:
    """Leave out the pages of docs/, which a build of the site checks."""
    command = [sys.executable, "docs/make.py", "--check", "README.md", "docs/img"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_path_of_which_nothing_is_generated_is_refused() -> None:
    command = [sys.executable, "docs/make.py", "--check", "README.md", "docs/tyop.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (found.returncode, found.stdout) == (1, "")
    assert "given docs/tyop.md, needed " in found.stderr


def test_scripts_that_tests_import_have_different_names() -> None:
    """Tests of one process import the scripts of both folders as modules without a package."""
    scripts = [path.name for folder in ("docs", "benchmarks", "scripts") for path in (ROOT / folder).glob("*.py")]
    assert sorted(set(scripts)) == sorted(scripts)


def test_a_marker_that_is_no_part_of_a_region_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    make = import_module("make")
    example = "<!-- begin example rules.py -->\nold\n<!-- end example rules.py -->"
    example = example.replace("rules.py", next(path.name for path in sorted(make.EXAMPLES.glob("*.py"))))
    written = make.filled(f"a\n{example}\nb\n{example}")
    assert "old" not in written
    assert make.filled(written) == written
    alone = [line for line in example.splitlines() if line != "old"]
    for marker in (*alone, f"<!-- write {alone[0][11:]}", *(f"  {line}" for line in alone), f"{alone[0]} "):
        with pytest.raises(AssertionError, match=re.escape(repr(marker))):
            make.filled(f"{example}\n{marker}\nold\n")
    with pytest.raises(AssertionError, match=re.escape(repr(alone[0]))):
        make.filled(f"{alone[0]}\nold\n{example}")


@pages
def test_each_generated_part_begins_and_ends(page: Path) -> None:
    markers = re.findall(r"(?m)^<!-- (\w+) (.+?) -->$", page.read_text())
    assert markers[::2] == [("begin", what) for _, what in markers[1::2]]
    assert markers[1::2] == [("end", what) for _, what in markers[::2]]


def test_each_fault_has_a_code_of_the_table_and_each_code_a_fault() -> None:
    folders = ("graph", "nodes", "runtime/cli", "runtime/cluster", "runtime/plan")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    nodes = [
        node
        for path in paths
        if path.name not in ("errors.py", "fake.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    faults = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("Fault", "fault")]
    given = [call.args[0] for call in faults if len(call.args) >= 4]
    given += [word.value for call in calls for word in call.keywords if word.arg == "code"]
    codes = {node.value for node in given if isinstance(node, ast.Constant)}
    listed = [code for code, _, _ in CODES]
    assert len(set(listed)) == len(listed)
    assert codes - set(listed) == set()
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= {f"missing-{name}" for name in NEEDED}
    assert set(listed) - words == set()


def test_each_code_has_a_cause_and_a_cure() -> None:
    for code, cause, cure in CODES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", code)
        assert cause.endswith(".")
        assert cure.endswith(".")


def test_the_names_that_a_nodes_figures_must_not_have_are_the_first_eight_rows() -> None:
    text = (ROOT / "docs" / "run-folder.md").read_text().partition("## metrics.jsonl")[2]
    rows = re.findall(r"(?m)^\| (`.+?) \|", text)
    assert {name for row in rows[:8] for name in re.findall(r"`(\w+)`", row)} == COLUMNS


def test_the_documentation_stays_short() -> None:
    assert len(README.read_text()) <= 16_000
    # Count neither directives, which a reference replaces, nor names of tests that show a promise.
    uncounted = re.compile(r"(?m)^::: .*\n|`test_\w+`")
    assert sum(len(uncounted.sub("", written(page))) for page in PAGES) <= 150_000
