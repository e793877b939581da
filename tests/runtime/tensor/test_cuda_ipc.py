"""A GPU's memory for others to write: what of it needs none. `test_put.py` has the ways between processes, which run on
a GPU, too, where there is one."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.runtime.tensor import cuda_ipc
from penstock.runtime.tensor.cuda_ipc import DeviceMemory, Export, OpenedMemory, finish, visible_devices
from penstock.runtime.tensor.one_sided import Place
from penstock.runtime.tensor.shm import SHM, SegmentError, create_segment, open_segment, sweep

HANDLE = bytes(range(64))
RUN = f"testblocks{os.getpid()}"
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class HostBlocks:
    """What the driver gives, in the host's memory: each block is mapped again when it is opened."""

    def __init__(self) -> None:
        self.made = 0

    def export(self, nbytes: int) -> tuple[Export, Tensor]:
        segment = create_segment(f"penstock-{RUN}-owner-{self.made}", nbytes, [SHM])
        self.made += 1
        handle = segment.name.encode().ljust(len(HANDLE), b"\0")
        return Export(0, handle, nbytes), torch.frombuffer(segment.view, dtype=torch.uint8)

    def open(self, block: Export) -> Tensor:
        segment = open_segment(block.handle.rstrip(b"\0").decode(), [SHM], writable=True)
        return torch.frombuffer(segment.view, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: Any) -> Iterator[HostBlocks]:
    found = HostBlocks()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda index: found)
    yield found
    sweep(RUN)


def test_what_is_written_through_a_place_is_in_the_owners_block_and_nothing_beside_it(driver: HostBlocks) -> None:
    memory, opened = DeviceMemory("cuda:0", "owner", 1.0), OpenedMemory(1.0)
    first, second = memory(4096), memory(8192)
    assert memory.shared
    for buffer, offset in ((first, 1024), (second, 512), (second, 4096)):
        like = torch.empty(16, 8, dtype=torch.bfloat16)
        opened.view(memory.place(buffer[offset:]), like, (16, 1)).fill_(3)
        rows = buffer[offset : offset + 512].view(torch.bfloat16).view(16, 16)
        assert rows[:, :8].eq(3).all()
        assert not rows[:, 8:].any()
    assert (int(first.count_nonzero()), int(second.count_nonzero())) == (256, 512)  # 3 is 0x4040
    with pytest.raises(SegmentError, match="is not in the 4096 bytes"):
        opened.view(memory.place(first[4000:]), torch.empty(64), (1,))
    with pytest.raises(SegmentError, match="owner: a tensor of 12 bytes is in none of its segments"):
        memory.place(torch.zeros(3))


def test_where_the_driver_exports_nothing_memory_is_torchs_and_the_user_is_told(driver: Any, monkeypatch: Any) -> None:
    def refuse(nbytes: int) -> None:
        raise RuntimeError("cuIpcGetMemHandle on cuda:0: operation not supported (801)")

    monkeypatch.setattr(driver, "export", refuse)
    told: list[str] = []
    memory = DeviceMemory("cpu", "generator.0", 1.0, told.append)
    assert memory(4096).nbytes == 4096
    assert not memory.shared
    assert told == [f"generator.0: {memory.refused}; weights come as messages through the host, which is slower"]


def test_a_block_is_found_by_its_name() -> None:
    block = Export(3, HANDLE, 4 << 30)
    assert Export.parse(block.name()) == block
    assert Export.parse(block.name()).handle == HANDLE


@pytest.mark.parametrize(
    "name",
    [
        "penstock-run-owner-0",
        Export(0, HANDLE[1:], 1).name(),
        Export(0, HANDLE, 1).name() + "\n",
        f"cuda:-1/{HANDLE.hex()}/1",
        f"cuda:0/{HANDLE.hex()}/{'9' * 16}",
        f"cuda:0/{'zz' * 64}/1",
    ],
)
def test_what_is_no_blocks_name_reaches_no_driver(name: str) -> None:
    with pytest.raises(SegmentError, match="needed the name of a GPU's block"):
        OpenedMemory(1.0).view(Place(name, 0), torch.zeros(1), (1,))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_none_to_compare() -> None:
    assert visible_devices() == 0


@needs_a_gpu
def test_a_block_is_zero_and_the_place_of_a_tensor_in_it_is_known() -> None:
    memory = DeviceMemory("cuda:0", "owner", 30.0)
    buffer = memory(4096)
    assert (memory.shared, buffer.nbytes, int(buffer.count_nonzero())) == (True, 4096, 0)
    place = memory.place(buffer[1024:])
    assert place.offset == 1024
    assert Export.parse(place.segment).nbytes == 2 << 20
    with pytest.raises(SegmentError, match="in none of its segments"):
        memory.place(torch.zeros(3, device="cuda:0"))


@needs_a_gpu
def test_a_gpu_that_is_busy_for_longer_than_the_deadline_is_named() -> None:
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"cuda:0 is not through with the work of this process after 0.05 s"):
        finish(torch.cuda.current_stream(), 0.05)
    finish(torch.cuda.current_stream(), 60.0)


@needs_a_gpu
def test_a_block_of_this_process_is_not_opened_and_the_error_says_what_the_driver_said() -> None:
    memory = DeviceMemory("cuda:0", "owner", 30.0)
    buffer = memory(4096)
    with pytest.raises(SegmentError, match=r"a block of 2097152 bytes on cuda:0: cuIpcOpenMemHandle_v2 on cuda:0"):
        OpenedMemory(1.0).view(memory.place(buffer), buffer, (1,))
