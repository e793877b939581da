"""The benchmark of what only a GPU shows: it ends well where there is none, and what of it needs none is right."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.tensor.digest import MODES
from penstock.runtime.tensor.wire_format import FORMATS


def gpu() -> Any:
    return import_module("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--keep"])
    gpu().main()
    assert "sees no GPU here" in capsys.readouterr().out


def test_two_ranks_parts_are_the_converted_whole_in_every_format() -> None:
    right = {"parts_are_the_whole": True, "as_on_the_cpu": True}
    assert gpu().conversion("cpu") == dict.fromkeys(FORMATS, right)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_phase_names_a_way_a_proof_and_maybe_a_format(tmp_path: Path, device: str) -> None:
    for phase in gpu().phases(device):
        way, proof, *wire = phase.split()
        assert proof in MODES
        assert set(wire) <= set(FORMATS)
        bridge = import_module("gpu_ranks").bridge(tmp_path, phase)
        assert way == (bridge.backend if bridge.backend == "nccl" else bridge.transport)


def test_a_process_that_ends_early_is_named_with_its_status(tmp_path: Path) -> None:
    rank = gpu().Rank("source", tmp_path, "no such device", 1)
    try:
        with pytest.raises(RuntimeError, match="source: ended with 'status 1'"):
            rank.answer()
    finally:
        rank.end()
