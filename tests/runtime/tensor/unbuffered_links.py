"""A test instrument: links whose ranks are threads that seem to have GPUs, and whose buckets are sent by
`tests.unbuffered` instead of NCCL. All other code of a link is the real one."""

import threading
from itertools import count
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from penstock.runtime.tensor import link, nccl
from penstock.runtime.tensor.link import RankFacts
from penstock.runtime.tensor.nccl import UntilOver, Verb
from penstock.runtime.tensor.process_group import Connection
from penstock.runtime.tensor.send_recv import BucketSizes
from tests.unbuffered import Operation, Unbuffered

_worlds: dict[str, Unbuffered] = {}
_numbers = count(1)
_lock = threading.Lock()


class UnbufferedGroup:
    """Replaces `NcclGroup`: the ranks of a link share one world, which they find by their store."""

    device = torch.device("cpu")

    def __init__(self, connection: Connection, store: Store, device: torch.device) -> None:
        if connection.rank == 0:
            with _lock:
                name = f"world {next(_numbers)}"
                _worlds[name] = Unbuffered(len(connection.names), patience=10.0)
            store.set("world", name)
        self.world = _worlds[store.get("world").decode()]
        self.rank = self.world.rank(connection.rank)
        self.ended = threading.Event()

    def call(self, verb: Verb, messages: Any) -> UntilOver:
        """Begin a call; its wait raises as soon as no rank can continue."""
        return self.rank.group([Operation(verb, buffer, peer) for peer, buffer in messages]).wait

    def fault(self) -> str:
        return ""

    def abort(self) -> None:
        self.ended.set()


def with_gpus(monkeypatch: Any, sizes: BucketSizes) -> dict[str, Unbuffered]:
    """Give each later rank a GPU of its own; return the worlds of the links by name."""
    facts = RankFacts(0, 0, 0, 0, 2_027_003)
    monkeypatch.setattr(RankFacts, "here", staticmethod(lambda *given: facts._replace(gpu=next(_numbers))))
    monkeypatch.setattr(link, "NcclGroup", UnbufferedGroup)
    monkeypatch.setattr(nccl, "NCCL_SIZES", sizes)
    _worlds.clear()
    return _worlds
