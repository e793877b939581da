"""torch's process groups, made directly: no global world, no collective, no TCP store. The only file that knows them.

Gloo's listening sockets are bound to the interface that the bridge names, and ranks find each other through a file.
Neither authenticates: on one host that is the loopback interface and a private folder, and beyond it a network must
be trusted.
"""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Work


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
        """Until the message is sent or received; without the interpreter's lock. RuntimeError past the deadline."""
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


def open_group(path: Path, rank: int, size: int, *, timeout: float, backend: str, interface: str) -> Group:
    """Join as `rank` of `size`, meeting in the file `path`; blocks until all have. RuntimeError past `timeout`, and for
    what this machine lacks.
    """
    if not path.parent.is_dir():  # torch would look for it for minutes
        raise RuntimeError(f"no folder {path.parent} to meet in")
    if backend == "nccl" and not dist.is_nccl_available():
        raise RuntimeError(f"given nccl, which torch {torch.__version__} here is built without; needed gloo")
    store = FileStore(str(path), size)
    store.set_timeout(timedelta(seconds=timeout))
    meeting = PrefixStore("bridge", store)
    if backend == "nccl":
        return _open_nccl(meeting, rank, size, timeout)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=interface)]
    options._timeout = timedelta(seconds=timeout)
    return Group(gloo(meeting, rank, size, options), torch.device("cpu"), timeout)


def _open_nccl(meeting: PrefixStore, rank: int, size: int, timeout: float) -> Group:
    """Ranks on different GPUs, each with its GPU as the current device. NCCL_SOCKET_IFNAME names the interface.
    The tests do not run this: it needs two GPUs.
    """
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    nccl = ProcessGroupNCCL(meeting, rank, size, options)
    return Group(nccl, torch.device("cuda", torch.cuda.current_device()), timeout)
