"""Round trips of tasks through the real control plane: ZeroMQ, messages, workers' loops and executors, an empty node.

Workers are threads with a socket and an executor each, spread over at most 16 processes: 1 and 16 workers are one per
process, 256 are 16 in each of 16 processes. Ray's actors do an empty method, where Ray is installed.
"""

import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.graph import node, program, trace
from penstock.graph.ir import Firing
from penstock.graph.types import Context, Policy
from penstock.runtime.control.config import Flags, RunConfig
from penstock.runtime.control.endpoints import ipc_endpoint
from penstock.runtime.control.executor import Executor, Setup
from penstock.runtime.control.keys import Door, Join
from penstock.runtime.control.messages import Goodbye, Order, Results, rank_peer
from penstock.runtime.control.weights import LocalWays
from penstock.runtime.control.wire import Client, Server
from penstock.runtime.control.worker import work
from penstock.runtime.plan.plan import Plan, Pool, Rank, Replica
from penstock.runtime.schedule.events import Done, Fire, Free

PROCESSES = 16
WINDOW = 256
"""Tasks in flight at each worker when pipelined, for both systems."""


class Empty:
    """What flows: nothing."""

    maker = f"{Path(__file__).resolve()}:open_empty"
    pool = "worker"

    def read(self, ordinal: int) -> "Empty":
        return self


def open_empty(context: Context) -> Empty:
    return Empty()


@node(pool="worker")
def nothing(item: Empty) -> Empty:
    return item


@node(pool="worker", clock="update")
def same(policy: Policy, item: Empty) -> Policy:
    return policy


@program
def empty(policy: Policy, items: Empty) -> Policy:
    return same(policy, nothing(items))


def config(workers: int) -> RunConfig:
    """`workers` replicas of a pool that holds the source and the empty node; nobody holds the policy."""
    graph = trace(empty)
    replicas = tuple(Replica(f"worker/{i}", (Rank(),), 1024) for i in range(workers))
    return RunConfig(graph, None, Plan((Pool("worker", ("items", "nothing"), replicas),)), Flags(), "bench")


def serve(join_file: str, workers: int, first: int, last: int) -> None:
    """A process with workers `first` to `last` - 1, a thread each."""
    join, run = Join.read(Path(join_file)), config(workers)

    def worker(index: int) -> None:
        name = f"worker/{index}"
        contexts = run.contexts("worker", Rank())
        setup = Setup(run.graphs, run.plan, name, 0, contexts, Path(join.folder))
        executor = Executor(setup, LocalWays({}, name, 0, "cpu", {}), {})
        client = Client(join, "rank", name)
        work(client, _Bare(executor))  # type: ignore[arg-type]
        client.close()

    threads = [threading.Thread(target=worker, args=[index]) for index in range(first, last)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Bare:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor


@contextmanager
def cluster(workers: int) -> Iterator[Server]:
    """A server with all workers connected; they are gone at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        door = Door("bench", ipc_endpoint(folder), secrets.token_hex(8))
        server = Server(door, silence=600.0)
        join = folder / "join.json"
        Join("bench", server.endpoint, door.token, "local", scratch).write(join)
        num = min(PROCESSES, workers)
        bounds = [round(i * workers / num) for i in range(num + 1)]
        spans = pairwise(bounds)
        code = "import sys; sys.path.insert(0, {!r}); import round_trips as r; r.serve({!r}, {}, {}, {})"
        here = str(Path(__file__).resolve().parent)
        children = [
            subprocess.Popen([sys.executable, "-c", code.format(here, str(join), workers, a, b)]) for a, b in spans
        ]
        try:
            until = time.monotonic() + 240
            while len(server.peers) < workers:
                server.receive(0.1)
                if time.monotonic() > until:
                    raise TimeoutError(f"{len(server.peers)} of {workers} workers joined in 240 s")
            yield server
        finally:
            for peer in server.peers:
                server.send(peer, Goodbye("done"))
            server.close()
            for child in children:
                try:
                    child.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    child.kill()


def round_trips(server: Server, workers: int, window: int, seconds: float) -> float:
    """Tasks per second with `window` in flight at each worker."""
    names = [f"worker/{i}" for i in range(workers)]
    ordinal = dict.fromkeys(names, 0)

    def ask(name: str, count: int) -> None:
        commands: list[Any] = []
        for _ in range(count):
            firing = Firing("items", ordinal[name])
            ordinal[name] += 1
            commands += [Fire(firing, name, (firing.index,)), Free((firing,), name)]
        server.send(rank_peer(name, 0), Order(tuple(commands)))

    def run(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            for _, message in server.receive(1.0):
                if isinstance(message, Results):
                    count = sum(isinstance(r.event, Done) for r in message.results)
                    done += count
                    event = message.results[0].event
                    assert isinstance(event, Done)
                    ask(event.replica, count)
        return done

    for name in names:
        ask(name, window)
    run(time.perf_counter() + seconds / 4)
    start = time.perf_counter()
    done = run(start + seconds)
    rate = done / (time.perf_counter() - start)
    _drain(server)
    return rate


def _drain(server: Server) -> None:
    while server.receive(0.3):
        pass


def ray_round_trips(workers: int, seconds: float) -> dict[str, float] | None:
    """Ray's actor calls per second: one at a time, and with many in flight; None without Ray."""
    try:
        import ray
    except ImportError:
        return None
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        actor = ray.remote(num_cpus=2 / (workers + 1))(_Actor)
        actors = [actor.remote() for _ in range(workers)]
        ray.get([a.nothing.remote() for a in actors])
        found = {}
        for name, window in (("one_in_flight", 1), ("pipelined", WINDOW)):
            start, done = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                ray.get([a.nothing.remote() for a in actors for _ in range(window)])
                done += window * workers
            found[name] = done / (time.perf_counter() - start)
        return found
    finally:
        ray.shutdown()


class _Actor:
    def nothing(self) -> None:
        return None


def measure(workers: int, seconds: float) -> dict[str, Any]:
    """One row: Penstock one in flight (at each worker) and pipelined, and Ray beside it."""
    with cluster(workers) as server:
        row: dict[str, Any] = {
            "workers": workers,
            "processes": min(PROCESSES, workers),
            "one_in_flight": round_trips(server, workers, 1, seconds),
            "pipelined": round_trips(server, workers, WINDOW, seconds),
        }
    row["ray"] = ray_round_trips(workers, seconds) if workers <= 16 else None
    return row


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1, 2.0)))
