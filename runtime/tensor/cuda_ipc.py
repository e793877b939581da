"""A GPU's memory that other processes of its host write: each block is exported once, and named by its handle.

The blocks come directly from the CUDA driver (`libcuda`, by its C names; torch loads it too), not from torch's
allocator. A handle names a whole block of the driver: that of a torch tensor would expose everything else in its block,
and with expandable segments or the asynchronous allocator there is no such block. Torch's own way (`_share_cuda_`)
counts references in files that a killed process leaves behind. Here nothing is counted: a block lives as long as its
process, and a process that has opened it must not use it longer. But the driver frees the memory only when all of these
processes have unmapped it: so a block is unmapped with its last view.

`_Driver` has the driver calls; the rest is as in `one_sided`.
"""

import ctypes
import hashlib
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.tensor.one_sided import PeerMemory, WritableMemory
from penstock.runtime.tensor.shm import SegmentError

_UNIT = 2 << 20  # bytes: smaller allocations share a block of the driver, and a handle would expose all of it
_HANDLE_BYTES = 64
_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: copies between two GPUs are direct if possible
_POLL_S = 5e-5

# Keeps memory mapped that a GPU may still be writing.
_unfinished: list[Sequence[tuple[Tensor, Tensor]]] = []

_log = logging.getLogger(__name__)


class Export(NamedTuple):
    """A block of a GPU's memory as other processes find it: the GPU's number, which is the same for all of them (see
    `visible_devices`), the driver's handle, and the bytes."""

    device: int
    handle: bytes
    nbytes: int

    def name(self) -> str:
        return f"cuda:{self.device}/{self.handle.hex()}/{self.nbytes}"

    @staticmethod
    def parse(name: str) -> "Export":
        """The inverse of `name`. Raises SegmentError for anything else."""
        found = re.fullmatch(rf"cuda:(\d{{1,3}})/([0-9a-f]{{{2 * _HANDLE_BYTES}}})/(\d{{1,15}})", name)
        if found is None:
            needed = "the name of a GPU's block (cuda:<number>/<handle>/<bytes>)"
            raise SegmentError(f"given {name[:40]!r}, needed {needed}")
        return Export(int(found[1]), bytes.fromhex(found[2]), int(found[3]))


class DeviceMemory(WritableMemory):
    """Memory of one GPU that senders on the same host can write. If the driver cannot export any, it is torch's. A wait
    for the GPU ends after `timeout` seconds.
    """

    kind = "cuda_ipc"
    fallback = "weights come as messages through the host"

    def __init__(
        self, device: torch.device | str, owner: str, timeout: float, warn: Callable[[str], object] = _log.warning
    ) -> None:
        super().__init__(owner, device, warn)
        self._timeout = timeout

    def _export(self, nbytes: int) -> tuple[str, Tensor]:
        try:
            block, buffer = _driver(self._device.index or 0).export(nbytes)
        except (OSError, RuntimeError) as error:
            raise SegmentError(str(error)) from error
        return block.name(), buffer.zero_()

    def wait_idle(self) -> None:
        # The receiving thread's stream comes after the steps that read this memory.
        finish(torch.cuda.current_stream(self._device), self._timeout)

    def close(self) -> None:
        """Does nothing: other processes may have a block open, so blocks end with the process."""


class OpenedMemory(PeerMemory):
    """Other ranks' blocks, each opened once. Copies run in their own stream, in parallel with computation."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _open(self, name: str) -> Tensor:
        block = Export.parse(name)
        try:
            return _driver(block.device).open(block)
        except (OSError, RuntimeError) as error:
            raise SegmentError(f"a block of {block.nbytes} bytes on cuda:{block.device}: {error}") from error

    def write(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for device in {piece.device for _, piece in pairs}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                for target, piece in pairs:
                    if piece.device == device:
                        target.copy_(piece, non_blocking=True)
            try:
                # The receiver's streams, in another process, cannot wait for this stream: the host must.
                finish(stream, self._timeout)
            except RuntimeError:
                _unfinished.append(pairs)
                raise

    def close(self) -> None:
        """Forget the blocks. A view that is still in use keeps its block mapped."""
        self._opened.clear()


def finish(stream: torch.cuda.Stream, timeout: float) -> None:
    """Wait until a GPU has done the work queued on a stream so far. RuntimeError past `timeout` seconds."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    deadline = time.monotonic() + timeout
    # Not `synchronize`: it has no timeout, and the other process may occupy the GPU.
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise RuntimeError(f"{stream.device} is not through with the work of this process after {timeout:g} s")
        time.sleep(_POLL_S)


def visible_devices() -> int:
    """A number that is equal in processes that see the same GPUs with the same indices; 0 without GPUs."""
    count = torch.cuda.device_count()
    facts = "\n".join(str(torch.cuda.get_device_properties(k).uuid) for k in range(count))
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "little") if count else 0


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Block:
    """Memory at an address, which torch uses without a copy. torch keeps this object for as long as a view of it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Driver:
    """The driver's calls on one GPU, in torch's context. RuntimeError for one that fails."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        torch.zeros(1, device=self._device)  # torch makes its context first
        self._library = ctypes.CDLL("libcuda.so.1")
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        # torch uses the primary context; it could not use memory of another one.
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def export(self, nbytes: int) -> tuple[Export, Tensor]:
        """A new block of at least `nbytes` bytes that others can open."""
        # A block of its own: a handle exposes everything in its block.
        nbytes = -(-nbytes // _UNIT) * _UNIT
        torch.cuda.empty_cache()  # the driver cannot use memory in torch's cache
        address, handle = ctypes.c_uint64(), _Handle()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except RuntimeError:
                self._call("cuMemFree_v2", address)
                raise
        own = self._tensor(_Block(address.value, nbytes), address.value)
        return Export(self._device.index, bytes(handle.reserved), nbytes), own

    def open(self, block: Export) -> Tensor:
        """Another process's block, which is unmapped with the last view of it. The driver refuses one of this
        process."""
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(block.handle)
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_PEERS))
        memory = _Block(address.value, block.nbytes)
        weakref.finalize(memory, self._unmap, address).atexit = False
        return self._tensor(memory, address.value)

    def _unmap(self, address: ctypes.c_uint64) -> None:
        with suppress(RuntimeError), self._current():  # a GPU that has failed has nothing left to unmap
            self._call("cuIpcCloseMemHandle", address)

    def _tensor(self, memory: _Block, address: int) -> Tensor:
        tensor = torch.as_tensor(memory, device=self._device)
        if tensor.data_ptr() != address:
            raise RuntimeError(f"torch {torch.__version__} copied a block of {self._device}, needed to use it as it is")
        return tensor

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes this GPU's context current in the block, in any thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise RuntimeError(f"{name} on {self._device}: {(text.value or b'unknown error').decode()} ({code})")


@lru_cache
def _driver(index: int) -> _Driver:
    """One object per GPU, kept forever, since its context is torch's."""
    return _Driver(index)
