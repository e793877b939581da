"""torch.distributed.checkpoint loads what is exported for it with equal bits, whatever mesh wrote the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.graph.protocols import Axes
from penstock.runtime.record.checkpoints import StateError
from penstock.runtime.tensor.dcp import state_dict, write

from .test_checkpoint import MESHES, SHAPES, WHOLE, _write


@pytest.mark.parametrize("format", ["dcp", "dcp-safetensors"])
@pytest.mark.parametrize("mesh", MESHES)
def test_torch_loads_what_is_exported_of_any_mesh(tmp_path: Path, mesh: Axes, format: str) -> None:
    _write(tmp_path / "cut", mesh)
    state = state_dict(tmp_path / "cut", "trainer/0", "policy")
    write(state, format, tmp_path / "out")
    wanted: dict[str, Any] = {
        "model": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
        "optimizer": {"state": {name: {"exp_avg": torch.zeros(shape)} for name, shape in SHAPES.items()}},
        "other": {"seed": torch.zeros(1, dtype=torch.long)},
    }
    out = str(tmp_path / "out")
    load(
        wanted, storage_reader=FileSystemReader(out) if format == "dcp" else HuggingFaceStorageReader(out), no_dist=True
    )
    for name in SHAPES:
        assert torch.equal(wanted["model"][name], WHOLE[f"master.{name}"])
        assert torch.equal(wanted["optimizer"]["state"][name]["exp_avg"], WHOLE[f"exp_avg.{name}"])
    assert wanted["other"]["seed"].tolist() == [7]
    assert (format == "dcp") == (tmp_path / "out" / ".metadata").exists()


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"trainer-0-0\.safetensors: not a readable state"):
        state_dict(tmp_path, "trainer/0", "policy")
