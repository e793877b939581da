"""What the controller, and the desk, cost a run of 1,024 ranks on 64 hosts: `control.py --ranks` calls it.

The real controller's process, over TCP and CURVE on loopback; what it talks to are fake agents and ranks (see
`fake_ranks`), whose updates take as long as is asked for and cost nothing. The real desk, and agents that enrol there
by `applicant.enrol`, each in a thread, as they do on hosts of their own. Processor time is that of all threads.
"""

import json
import os
import queue
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
from penstock.runtime.control.launcher import CONTROLLER
from penstock.runtime.control.process import kill, start
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.security import DeskKeys, Keys
from penstock.runtime.record.folder import RunFolder, make_folder

HERE = Path(__file__).resolve().parent
# Seconds for the fakes to get ready, and for an update beyond its own time.
START_S, SLACK_S = 300.0, 120.0
# Names in a manifest: the tensors of a dense model of 32 layers.
TENSORS = 291
GPU = "H100"


@dataclass(frozen=True)
class Layout:
    """A trainer of so many ranks on the first half of the hosts, and generators of `tp` ranks on the other half."""

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
        pools = {"trainer": tuple(names[:half]), "generator": tuple(names[half:])}
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
    """Seconds of processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def controlled(config: RunConfig, profile: str = "") -> Iterator[tuple[Popen[bytes], Path, Keys]]:
    """The controller's process of a new run folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run")
        config.write(folder, {})
        hosts = {rank.host for replica in config.plan.replicas for rank in replica.ranks}
        keys = Keys.make(config.run, "tcp://127.0.0.1:0", sorted(hosts))
        keys.door.write(folder.path / "keys" / "controller.json")
        make_folder(folder.path / "logs")
        command = ["-m", "cProfile", "-o", profile, *CONTROLLER] if profile else [*CONTROLLER]
        controller = start([*command, str(folder.path)], config.run, stdin=PIPE, stdout=PIPE, stderr=sys.stderr.buffer)
        try:
            yield controller, folder.path, keys
        finally:
            kill(controller)
            controller.wait()


def lines_of(controller: Popen[bytes]) -> "queue.Queue[dict[str, Any] | None]":
    """What the controller says, as it comes; None at its end."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        assert controller.stdout is not None
        for line in controller.stdout:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def steps(layout: Layout, updates: int, pace: float, processes: int = 4, profile: str = "") -> dict[str, Any]:
    """A whole run: seconds and processor seconds of the start, and processor seconds of the controller for each update,
    without the first, which are the first weights', and the last, after which there is no more to generate. Raises
    RuntimeError for a run that does not end well."""
    config = layout.config(updates)
    with controlled(config, profile) as (controller, folder, keys):
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
    """So many agents come to one desk at once, try whether they reach each other, and are admitted."""
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
    """Something that accepts connections where the controller will be."""

    def __enter__(self) -> str:
        import socket

        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        return f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self._socket.close()


def _quiet(text: str) -> None:
    pass


def main() -> None:
    layouts: Mapping[str, Layout] = {"tp": TENSOR_PARALLEL, "single": SINGLE}
    what = sys.argv[1]
    if what == "enrol":
        print(json.dumps(enrolment(int(sys.argv[2]))))
    else:
        updates, pace = int(sys.argv[2]), float(sys.argv[3])
        print(json.dumps(steps(layouts[what], updates, pace, profile=sys.argv[4] if len(sys.argv) > 4 else "")))


if __name__ == "__main__":
    main()
