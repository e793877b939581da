"""Round trips of tasks through the real control plane: ZeroMQ, messages, ranks with heartbeats, an empty node.

    python benchmarks/round_trips.py PROCESSES THREADS WINDOW SECONDS

prints one JSON object: seconds of start-up (not part of the rates) and tasks per second with one task in flight, with
the workers taking turns; with one at each worker; and with WINDOW at each. A worker has everything that a rank has: its
own socket, Hello, Setup and Ready, a heartbeat, the work loop, the executor, the store. A process has THREADS of them.
A task is one order, as a controller sends one for each answer: a Fire of a node that returns nothing, and a Free.
"""

import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic, perf_counter, sleep
from typing import NoReturn

from penstock.graph import node, program, trace
from penstock.graph.context import Context
from penstock.graph.imports import load
from penstock.graph.ir import Firing
from penstock.graph.types import Policy
from penstock.runtime.cluster.endpoints import ipc_endpoint
from penstock.runtime.cluster.placement import Plan, Pool, Rank, Replica
from penstock.runtime.control.messages import Goodbye, Hello, Note, Order, Ready, Results, Setup, rank_peer
from penstock.runtime.control.process import PARENT, die_with_parent, kill, start
from penstock.runtime.control.rendezvous import HeartbeatThread
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.security import Join, ServerKeys
from penstock.runtime.control.sockets import Client, Server
from penstock.runtime.control.worker import serve
from penstock.runtime.schedule.events import Done, Fire, Free
from penstock.runtime.tensor.shm import sweep

HERE = str(Path(__file__).resolve())
START_S = 180.0
"""Deadline in seconds for all workers to be ready."""
ANSWER_S = 30.0
"""Deadline in seconds for any worker to answer while tasks are in flight."""
TICK = 0.1


@dataclass(frozen=True)
class Empty:
    """An empty value, which is what flows between the nodes."""

    maker = f"{HERE}:open_empty"
    pool = "worker"

    def read(self, ordinal: int) -> "Empty":
        return self


def open_empty(context: Context) -> Empty:
    return Empty()


@node(pool="worker")
def nothing(item: Empty) -> None:
    """What a task does: nothing."""


@node(pool="trainer", clock="update")
def same(policy: Policy, item: Empty) -> Policy:
    return policy


@program
def empty(policy: Policy, items: Empty) -> Policy:
    nothing(items)
    return same(policy, items)


def config(names: Sequence[str], run: str) -> RunConfig:
    """Return a config whose worker pool has the source and the empty node. The trainer is planned, but not started."""
    workers = Pool("worker", ("items", "nothing"), tuple(Replica(name, (Rank(),)) for name in names))
    trainer = Pool("trainer", ("policy", "same"), (Replica("trainer/0", (Rank(),)),))
    return RunConfig(trace(empty), None, Plan((workers, trainer)), RunOptions(), run)


# Workers --------------------------------------------------------------------------------------------------


def hosts(join_file: str, processes: int, threads: int) -> None:
    """Fork the processes of all workers, as an agent forks those of its ranks: imports are done once, before that."""
    die_with_parent()
    import_module("penstock.runtime.control.rank")
    load(f"{HERE}:nothing")
    os.environ[PARENT] = str(os.getpid())
    made = []
    for index in range(processes):
        made.append(os.fork())
        if made[-1] == 0:
            host(join_file, index * threads, (index + 1) * threads)
    for pid in made:
        os.waitpid(pid, 0)


def host(join_file: str, first: int, last: int) -> NoReturn:
    """Run a process with workers `first` to `last` - 1, each in a thread."""
    die_with_parent()
    join = Join.read(Path(join_file))
    threads = [threading.Thread(target=worker, args=[join, f"worker/{i}"]) for i in range(first, last)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # as a rank's process exits


def worker(join: Join, name: str) -> None:
    """Do what the main function of a rank's process does."""
    pulse = HeartbeatThread(join, name, 0).start()
    client = Client(join, "rank", name, 0)
    try:
        serve(client, join, name, 0, pulse)
    finally:
        pulse.stop()
        client.close()


# The controller's side ------------------------------------------------------------------------------------


@contextmanager
def cluster(processes: int, threads: int) -> Iterator["Driver"]:
    """Start all workers and stop them at the end. Raises RuntimeError if one is not ready within START_S."""
    run = secrets.token_hex(6)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server_keys = ServerKeys(run, ipc_endpoint(folder), secrets.token_hex(16))
        server = Server(server_keys, {rank_peer(f"worker/{i}", 0): "local" for i in range(processes * threads)})
        join = folder / "join.json"
        Join(run, server.endpoint, server_keys.token, "local", scratch).write(join)
        child = start([HERE, "hosts", str(join), str(processes), str(threads)], run, stderr=sys.stderr.buffer)
        try:
            driver = Driver(server, [f"worker/{i}" for i in range(processes * threads)])
            driver.assemble(run)
            yield driver
        finally:
            for peer in server.peers:
                server.send(peer, Goodbye("done"))
            with suppress(TimeoutExpired):
                child.wait(timeout=10.0)
            kill(child)
            child.wait()
            server.close()
            sweep(run)


class Driver:
    """Sends tasks to workers and receives their answers, as a controller does: with heartbeats and deadlines."""

    def __init__(self, server: Server, names: Sequence[str]) -> None:
        self.server, self.names = server, names

    def assemble(self, run: str) -> None:
        """Set up each worker that says Hello; return when all are ready."""
        setup = Setup(json.dumps(config(self.names, run).to_json()), ())
        ready, until = 0, monotonic() + START_S
        while ready < len(self.names):
            if monotonic() > until:
                raise RuntimeError(f"{ready} of {len(self.names)} workers were ready within {START_S:.0f} s")
            for peer, message in self.server.receive(TICK):
                if isinstance(message, Hello):
                    self.server.send(peer, setup)
                elif isinstance(message, Note):
                    raise RuntimeError(message.text)
                ready += isinstance(message, Ready)

    def ask(self, firing: Firing, name: str) -> None:
        """Send one task in one order."""
        order = Order((Fire(firing, name, (firing.index,)), Free((firing,), name)))
        if not self.server.send(rank_peer(name, 0), order):
            raise RuntimeError(f"{name} cannot be reached")

    def answers(self) -> list[Done]:
        """Return the tasks that were done, at least one. Raises RuntimeError after ANSWER_S."""
        until = monotonic() + ANSWER_S
        while monotonic() < until:
            messages = self.server.receive(TICK)
            if late := self.server.tracker.late(monotonic()):
                raise RuntimeError(f"no heartbeat from {', '.join(late)}")
            found = [_done(r.event) for _, m in messages if isinstance(m, Results) for r in m.results]
            if found:
                return found
        raise RuntimeError(f"no answer from any of {len(self.names)} workers for {ANSWER_S:.0f} s")

    def provide(self, window: int) -> None:
        """Let each worker read the items that its tasks take; they stay there."""
        groups = range(window)
        for name in self.names:
            fires = tuple(Fire(Firing("items", group), name, (group,)) for group in groups)
            self.server.send(rank_peer(name, 0), Order(fires))
        self._await(window * len(self.names))

    def rate_one_at_a_time(self, seconds: float) -> float:
        """Measure tasks per second with each task sent when the previous one is done, the workers taking turns."""
        self._ask_in_turn(seconds / 4)
        begin = perf_counter()
        done = self._ask_in_turn(seconds)
        return done / (perf_counter() - begin)

    def _ask_in_turn(self, seconds: float) -> int:
        done, until = 0, perf_counter() + seconds
        while perf_counter() < until:
            self.ask(Firing("nothing", 0), self.names[done % len(self.names)])
            self._await(1)
            done += 1
        return done

    def rate(self, window: int, seconds: float) -> float:
        """Measure tasks per second with `window` in flight at each worker, after a warm-up of a quarter of the time."""
        for group in range(window):
            for name in self.names:
                self.ask(Firing("nothing", group), name)
        self._keep_asking(seconds / 4)
        begin = perf_counter()
        done = self._keep_asking(seconds)
        rate = done / (perf_counter() - begin)
        self._await(window * len(self.names))
        return rate

    def _keep_asking(self, seconds: float) -> int:
        """Send a new task for each one that is done; return how many were done."""
        done, until = 0, perf_counter() + seconds
        while perf_counter() < until:
            for event in self.answers():
                self.ask(event.firing, event.replica)
                done += 1
        return done

    def _await(self, count: int) -> None:
        while count > 0:
            count -= len(self.answers())
        assert count == 0, f"{-count} answers more than tasks"


def _done(event: object) -> Done:
    if not isinstance(event, Done):
        raise RuntimeError(f"an empty task ended with {event}")
    return event


def measure(processes: int, threads: int, window: int, seconds: float) -> dict[str, float]:
    """Measure seconds of start-up and tasks per second with one in flight, one at each worker, and `window` at each."""
    begin = perf_counter()
    with cluster(processes, threads) as driver:
        started = perf_counter() - begin
        driver.provide(window)
        sleep(1.0)  # lets background work of the start finish
        one = driver.rate_one_at_a_time(seconds)
        each, pipelined = driver.rate(1, seconds), driver.rate(window, seconds)
    return {"start_s": started, "one_in_flight": one, "one_at_each": each, "pipelined": pipelined}


if __name__ == "__main__":
    if sys.argv[1] == "hosts":
        hosts(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
