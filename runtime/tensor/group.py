"""torch's process groups, made directly: no global world, no collective, no TCP store. The only file that knows them.

Gloo listens at the one address that it is given. Whoever reaches it is not asked for a key, nor is anything encrypted:
on one host that is loopback, and beyond it a network must be trusted.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from penstock.runtime.control.endpoints import LOOPBACK

Meet = Callable[[str], Store]
"""Where the ranks of a group meet, by the group's name."""


class Group:
    """Point-to-point messages between numbered ranks. `device` is where buffers must lie.

    Messages to one peer are told apart by `tag` (gloo) and by their order (NCCL, which has no tags).
    """

    def __init__(self, backend: Any, device: torch.device, timeout: float) -> None:
        self._backend = backend
        self.device = device
        self._timeout = timeout

    def send(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Begin to send; `buffer` must not change until `wait` returns."""
        work: Work = self._backend.send([buffer], peer, tag)
        return work

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Work:
        work: Work = self._backend.recv([buffer], peer, tag)
        return work

    def wait(self, work: Work) -> None:
        """Until the message is sent or received; without the interpreter's lock. RuntimeError past the deadline.

        Gloo tells of a lost peer at once for messages that have not begun; one that is half way waits for the deadline.
        """
        if self.device.type == "cpu":
            work.wait(timedelta(seconds=self._timeout))
            return
        # NCCL's own wait only orders streams, and its watchdog ends the whole process: so look, with a deadline.
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self._timeout} s")
            time.sleep(1e-4)
        work.wait()


class AbsentError(RuntimeError):
    """Not all ranks have come to meet; `ranks` have not."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"ranks {names} have not come" if len(ranks) > 1 else f"rank {names} has not come")
        self.ranks = ranks


def open_group(
    store: Store, rank: int, size: int, *, timeout: float, backend: str = "gloo", address: str = LOOPBACK
) -> Group:
    """Join as `rank` of `size`; blocks until all have. `store` is where they meet: no other group has used it.

    Gloo listens at `address`, and the others must reach it there. Raises AbsentError past `timeout`, and RuntimeError
    for ranks that do not reach each other and for what this machine lacks.
    """
    if backend == "nccl" and not dist.is_nccl_available():
        raise RuntimeError(f"given nccl, which torch {torch.__version__} here is built without; needed gloo")
    began = time.monotonic()
    call_roll(store, rank, size, timeout)
    meeting = PrefixStore(backend, store)
    if backend == "nccl":
        return _open_nccl(meeting, rank, size, timeout)
    # For connecting: all have come, and what is left of the time has to do.
    left = max(timeout / 4, timeout - (time.monotonic() - began))
    return Group(_connect_gloo(meeting, rank, size, left, address), torch.device("cpu"), timeout)


def call_roll(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all ranks have come, so that an error can say who has not. Raises AbsentError past `timeout`."""
    here = [f"here/{number}" for number in range(size)]
    store.set(here[rank], "1")
    try:
        store.wait(here, timedelta(seconds=timeout))
    except RuntimeError:
        absent = tuple(number for number, key in enumerate(here) if not store.check([key]))
        if not absent:
            raise
        raise AbsentError(absent) from None


def _connect_gloo(meeting: PrefixStore, rank: int, size: int, seconds: float, address: str) -> Any:
    """Gloo itself says neither where it listens nor what a wait was for."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    try:
        options._devices = [gloo.create_device(hostname=address.strip("[]"))]
    except RuntimeError as error:
        needed = "needed an address of this machine (`address` of its host in the cluster file)"
        raise RuntimeError(f"cannot listen on {address}, {needed}: {error}") from error
    try:
        return gloo(meeting, rank, size, options)
    except RuntimeError as error:
        text = f"all have come, but do not reach each other; this one listens on {address}"
        raise RuntimeError(f"{text}: {error}") from error


def _open_nccl(meeting: PrefixStore, rank: int, size: int, timeout: float) -> Group:
    """Ranks on different GPUs, each with its GPU as the current device. NCCL_SOCKET_IFNAME names the interface.
    The tests do not run this: it needs two GPUs.
    """
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    nccl = ProcessGroupNCCL(meeting, rank, size, options)
    return Group(nccl, torch.device("cuda", torch.cuda.current_device()), timeout)
