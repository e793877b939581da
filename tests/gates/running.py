"""Runs of small programs, with processes or without: start one, wait for its events, look at what it left behind."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import torch
from torch import Tensor

from penstock.graph import Program, load, trace
from penstock.graph.program import trace_evaluation
from penstock.runtime.cli.report import recorded_steps
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.inprocess import run_in_process
from penstock.runtime.control.messages import record_bytes
from penstock.runtime.control.process import processes_of, sweep_processes
from penstock.runtime.control.run_config import EVALUATION, RunConfig, RunOptions
from penstock.runtime.record.event_log import commands_digest, read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.typed_json import Summary
from penstock.runtime.schedule.replay import Replayed, SegmentOrigin, replay
from penstock.runtime.tensor.checkpoint import CheckpointShard
from penstock.runtime.tensor.shm import SHM

HERE = Path(__file__).parent
# The prefix of names of programs in this folder.
FAULTS = f"{HERE / 'programs_for_gates.py'}:"
# `toy`, which waits while there are certain files in its folder `holds`.
HELD = f"{FAULTS}held"
LARGE = f"{HERE / 'program_with_large_weights.py'}:large"
# One core: each rank has one thread, as in the plain loops that it is compared with.
ONE_HOST = Cluster(hosts=(Host(name="local", cores=1),))
# Two agents on this machine, over TCP: ranks of hosts with different names do not use each other's shared memory.
TWO_NAMES = Cluster(hosts=(Host(name="a", cores=1), Host(name="b", cores=1)), pools={"generator": "b"})
# Updates of a run that must not end before the test stops it, however late that is.
ENDLESS = 100_000
# Seconds that a test waits for anything; only a fault takes so long.
DEADLINE_S = 180.0
# Seconds from a request to stop to the end: on a busy machine, a process may be suspended for some of them.
GRACE_S = 60.0
# Seconds between two looks, some of which list all processes of the machine.
LOOK_S = 0.05

Options = Mapping[str, Any]
Line = dict[str, Any]


def toy_flags(**changes: Any) -> RunOptions:
    """Return options of a run of fake nodes, with a long grace for its last checkpoint."""
    return RunOptions(**{"batch": 4, "slots": 16, "deadline": 60.0, "grace": GRACE_S, **changes})


def model_flags(**changes: Any) -> RunOptions:
    """Return options of a run of the small untrained model."""
    return toy_flags(**{"batch": 2, "max_tokens": 6, "seed": 3, "data": "arithmetic", **changes})


def delays(ms: float = 0.0, **changes: float) -> dict[str, float]:
    """Return options of the program toy: the milliseconds that each of its nodes takes."""
    return {f"{name}_ms": ms for name in ("generate", "score", "update", "sync")} | {
        f"{name}_ms": value for name, value in changes.items()
    }


def penstock(*words: str, timeout: float = 300.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock.runtime.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def make_run(
    path: Path,
    program: str,
    options: Options,
    flags: RunOptions,
    *,
    generators: int = 1,
    cluster: Cluster = ONE_HOST,
    evaluate: bool = False,
    meshes: Sequence[str] = (),
) -> Path:
    """Make a run folder that is ready to be launched."""
    found = load(program)
    assert isinstance(found, Program)
    graph = trace(found, options)
    evaluation = trace_evaluation(found, graph, EVALUATION) if evaluate and found.evaluation else None
    folder = RunFolder.create(path)
    wanted = replace(flags, generators=generators, mesh=tuple(meshes), device="cpu")
    config = RunConfig.make(graph, evaluation, cluster, wanted)
    config.write(folder, {"program": program, "cluster": cluster.model_dump(mode="json")})
    folder.unlock()
    return path


def holding(folder: Path, *names: object) -> Path:
    """Make the folder `holds` of a run of HELD with these files: "start", "group NUMBER" or the number of an update."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / str(name)).touch()
    return folder


def with_updates(folder: Path, updates: int) -> Path:
    """Set the total number of updates of a run, as a resume does."""
    run = RunFolder.open(folder)
    config = RunConfig.load(run)
    replace(config, flags=replace(config.flags, updates=updates)).write(run, run.read_json("config.json")["asked"])
    return folder


class Running:
    """A launcher in a process of its own, and the lines that it prints. `where` is the start of its command; `grace` is
    the launcher's grace if it differs from the run's."""

    def __init__(self, folder: Path, where: Sequence[str] = (), grace: float | None = None) -> None:
        self.folder, self.run = folder, f"g{secrets.token_hex(6)}"
        self.lines: list[Line] = []
        command = [*where, sys.executable, str(HERE / "launch_run.py"), str(folder), self.run]
        command += [] if grace is None else [str(grace)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        """End what a failed test has left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        sweep_processes(self.run)
        self._reader.join(DEADLINE_S)

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """Wait until `look` returns a true value, and return it. Fails at the deadline, or when the run ends before."""

        def look_or_end() -> Any:
            ended = self.process.poll() is not None
            found = look()
            assert found or not ended, f"the run ended before {what}: {self.lines[-3:]}"
            return found

        return until(look_or_end, f"{what}; last lines {self.lines[-3:]}")

    def until_update(self, number: int) -> None:
        """Wait until `number` updates are in metrics.jsonl."""
        self.until(lambda: num_rows(self.folder) >= number, f"update {number}")

    def until_line(self, match: Callable[[Line], bool], what: str) -> Line:
        found: Line = self.until(lambda: next((line for line in list(self.lines) if match(line)), None), what)
        return found

    def until_ready(self) -> Mapping[str, Any]:
        """Wait until all ranks are ready, and return what is in processes.json."""
        plan = json.loads((self.folder / "plan.json").read_text())
        count = sum(len(replica["ranks"]) for pool in plan["pools"] for replica in pool["replicas"])

        def look() -> Mapping[str, Any] | None:
            path = self.folder / "processes.json"
            found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            return found if found and sum(map(len, found["pools"].values())) == count else None

        ready: Mapping[str, Any] = self.until(look, "all ranks were ready")
        return ready

    def agent(self) -> int:
        """Return the pid of the one local agent."""
        (found,) = self.pids(lambda process: "penstock.runtime.control.agent" in process.cmdline())
        return found

    def pids(self, match: Callable[[psutil.Process], bool]) -> list[int]:
        """Return the run's processes that match. Leave out a process that ends meanwhile, as many do at a start."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if match(process):
                    found.append(process.pid)
        return found

    def signal(self, number: int, pid: int = 0) -> None:
        """Send a signal to one of the run's processes, by default the launcher."""
        os.kill(pid or self.process.pid, number)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the launcher, and wait until all processes of the run have died with it."""
        self.process.kill()
        self.process.wait()
        until(lambda: processes_of(self.run) == [], "no process is left")

    def wait(self) -> int:
        """Wait for the exit status, and assert that nothing is left."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert_nothing_is_left(self.folder, self.run)
        return status

    @property
    def errors(self) -> str:
        return "\n".join(line["text"] for line in self.lines if line.get("kind") == "error")

    @property
    def cause(self) -> str:
        """The code of the reported failure; "" if there is none."""
        codes: list[str] = [line.get("code", "") for line in self.lines if line.get("kind") == "error"]
        return codes[0] if codes else ""

    @property
    def notes(self) -> list[str]:
        return [line["text"] for line in self.lines if line.get("kind") == "note"]


def until(look: Callable[[], Any], what: str) -> Any:
    """Wait until `look` returns a true value, and return it. Fails at the deadline."""
    end = monotonic() + DEADLINE_S
    while monotonic() < end:
        if found := look():
            return found
        sleep(LOOK_S)
    raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")


def run_to_end(folder: Path) -> Path:
    """Launch a run with processes and let it end well."""
    with Running(folder) as running:
        assert running.wait() == 0, running.errors
    return folder


def run_to_failure(folder: Path, trouble: Callable[[Running], object] = lambda running: None) -> tuple[str, Line]:
    """Launch a run, call `trouble` on it, let it fail, and return (the errors, the summary)."""
    with Running(folder) as running:
        trouble(running)
        assert running.wait() == 1
    found = summary(folder)
    assert (found["status"], found["cause"]) == ("failed", running.cause)
    return running.errors, found


def run_here(folder: Path) -> Path:
    """Run a folder in this process and let it end well."""
    status, lines = status_here(folder)
    assert status == "done", lines[-1]
    return folder


def status_here(folder: Path, tell: Callable[[Line], None] = lambda line: None) -> tuple[str, list[Line]]:
    """Run a folder in this process, `tell` each line as it comes, and return the status and all lines."""
    threads, before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    run, lines = RunFolder.open(folder), list[Line]()
    run.lock()

    def hear(line: Line) -> None:
        lines.append(line)
        tell(line)

    try:
        return run_in_process(run, hear), lines
    finally:
        run.unlock()
        torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, before)


def assert_nothing_is_left(folder: Path, run: str) -> None:
    """Assert that there is no process, shared-memory segment, socket or key."""
    assert processes_of(run) == []
    assert segments_of(run, folder) == []
    assert [p for p in folder.rglob("*") if p.is_socket()] == []
    assert not (folder / "keys").exists()
    assert not (folder / "processes.json").exists()


def segments_of(run: str, folder: Path) -> list[Path]:
    return [path for place in (SHM, folder) for path in place.glob(f"penstock-{run}-*")]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without a line that is being written."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def num_rows(folder: Path) -> int:
    """Return the number of whole lines. It is called often, so it does not parse them."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary, and assert that all its fields are in `Summary`."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert found.keys() <= Summary.__annotations__.keys()
    return found


def figures(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without times and rates."""
    times = {"time_s", "seconds", "update_s", "sync_s", "generate_tokens_per_s", "train_tokens_per_s", "pools"}
    return [{name: value for name, value in row.items() if name not in times} for row in rows(folder)]


def assert_all_consumed(folder: Path, groups: int, failed: int = 0) -> None:
    assert summary(folder)["fates"] == {"consumed": groups, "dropped": 0, "failed": failed}


def printed(folder: Path, rank: str) -> dict[str, Any]:
    """Return what a rank printed when it closed: its store's use, the values that it sent, received and offloaded."""
    lines = (folder / "logs" / f"{rank}.out").read_text().splitlines()
    (found,) = [json.loads(line) for line in lines if line.startswith('{"kind": "values"')]
    return dict(found)


def passed_on(folder: Path, generators: int) -> list[int]:
    """Return the number of versions that each generator passed on."""
    return [printed(folder, f"generator-{index}-0")["sent"].get("passed on", 0) for index in range(generators)]


def interrupt_at(update: int, line: Line) -> None:
    """Interrupt a run in this process after this update, as Ctrl-C does."""
    if line.get("kind") == "row" and line["row"]["update"] == update:
        os.kill(os.getpid(), signal.SIGINT)


def replayed(folder: Path) -> list[Replayed]:
    """Replay all stages of a run, over all its segments. Raises LogError or ReplayError."""
    logs = [stage for segment in read_log(folder / "events.log") for stage in segment.stages]
    stages = [(SegmentOrigin.from_json(log.facts), recorded_steps(log)) for log in logs]
    return replay(stages, lambda commands: commands_digest(map(record_bytes, commands)))


def final_state(folder: Path, update: int) -> dict[str, Tensor]:
    """Return all tensors of the policy's state (weights and optimizer) in the checkpoint before `update`."""
    return CheckpointShard(folder / "checkpoints" / f"{update:08d}", "trainer/0", 0).carried("policy")[0]


def assert_equal_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []
