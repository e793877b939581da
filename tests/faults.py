"""Programs with faults, in files of their own. A comment above a line has the fault expected there: `# CODE: words`."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.graph import Fault, GraphError, check, load, trace

MARK = re.compile(r"\s*# ([a-z]+(?:-[a-z]+)+): (.+)")
Told = list[tuple[int, str, str]]


def marked(file: Path) -> dict[str, Told]:
    """Return the expected faults of each program as (line, code, words), in the order of the lines."""
    text = file.read_text()
    marks: Told = []
    above: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := MARK.fullmatch(line):
            above.append((match[1], match[2]))
        else:
            marks += [(number, code, words) for code, words in above]
            above = []
    found = {}
    for item in ast.parse(text).body:
        if isinstance(item, ast.FunctionDef) and any(ast.unparse(d).startswith("program") for d in item.decorator_list):
            begin, end = item.decorator_list[0].lineno, item.end_lineno or item.lineno
            found[item.name] = [mark for mark in marks if begin <= mark[0] <= end]
    assert sum(map(len, found.values())) == len(marks), "a mark outside of the programs"
    return found


def faults_of(make: Callable[[], Any], **settings: Any) -> list[Fault]:
    """Return the faults that are found while a graph is made, or else by `check`."""
    try:
        return check(make(), **settings)
    except GraphError as error:
        return list(error.faults)


def assert_told(file: Path, name: str, expected: Told, **options: Any) -> None:
    """Assert that a program has the expected faults, in their order, each with all its words (given … needed)."""
    program = load(f"{file}:{name}")
    faults = faults_of(lambda: trace(program, options), batch=4)
    lines = [(int(fault.where.removeprefix(f"{file}:")), fault.code) for fault in faults]
    assert lines == [(line, code) for line, code, _ in expected], "\n".join(map(str, faults))
    for fault, (_, _, words) in zip(faults, expected, strict=True):
        text = f"{fault.what} given {fault.given} needed {fault.needed}"
        for word in words.split(" … "):
            assert word in text
