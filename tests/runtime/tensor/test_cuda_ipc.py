"""A GPU's memory for others to write: what of it needs none. `test_put.py` has the ways between processes, which run on
a GPU, too, where there is one."""

from pathlib import Path

import pytest
import torch

from penstock.runtime.tensor.cuda_ipc import DeviceMemory, Export, OpenedMemory, finish, visible_devices
from penstock.runtime.tensor.memory import Place
from penstock.runtime.tensor.segments import SegmentError

HANDLE = bytes(range(64))
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
