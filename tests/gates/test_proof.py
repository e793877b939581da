"""Weights that arrive other than they were sent stop a run before anything is generated with them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.process_group import LocalTransport

from .running import FAULTS, HERE, Running, make_run, rows, status_here, summary

pytestmark = pytest.mark.timeout(400)
Tensors = dict[str, Tensor]
FIRST, SECOND = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def flip_a_bit(new: Tensors, old: Tensors) -> None:
    new[FIRST].view(torch.int32)[3, 5] ^= 1


def skip_a_tensor(new: Tensors, old: Tensors) -> None:
    new[FIRST].copy_(old[FIRST])


def keep_the_version_before(new: Tensors, old: Tensors) -> None:
    for name, tensor in new.items():
        tensor.copy_(old[name])


def swap_two_tensors(new: Tensors, old: Tensors) -> None:
    kept = new[FIRST].clone()
    new[FIRST].copy_(new[SECOND])
    new[SECOND].copy_(kept)


@pytest.mark.parametrize(
    ("damage", "named", "spared"),
    [
        (flip_a_bit, [FIRST], [SECOND]),
        (skip_a_tensor, [FIRST], [SECOND]),
        (keep_the_version_before, [FIRST, SECOND], []),
        (swap_two_tensors, [FIRST, SECOND], []),
    ],
)
def test_a_damaged_sync_stops_a_run_and_names_the_tensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Tensors, Tensors], None],
    named: list[str],
    spared: list[str],
) -> None:
    before: Tensors = {}
    receive = LocalTransport.receive

    def damaged(self: LocalTransport, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        received = receive(self, version, copies, parts)
        tensors = {name: part.tensor for name, part in parts.items()}
        if version == 2:
            damage(tensors, before)
        before.update({name: tensor.clone() for name, tensor in tensors.items()})
        return received

    monkeypatch.setattr(LocalTransport, "receive", damaged)
    flags = RunOptions(updates=4, batch=2, max_tokens=4, slots=16, data="arithmetic")
    folder = make_run(tmp_path / "r", f"{FAULTS}digits", {}, flags)
    assert status_here(folder)[0] == "failed"
    error = summary(folder)["error"]
    assert "version 2" in error
    assert [name for name in named if name not in error] == []
    assert [name for name in spared if name in error] == []
    assert len(rows(folder)) == 2


def test_a_bad_wire_between_processes_stops_the_run_and_names_the_tensor_and_the_rank(tmp_path: Path) -> None:
    program = f"{HERE / 'program_with_a_bad_wire.py'}:bad_wire"
    folder = make_run(tmp_path / "r", program, {}, RunOptions(updates=4, batch=2, slots=16, deadline=60.0))
    with Running(folder) as running:
        assert running.wait() == 1
    assert "generator/0 rank 0" in running.errors
    assert "version 2" in running.errors
    assert "values: sent" in running.errors
    assert len(rows(folder)) == 2
