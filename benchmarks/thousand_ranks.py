"""The cost of the controller and the desk in a run of 1,024 ranks on 64 hosts: `control.py --ranks` calls it.

The controller is a real process that communicates over TCP and CURVE on loopback with fake agents and ranks (see
`fake_ranks`), whose updates take a given time and no processor. The desk is real, too; agents enrol there by
`applicant.enrol`, as on hosts of their own, but each in a thread. Processor time is that of all threads.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from time import monotonic, perf_counter, process_time
from typing import Any

from penstock.graph import trace
from penstock.programs.aipo import aipo
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.applicant import enrol
from penstock.runtime.control.desk import TICKET, Desk
from penstock.runtime.control.early import CONTROLLER
from penstock.runtime.control.process import kill, start
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.security import DeskKeys, Keys
from penstock.runtime.record.folder import RunFolder, make_folder

HERE = Path(__file__).resolve().parent
# Deadlines in seconds: for the fakes to get ready, and for an update beyond its own time.
START_S, SLACK_S = 300.0, 120.0
# Names in a manifest, as many as a dense model of 32 layers has tensors.
TENSORS = 291
GPU = "H100"


@dataclass(frozen=True)
class Layout:
    """A trainer of `trainer` ranks on the first half of the hosts, and generators of `tp` ranks on the other half."""

    hosts: int
    trainer: int
    generators: int
    tp: int
    batch: int

    @property
    def ranks(self) -> int:
        return self.trainer + self.generators * self.tp

    def config(self, updates: int) -> RunConfig:
        half, each = self.hosts // 2, 2 * self.ranks // self.hosts
        hosts = tuple(
            Host(
                name=f"node{index:03d}",
                cores=64,
                devices=tuple(f"cuda:{device}" for device in range(each)),
                gpu=GPU,
                agent="external",
                address="127.0.0.1",
            )
            for index in range(self.hosts)
        )
        names = [host.name for host in hosts]
        pools: dict[str, Any] = {"trainer": tuple(names[:half]), "generator": tuple(names[half:])}
        cluster = Cluster(hosts=hosts, bind="127.0.0.1:0", pools=pools)
        mesh = (f"trainer=fsdp{self.trainer}", f"generator=tp{self.tp}")
        options = RunOptions(
            updates=updates,
            batch=self.batch,
            generators=self.generators,
            mesh=mesh,
            checkpoint_every=1 << 30,
            startup_deadline=START_S,
        )
        return RunConfig.make(trace(aipo, {"lag": 1}), None, cluster, options)


TENSOR_PARALLEL = Layout(hosts=64, trainer=512, generators=64, tp=8, batch=128)
SINGLE = Layout(hosts=64, trainer=512, generators=512, tp=1, batch=512)


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def controlled(config: RunConfig) -> Iterator[tuple[Popen[bytes], Path, Keys]]:
    """Start a controller's process on a new run folder; kill it at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run")
        config.write(folder, {})
        hosts = {rank.host for replica in config.plan.replicas for rank in replica.ranks}
        keys = Keys.make(config.run, "tcp://127.0.0.1:0", sorted(hosts))
        keys.server.write(folder.path / "keys" / "controller.json")
        make_folder(folder.path / "logs")
        controller = start(
            [*CONTROLLER, str(folder.path)], config.run, stdin=PIPE, stdout=PIPE, stderr=sys.stderr.buffer
        )
        try:
            yield controller, folder.path, keys
        finally:
            kill(controller)
            controller.wait()


def lines_of(controller: Popen[bytes]) -> "queue.Queue[dict[str, Any] | None]":
    """Return a queue of the controller's output lines as they arrive; None at the end."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        assert controller.stdout is not None
        for line in controller.stdout:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def steps(layout: Layout, updates: int, pace: float, processes: int = 4) -> dict[str, Any]:
    """Measure a whole run: seconds and processor seconds of the start, and processor seconds of the controller per
    update. The first update is left out, which includes the first weights, and the last, during which nothing more is
    generated. Raises RuntimeError for a run that does not finish."""
    config = layout.config(updates)
    with controlled(config) as (controller, folder, keys):
        lines, began = lines_of(controller), monotonic()
        children: list[Popen[bytes]] = []
        try:
            marks: list[tuple[float, float]] = []
            ready = (0.0, 0.0)
            while True:
                line = lines.get(timeout=START_S + pace + SLACK_S)
                now = monotonic()
                match line and line.get("kind"):
                    case None:
                        raise RuntimeError("the controller ended")
                    case "listening":
                        assert line is not None
                        began = now
                        children = _fakes(config, folder, keys, line["endpoint"], pace, processes)
                    case "stage" if not marks:
                        ready = now - began, processor_s(controller.pid)
                        marks.append((now, ready[1]))
                    case "row":
                        marks.append((now, processor_s(controller.pid)))
                    case "error" | "note":
                        print(line, file=sys.stderr)
                    case "summary":
                        assert line is not None
                        if line["status"] != "done":
                            raise RuntimeError(str(line["error"]))
                        records = line["records"]
                        break
        finally:
            _end(children)
    (first, used), (last, used_last) = marks[1], marks[-2]
    counted = len(marks) - 3
    return {
        "hosts": layout.hosts,
        "ranks": layout.ranks,
        "generators": layout.generators,
        "groups": layout.batch,
        "update_s": (last - first) / counted,
        "controller_s": (used_last - used) / counted,
        "share": (used_last - used) / (last - first),
        "events": records / updates,
        "start_s": ready[0],
        "start_processor_s": ready[1],
        "config_bytes": len(json.dumps(config.to_json())),
    }


def _fakes(
    config: RunConfig, folder: Path, keys: Keys, endpoint: str, pace: float, processes: int
) -> list[Popen[bytes]]:
    files = []
    for host in keys.hosts:
        files.append(folder / "keys" / f"{host}.json")
        keys.join(host, endpoint, folder).write(files[-1])
    command = [str(HERE / "fake_ranks.py"), str(pace), str(TENSORS)]
    shares = [files[index::processes] for index in range(processes)]
    return [start([*command, *map(str, share)], config.run, stderr=sys.stderr.buffer) for share in shares if share]


def _end(children: list[Popen[bytes]]) -> None:
    for child in children:
        try:
            child.wait(timeout=10.0)
        except TimeoutExpired:
            kill(child)
            child.wait()


def enrolment(agents: int) -> dict[str, Any]:
    """Enrol `agents` agents at one desk at once: they test whether they reach each other, and are admitted."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run")
        desk = Desk(DeskKeys.make("benchmark"), "127.0.0.1:0", folder.path, expected=agents)
        with ThreadPoolExecutor(agents) as pool, Listening() as controller:
            try:
                began, used = perf_counter(), process_time()
                coming = [pool.submit(enrol, folder.path / TICKET, None, "", _quiet) for _ in range(agents)]
                desk.wait(agents, START_S, list, _quiet)
                waited = perf_counter() - began
                names = [host.name for host in desk.cluster("127.0.0.1:0").hosts]
                keys = Keys.make("benchmark", controller, names)
                for name in names:
                    desk.admit(name, keys.join(name, controller, folder.path))
                for one in coming:
                    one.result(START_S)
                seconds, processor = perf_counter() - began, process_time() - used
            finally:
                desk.close()
        return {"agents": agents, "enrolled_s": waited, "admitted_s": seconds, "processor_s": processor}


class Listening:
    """A socket that listens in place of the controller."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        return f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self._socket.close()


def _quiet(text: str) -> None:
    pass


# The estimate of a start -----------------------------------------------------------------------------------


def start_steps(layout: Layout, measured: Mapping[str, Any], enrolled: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each step of a start of `layout`: what was measured here, and the seconds that a formula derives from it.
    Steps that hosts do independently happen on all of them at once."""
    own, each = layout.ranks // layout.hosts, forking()
    imported, sizes = importing(), (4, 8, 16)
    met = {size: meeting(size) for size in sizes}
    # A rank connects to every other one and has a core of its own, while here all ranks share one process.
    pair = met[sizes[-1]] / sizes[-1] ** 2
    return [
        _step(
            "enrolment", f"{enrolled['agents']} agents", enrolled["enrolled_s"], "as measured", enrolled["enrolled_s"]
        ),
        _step("imports, once for a host", "one", imported, "as measured", imported),
        _step("forks of a host", "one", each, f"{own} ranks, one after the other", own * each),
        _step(
            "greetings and the board",
            f"{measured['ranks']} ranks, the controller's processor",
            measured["start_processor_s"],
            "as measured",
            measured["start_processor_s"],
        ),
        _step(
            f"gloo's connections of {layout.trainer} ranks",
            f"{sizes[-1]} ranks in one process",
            met[sizes[-1]],
            f"seconds / {sizes[-1]}² for each of {layout.trainer - 1} others",
            pair * (layout.trainer - 1),
        ),
        _step(
            "a model of 140 GB from a shared disk",
            "",
            None,
            f"140 GB of 2 GB/s for each of {layout.hosts // 2} hosts' shares",
            140 / 2 / (layout.hosts // 2),
        ),
        _step(
            "the first weights",
            "",
            None,
            f"140 GB x {layout.generators} replicas at 50 GB/s for each of {layout.trainer} senders",
            140 * layout.generators / layout.trainer / 50,
        ),
    ]


def _step(name: str, of: str, measured: float | None, formula: str, seconds: float) -> dict[str, Any]:
    return {"step": name, "measured with": of, "measured_s": measured, "formula": formula, "seconds": seconds}


def importing() -> float:
    """Measure the seconds in which a process imports what ranks need."""
    began = perf_counter()
    subprocess.run([sys.executable, "-c", "import penstock.runtime.control.rank"], check=True, timeout=START_S)
    return perf_counter() - began


def forking() -> float:
    """Measure the seconds of a fork of a process with those imports, until the child has exited."""
    script = (
        "import os, time, penstock.runtime.control.rank as _\n"
        "began = time.perf_counter()\n"
        "for _ in range(16):\n"
        "    pid = os.fork()\n"
        "    if not pid: os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "print((time.perf_counter() - began) / 16)"
    )
    made = subprocess.run([sys.executable, "-c", script], check=True, timeout=START_S, stdout=PIPE, text=True)
    return float(made.stdout)


def meeting(size: int) -> float:
    """Measure the seconds in which `size` ranks, threads of this process, connect by gloo."""
    from datetime import timedelta

    from torch._C._distributed_c10d import HashStore

    from penstock.runtime.tensor.process_group import Connection

    store, names = HashStore(), [f"rank {number}" for number in range(size)]
    store.set_timeout(timedelta(seconds=START_S))
    with ThreadPoolExecutor(size) as pool:
        began = perf_counter()
        made = [pool.submit(Connection, "start", names, store, number, timeout=START_S) for number in range(size)]
        opened = [one.result(START_S) for one in made]
        seconds = perf_counter() - began
    for one in opened:
        one.close()
    return seconds


def figures(updates: int, pace: float) -> dict[str, Any]:
    """Return all figures, as `control.py --ranks` keeps them."""
    measured = steps(TENSOR_PARALLEL, updates, pace)
    enrolled = [enrolment(agents) for agents in (16, 64, 128)]
    plan = start_steps(TENSOR_PARALLEL, measured, enrolled[-1])
    slowest = max(plan, key=lambda step: float(step["seconds"]))
    return {
        "controller": [measured],
        "enrolment": enrolled,
        "start": plan,
        "start_s": sum(float(step["seconds"]) for step in plan),
        "slowest": slowest["step"],
    }
