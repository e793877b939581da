"""Checkpoints and offloaded state are restored equal, on any mesh; a failed write leaves the old checkpoint."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.graph.ir import Firing
from penstock.graph.protocols import Axes, Sharding
from penstock.runtime.record.checkpoints import StateError, part_path
from penstock.runtime.record.folder import sync
from penstock.runtime.tensor import offload as module
from penstock.runtime.tensor.checkpoint import (
    CheckpointShard,
    HostBuffers,
    StateFile,
    copy_shard,
    layout_of,
    save_state,
)
from penstock.runtime.tensor.codec import CodecError
from penstock.runtime.tensor.layout import Mesh
from penstock.runtime.tensor.offload import Offload, OffloadError
from penstock.runtime.tensor.offload import host_blocks as offload_blocks

# State files -------------------------------------------------------------------------------------------------


def load_state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    file = StateFile.open(path)
    return file.tensors(), file.facts


def test_tensors_and_facts_come_back_equal(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    tensors = {
        "half": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 2),
        "strided": torch.randn(3, 4).t(),
        "view": flat[2:5],
        "overlap": flat[4:9],
        "tied": flat,
    }
    facts = {"version": 3, "key": 2**70, "names": ["a"], "nothing": None, "nan_free": 0.1}
    save_state(tmp_path / "s.safetensors", tensors, facts)
    back, back_facts = load_state(tmp_path / "s.safetensors")
    assert back_facts == facts
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
        assert back[name].dtype == tensor.dtype
    assert os.listdir(tmp_path) == ["s.safetensors"]


WRITE = """
import resource, sys, torch
from penstock.runtime.tensor.checkpoint import save_state
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
save_state(sys.argv[1], {"a": torch.ones(1_000_000)}, {})
"""


@pytest.mark.timeout(300)
def test_a_write_that_fails_halfway_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for number in (0, 1):
        save_state(path, {f"a{number}": torch.zeros(2)}, {"n": number})
    done = subprocess.run([sys.executable, "-c", WRITE, str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"StateError: {path}: cannot write 4000000 bytes of state" in done.stderr
    assert "bytes free" in done.stderr
    assert load_state(path)[1] == {"n": 1}
    assert load_state(path)[0].keys() == {"a1"}
    assert os.listdir(tmp_path) == ["s"]
    with pytest.raises(StateError, match=r"absent/s: cannot write 8 bytes of state \(no such folder\)"):
        save_state(tmp_path / "absent" / "s", {"a": torch.zeros(2)}, {})


def test_what_is_no_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_state(path, {"a": torch.zeros(1000)}, {})
    for content in (b"", b"garbage that is no header", bytes(100), path.read_bytes()[:-10]):
        path.write_bytes(content)
        with pytest.raises(StateError, match=f"{path}: not a readable state"):
            load_state(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(StateError, match="given format None"):
        load_state(path)


def _damage(path: Path, at: bytes) -> None:
    """Flip one bit of the first of these bytes, which occur once in the file."""
    data = bytearray(path.read_bytes())
    place = data.index(at)
    data[place] ^= 1
    path.write_bytes(data)


def test_a_bit_that_a_disk_has_changed_is_found_whatever_it_belongs_to(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.tensor(7), "c": torch.tensor([True, False]), "d": torch.zeros(0)}
    path = tmp_path / "s"
    for name in ("a", "b"):
        save_state(path, tensors, {"number": 1234567})
        _damage(path, tensors[name].numpy().tobytes())
        with pytest.raises(StateError, match=rf"{path}: not a readable state: {name}: .*checksum"):
            load_state(path)
        # Damage in a tensor that is not read does not matter.
        assert StateFile.open(path).tensors("c").keys() == {""}
    save_state(path, tensors, {"number": 1234567})
    _damage(path, b"1234567")
    with pytest.raises(StateError, match=rf"{path}: not a readable state: facts: .*checksum"):
        StateFile.open(path)


def test_a_state_of_a_version_without_checksums_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "s", {"format": "penstock-state-1", "facts": '{"n": 1}'})
    tensors, facts = load_state(tmp_path / "s")
    assert tensors["a"].tolist() == [1, 1]
    assert facts == {"n": 1}


# Shards of a checkpoint --------------------------------------------------------------------------------------


SHAPES = {
    "up.weight": (7, 6),
    "down.weight": (6, 7),
    "norm.weight": (5,),
    "mlp.experts.0.up.weight": (3, 2),
    "mlp.experts.1.up.weight": (3, 2),
}
RULES = {"up.weight": (0, 0), "down.weight": (1, 0), "norm.weight": None}
WHOLE = {
    f"{kind}.{name}": torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * index
    for index, kind in enumerate(("master", "exp_avg"))
    for name, shape in SHAPES.items()
}
MESHES: list[Axes] = [
    (),
    (("fsdp", 2),),
    (("fsdp", 3), ("tp", 2)),
    (("dp", 2), ("fsdp", 2)),
    (("tp", 4),),
    (("ep", 2), ("fsdp", 2)),
]


class Whole:
    """A value that each rank holds whole."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def weights(self) -> Mapping[str, Tensor]:
        return {}

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {**WHOLE, "seed": torch.tensor([7])}, {"version": 3}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None: ...

    def export(self, folder: str) -> None:
        (Path(folder) / f"exported-{self.rank}").touch()


class Parts(Whole):
    """A value of which each rank holds a shard."""

    def __init__(self, mesh: Axes, rank: int) -> None:
        super().__init__(rank)
        self.mesh = mesh

    def sharding(self) -> Sharding:
        return Sharding(self.mesh, SHAPES, RULES, RULES, experts=2)

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {**self.own(), "seed": torch.tensor([7])}, {"version": 3}

    def own(self) -> dict[str, Tensor]:
        layout = layout_of(self)
        assert layout is not None
        found = {}
        for name, tensor in WHOLE.items():
            held = layout.by_name[name.partition(".")[2]].held_by(self.rank)
            found[name] = tensor[tuple(map(slice, held[0].start, held[0].stop))] if held else tensor[:0]
        return found


def _value(mesh: Axes, rank: int) -> Whole:
    return Parts(mesh, rank) if mesh else Whole(rank)


def _write(folder: Path, mesh: Axes) -> None:
    ranks = Mesh(mesh).size
    for rank in range(ranks):
        copy_shard(folder, "trainer/0", rank, ranks, {"policy": _value(mesh, rank)}, {}, {}).write()


@pytest.mark.parametrize("before", MESHES)
@pytest.mark.parametrize("after", MESHES)
def test_every_mesh_reads_what_any_other_wrote(tmp_path: Path, before: Axes, after: Axes) -> None:
    _write(tmp_path, before)
    for rank in range(Mesh(after).size):
        value = _value(after, rank)
        tensors, facts = CheckpointShard(tmp_path, "trainer/0", rank).carried("policy", layout_of(value))
        needed, _ = value.state()
        assert facts == {"version": 3}
        assert tensors.keys() == needed.keys()
        assert all(torch.equal(tensors[name], needed[name]) for name in needed if needed[name].numel())
        assert all(tensors[name].numel() == 0 for name in needed if not needed[name].numel())


@pytest.mark.parametrize("before", MESHES)
@pytest.mark.parametrize("after", MESHES)
def test_a_damaged_part_is_found_by_a_rank_of_any_mesh(tmp_path: Path, before: Axes, after: Axes) -> None:
    _write(tmp_path, before)
    damaged = Mesh(before).size - 1
    held = _value(before, damaged).state()[0]["master.up.weight"]
    _damage(tmp_path / f"trainer-0-{damaged}.safetensors", held.numpy().tobytes())
    found = []
    for rank in range(Mesh(after).size):
        try:
            CheckpointShard(tmp_path, "trainer/0", rank).carried("policy", layout_of(_value(after, rank)))
        except StateError as error:
            found.append(str(error))
    assert found
    assert all(f"trainer-0-{damaged}.safetensors: not a readable state: carried/policy/master" in t for t in found)


@pytest.mark.parametrize("after", MESHES)
def test_parts_that_more_ranks_left_there_are_not_read(tmp_path: Path, after: Axes) -> None:
    """They are left of an incomplete checkpoint on another mesh."""
    _write(tmp_path, (("fsdp", 3), ("tp", 2)))
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"stale")
    _write(tmp_path, (("fsdp", 2),))
    for rank in range(Mesh(after).size):
        value = _value(after, rank)
        tensors, _ = CheckpointShard(tmp_path, "trainer/0", rank).carried("policy", layout_of(value))
        assert all(torch.equal(tensors[name], t) for name, t in value.state()[0].items() if t.numel())


def test_a_rank_whose_part_is_missing_is_named(tmp_path: Path) -> None:
    mesh: Axes = (("fsdp", 3), ("tp", 2))
    _write(tmp_path, mesh)
    for number in (4, 0):
        (tmp_path / f"trainer-0-{number}.safetensors").unlink()
        with pytest.raises(StateError, match=rf"trainer-0-{number}\.safetensors: not a readable state"):
            CheckpointShard(tmp_path, "trainer/0", number)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_whose_host_has_its_part_alone_goes_on_on_the_same_mesh(tmp_path: Path, mesh: Axes) -> None:
    """For example, on hosts that share no folder."""
    _write(tmp_path / "all", mesh)
    for rank in range(Mesh(mesh).size):
        own, value = tmp_path / str(rank), _value(mesh, rank)
        own.mkdir()
        (tmp_path / "all" / (name := f"trainer-0-{rank}.safetensors")).rename(own / name)
        part = CheckpointShard(own, "trainer/0", rank)
        tensors, _ = part.carried("policy", layout_of(value))
        assert all(torch.equal(tensors[name], tensor) for name, tensor in value.state()[0].items())
        if Mesh(mesh).size > 1:
            with pytest.raises(StateError, match=r"trainer-0-\d\.safetensors: not a readable state"):
                part.carried("policy", layout_of(Parts((("fsdp", 5),), rank)))


def test_memory_of_copies_is_counted_as_it_is_taken() -> None:
    assert [HostBuffers.needed(nbytes, pinned=True) for nbytes in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    buffers = HostBuffers()
    tensors = {"w": torch.arange(5.0), "b": torch.arange(3)}
    copies = buffers.copy(tensors)
    assert all(torch.equal(copies[name], tensors[name]) for name in tensors)
    again = buffers.copy({"w": torch.ones(5), "b": torch.zeros(4)})
    # The buffer of a tensor of the same shape is used again; one of another shape is freed.
    assert again["w"].data_ptr() == copies["w"].data_ptr()
    assert buffers.nbytes == 5 * 4 + 4 * 4


def test_memory_is_asked_for_all_that_may_change_after_the_export(tmp_path: Path) -> None:
    policy, state, sample = Whole(0), torch.ones(3), torch.zeros(5)
    found = []

    def buffers_for(needed: int) -> HostBuffers:
        assert (tmp_path / "cut" / "policy" / "exported-0").exists()
        found.append(needed)
        return HostBuffers()

    values = {(Firing("basket", 0), "value"): sample}
    given = tmp_path / "cut", "trainer/0", 0, 1, {"policy": policy}, {"counter": state}, values
    copy = copy_shard(*given, buffers_for=buffers_for)
    assert copy.apart
    assert found == [sum(tensor.nbytes for tensor in policy.state()[0].values()) + state.nbytes]
    assert not copy_shard(*given).apart


def test_ranks_that_hold_parts_export_together_and_of_others_the_first(tmp_path: Path) -> None:
    for mesh in ((), (("fsdp", 2),)):
        for rank in range(2):
            copy_shard(tmp_path / str(mesh), "trainer/0", rank, 2, {"policy": _value(mesh, rank)}, {}, {}).write()
    exported = [sorted(p.name for p in (tmp_path / str(m) / "policy").iterdir()) for m in ((), (("fsdp", 2),))]
    assert exported == [["exported-0"], ["exported-0", "exported-1"]]


def test_all_that_a_rank_wrote_is_on_the_disk_when_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[Any] = set()
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        synced.add(os.stat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    cut = tmp_path / "cut"
    copy_shard(cut, "trainer/0", 0, 1, {"policy": Whole(0)}, {"counter": 1}, {}).write()
    written = {cut, *cut.rglob("*")}
    assert {path.name for path in written} == {"cut", "policy", "exported-0", "trainer-0-0.safetensors"}
    assert [path for path in written if path.stat().st_ino not in synced] == []


def test_a_state_that_can_no_longer_be_kept_is_told_with_its_node(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=r"the state of counter cannot be kept in a checkpoint: .*given object"):
        copy_shard(tmp_path / "cut", "trainer/0", 0, 1, {}, {"other": 1, "counter": object()}, {}).write()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        copy_shard(tmp_path / "gone" / "checkpoints" / "cut", "trainer/0", 0, 1, {}, {}, {}).write()
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_run_is_refused_with_both(tmp_path: Path) -> None:
    """For example, a folder that is not shared stays on a host for the next run."""
    for rank, run in enumerate(("ours", "theirs")):
        copy_shard(tmp_path, "trainer/0", rank, 2, {"policy": Whole(rank)}, {}, {}, run=run).write()
    with pytest.raises(StateError, match=r"trainer-0-1\.safetensors: given a part of run theirs, needed .* ours"):
        CheckpointShard(tmp_path, "trainer/0", 1, "ours")
    copy_shard(tmp_path, "trainer/0", 1, 2, {"policy": Whole(1)}, {}, {}, run="ours").write()
    assert CheckpointShard(tmp_path, "trainer/0", 1, "ours").carried("policy")[1] == {"version": 3}


def test_a_checkpoint_of_an_earlier_format_is_told_with_what_is_needed(tmp_path: Path) -> None:
    """It was written before replicas had several ranks."""
    path = tmp_path / "trainer-0-0.safetensors"
    save_state(path, {}, {"carried": {}, "encoded": {}, "keys": []})
    with pytest.raises(StateError, match=rf"{path}: given a checkpoint of format 1, needed 3: go on with"):
        CheckpointShard(tmp_path, "trainer/0", 0)


def test_texts_of_states_and_values_are_not_in_the_header_which_has_a_limit(tmp_path: Path) -> None:
    """safetensors limits the header to 100 MB."""
    said, key = ('"\n' * 500_000, -math.inf), (Firing("score", 3), "text")
    copy_shard(tmp_path, "scorer/0", 0, 1, {}, {"seen": said}, {key: said}).write()
    with part_path(tmp_path, "scorer/0", 0).open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 2000
    shard = CheckpointShard(tmp_path, "scorer/0", 0)
    assert shard.made == [key]
    assert [shard.value(name, tuple) for name in ("state/seen", "value/score/3/text")] == [said, said]


def test_a_checkpoint_of_format_2_is_read(tmp_path: Path) -> None:
    """It has the texts of states and values in the file's header."""
    plain = {"tensors": [], "plain": {"value": ["a", 1]}, "tuples": ["value"]}
    facts = {"format": 2, "ranks": 1, "carried": {}, "layouts": {}, "encoded": {"state/seen": plain}, "keys": []}
    save_state(part_path(tmp_path, "scorer/0", 0), {}, facts)
    assert CheckpointShard(tmp_path, "scorer/0", 0).value("state/seen", tuple) == ("a", 1)


def test_a_temporary_file_of_another_rank_may_be_gone_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks export at the same time, and the first one writes under temporary names that it renames."""
    mesh = (("fsdp", 2),)

    class Written(Parts):
        def export(self, folder: str) -> None:
            super().export(folder)
            (Path(folder) / ".tmp-of-rank-0").touch()

    synced: list[str] = []

    def renamed_meanwhile(path: Path) -> None:
        if path.name.startswith(".tmp"):
            path.rename(path.with_name("model.safetensors"))
        sync(path)
        synced.append(path.name)

    monkeypatch.setattr("penstock.runtime.tensor.checkpoint.sync", renamed_meanwhile)
    copy_shard(tmp_path / "1", "trainer/0", 1, 2, {"policy": Written(mesh, 1)}, {}, {}).write()
    assert {"policy", "exported-1"} < set(synced)
    assert part_path(tmp_path / "1", "trainer/0", 1).is_file()


# State on the host -------------------------------------------------------------------------------------------


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "exp_avg": torch.randn(300, 70, generator=generator),
        "master": nn.Parameter(torch.randn(1000, generator=generator).to(torch.bfloat16)),
        "odd": torch.tensor([math.nan, -0.0, math.inf]),
        "step": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).tolist() for name, t in tensors.items()}


def places(tensors: dict[str, Tensor]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()]


def away(offload: Offload, tensors: dict[str, Tensor]) -> None:
    offload.leave(tensors)
    offload.fence()


def back(offload: Offload) -> None:
    offload.come_back()
    offload.fence()


def test_pinned_memory_for_a_large_state_is_little_more_than_the_state() -> None:
    """The master weights and AdamW's moments of Llama 3.1 8B would take 128 GiB as one block."""
    layer = [4096 * 4096] * 2 + [4096 * 1024] * 2 + [4096 * 14336] * 3 + [4096] * 2
    kept = [4 * count for _ in range(3) for count in [128256 * 4096] * 2 + layer * 32]
    sizes = {str(number): nbytes for number, nbytes in enumerate(kept)}
    blocks = offload_blocks(sizes)
    assert sorted(name for block in blocks for name in block) == sorted(sizes)
    pinned = sum(HostBuffers.needed(sum(sizes[name] for name in block), pinned=True) for block in blocks)
    assert pinned < 1.05 * sum(kept)
    assert HostBuffers.needed(sum(kept), pinned=True) > 1.4 * sum(kept)
    assert offload_blocks({"a": 3 << 9, "b": 9 << 9, "c": 1, "d": 0}, 8 << 9) == [["a", "c", "d"], ["b"]]


def test_every_bit_is_there_wherever_it_lies_and_the_device_memory_is_given_back() -> None:
    given, held = state(), state()
    offload, objects = Offload("trainer/0"), list(held.values())
    room: set[int] = set()
    for _ in range(3):
        at_home = places(held)
        away(offload, held)
        assert bits(held) == bits(given)
        room |= set(places(held))
        assert len(room) == 1  # one block, the same each time
        back(offload)
        assert bits(held) == bits(given)
        assert room.isdisjoint(places(held))
        assert len(set(at_home)) == 5
        for name in ("exp_avg", "step"):
            held[name].add_(1)
            given[name].add_(1)
    assert all(ours is theirs for ours, theirs in zip(objects, held.values(), strict=True))
    assert offload.moves == 6
    assert offload.nbytes == sum(t.nbytes for t in held.values())


def test_what_is_new_leaves_with_the_rest() -> None:
    held = {"master": torch.ones(5)}
    offload = Offload("trainer/0")
    away(offload, held)
    back(offload)
    held["exp_avg"] = torch.full((7,), 2.0)
    away(offload, held)
    assert len(set(places(held))) == 1
    assert [t.tolist() for t in held.values()] == [[1.0] * 5, [2.0] * 7]


def test_moves_follow_each_other() -> None:
    offload, held = Offload("trainer/0"), state()
    with pytest.raises(OffloadError, match="trainer/0: move from the host: given on the device, needed on the host"):
        offload.come_back()
    offload.leave(held)
    with pytest.raises(OffloadError, match="moving"):
        offload.leave(held)
    offload.fence()
    offload.fence()
    with pytest.raises(OffloadError, match="given on the host, needed on the device"):
        offload.leave(held)


def test_a_move_that_hangs_meets_the_deadline_and_may_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, release = Offload("trainer/0"), threading.Event()
    monkeypatch.setattr(module, "give_back", lambda: release.wait(30))
    offload.leave(state())
    with pytest.raises(OffloadError, match=r"trainer/0: 6 tensors, \d+ bytes, to the host: not there after 0.01 s"):
        offload.fence(0.01)
    release.set()
    offload.fence()
    assert offload.where == "host"


def test_a_move_that_fails_says_why_and_leaves_the_state_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, held = Offload("trainer/0"), state()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "touched", refuse)
        offload.leave(held)
        with pytest.raises(OffloadError, match="to the host: no such device"):
            offload.fence()
    assert offload.where == "device"
    assert bits(held) == bits(state())
    away(offload, held)
    assert len(set(places(held))) == 1  # memory was allocated again
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", refuse)
        offload.come_back()
        with pytest.raises(OffloadError, match="to the device: no such device"):
            offload.fence()
    assert bits(held) == bits(state())
    back(offload)
    assert bits(held) == bits(state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_on_a_gpu_leaves_after_what_the_stream_was_given_and_gives_its_memory_back() -> None:
    held = {"exp_avg": torch.zeros(1 << 24, device="cuda")}
    offload = Offload("trainer/0")
    for _ in range(3):
        before = torch.cuda.memory_reserved()
        for _ in range(50):
            held["exp_avg"].add_(1)
        away(offload, held)
        assert held["exp_avg"].is_pinned()
        assert torch.cuda.memory_reserved() <= before - held["exp_avg"].nbytes
        back(offload)
        assert held["exp_avg"].is_cuda
    assert bool((held["exp_avg"] == 150).all())
