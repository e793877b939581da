"""A replica of one rank in a chain, as a process: `main(FOLDER, INDEX, REPLICAS)`.

It receives what each line of its input (the facts of a sync, JSON) says, from the trainer or from the replica before
it, passes it on to the one after it, swaps, and answers with what is live. Errors are answers too, and what ended the
passing on is one by itself. A line with `hurry` says for which link, named by its source, it has less patience from now
on, and how many seconds.
"""

import json
import sys
from functools import cache
from pathlib import Path

from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor.broadcast_chain import ChainForwarder, ChainHop
from penstock.runtime.tensor.digest import digest
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.weight_sync import WeightReceiver

from .peer import CHANNEL, answer, hurry, receive


def link(folder: Path, source: int) -> ReplicaLink:
    """From a replica to the one after it; from the trainer to the first for -1."""
    label = f"{CHANNEL} from {'trainer' if source < 0 else f'generator/{source}'} to generator/{source + 1}"
    return ReplicaLink(label, FileStore(f"{folder}/link-{source}"), timeout=60.0, transport="messages")


def main(folder: str, at: str, replicas: str) -> None:
    index = int(at)

    @cache
    def opened(source: int) -> MessageTransport:
        bridge = link(Path(folder), source).open("source" if source == index else "destination")
        assert isinstance(bridge, MessageTransport)
        return bridge

    relay = ChainForwarder(CHANNEL, 0, lambda error: answer(failed=str(error)))
    last = index == int(replicas) - 1
    leg = ChainHop(relay, lambda: opened(index - 1), None if last else lambda: opened(index), linked=index > 0)
    receiver = WeightReceiver(CHANNEL)
    answer(started=True)
    for line in sys.stdin:
        facts = json.loads(line)
        if "hurry" in facts:
            hurry(opened(facts["hurry"]), facts["seconds"])
            continue
        try:
            moved = receive(receiver, facts, leg)
            receiver.swap(facts["version"])
            answer(version=receiver.weights.version, digest=digest(receiver.weights.tensors), bytes=moved.nbytes)
        except RuntimeError as error:
            answer(error=type(error).__name__, text=str(error), live=receiver.weights.version)
