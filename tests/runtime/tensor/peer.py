"""Peer processes of the tests, one rank each: `main` is one end of a link, `chained` a replica in a chain.

Each obeys the JSON lines of its input, and answers in JSON lines, also for errors.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor import one_sided, send_recv
from penstock.runtime.tensor.broadcast_chain import ChainForwarder, ChainHop
from penstock.runtime.tensor.cuda_ipc import DeviceMemory, OpenedMemory
from penstock.runtime.tensor.digest import digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import SharedMemory, WritableMemory
from penstock.runtime.tensor.process_group import Receiving, Transport
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.weight_sync import Moved, WeightPublisher, WeightReceiver
from tests.forks import Forked

CHANNEL = "policy>generator"


class Policy:
    """Weights that depend on the version: large and small tensors of several dtypes."""

    def __init__(self, large: int = 300_000, device: str = "cpu") -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {
            "embed": torch.zeros(large, dtype=torch.bfloat16, device=device),
            "norm": torch.zeros(7, device=device),
            "matrix": torch.zeros(600, 700, device=device),
            "step": torch.zeros((), dtype=torch.int64, device=device),
            "flags": torch.zeros(3, dtype=torch.bool, device=device),
        }

    def advance(self, version: int) -> None:
        """Change everything in place, as an optimizer does."""
        generator = torch.Generator(self.device).manual_seed(version)
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                tensor.normal_(generator=generator)
            else:
                tensor.fill_(version)

    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return self.tensors, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)

    def export(self, folder: str) -> None:
        """Export nothing."""


def hurry(transport: Any, seconds: float) -> None:
    """Limit each later wait of a transport to this many seconds. Call it after the expected event has happened, since a
    machine may be suspended for seconds before.
    """
    transport._connection.timeout = seconds


def published(publisher: WeightPublisher, version: int) -> dict[str, Any]:
    """Publish a version; return the facts for its receivers, as they travel."""
    digests = publisher.publish(version)
    facts = {"version": version, "digests": digests, "description": publisher.description}
    read: dict[str, Any] = json.loads(json.dumps(facts))
    return read


def receive(receiver: WeightReceiver, facts: Mapping[str, Any], transport: Receiving) -> Moved:
    """Receive the version with these facts."""
    receiver.describe(facts["description"])
    return receiver.receive(facts["version"], facts["digests"], transport)


class Peer:
    """A peer process, as the tests see it."""

    def __init__(self, function: str, *arguments: object) -> None:
        self.process = Forked(f"tests.runtime.tensor.peer:{function}", *map(str, arguments))
        assert self.read() == {"started": True}

    def tell(self, **order: Any) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.read()


class End:
    """The transport of one end of a link, opened at its first use, when a receiver's arena must exist. `kind` is
    "messages", or the memory that is written directly ("shm", "cuda_ipc")."""

    def __init__(self, folder: Path, side: Any, kind: Any, device: str = "cpu") -> None:
        self.folder = folder
        self.link = ReplicaLink(CHANNEL, FileStore(str(folder / "link")), transport=kind)
        self.side, self.device = side, device
        self.memory: WritableMemory | None = None
        if side == "destination" and kind != "messages":
            shared = SharedMemory(folder.name, "destination")
            self.memory = shared if device == "cpu" else DeviceMemory(device, "destination", 30.0)
        self.opened: Transport | None = None

    def open(self) -> Transport:
        self.opened = self.opened or self.link.open(self.side, 0, self.memory, self.device)
        return self.opened

    def send(self, *facts: Any) -> int:
        return self.open().send(*facts)

    def receive(self, *facts: Any) -> int:
        return self.open().receive(*facts)

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()


def answer(**facts: Any) -> None:
    """Write one line from any thread; `print` would write the line end separately."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def die(*given: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def synced(receiver: WeightReceiver, facts: Mapping[str, Any], transport: Receiving) -> None:
    moved = receive(receiver, facts, transport)
    receiver.swap(facts["version"])
    answer(version=receiver.weights.version, digest=digest(receiver.weights.tensors), bytes=moved.nbytes)


def main(side: str, folder: str, kind: str, device: str) -> None:
    """A source publishes (`publish`), sends (`send`), or dies during its next send (`die`). A destination receives what
    is published, and swaps it in."""
    end = End(Path(folder), side, kind, device)
    policy, receiver = Policy(device=device), WeightReceiver(CHANNEL, allocate=end.memory, device=device)
    publisher = WeightPublisher(CHANNEL, policy, keep=4, device=device)
    answer(started=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "open" in order:
                answer(open=type(end.open()).__name__)
            elif "publish" in order:
                policy.advance(order["publish"])
                answer(**published(publisher, order["publish"]))
            elif "send" in order:
                publisher.send(order["send"], end)
                answer(sent=order["send"])
            elif "die" in order:
                one_sided.copy_elements = send_recv.pack = OpenedMemory.write = die  # type: ignore[assignment, attr-defined, method-assign]
            else:
                synced(receiver, order, end)
        except RuntimeError as error:
            answer(error=type(error).__name__, text=str(error))


def chain_link(folder: Path, source: int) -> ReplicaLink:
    """The link from a replica to the next one; -1 is the trainer."""
    label = f"{CHANNEL} from {'trainer' if source < 0 else f'generator/{source}'} to generator/{source + 1}"
    return ReplicaLink(label, FileStore(f"{folder}/link-{source}"), timeout=60.0, transport="messages")


def chained(folder: str, at: str, replicas: str) -> None:
    """A replica of one rank in a chain: it receives from the trainer or the previous replica, forwards, and swaps. A
    failed forwarding is reported in its own answer. A line with `hurry` limits the waits of a link, named by its
    source, to the given seconds from then on.
    """
    index = int(at)

    @cache
    def opened(source: int) -> MessageTransport:
        link = chain_link(Path(folder), source).open("source" if source == index else "destination")
        assert isinstance(link, MessageTransport)
        return link

    relay = ChainForwarder(CHANNEL, 0, lambda error: answer(failed=str(error)))
    onward = None if index == int(replicas) - 1 else lambda: opened(index)
    hop = ChainHop(relay, lambda: opened(index - 1), onward, linked=index > 0)
    receiver = WeightReceiver(CHANNEL)
    answer(started=True)
    for line in sys.stdin:
        facts = json.loads(line)
        if "hurry" in facts:
            hurry(opened(facts["hurry"]), facts["seconds"])
            continue
        try:
            synced(receiver, facts, hop)
        except RuntimeError as error:
            answer(error=type(error).__name__, text=str(error), live=receiver.weights.version)
