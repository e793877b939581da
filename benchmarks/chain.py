"""One trainer and three replicas: weights sent to each of them, and along a chain, through network cards of one speed.

    python benchmarks/chain.py [--keep]

Each is a process with one rank on this machine, and weights are sent as messages over gloo on the loopback. The rate at
which a process sends, on all of its links together, is limited to `--gb-per-s`, as by a network card of its own:
otherwise only the machine's memory and cores would be measured. A time is from the trainer's start until the last
replica has the version, proved. `trainer_bytes` is what the trainer sends for one version, and `message_ms` is the time
of one message on a card, which each further link of a chain adds. The two methods take turns.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from report import Keep, publish, spread
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from weights import Weights

from penstock.runtime.tensor.broadcast_chain import ChainForwarder, ChainHop
from penstock.runtime.tensor.digest import digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import Connection, Message
from penstock.runtime.tensor.reshard import BUCKET
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.weight_sync import Moved, WeightPublisher, WeightReceiver

METHODS = ("direct", "chain")
TENSORS = 16
TIMEOUT = 60.0


class Card:
    """Limits what a process sends to `rate` bytes per second, and counts it."""

    def __init__(self, rate: float) -> None:
        self.sent = 0
        self._rate, self._free = rate, 0.0
        self._lock = threading.Lock()
        self._send = Connection.send
        Connection.send = lambda connection, *given: self.send(connection, *given)  # type: ignore[method-assign]

    def send(self, connection: Connection, buffer: Tensor, *address: Any) -> Message:
        with self._lock:
            self.sent += buffer.nbytes
            self._free = max(self._free, time.perf_counter()) + buffer.nbytes / self._rate
            free = self._free
        time.sleep(max(0.0, free - time.perf_counter()))
        return self._send(connection, buffer, *address)


class Policy(Weights):
    """Weights in bf16, of which every value changes with each version."""

    def __init__(self, nbytes: int) -> None:
        super().__init__({f"w{k}": torch.zeros(nbytes // 2 // TENSORS, dtype=torch.bfloat16) for k in range(TENSORS)})

    def advance(self) -> None:
        for tensor in self.tensors.values():
            tensor.normal_()


class Spans:
    """The links that one process has opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, MessageTransport] = {}

    def open(self, method: str, source: int, target: int, side: Any) -> MessageTransport:
        """Return the link from replica `source`, or from the trainer for -1, opened at first use."""
        name = f"{method}-{source}-{target}"
        if name not in self._opened:
            opened = ReplicaLink(name, FileStore(str(self._folder / name)), timeout=TIMEOUT, transport="messages").open(
                side
            )
            assert isinstance(opened, MessageTransport)
            self._opened[name] = opened
        return self._opened[name]


def replica(folder: Path, index: int, replicas: int, rate: float) -> None:
    """Run a replica's process. Each input line is a method and the facts of a version; the answers are that it has
    arrived and the digest of the weights after the swap."""
    torch.set_num_threads(1)
    Card(rate)
    spans = Spans(folder)
    legs: dict[str, ChainHop] = {}
    for method in METHODS:
        linked = method == "chain" and index > 0
        upstream = partial(spans.open, method, index - 1 if linked else -1, index, "destination")
        onward = partial(spans.open, method, index, index + 1, "source")
        last = method == "direct" or index == replicas - 1
        legs[method] = ChainHop(
            ChainForwarder(method, 0, lambda error: sys.exit(str(error))), upstream, None if last else onward, linked
        )
    receivers = {method: WeightReceiver(method) for method in METHODS}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, version, digests, description = json.loads(line)
        receivers[method].describe(description)
        receivers[method].receive(version, digests, legs[method])
        print(json.dumps("arrived"), flush=True)
        receivers[method].swap(version)
        print(json.dumps(digest(receivers[method].weights.tensors)), flush=True)


class Trainer:
    """The trainer, in this process: publishes, and sends to one replica or to all of them."""

    def __init__(self, folder: Path, nbytes: int, processes: list[Any], rate: float) -> None:
        self.card, self.spans, self.processes = Card(rate), Spans(folder), processes
        self.policy = Policy(nbytes)
        self.publishers = {method: WeightPublisher(method, self.policy) for method in METHODS}

    def sync(self, method: str, version: int) -> dict[str, float]:
        self.policy.advance()
        facts = [method, version, self.publishers[method].publish(version), self.publishers[method].description]
        ended: SimpleQueue[Moved | Exception] = SimpleQueue()
        targets = range(len(self.processes)) if method == "direct" else (0,)
        before, started = self.card.sent, time.perf_counter()
        for process in self.processes:
            process.stdin.write(json.dumps(facts) + "\n")
            process.stdin.flush()
        for target in targets:
            threading.Thread(target=lambda t=target: ended.put(self._send(method, version, t)), daemon=True).start()
        assert {json.loads(process.stdout.readline()) for process in self.processes} == {"arrived"}
        taken = time.perf_counter() - started
        for _ in targets:
            ended.get(timeout=TIMEOUT)
        same = [json.loads(process.stdout.readline()) == digest(self.policy.tensors) for process in self.processes]
        return {"ms": 1e3 * taken, "bytes": self.card.sent - before, "equal": all(same)}

    def _send(self, method: str, version: int, target: int) -> Moved:
        return self.publishers[method].send(version, self.spans.open(method, -1, target, "source"))


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--gb-per-s", str(args.gb_per_s), "--replicas", str(args.replicas)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    own = [["--replica", str(index), "--folder", str(folder)] for index in range(args.replicas)]
    processes: list[Any] = [subprocess.Popen([*command, *extra], **pipes) for extra in own]
    try:
        assert {json.loads(process.stdout.readline()) for process in processes} == {"ready"}
        trainer = Trainer(folder, args.mb * 1_000_000, processes, args.gb_per_s * 1e9)
        found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
        for version in range(args.repeats + 1):
            for method in METHODS:
                found[method].append(trainer.sync(method, version))
        del found["direct"][0], found["chain"][0]  # in the first, links are opened and memory is first touched
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    times = {f"{method}_ms": spread([row["ms"] for row in found[method]]) for method in METHODS}
    return {
        "bytes": trainer.policy.tensors["w0"].nbytes * TENSORS,
        "bit_equal": all(row["equal"] for rows in found.values() for row in rows),
        "trainer_bytes": {method: int(found[method][0]["bytes"]) for method in METHODS},
        **times,
        "speedup": times["direct_ms"]["median"] / times["chain_ms"]["median"],
        "message_ms": BUCKET / args.gb_per_s / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100, help="bytes of the weights, in millions")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--gb-per-s", type=float, default=0.2, help="what a network card lets through")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/chain.json")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica is not None:
        replica(args.folder, args.replica, args.replicas, args.gb_per_s * 1e9)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measured(args, Path(folder))
    publish("chain", {"replicas": args.replicas, "card_gb_per_s": args.gb_per_s, **figures}, args.keep)


if __name__ == "__main__":
    main()
