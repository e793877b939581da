"""Writes what the documentation shows of the project itself, so that it stays true.

    python docs/make.py [PATH …]            write the pictures and the regions of the pages, or those of PATH alone
    python docs/make.py --check [PATH …]    exit status 1, naming them, if some are not as they would be written

In README.md and the pages of docs/ a region stands between the lines `<!-- begin WHAT -->` and `<!-- end WHAT -->`. It
is kept in the file; a build of the site fails for one that is stale (site_hooks.py). PROGRAM is a built-in name, or
FILE.py:FUNCTION in docs/examples. WHAT is one of

    source NAME               a built-in program's function, as it is written
    example FILE              a file of docs/examples
    show PROGRAM              what `penstock show PROGRAM` prints
    check PROGRAM             what `penstock check PROGRAM` prints
    schedule PROGRAM FLAG …   the period and the drawing that `penstock simulate PROGRAM` prints
    fields CLASS              a table of a file of JSON: the fields of a class of runtime/record/typed_json.py
    help [VERB]               what `penstock VERB --help` prints
    algorithms                the table of the algorithms (see library.py)
    graphs                    a section for each of them: its picture, its source, what `penstock show` prints
    names FOLDER              links to the algorithms, FOLDER/NAME.py, and to the other programs
    figures NAME [TABLE …]    benchmarks/results/NAME.json as tables, with date, commit and machine
    processors NAMES TABLE COLUMN …
                              that table of each of the results (NAME,NAME,…) on each kind of processor, as one
    gpu CARD PHASE COLUMN …   cases of a phase of `gpu.py` on that card, with these columns
    excerpt NAME              benchmarks/results/NAME.txt: a recorded output, most lines of progress left out
"""

import argparse
import ast
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import BytesIO, TextIOWrapper
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from library import Entry, algorithms, loss, others

from penstock.graph import Graph, GraphError, Program, check, load, trace
from penstock.graph.show import text
from penstock.graph.svg import svg
from penstock.host import module_command
from penstock.runtime.cli.main import main as cli
from penstock.runtime.cli.tracing import faults_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = ROOT / "docs" / "img" / "graphs"
EXAMPLES = ROOT / "docs" / "examples"
RESULTS = ROOT / "benchmarks" / "results"
HOME = "/home/me"
"""Where pages say that the examples are."""
# Seconds in which a command ends: it may have the lowest priority beside tests that keep all cores busy.
COMMAND_S = 600.0
MARKER = re.compile(r"(?m)^.*<!-- *(?:begin|end|write)\b.*")
REGION = re.compile(r"(?ms)^<!-- begin (?P<what>[^>]+?) -->\n(?P<body>.*?)^<!-- end (?P=what) -->$")
PROCESSORS = {"AMX": "_amx", "AMX off": "_amx_off", "AVX-512": "", "AVX2": "_avx2"}
"""The kinds of processors, by the ends of their results' names (`by_processor` of the benchmarks)."""
FILES = ROOT / "runtime" / "record" / "typed_json.py"
KINDS = {
    "Text": "text",
    "Count": "integer",
    "Number": "number or null",
    "Annotated": "number",
    "dict": "object",
    "list": "list",
}
"""The types of its fields in words."""
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1"}
"""The environment of a command whose output is shown."""
KEPT = 2
"""Lines of progress of an excerpt that are kept at each end of a row of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; name what is stale")
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="files or folders (default: all)")
    given = parser.parse_args()
    stale = [(path, wanted) for path, wanted in generated(given.paths or [ROOT]) if not _is(path, wanted)]
    for path, wanted in stale:
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted)
        print(f"{path.relative_to(ROOT)}: {'stale; run `python docs/make.py`' if given.check else 'written'}")
    sys.exit(1 if given.check and stale else 0)


def generated(places: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """What each picture and page in `places` is to hold."""
    roots = [place.resolve() for place in places]

    def chosen(path: Path) -> bool:
        return any(path.is_relative_to(root) for root in roots)

    pictures = {PICTURES / f"{one.name}.svg": one.name for one in algorithms()}
    for place, root in zip(places, roots, strict=True):
        if not any(path.is_relative_to(root) for path in (*pictures, *PAGES)):
            sys.exit(f"given {place}, needed README.md, a page of docs/, a picture of docs/img/graphs, or their folder")
    for path, name in pictures.items():
        if chosen(path):
            yield path, picture(name)
    for page in filter(chosen, PAGES):
        yield page, filled(page.read_text())


def filled(page: str) -> str:
    """The text of a page with all its regions written again. A marker that neither begins nor ends a region is
    refused: it would be published as it is."""

    def region(match: re.Match[str]) -> str:
        return f"<!-- begin {match['what']} -->\n{_write(match['what'])}\n<!-- end {match['what']} -->"

    beside = MARKER.findall(REGION.sub(r"\g<body>", page))
    assert not beside, f"given {beside}, needed a line `<!-- begin WHAT -->` and below it `<!-- end WHAT -->`"
    return REGION.sub(region, page)


def _write(what: str) -> str:
    writer, *words = shlex.split(what)
    return WRITERS[writer](*words)


def program(name: str) -> Program[..., Any]:
    """A built-in program, or FILE.py:FUNCTION of docs/examples."""
    with _in_examples():
        found = load(name)
    assert isinstance(found, Program)
    return found


@contextmanager
def _in_examples() -> Iterator[None]:
    """The folder of the examples as the current one, where they import each other."""
    before = os.getcwd()
    os.chdir(EXAMPLES)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))
        os.chdir(before)


def graph(name: str) -> Graph:
    return trace(program(name))


def picture(name: str) -> str:
    return svg(graph(name)).rstrip("\n") + "\n"


# Regions -----------------------------------------------------------------------------------------------------


def source(name: str) -> str:
    return fenced(inspect.getsource(program(name).fn).rstrip(), "python")


def example(name: str) -> str:
    return fenced((EXAMPLES / name).read_text().rstrip(), f'python title="{name}"')


def show(name: str) -> str:
    return fenced(f"$ penstock show {name}\n{text(graph(name))}", "console")


def checked(name: str) -> str:
    """What `penstock check` says, with the folder of the examples as /home/me."""
    try:
        faults = check(graph(name), batch=8)
    except GraphError as error:
        faults = list(error.faults)
    assert faults, f"{name} is shown for its faults, and has none"
    return fenced(f"$ penstock check {name}\n{faults_text(faults)}".replace(str(EXAMPLES), HOME), "console")


def fields_table(name: str) -> str:
    """Each field with its type in words and its docstring."""
    (found,) = (item for item in ast.parse(FILES.read_text()).body if getattr(item, "name", "") == name)
    assert isinstance(found, ast.ClassDef)
    rows = []
    for field, doc in pairwise(found.body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(doc, ast.Expr), f"{name}.{ast.unparse(field.target)} has no docstring"
            assert isinstance(doc.value, ast.Constant)
            kind = re.match(r"(?:NotRequired\[)?(\w+)", ast.unparse(field.annotation))
            assert kind
            rows.append([f"`{ast.unparse(field.target)}`", KINDS[kind[1]], str(doc.value.value)])
    return _table(["field", "type", "meaning"], rows)


def help_text(*verb: str) -> str:
    command = ["penstock", *verb, "--help"]
    # In this process: a process for each verb would take most of its time to import the same modules.
    output = TextIOWrapper(BytesIO(), encoding="utf-8")
    with redirect_stdout(output), mock.patch.dict(os.environ, PLAIN):
        try:
            cli(command[1:])
        except SystemExit as leaving:
            status = leaving.code
    assert status == 0, f"{' '.join(command)}: exit status {status}"
    output.seek(0)
    printed = output.read().rstrip()
    if "\nPROGRAM is package" in printed:  # each verb lists the built-in programs, which have a page
        printed = re.sub(r"(?ms)^PROGRAM is package.*?(?=^Its keyword)", "", printed)
    return fenced(f"$ {' '.join(command)}\n{printed}", "console")


def schedule(*words: str) -> str:
    """A simulation from the folder of the examples."""
    command = ["penstock", "simulate", *words, "--width", "90"]
    kept = [line for line in _printed(command).splitlines() if re.match(r"period|groups|\w+/\d+ ", line)]
    return fenced("\n".join([f"$ {' '.join(command)}", *kept]), "console")


def _printed(command: list[str]) -> str:
    """What a command of ours prints, 100 columns wide.

    One that stands still ends with the stack of each of its processes on stderr, and is begun once more.
    """
    run = module_command("penstock.runtime.cli.main", *command[1:])
    place = {**os.environ, **PLAIN, "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    for _ in range(2):
        # A group of processes of its own, all of which can be asked where they are.
        process = subprocess.Popen(
            run, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=EXAMPLES, env=place, process_group=0
        )
        try:
            stdout, stderr = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            _, stderr = process.communicate(timeout=COMMAND_S)
            print(f"{' '.join(command)}: has not ended within {COMMAND_S:g} s\n{stderr}", file=sys.stderr)
        else:
            break
    assert process.returncode == 0, f"{' '.join(command)}: {stderr}"
    return stdout


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
        code = f"programs/{one.name}.py"
        parts += [
            f"### {one.name}",
            f"{one.summary}.",
            f"![The graph of {one.name}](img/graphs/{one.name}.svg)",
        ]
        parts += [_folded(f"Source: {code}", fenced((ROOT / code).read_text().rstrip(), "python"))]
        parts += [_folded(f"As text: penstock show {one.name}", show(one.name))]
    return "\n\n".join(parts)


def _folded(title: str, content: str) -> str:
    """A block that a click opens, both in the site and where Markdown is shown."""
    return f'<details class="quote" markdown="1">\n<summary>{title}</summary>\n\n{content}\n\n</details>'


def program_names(folder: str) -> str:
    def links(found: list[Entry]) -> str:
        return ",\n".join(f"[`{one.name}`]({folder}/{one.name}.py)" for one in found)

    return f"{links(algorithms())}.\nOther programs: {links(others())}."


def figures(name: str, *tables: str) -> str:
    """`tables` names those that are shown; without any, all and the single figures are."""
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
    if plain and not tables:
        parts.append(_table(["figure", "value"], [[key, _cell(value)] for key, value in plain.items()]))
    for key, rows in record.items():
        if _is_table(rows) and (key in tables or not tables):
            columns = list(dict.fromkeys(column for row in rows for column in row))
            parts.append(f"{key.replace('_', ' ')}:\n\n" if len(record) - len(plain) > 1 else "")
            parts.append(_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows]))
    return "\n\n".join(part.strip("\n") for part in parts if part)


def processors(names: str, table: str, *columns: str) -> str:
    """Which model a row is of it says itself, or its result's name does; what a row shares with the one above it is
    left out."""
    shown: list[list[str]] = []
    about: dict[str, dict[str, None]] = {}
    for name in names.split(","):
        for kind, suffix in PROCESSORS.items():
            if not (path := RESULTS / f"{name}{suffix}.json").exists():
                continue
            record: dict[str, Any] = json.loads(path.read_text())
            on, measured = record["machine"], f"{record['date']} (commit {record['commit']})"
            about.setdefault(f"{kind}: {on['cpu']}, {on['cores']} cores", {})[measured] = None
            model = name.rpartition("_")[2]
            shown += [[row.get("model", model), kind, *(_cell(row.get(c)) for c in columns)] for row in record[table]]
    models = [row[0] for row in shown]
    shown.sort(key=lambda row: models.index(row[0]))
    rows = [list(row) for row in shown]
    for above, row, left in zip(shown, shown[1:], rows[1:], strict=False):
        for at in range(2):
            if above[: at + 1] == row[: at + 1]:
                left[at] = ""
    under = "; ".join(f"{machine}, {', '.join(measured)}" for machine, measured in about.items())
    return f"*{under}.*\n\n{_table(['model', 'processor', *columns], rows)}"


def gpu(card: str, phase: str, *columns: str) -> str:
    record: dict[str, Any] = json.loads((RESULTS / f"gpu_{card}.json").read_text())
    found, names = record["phases"][phase], [column.replace("_", " ") for column in columns]
    cases = {name: each for name, each in found.items() if isinstance(each, dict) and columns[0] in each}
    rows = [[name, *(_cell(each.get(column)) for column in columns)] for name, each in cases.items()]
    about = f"{found['date']}, commit {found['commit']}, {record['machine']['gpu']}, PyTorch {record['torch']}"
    return f"*{about}*\n\n{_table([phase, *names], rows)}"


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
    "example": example,
    "show": show,
    "check": checked,
    "fields": fields_table,
    "help": help_text,
    "schedule": schedule,
    "algorithms": algorithm_table,
    "graphs": algorithm_graphs,
    "names": program_names,
    "figures": figures,
    "processors": processors,
    "gpu": gpu,
    "excerpt": excerpt,
}


def _is(path: Path, wanted: str) -> bool:
    return path.exists() and path.read_text() == wanted


if __name__ == "__main__":
    main()
