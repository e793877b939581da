"""Seconds of `penstock run aipo` until its first update begins, with the base model in the cache.

    python benchmarks/startup.py [--repeats 5] [--against COMMIT] [--keep]

`ranks ready`: all processes have started, and training begins. `first update`: the trainer begins to learn, after
groups have been sampled. `processor` is the processor seconds of all processes until the command has ended, which a
busy machine changes little. Nothing is evaluated, since that is not part of the start. With `--against`, another commit
is measured in turn.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import ROOT, Keep, publish, spread


def start(tree: Path, folder: Path) -> dict[str, float]:
    """Run the code in `tree` once; return seconds since the start of the command."""
    words = ["run", "aipo", "--plain", "--updates=1", "--eval-groups=0", "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "penstock.runtime.cli.main", *words]
    found: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder.parent) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for name, begins in (("ranks ready", "training"), ("first update", "update 1/1")):
                if line.startswith(begins):
                    found[name] = time.monotonic() - began
    if process.returncode:
        raise RuntimeError(f"penstock run ended with {process.returncode}")
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["first update"] -= row["update_s"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["processor"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", default="", metavar="COMMIT", help="another commit, measured in turn")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/startup.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"now": ROOT}
        if args.against:
            trees = {"before": Path(scratch) / "tree", **trees}
            subprocess.run(["git", "worktree", "add", "--detach", trees["before"], args.against], cwd=ROOT, check=True)
        try:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            for repeat in range(args.repeats + 1):
                for name, tree in trees.items():
                    found = start(tree, Path(scratch) / f"{name}-{repeat}")
                    print(f"{name}: {json.dumps(found)}", flush=True)
                    if repeat:  # the first one writes Python's compiled files
                        rows[name].append(found)
        finally:
            if args.against:
                subprocess.run(["git", "worktree", "remove", "--force", trees["before"]], cwd=ROOT, check=True)
    figures: list[dict[str, Any]] = [
        {"code": name, **{what: spread([one[what] for one in found]) for what in found[0]}}
        for name, found in rows.items()
    ]
    publish("startup", {"against": args.against, "rows": figures}, args.keep)


if __name__ == "__main__":
    main()
