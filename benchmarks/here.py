"""Runs in this process on one core, and several such processes at once that continue an interrupted benchmark."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.graph import Program, trace
from penstock.graph.program import trace_evaluation
from penstock.runtime.cli.base_model import base_model
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.inprocess import run_in_process
from penstock.runtime.control.run_config import EVALUATION, RunConfig, RunOptions
from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows

Job = dict[str, Any]
ONE_CORE = Cluster(hosts=(Host(name="local", cores=1),))
"""One thread for every rank, so that as many runs as there are cores hardly disturb each other."""


def run_here(
    program: Program[..., Any], options: Mapping[str, Any], flags: RunOptions, keep: Path | None = None
) -> Job:
    """Run to the end; return the summary with the `rows` of metrics.jsonl and the wall-clock and processor seconds.

    The carried values of the last checkpoint are copied to `keep`, each into a folder.
    """
    graph = trace(program, options)
    evaluation = trace_evaluation(program, graph, EVALUATION) if program.evaluation is not None else None
    config = RunConfig.make(graph, evaluation, ONE_CORE, replace(flags, device="cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run")
        config.write(folder, {"program": program.__name__})
        began, busy = time.monotonic(), time.process_time()
        run_in_process(folder, lambda line: None)
        taken = {"seconds": round(time.monotonic() - began, 2), "cpu_s": round(time.process_time() - busy, 2)}
        saved = latest_checkpoint(folder)
        if keep is not None and saved is not None:
            shutil.copytree(saved.folder, keep, dirs_exist_ok=True)
        return {**folder.read_json("summary.json"), **taken, "rows": read_rows(folder.metrics)}


def serve(work: Callable[[Job], Job]) -> None:
    """Run a worker: read one job per line from standard input, and print each result as one line."""
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), flush=True)


def shared_base(scratch: Path) -> Path:
    """Return the demo's base model, copied into `scratch` at the first call, so that all runs begin from the same one
    even if code changes in the meantime."""
    place = scratch / "base"
    if not place.is_dir():
        shutil.copytree(base_model("", lambda line: None), scratch / "copying", dirs_exist_ok=True)
        (scratch / "copying").rename(place)
    return place


def spread_out(jobs: Sequence[Job], worker: Sequence[str], processes: int, kept: Path) -> list[Job]:
    """Return the results of all jobs, in the jobs' order: those in the file `kept`, one per line, and the others by
    workers.

    `worker` are the arguments of a Python command that calls `serve`; a result also has the fields of its job. Raises
    RuntimeError when a worker ends early; the results until then stay in `kept`.
    """
    done = {_key(job, result): result for result in read_lines(kept) for job in jobs if _same(job, result)}
    missing = [job for job in jobs if _key(job, job) not in done]
    waiting = iter(missing)  # shared by all threads: each of them takes the next one
    print(f"{len(done)} of {len(jobs)} runs are there, {len(missing)} to do", flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("".join(json.dumps(result) + "\n" for result in read_lines(kept)))  # without a torn last line
    with kept.open("a") as file, ThreadPoolExecutor(max(1, processes)) as threads:

        def attend() -> None:
            with subprocess.Popen([sys.executable, *worker], stdin=-1, stdout=-1, text=True) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                while (job := next(waiting, None)) is not None:
                    process.stdin.write(json.dumps(job) + "\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                    if not line:
                        raise RuntimeError(f"the worker ended at {job}; see above")
                    file.write(line)
                    file.flush()
                    done[_key(job, job)] = json.loads(line)
                    print(f"{len(done)}/{len(jobs)}  {line[:150].rstrip()}", flush=True)

        for future in [threads.submit(attend) for _ in range(min(processes, len(missing)))]:
            future.result()
    return [done[_key(job, job)] for job in jobs]


def read_lines(path: Path) -> list[Job]:
    """Read the complete lines of a file of JSON objects; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _same(job: Job, result: Job) -> bool:
    return all(result.get(name) == value for name, value in job.items())


def _key(job: Job, values: Job) -> str:
    return json.dumps({name: values[name] for name in sorted(job)})
