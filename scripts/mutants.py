"""Check that the tests still notice known faults: `python scripts/mutants.py [ID …] [--jobs N]`.

`tests/mutants.toml` lists mutants: small changes of the product, each of which breaks one rule and makes a test fail.
For each of them this script changes a copy of the tree and runs the tests that must fail. The working tree is only
read.

The list survives moved files and reformatting. A mutant's text is searched for in all product files, regardless of
white space and trailing commas; a test that is not in the listed file is searched for by its function's name. What is
found neither way is reported and must be updated by hand.

Prints one line for each mutant:
    killed           a named test failed, or did not end in time
    survived         all named tests passed: no test checks the rule any more
    does not apply   the text is in no product file, or in several places
    test missing     no test has that name, or it was skipped or deselected
    broken           the copy could not be tested: a syntax error, an import error, or pytest had to be killed
    red without it   a named test fails in the unchanged tree
Exits with 0 if all were killed.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = "tests/mutants.toml"
PRODUCT = ("graph", "nodes", "runtime", "programs")

PASSED, FAILED = 0, 1
"""Exit statuses of pytest. The others mean that the tests were not run as requested."""
START_S = 120.0
"""Seconds allowed for pytest to start and collect the tests, on a busy machine."""
SKIPPED = re.compile(r"^\d+ (skipped|deselected)", re.MULTILINE)
TOKEN = re.compile(r"\w+|[^\w\s]")
"""The tokens by which texts are compared: words and punctuation, without the white space between them."""


class MutantError(ValueError):
    """A mutant cannot be tried. Has its verdict and the reason."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


@dataclass(frozen=True)
class Mutant:
    """`old` is the product text that implements `rule`, `new` the text that breaks it, and `tests` are the ids of the
    tests that fail then.

    `file` is where `old` was when the mutant was written. It is a hint for readers: `old` is found in any file.
    """

    id: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    word: str
    why: str = ""
    seconds: float = 0.0


def read_mutants(path: Path) -> list[Mutant]:
    """Return all mutants of the list. Raises ValueError if two have the same id."""
    entries = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    if twice := [name for name, number in Counter(mutant.id for mutant in mutants).items() if number > 1]:
        raise ValueError(f"{path}: given the ids {', '.join(twice)} twice, needed one mutant for each")
    return mutants


def pattern(text: str) -> re.Pattern[str]:
    """Return a pattern that finds a text however a formatter breaks its lines: white space between words and
    punctuation is free, and so is a comma before a closing bracket. "…" matches anything within a line."""
    parts, before = [], ""
    for token in TOKEN.findall(text):
        if before:
            both_words = (before[-1].isalnum() or before[-1] == "_") and (token[0].isalnum() or token[0] == "_")
            parts.append(r"\s+" if both_words else r"\s*")
        if token in ")]}":
            parts.append(r",?\s*")
        parts.append(".*?" if token == "…" else re.escape(token))
        before = token
    start, end = (r"\b" if re.match(r"\w", text.strip()[place]) else "" for place in (0, -1))
    return re.compile(f"{start}{''.join(parts)}{end}")


def mutated(mutant: Mutant, root: Path) -> tuple[Path, str]:
    """Return the product file that contains the mutant's text, and its content with the change. Raises MutantError."""
    sought, words = pattern(mutant.old), set(TOKEN.findall(mutant.old)) - {"…"}
    paths = sorted(path for folder in PRODUCT for path in (root / folder).rglob("*.py"))
    places = [
        (path, text, found)
        for path in paths
        for text in [path.read_text()]
        # Checking for the single words is much faster than searching for the whole text.
        if all(word in text for word in words)
        for found in sought.finditer(text)
    ]
    if len(places) != 1:
        where = ", ".join(sorted({str(path.relative_to(root)) for path, _, _ in places}))
        why = f"in {len(places)} places: {where}" if places else f"in no product file (it was in {mutant.file})"
        raise MutantError("does not apply", why)
    path, text, found = places[0]
    # The lines of a replacement after the first get the indentation of the line that is replaced.
    indent = re.match(r"\s*", text[text.rfind("\n", 0, found.start()) + 1 :])
    new = mutant.new.strip().replace("\n", "\n" + (indent[0] if indent else ""))
    changed = text[: found.start()] + new + text[found.end() :]
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise MutantError("broken", f"{path.relative_to(root)}:{error.lineno}: {error.msg}") from None
    return path, changed


def located(mutant: Mutant, root: Path) -> list[str]:
    """Return the current ids of the mutant's tests that still exist. Raises MutantError if there is none."""
    ids = [f"{path.relative_to(root)}::{name}" for name, path in _places(mutant.tests, root)]
    if not ids:
        raise MutantError("test missing", f"none of {', '.join(mutant.tests)}")
    return ids


def _places(tests: Iterable[str], root: Path) -> Iterator[tuple[str, Path]]:
    """Yield each test's function with its file: the named file, or every test file that defines such a function."""
    for test in tests:
        file, _, name = test.partition("::")
        function = re.compile(rf"^def {re.escape(name)}\(", re.MULTILINE)
        named = root / file
        if named.is_file() and function.search(named.read_text()):
            yield name, named
            continue
        for path in sorted((root / "tests").rglob("test_*.py")):
            if function.search(path.read_text()):
                yield name, path


class Copy:
    """A copy of the tree in which tests are run. `timeout` is in seconds per test."""

    def __init__(self, root: Path, timeout: float) -> None:
        self.root, self.timeout = root, timeout
        self._ticks = count(int(root.stat().st_mtime) + 10, 10)

    @staticmethod
    def of(tree: Path, folder: Path, timeout: float) -> "Copy":
        """Copy tracked files, and untracked files that git does not ignore; links are copied as links."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            source, target = tree / name, folder / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        return Copy(folder, timeout)

    def write(self, path: Path, text: str) -> None:
        """Write a file with a unique modification time: Python validates compiled files by the source's time in
        seconds and its size."""
        path.write_text(text)
        tick = next(self._ticks)
        os.utime(path, (tick, tick))

    def pytest(self, tests: Sequence[str], *options: str) -> tuple[int | None, str]:
        """Return the exit status of pytest, None if it had to be killed, and what it printed."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *options, *tests]
        command += ["-o", f"timeout={self.timeout}"]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that processes that the tests have started can be killed with them
        )
        try:
            said, _ = process.communicate(timeout=START_S + self.timeout * len(tests))
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            return None, said


def attempt(mutant: Mutant, copy: Copy, red: frozenset[str]) -> Verdict:
    """Change the copy, run the mutant's tests, and undo the change. `red` are tests that fail without any change."""
    began = monotonic()
    try:
        tests = located(mutant, copy.root)
        if failing := sorted(red.intersection(tests)):
            raise MutantError("red without it", failing[0])
        path, changed = mutated(mutant, copy.root)
    except MutantError as error:
        return Verdict(mutant, error.verdict, str(error))
    original = path.read_text()
    copy.write(path, changed)
    try:
        status, said = copy.pytest(tests, "-x", "--tb=line")
    finally:
        copy.write(path, original)
    if status == FAILED:
        word, why = "killed", ""
    elif status == PASSED and SKIPPED.search(said):
        word, why = "test missing", said.strip().splitlines()[-1]
    elif status == PASSED:
        word, why = "survived", f"{path.relative_to(copy.root)}: {mutant.rule}"
    else:
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        word, why = "broken", "the tests did not end" if status is None else last
    return Verdict(mutant, word, why, monotonic() - began)


def failing_now(mutants: Iterable[Mutant], copy: Copy) -> frozenset[str]:
    """Return the named tests that fail in the unchanged tree."""
    tests = dict.fromkeys(
        f"{path.relative_to(copy.root)}::{name}" for each in mutants for name, path in _places(each.tests, copy.root)
    )
    if not tests:
        return frozenset()
    status, said = copy.pytest(list(tests), "--tb=no", "-rfE")
    if status not in (PASSED, FAILED):
        raise SystemExit(f"the tests could not be run without a mutant:\n{said[-2000:]}")
    return frozenset(re.findall(r"^(?:FAILED|ERROR) (\S+::\w+)", said, re.MULTILINE))


def look(mutants: Iterable[Mutant]) -> int:
    """Print the mutants that do not apply to the working tree or have no test there; return 0 if there are none."""
    status = 0
    for mutant in mutants:
        try:
            located(mutant, ROOT)
            mutated(mutant, ROOT)
        except MutantError as error:
            status = 1
            print(f"{error.verdict:15} {mutant.id}  {error}")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", metavar="ID", help="these mutants; all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each test (default: 30)")
    parser.add_argument("--dry", action="store_true", help="only look whether all texts and tests are still there")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    flags = parser.parse_args(argv)
    mutants = read_mutants(ROOT / MUTANTS)
    if unknown := set(flags.only) - {mutant.id for mutant in mutants}:
        parser.error(f"given {', '.join(sorted(unknown))}; needed ids of {MUTANTS}")
    chosen = [mutant for mutant in mutants if not flags.only or mutant.id in flags.only]
    if flags.dry:
        return look(chosen)
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        made = [Copy.of(ROOT, Path(folder, str(number)), flags.timeout) for number in range(max(1, flags.jobs))]
        for copy in made:
            copies.put(copy)
        red = frozenset[str]() if flags.no_baseline else failing_now(chosen, made[0])

        def run(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return attempt(mutant, copy, red)
            finally:
                copies.put(copy)

        verdicts = []
        with ThreadPoolExecutor(len(made)) as threads:
            for verdict in threads.map(run, chosen):
                verdicts.append(verdict)
                print(f"{verdict.word:15} {verdict.seconds:5.1f} s  {verdict.mutant.id}  {verdict.why}", flush=True)
    counts = Counter(verdict.word for verdict in verdicts)
    said = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    print(f"{len(verdicts)} mutants: {said}; {monotonic() - began:.0f} s")
    return 0 if counts["killed"] == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
