"""The code that one prompt group passes through in one process: how many files a reader has to open.

    python benchmarks/walk.py [--keep]

`aipo` runs as with `penstock run aipo --in-process`, with 1 group of 2 samples per update and lag 0, so that one update
covers one group, from its prompt to the generation of the next. The functions that are called between the end of one
update and the end of the next are counted. A call is between two functions of Penstock; frames between them (torch, the
standard library) are skipped. A change of package is a call from one package to another one: graph, nodes, programs, or
one of the runtime's.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from report import ROOT, Keep, publish

from penstock.graph import trace
from penstock.programs.aipo import aipo
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.inprocess import run_in_process
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.folder import RunFolder

FIRST, UPDATES = 2, 5
"""The update at whose end counting starts, after everything that is made once; and the number of updates."""


class Walk:
    """A profile function that counts calls."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.functions: set[CodeType] = set()
        self._files: dict[CodeType, str] = {}

    def file(self, code: CodeType) -> str:
        """Return the file of a function, relative to the repository; "" if it is not one of Penstock's."""
        if code not in self._files:
            path = Path(code.co_filename).resolve()
            ours = any(path.is_relative_to(ROOT / folder) for folder in ("graph", "nodes", "runtime", "programs"))
            self._files[code] = str(path.relative_to(ROOT)) if ours else ""
        return self._files[code]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        # A comprehension is part of its function.
        if event != "call" or frame.f_code.co_name.startswith("<") or not (called := self.file(frame.f_code)):
            return
        caller = frame.f_back
        while caller is not None and not self.file(caller.f_code):
            caller = caller.f_back
        self.functions.add(frame.f_code)
        self.calls[self.file(caller.f_code) if caller else "", called] += 1

    def counted(self) -> dict[str, int]:
        package = {
            file: file.split("/")[: 2 if file.startswith("runtime/") else 1] for pair in self.calls for file in pair
        }
        return {
            "files": len({called for _, called in self.calls}),
            "functions": len(self.functions),
            "calls": self.calls.total(),
            "calls_across_files": sum(n for (caller, called), n in self.calls.items() if caller != called),
            "changes_of_package": sum(n for (a, b), n in self.calls.items() if package[a] != package[b]),
        }


@contextmanager
def profiled(walk: Walk) -> Iterator[Any]:
    """Give a function that receives the lines for the display and counts calls between the ends of two updates."""
    seen = 0

    def hear(line: dict[str, Any]) -> None:
        nonlocal seen
        if line["kind"] == "row":
            seen += 1
            sys.setprofile(walk if seen == FIRST else None)

    try:
        yield hear
    finally:
        sys.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/walk.json")
    args = parser.parse_args()
    walk = Walk()
    options = RunOptions(updates=UPDATES, batch=1, max_tokens=4, slots=4, eval_groups=0, device="cpu")
    one_core = Cluster(hosts=(Host(name="local", cores=1),))
    config = RunConfig.make(trace(aipo, {"samples": 2, "lag": 0}), None, one_core, options)
    with tempfile.TemporaryDirectory() as scratch, profiled(walk) as hear:
        folder = RunFolder.create(Path(scratch) / "run")
        config.write(folder, {"program": "aipo"})
        status = run_in_process(folder, hear)
    if status != "done" or not walk.calls:
        raise SystemExit(f"the run ended as {status!r}, and {walk.calls.total()} calls were counted")
    publish("walk", walk.counted(), args.keep)


if __name__ == "__main__":
    main()
