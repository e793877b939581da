"""The state of a carried value that its ranks hold in parts, read back on the same mesh and on others."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.protocols import Axes, Sharding
from penstock.runtime.record.folder import part_path, sync
from penstock.runtime.tensor.checkpoint import CheckpointShard, StateError, layout_of, save_state, write_shard
from penstock.runtime.tensor.codec import CodecError
from penstock.runtime.tensor.layout import Mesh

SHAPES = {"up.weight": (7, 6), "down.weight": (6, 7), "norm.weight": (5,)}
RULES = {"up.weight": (0, 0), "down.weight": (1, 0), "norm.weight": None}
WHOLE = {
    f"{kind}.{name}": torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * index
    for index, kind in enumerate(("master", "exp_avg"))
    for name, shape in SHAPES.items()
}
MESHES: list[Axes] = [(), (("fsdp", 2),), (("fsdp", 3), ("tp", 2)), (("dp", 2), ("fsdp", 2)), (("tp", 4),)]


class Whole:
    """A value that each rank has all of."""

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
    """A value whose ranks hold parts of it."""

    def __init__(self, mesh: Axes, rank: int) -> None:
        super().__init__(rank)
        self.mesh = mesh

    def sharding(self) -> Sharding:
        return Sharding(self.mesh, SHAPES, RULES, RULES)

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
        write_shard(folder, "trainer/0", rank, ranks, {"policy": _value(mesh, rank)}, {}, {})


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


@pytest.mark.parametrize("after", MESHES)
def test_parts_that_more_ranks_left_there_are_not_read(tmp_path: Path, after: Axes) -> None:
    """As of a cut on another mesh that was never complete."""
    _write(tmp_path, (("fsdp", 3), ("tp", 2)))
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"stale")
    _write(tmp_path, (("fsdp", 2),))
    for rank in range(Mesh(after).size):
        value = _value(after, rank)
        tensors, _ = CheckpointShard(tmp_path, "trainer/0", rank).carried("policy", layout_of(value))
        assert all(torch.equal(tensors[name], t) for name, t in value.state()[0].items() if t.numel())


def test_a_rank_whose_part_is_missing_is_named(tmp_path: Path) -> None:
    _write(tmp_path, (("fsdp", 3), ("tp", 2)))
    (tmp_path / "trainer-0-4.safetensors").unlink()
    with pytest.raises(StateError, match=r"trainer-0-4\.safetensors: not a readable state"):
        CheckpointShard(tmp_path, "trainer/0", 0)


def test_ranks_that_hold_parts_export_together_and_of_others_the_first(tmp_path: Path) -> None:
    for mesh in ((), (("fsdp", 2),)):
        for rank in range(2):
            write_shard(tmp_path / str(mesh), "trainer/0", rank, 2, {"policy": _value(mesh, rank)}, {}, {})
    exported = [sorted(p.name for p in (tmp_path / str(m) / "policy").iterdir()) for m in ((), (("fsdp", 2),))]
    assert exported == [["exported-0"], ["exported-0", "exported-1"]]


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"trainer-0-0\.safetensors: not a readable state"):
        CheckpointShard(tmp_path, "trainer/0", 0)


def test_all_that_a_rank_wrote_is_on_the_disk_when_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[Any] = set()
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        synced.add(os.stat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    cut = tmp_path / "cut"
    write_shard(cut, "trainer/0", 0, 1, {"policy": Whole(0)}, {"counter": 1}, {})
    written = {cut, *cut.rglob("*")}
    assert {path.name for path in written} == {"cut", "policy", "exported-0", "trainer-0-0.safetensors"}
    assert [path for path in written if path.stat().st_ino not in synced] == []


def test_a_state_that_can_no_longer_be_kept_is_told_with_its_node(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=r"the state of counter cannot be kept in a checkpoint: .*given object"):
        write_shard(tmp_path / "cut", "trainer/0", 0, 1, {}, {"other": 1, "counter": object()}, {})
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        write_shard(tmp_path / "gone" / "checkpoints" / "cut", "trainer/0", 0, 1, {}, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_run_is_refused_with_both(tmp_path: Path) -> None:
    """As of a folder that a host has kept for itself, and gives to the next run."""
    for rank, run in enumerate(("ours", "theirs")):
        write_shard(tmp_path, "trainer/0", rank, 2, {"policy": Whole(rank)}, {}, {}, run=run)
    with pytest.raises(StateError, match=r"trainer-0-1\.safetensors: given a part of run theirs, needed .* ours"):
        CheckpointShard(tmp_path, "trainer/0", 0, "ours")
    write_shard(tmp_path, "trainer/0", 1, 2, {"policy": Whole(1)}, {}, {}, run="ours")
    assert CheckpointShard(tmp_path, "trainer/0", 0, "ours").carried("policy")[1] == {"version": 3}


def test_a_checkpoint_of_an_earlier_format_is_told_with_what_is_needed(tmp_path: Path) -> None:
    """Such as was written before there were ranks."""
    path = tmp_path / "trainer-0-0.safetensors"
    save_state(path, {}, {"carried": {}, "encoded": {}, "keys": []})
    with pytest.raises(StateError, match=rf"{path}: given a checkpoint of format 1, needed 2: go on with"):
        CheckpointShard(tmp_path, "trainer/0", 0)


def test_a_temporary_file_of_another_rank_may_be_gone_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a model call its export at the same time, and the first one writes under names that it changes."""
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
    write_shard(tmp_path / "1", "trainer/0", 1, 2, {"policy": Written(mesh, 1)}, {}, {})
    assert {"policy", "exported-1"} < set(synced)
    assert part_path(tmp_path / "1", "trainer/0", 1).is_file()
