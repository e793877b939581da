"""The ranks of one replica, together: torch.distributed's default group, and the step that they keep.

They are processes of one host, and talk over its loopback interface: nothing listens beyond it.
"""

import os
from collections import deque
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock.runtime.tensor.crossing import first_line
from penstock.runtime.tensor.group import call_roll

T = TypeVar("T")


class WorldError(RuntimeError):
    """The ranks of a replica did not all meet, or one of them is gone."""


def open_world(store: Store, rank: int, size: int, *, timeout: float, device: str = "cpu") -> None:
    """Make the default group of `size` ranks, which meet at `store`; blocks until all have. It must be kept.

    NCCL carries what lies on GPUs, gloo the rest. Raises WorldError past `timeout` seconds, which bound each
    collective, too.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    store.set_timeout(timedelta(seconds=timeout))
    try:
        call_roll(store, rank, size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        text = f"rank {rank}: the {size} ranks of the replica did not meet within {timeout:g} s"
        raise WorldError(f"{text}: {first_line(error)}") from error


class Pace(Protocol):
    """When a rank takes up what it has been told."""

    busy: bool
    """Whether another rank may be, so that this one must not wait for messages."""

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        """Those of the orders in `waiting` to carry out before the next step, removed from it."""


class Free:
    """A rank alone, or one whose nodes keep step by themselves: at once."""

    busy = False

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        taken = list(waiting)
        waiting.clear()
        return taken


class Lockstep:
    """Ranks whose streams decode together: each takes up what all of them have got, so that all make the same steps
    with the same groups and the same weights.

    All ranks get the same orders in the same sequence, each in its own time. One that has any waits for the others to
    come here, too: what it has got, they will get. As long as one of them was busy when they last met, all come back.
    """

    def __init__(self) -> None:
        self.taken, self.busy = 0, False

    def take(self, waiting: deque[T], busy: bool) -> list[T]:
        if not (waiting or busy or self.busy):
            return []
        met = torch.tensor([self.taken + len(waiting), -int(busy)])
        try:
            dist.all_reduce(met, dist.ReduceOp.MIN)
        except RuntimeError as error:
            raise WorldError(f"a rank of this replica is gone: {first_line(error)}") from error
        count, self.busy = int(met[0]) - self.taken, bool(met[1])
        self.taken += count
        return [waiting.popleft() for _ in range(count)]
