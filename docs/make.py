"""Writes what the documentation shows of the project itself, so that it stays true.

    python docs/make.py            write the picture and every marked region
    python docs/make.py --check    exit status 1, naming them, if some are not as they would be written

A region stands between `<!-- begin WHAT -->` and `<!-- end WHAT -->` in README.md or a page of docs/. WHAT is one of

    source NAME            a built-in program's function, as it is written
    show NAME              what `penstock show NAME` prints
    help                   what `penstock --help` prints
    schedule NAME FLAG …   the period and the drawing that `penstock simulate NAME` prints
    tree FOLDER …          the files of these folders, with the first sentence of each one's docstring
    algorithms             the table of the algorithms (see algorithms.py)
    graphs                 a section for each of them: its options, and what `penstock show NAME` prints
    names FOLDER           links to the algorithms, FOLDER/NAME.py, and to the other programs
    figures NAME           benchmarks/results/NAME.json as a table, with date, commit and machine
    excerpt NAME           benchmarks/results/NAME.txt: a recorded output, most lines of progress left out
"""

import argparse
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from algorithms import Entry, algorithms, loss, others

from penstock.graph import Graph, Program, load, trace
from penstock.graph.show import text
from penstock.graph.svg import svg
from penstock.runtime.cli.main import overview

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = {"docs/img/aipo.svg": "aipo"}
REGION = re.compile(r"(?ms)^<!-- begin (?P<what>[^>]+?) -->\n.*?^<!-- end (?P=what) -->$")
KEPT = 2
"""Lines of progress of an excerpt that are kept at each end of a row of them."""
PHRASE = 100
"""The longest phrase for a file; a longer first sentence ends at its last colon or semicolon, else at a comma."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; name what is stale")
    check = parser.parse_args().check
    stale = [path for path, wanted in generated().items() if not _is(path, wanted)]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated()[path])
        print(f"{path.relative_to(ROOT)}: {'stale; run `python docs/make.py`' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@lru_cache
def generated() -> dict[Path, str]:
    """What each picture and page is to hold."""
    pictures = {ROOT / name: svg(graph(program)).rstrip("\n") + "\n" for name, program in PICTURES.items()}
    return pictures | {page: filled(page.read_text()) for page in pages()}


def filled(page: str) -> str:
    """A page with all its regions written again."""

    def region(match: re.Match[str]) -> str:
        what, *words = match["what"].split()
        return f"<!-- begin {match['what']} -->\n{WRITERS[what](*words)}\n<!-- end {match['what']} -->"

    return REGION.sub(region, page)


def program(name: str) -> Program[..., Any]:
    found = load(name)
    assert isinstance(found, Program)
    return found


def graph(name: str) -> Graph:
    return trace(program(name))


# Regions -----------------------------------------------------------------------------------------------------


def source(name: str) -> str:
    return fenced(inspect.getsource(program(name).fn).rstrip(), "python")


def show(name: str) -> str:
    return fenced(f"$ penstock show {name}\n{text(graph(name))}", "console")


def help_text() -> str:
    return fenced(f"$ penstock --help\n{overview().rstrip()}", "console")


def schedule(*words: str) -> str:
    command = ["penstock", "simulate", *words, "--width", "90"]
    run = [sys.executable, "-m", "penstock.runtime.cli.main", *command[1:]]
    printed = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    kept = [line for line in printed if re.match(r"period|\w+/\d+ ", line)]
    return fenced("\n".join([f"$ {' '.join(command)}", *kept]), "console")


def tree(*folders: str) -> str:
    """Files in alphabetical order within their folder, sub-folders after them; `__init__.py` speaks for its folder."""
    rows: list[tuple[str, str]] = []
    for folder in folders:
        _walk(ROOT / folder, 0, rows)
    width = max(len(name) for name, _ in rows)
    return fenced("\n".join(f"{name:<{width}}  {phrase}".rstrip() for name, phrase in rows), "text")


def _walk(folder: Path, depth: int, rows: list[tuple[str, str]]) -> None:
    pad = "  " * depth
    rows.append((f"{pad}{folder.name}/", _phrase(folder / "__init__.py")))
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    rows += [(f"{pad}  {path.name}", _phrase(path)) for path in files]
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.glob("*.py")):
            _walk(path, depth + 1, rows)


def _phrase(path: Path) -> str:
    found = re.match(r'\s*"""(.*?)"""', path.read_text(), re.DOTALL) if path.exists() else None
    if found is None:
        return ""
    first = " ".join(found[1].strip().split("\n\n")[0].split())
    sentence = re.split(r"\.(?:$|\s(?=[A-Z`]))", first)[0]
    for mark in (r"(?<!`)[:;] ", r", "):
        while len(sentence) > PHRASE and (marks := list(re.finditer(mark, sentence))):
            sentence = sentence[: marks[-1].start()]
    return sentence


def algorithm_table() -> str:
    columns = ["algorithm", "lines", "paper", "pools", "lag", "loss", "needs beside"]
    rows = [
        [
            f"[{one.name}](#{one.name})",
            str(one.lines),
            "<br>".join(one.papers),
            ", ".join(one.graph.pools()),
            one.lag,
            loss(one.graph) or "its own",
            "<br>".join(one.needs()),
        ]
        for one in algorithms()
    ]
    return _table(columns, rows)


def algorithm_graphs() -> str:
    parts = []
    for one in algorithms():
        parts += [f"### {one.name}", f"{one.summary}: [programs/{one.name}.py](../programs/{one.name}.py)."]
        parts.append(show(one.name))
    return "\n\n".join(parts)


def program_names(folder: str) -> str:
    def links(found: list[Entry]) -> str:
        return ",\n".join(f"[`{one.name}`]({folder}/{one.name}.py)" for one in found)

    return f"{links(algorithms())}.\nOther programs: {links(others())}."


def figures(name: str) -> str:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return f"*Not measured yet: `benchmarks/results/{name}.json` is missing.*"
    record: dict[str, Any] = json.loads(path.read_text())
    on = record.pop("machine")
    about = f"*{record.pop('date')}, commit {record.pop('commit')}, {on['cpu']}, {on['cores']} cores"
    about += f", {on['gpu']}.*" if on["gpu"] else ", no GPU.*"
    record.pop("benchmark")
    parts = [about]
    plain = {key: value for key, value in record.items() if not _is_table(value)}
    if plain:
        parts.append(_table(["figure", "value"], [[key, _cell(value)] for key, value in plain.items()]))
    for key, rows in record.items():
        if _is_table(rows):
            columns = list(dict.fromkeys(column for row in rows for column in row))
            parts.append(f"{key}:\n\n" if len(record) - len(plain) > 1 else "")
            parts.append(_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows]))
    return "\n\n".join(part.strip("\n") for part in parts if part)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _cell(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{_cell(value['median'])} ({_cell(value['min'])} to {_cell(value['max'])})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value).replace("|", "\\|")


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def excerpt(name: str) -> str:
    path = RESULTS / f"{name}.txt"
    if not path.exists():
        return f"*Not recorded yet: `benchmarks/results/{name}.txt` is missing.*"
    lines: list[str] = []
    for progress, row in groupby(path.read_text().rstrip().splitlines(), lambda line: line.startswith("update ")):
        block = list(row)
        lines += [*block[:KEPT], "…", *block[-KEPT:]] if progress and len(block) > 2 * KEPT + 1 else block
    return fenced("\n".join(lines), "console")


def fenced(content: str, language: str) -> str:
    return f"```{language}\n{textwrap.dedent(content)}\n```"


WRITERS: dict[str, Callable[..., str]] = {
    "source": source,
    "show": show,
    "help": help_text,
    "schedule": schedule,
    "tree": tree,
    "algorithms": algorithm_table,
    "graphs": algorithm_graphs,
    "names": program_names,
    "figures": figures,
    "excerpt": excerpt,
}


def _is(path: Path, wanted: str) -> bool:
    return path.exists() and path.read_text() == wanted


if __name__ == "__main__":
    main()
