"""The other process of the bridge's tests: `main(SIDE, FILE, TIMEOUT)`.

As a destination it receives what each line of its input (the facts of a sync, JSON) says, swaps, and answers with
what is live; as a source it publishes and sends the version that each line names. Errors are answers too.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor.digest import digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import Receiving
from penstock.runtime.tensor.weight_sync import Moved, WeightPublisher, WeightReceiver

CHANNEL = "policy>generator"


class Policy:
    """Weights that are a function of the version: large and small, of several dtypes."""

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
        """What an optimizer does: change everything in place."""
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
        self.tensors.update(tensors)

    def export(self, folder: str) -> None:
        """Nothing that other tools read."""


def hurry(transport: Any, seconds: float) -> None:
    """From now on, each wait of a transport takes so long at most. What it is for has happened by then, however long it
    took: a machine may stand still for seconds.
    """
    transport._connection.timeout = seconds


def answer(**facts: Any) -> None:
    """One line, from any thread: `print` would write its end apart from it."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def published(publisher: WeightPublisher, version: int) -> dict[str, Any]:
    """Publish a version; the facts that its receivers need, as they travel."""
    digests = publisher.publish(version)
    facts = {"version": version, "digests": digests, "description": publisher.description}
    read: dict[str, Any] = json.loads(json.dumps(facts))
    return read


def receive(receiver: WeightReceiver, facts: Mapping[str, Any], transport: Receiving) -> Moved:
    """Receive the version of which these are the facts."""
    receiver.describe(facts["description"])
    return receiver.receive(facts["version"], facts["digests"], transport)


def main(side: str, path: str, timeout: str) -> None:
    bridge = ReplicaLink(CHANNEL, FileStore(path), timeout=float(timeout))
    answer(started=True)
    transport = bridge.open("source" if side == "source" else "destination")
    answer(open=True)
    policy, receiver = Policy(), WeightReceiver(CHANNEL)
    publisher = WeightPublisher(CHANNEL, policy)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if side == "source":
                policy.advance(order["version"])
                answer(facts=published(publisher, order["version"]))
                publisher.send(order["version"], transport)
            else:
                moved = receive(receiver, order, transport)
                receiver.swap(order["version"])
                answer(version=receiver.weights.version, digest=digest(receiver.weights.tensors), bytes=moved.nbytes)
        except RuntimeError as error:
            answer(error=type(error).__name__, text=str(error))
