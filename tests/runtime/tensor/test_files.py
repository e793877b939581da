"""States come back equal, and a failed write leaves the old one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.tensor.checkpoint import StateError, StateFile, save_state


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


def test_writing_replaces(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_state(path, {"a": torch.zeros(2)}, {"n": 1})
    save_state(path, {"b": torch.ones(2)}, {"n": 2})
    assert load_state(path)[0].keys() == {"b"}
    assert load_state(path)[1] == {"n": 2}


WRITE = """
import resource, sys, torch
from penstock.runtime.tensor.checkpoint import save_state
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
save_state(sys.argv[1], {"a": torch.ones(1_000_000)}, {})
"""


@pytest.mark.timeout(300)
def test_a_write_that_fails_halfway_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_state(path, {"a": torch.zeros(2)}, {"n": 1})
    done = subprocess.run([sys.executable, "-c", WRITE, str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"StateError: {path}: cannot write 4000000 bytes of state" in done.stderr
    assert "bytes free" in done.stderr
    assert load_state(path)[1] == {"n": 1}
    assert os.listdir(tmp_path) == ["s"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"absent/s: cannot write 8 bytes of state \(no such folder\)"):
        save_state(tmp_path / "absent" / "s", {"a": torch.zeros(2)}, {})


def test_facts_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_state(tmp_path / "s", {}, {"x": object()})


@pytest.mark.parametrize("content", [b"", b"garbage that is no header", bytes(100)])
def test_a_file_that_is_no_state_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(path)):
        load_state(path)


def test_a_truncated_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_state(path, {"a": torch.zeros(1000)}, {})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StateError, match="not a readable state"):
        load_state(path)
    with pytest.raises(StateError, match="not a readable state"):
        load_state(tmp_path / "absent")


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StateError, match="given format None"):
        load_state(tmp_path / "model.safetensors")
