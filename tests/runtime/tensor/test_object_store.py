"""Values in shared memory: equal copies, no leak, and no bad handle or damaged block crashes a reader."""

import json
import mmap
import os
import random
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.graph.types import Advantages, Prompts, Rewards
from penstock.runtime.tensor.codec import DTYPES, CodecError, decode, encode
from penstock.runtime.tensor.layout import ITEMSIZE
from penstock.runtime.tensor.object_store import FreeList, ObjectReader, ObjectStore
from penstock.runtime.tensor.shm import (
    PIECE,
    SHM,
    ObjectRef,
    ObjectRefError,
    SegmentError,
    create_segment,
    open_segment,
    segment_name,
    sweep,
)

# Values as tensors and JSON ----------------------------------------------------------------------------------


def through_json(value: Any, cls: type[Any]) -> Any:
    tensors, meta = encode(value)
    return decode(cls, tensors, json.loads(json.dumps(meta)))


@dataclass(frozen=True)
class Mixed:
    name: str
    scale: float
    count: int
    flag: bool
    nothing: None
    table: dict[str, list[int]]
    words: tuple[str, ...]
    values: Any


def mixed(values: Any, **changes: Any) -> Mixed:
    fields = {"name": "a", "scale": 0.1, "count": 2**70, "flag": True, "nothing": None, "table": {"k": [1]}}
    return Mixed(**{**fields, "words": ("x", "\ud800"), "values": values, **changes})


@pytest.mark.parametrize(
    "value",
    [Prompts((1,), ("p",), ("a",)), Rewards(torch.randn(4)), Advantages(torch.zeros(0))],
)
def test_what_flows_on_edges_comes_back_equal(value: Any) -> None:
    back = through_json(value, type(value))
    assert type(back) is type(value)
    for name, item in vars(value).items():
        if isinstance(item, torch.Tensor):
            assert torch.equal(getattr(back, name), item)
            assert getattr(back, name).dtype == item.dtype
        else:
            assert getattr(back, name) == item


@settings(deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3))
def test_every_dtype_and_shape_keeps_its_bits(dtype: str, shape: list[int]) -> None:
    raw = torch.randint(0, 2, (*shape, ITEMSIZE[dtype]), dtype=torch.uint8)
    tensor = raw.view(DTYPES[dtype]).reshape(shape)
    back = through_json(mixed(tensor), Mixed).values
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw.reshape(-1))


def test_json_fields_keep_their_values_tuples_stay_tuples_and_numpy_becomes_torch() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1]
    value = mixed(array, flag=np.bool_(True))
    back = through_json(value, Mixed)
    assert [getattr(back, n) for n in vars(value) if n != "values"] == [
        getattr(value, n) for n in vars(value) if n != "values"
    ]
    assert back.values.tolist() == array.tolist()
    assert back.values.dtype == torch.int16


def test_strided_and_differentiable_tensors_travel_as_plain_ones() -> None:
    tensor = torch.randn(3, 4, requires_grad=True)
    back = through_json(mixed(tensor.t()), Mixed).values
    assert torch.equal(back, tensor.t())
    assert not back.requires_grad


@pytest.mark.parametrize("value", [torch.arange(3), 1.5, 7, "text", True])
def test_a_tensor_or_scalar_is_a_value_by_itself(value: Any) -> None:
    back = through_json(value, type(value))
    assert torch.equal(back, value) if isinstance(value, torch.Tensor) else back == value


@pytest.mark.parametrize(
    "item",
    [
        *({1, 2}, ((1, 2),), {1: 2}, [(1,)], object(), b"bytes", np.array(["x"])),
        *(torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()),
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_cannot_be_given_back_is_refused_by_field(item: Any) -> None:
    with pytest.raises(CodecError, match=r"Mixed\.values"):
        encode(mixed(item))


def test_the_declared_class_decides_and_must_fit() -> None:
    tensors, meta = encode(Rewards(torch.zeros(2)))
    assert type(decode(Advantages, tensors, meta)) is Advantages
    with pytest.raises(CodecError, match=r"Prompts: given the fields \['values_N'\]"):
        decode(Prompts, tensors, meta)
    with pytest.raises(CodecError, match="needed a str"):
        decode(str, *encode(3))


# Segments ----------------------------------------------------------------------------------------------------


class Pieces(mmap.mmap):
    """An mmap that records its flags and madvise calls."""

    flags: int
    asked: list[tuple[int, int]]

    def __new__(cls, *given: Any, **options: Any) -> Self:
        made = super().__new__(cls, *given, **options)
        made.flags, made.asked = options["flags"], []
        return made

    def madvise(self, how: int, start: int = 0, length: int = 0) -> None:
        self.asked.append((start, length))
        super().madvise(how, start, length)


@pytest.mark.skipif(tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14), reason="needs Linux 5.14")
@pytest.mark.parametrize("writable", [True, False])
def test_a_segment_is_mapped_whole_by_pieces_between_which_threads_run(
    monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """Python holds the GIL while it maps: for gigabytes this would stop a rank's heartbeat for too long."""
    monkeypatch.setattr(mmap, "mmap", Pieces)
    size = 2 * PIECE + 5000
    made = create_segment(f"penstock-{secrets.token_hex(6)}-owner-0", size, [SHM])
    try:
        opened = open_segment(made.name, [SHM], writable)
        for segment in (made, opened):
            held: Any = segment.view.obj
            assert not held.flags & mmap.MAP_POPULATE
            assert held.asked == [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 5000)]
        # All pages of both maps are present.
        smaps = Path("/proc/self/smaps").read_text().split(made.name)[1:]
        assert [int(re.search(r"Rss: +(\d+)", one)[1]) for one in smaps] == [-(-size // 4096) * 4] * 2  # type: ignore[index]
        opened.close()
    finally:
        made.unlink()
        made.close()


OWNER = """
import sys
from pathlib import Path
from penstock.runtime.tensor.shm import create_segment
segment = create_segment(sys.argv[1], 8192, [Path(sys.argv[2])])
print("ready", flush=True)
sys.stdin.read()
"""


def start_owner(name: str, folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, name, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_segment_is_private_full_size_and_shared(tmp_path: Path) -> None:
    segment = create_segment(segment_name("run1", "generator/0", 0), 8192, [tmp_path])
    facts = segment.path.stat()
    assert (facts.st_mode & 0o777, facts.st_size) == (0o600, 8192)
    other = open_segment(segment.name, [tmp_path / "absent", tmp_path])
    segment.view[100:105] = b"hello"
    assert bytes(other.view[100:105]) == b"hello"
    with pytest.raises(TypeError):
        other.view[0] = 1
    segment.unlink()
    assert bytes(other.view[100:105]) == b"hello"
    other.close()
    segment.close()


def test_a_taken_name_is_never_reused(tmp_path: Path) -> None:
    segment = create_segment("penstock-run1-a-0", 4096, [tmp_path])
    with pytest.raises(SegmentError, match="penstock-run1-a-0 is there already"):
        create_segment("penstock-run1-a-0", 4096, [tmp_path])
    segment.close()


def test_no_room_is_an_error_with_the_numbers_and_leaves_no_file() -> None:
    name = f"penstock-noroom{os.getpid()}-a-0"
    with pytest.raises(SegmentError, match=rf"of {1 << 50} bytes \(/dev/shm: .*, \d+ of \d+ bytes free\)"):
        create_segment(name, 1 << 50, [SHM])
    assert not (SHM / name).exists()


@pytest.mark.parametrize("name", ["passwd", "penstock-../x", "penstock-a/../../b"])
def test_only_segment_names_are_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="needed a segment's name"):
        open_segment(name, [tmp_path])
    with pytest.raises(ValueError, match="needed letters and digits"):
        segment_name("my-run", "a", 0)


def test_a_file_that_others_may_write_or_that_is_empty_or_a_link_is_not_opened(tmp_path: Path) -> None:
    open_file = tmp_path / "penstock-run1-a-0"
    open_file.write_bytes(bytes(10))
    open_file.chmod(0o666)
    (tmp_path / "penstock-run1-a-1").symlink_to(open_file)
    (tmp_path / "penstock-run1-a-2").touch(mode=0o600)
    for number, fault in enumerate(("mode 666", "symbolic link", "0 bytes")):
        with pytest.raises((SegmentError, OSError), match=fault):
            open_segment(f"penstock-run1-a-{number}", [tmp_path])


@pytest.mark.timeout(300)
def test_sweep_takes_dead_runs_only(tmp_path: Path) -> None:
    mine = create_segment("penstock-mine-a-0", 4096, [tmp_path])
    dead = start_owner("penstock-mixed-a-0", tmp_path)
    alive = start_owner("penstock-mixed-b-0", tmp_path)
    try:
        (tmp_path / "unrelated").touch()
        (tmp_path / "penstock-old-a-0").touch(mode=0o600)
        dead.send_signal(signal.SIGKILL)
        dead.wait(50)
        assert sweep(folders=[tmp_path]) == ["penstock-old-a-0"]
        alive.send_signal(signal.SIGKILL)
        alive.wait(50)
        assert sweep(folders=[tmp_path]) == ["penstock-mixed-a-0", "penstock-mixed-b-0"]
    finally:
        for process in (dead, alive):
            process.kill()
            process.communicate()
    assert sorted(os.listdir(tmp_path)) == ["penstock-mine-a-0", "unrelated"]
    mine.close()


def test_sweep_of_one_run_takes_it_whatever_holds_it(tmp_path: Path) -> None:
    a, b = (create_segment(f"penstock-{run}-x-0", 4096, [tmp_path]) for run in ("a", "b"))
    assert sweep("a", [tmp_path]) == ["penstock-a-x-0"]
    assert os.listdir(tmp_path) == ["penstock-b-x-0"]
    a.close()
    b.close()


def test_what_the_launcher_and_the_controller_use_needs_no_torch() -> None:
    modules = ", ".join(f"penstock.runtime.tensor.{name}" for name in ("shm", "layout", "reshard", "wire_format"))
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=300, check=False).returncode == 0


# Free space --------------------------------------------------------------------------------------------------


SIZE = 64


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 24)), max_size=60))
def test_blocks_never_overlap_and_a_fitting_gap_is_always_found(steps: list[tuple[bool, int]]) -> None:
    blocks, used, taken = FreeList(SIZE), [False] * SIZE, []
    for take, number in steps:
        if take:
            gaps = [i for i in range(SIZE - number + 1) if not any(used[i : i + number])]
            offset = blocks.take(number)
            assert offset == (gaps[0] if gaps else None)
            if offset is not None:
                used[offset : offset + number] = [True] * number
                taken.append((offset, number))
        elif taken:
            offset, length = taken.pop(number % len(taken))
            used[offset : offset + length] = [False] * length
            blocks.give(offset, length)


# The store ---------------------------------------------------------------------------------------------------


RUN = f"t{os.getpid()}"


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    made = ObjectStore(RUN, "generator/0", segment_bytes=1 << 16)
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[ObjectReader]:
    made = ObjectReader(RUN)
    yield made
    made.close()


def rewards(count: int, seed: int = 0) -> Rewards:
    return Rewards(torch.randn(count, generator=torch.Generator().manual_seed(seed)))


def test_a_value_comes_back_as_a_copy_however_large(store: ObjectStore, reader: ObjectReader) -> None:
    for value in (rewards(1000), rewards(100_000)):
        handle = store.put(value)
        first, second = reader.get(handle, Rewards), reader.get(handle, Rewards)
        store.free(handle)
        first.values_N.zero_()
        assert torch.equal(second.values_N, value.values_N)
    assert store.usage().segments == 2
    plain = Prompts((3,), ("1+1=",), ("2",))
    assert reader.get(store.put(plain), Prompts) == plain


@settings(deadline=None)
@given(st.data())
def test_puts_and_frees_match_a_model(data: Any) -> None:
    store, reader = ObjectStore(RUN, f"model/{os.getpid()}", segment_bytes=4096), ObjectReader(RUN)
    live: list[tuple[ObjectRef, Rewards]] = []
    try:
        for _ in range(data.draw(st.integers(0, 30))):
            if live and data.draw(st.booleans()):
                handle, _ = live.pop(data.draw(st.integers(0, len(live) - 1)))
                store.free(handle)
            else:
                value = rewards(data.draw(st.integers(0, 400)), len(live))
                live.append((store.put(value), value))
            for handle, value in live:
                assert torch.equal(reader.get(handle, Rewards).values_N, value.values_N)
            assert store.usage().blocks == len(live)
            assert store.usage().block_bytes == sum(h.nbytes for h, _ in live)
    finally:
        reader.close()
        store.close()


def test_nothing_leaks_over_ten_thousand_puts(store: ObjectStore) -> None:
    draw = random.Random(0)
    values = [rewards(n) for n in (0, 10, 200, 1500)]
    live: list[ObjectRef] = []
    for _ in range(10_000):
        live.append(store.put(draw.choice(values)))
        if len(live) > 8:
            store.free(live.pop(draw.randrange(len(live))))
    assert store.usage().segment_bytes <= 4 * (1 << 16)
    for handle in live:
        store.free(handle)
    usage = store.usage()
    assert (usage.blocks, usage.block_bytes, usage.puts) == (0, 0, 10_000)


def test_freeing_twice_or_a_stranger_names_the_handle(store: ObjectStore) -> None:
    handle = store.put(rewards(3))
    store.free(handle)
    with pytest.raises(ObjectRefError, match=r"free: penstock-.*\[0:\d+\] of generator/0 .* is not in use"):
        store.free(handle)
    again = store.put(rewards(3))
    assert again.offset == handle.offset
    with pytest.raises(ObjectRefError, match="is not in use"):
        store.free(handle)
    with pytest.raises(ObjectRefError, match="is not in use"):
        store.free(replace(again, segment="penstock-other-x-0"))


def test_a_freed_or_reused_block_is_not_read(store: ObjectStore, reader: ObjectReader) -> None:
    handle = store.put(rewards(3))
    store.free(handle)
    with pytest.raises(ObjectRefError, match="freed"):
        reader.get(handle, Rewards)
    store.put(rewards(3, seed=1))
    with pytest.raises(ObjectRefError, match="freed"):
        reader.get(handle, Rewards)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 64},
        {"offset": -64},
        {"offset": 1 << 40},
        {"nbytes": 1 << 40},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": 64},
        {"serial": 99},
        {"segment": "penstock-other-generator%2F0-0"},
        {"segment": "../../etc/passwd"},
    ],
    ids=str,
)
def test_a_wrong_handle_is_an_error(change: dict[str, Any], store: ObjectStore, reader: ObjectReader) -> None:
    with pytest.raises(ObjectRefError):
        reader.get(replace(store.put(rewards(3)), **change), Rewards)


def test_a_segment_that_is_gone_names_the_owner(store: ObjectStore, reader: ObjectReader) -> None:
    handle = store.put(rewards(3))
    store.close()
    with pytest.raises(ObjectRefError, match=r"of generator/0 .*: its owner has closed it"):
        reader.get(handle, Rewards)


@settings(deadline=None)
@example(63, ord(" "))  # the header's 16 rows become 6, and 15 in the next example
@example(64, ord("5"))
@given(st.integers(24, 255), st.integers(0, 255))
def test_a_damaged_block_is_an_error_or_a_value_never_a_crash(position: int, byte: int) -> None:
    store, reader = ObjectStore(RUN, f"damage/{os.getpid()}", segment_bytes=4096), ObjectReader(RUN)
    try:
        handle = store.put(rewards(16))
        with open(f"/dev/shm/{handle.segment}", "r+b") as file:
            file.seek(handle.offset + position)
            file.write(bytes([byte]))
        try:
            assert reader.get(handle, Rewards).values_N.numel() == 16
        except ObjectRefError as error:
            assert "penstock-" in str(error)  # noqa: PT017 (either outcome is right)
    finally:
        reader.close()
        store.close()


def test_a_value_of_another_class_is_an_error(store: ObjectStore, reader: ObjectReader) -> None:
    with pytest.raises(ObjectRefError, match="Prompts: given the fields"):
        reader.get(store.put(rewards(3)), Prompts)


def test_where_the_first_folder_is_full_values_lie_in_the_next_and_the_user_is_told_once(tmp_path: Path) -> None:
    absent, told = tmp_path / "absent", list[str]()
    with pytest.raises(SegmentError, match=r"absent: No such file or directory, no such folder"):
        ObjectStore(RUN, "a", folders=[absent])
    store = ObjectStore(RUN, "a", folders=[absent, tmp_path], segment_bytes=4096, warn=told.append)
    reader = ObjectReader(RUN, folders=[tmp_path])
    for _ in range(3):
        assert torch.equal(reader.get(store.put(rewards(2000)), Rewards).values_N, rewards(2000).values_N)
    assert store.usage().segments > 2
    lacks = f"a: no room for 4096 bytes of samples in {absent} (no such folder)"
    assert told == [f"{lacks}; they lie in {tmp_path} where it is full, which is slower"]
    reader.close()
    for _ in range(2):
        store.close()
    assert os.listdir(tmp_path) == []


def test_a_store_made_anew_under_the_same_name_repeats_no_handle(reader: ObjectReader) -> None:
    first = ObjectStore(RUN, "again")
    old = first.put(rewards(3))
    assert torch.equal(reader.get(old, Rewards).values_N, rewards(3).values_N)
    first.close()
    second = ObjectStore(RUN, "again")
    new = second.put(rewards(3, seed=1))
    with pytest.raises(ObjectRefError, match="is not in use"):
        second.free(old)
    with pytest.raises(ObjectRefError, match="freed"):  # this reader still maps the removed segment
        reader.get(new, Rewards)
    second.close()
