"""The other process of the tests of shared memory: `main(SIDE, FOLDER, TIMEOUT, DEVICE)`, one rank.

It does what each line of its input says: a source publishes (`publish`), sends (`send`), and dies after the first
piece (`die`); a destination receives what is published (`facts`) and swaps. Errors are answers too.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor import one_sided as memories
from penstock.runtime.tensor.cuda_ipc import DeviceMemory
from penstock.runtime.tensor.digest import digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.one_sided import SharedMemory, WritableMemory
from penstock.runtime.tensor.process_group import Transport
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver
from tests.runtime.tensor.peer import CHANNEL, Policy, answer, published, receive


class Opening:
    """A transport that is opened at its first use: a receiver's arena must be there."""

    def __init__(
        self, bridge: ReplicaLink, side: Any, memory: WritableMemory | None = None, device: str = "cpu"
    ) -> None:
        self.bridge, self.side, self.memory, self.device = bridge, side, memory, device
        self.transport: Transport | None = None

    def opened(self) -> Transport:
        self.transport = self.transport or self.bridge.open(self.side, 0, self.memory, self.device)
        return self.transport

    def send(self, *facts: Any) -> int:
        return self.opened().send(*facts)

    def receive(self, *facts: Any) -> int:
        return self.opened().receive(*facts)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


def die_after_one_piece(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
    os.kill(os.getpid(), signal.SIGKILL)


def exported(run: str, device: str) -> WritableMemory:
    """A receiver's memory on a device, that others can write."""
    return SharedMemory(run, "destination") if device == "cpu" else DeviceMemory(device, "destination", 30.0)


def main(side: Any, folder: str, timeout: str, device: str) -> None:
    memory = exported(Path(folder).name, device) if side == "destination" else None
    transport = Opening(
        ReplicaLink(CHANNEL, FileStore(f"{folder}/bridge"), timeout=float(timeout)), side, memory, device
    )
    policy, receiver = Policy(device=device), WeightReceiver(CHANNEL, allocate=memory, device=device)
    publisher = WeightPublisher(CHANNEL, policy, keep=4, device=device)
    answer(started=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "publish" in order:
                policy.advance(order["publish"])
                answer(**published(publisher, order["publish"]))
            elif "send" in order:
                publisher.send(order["send"], transport)
                answer(sent=order["send"], way=type(transport.transport).__name__)
            elif "die" in order:
                memories.copy_elements = die_after_one_piece  # type: ignore[attr-defined]
            else:
                receive(receiver, order, transport)
                receiver.swap(order["version"])
                answer(version=receiver.weights.version, digest=digest(receiver.weights.tensors))
        except RuntimeError as error:
            answer(error=type(error).__name__, text=str(error))
