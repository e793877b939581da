"""The GPU benchmark: without a GPU it exits cleanly, and its phases run at small sizes on a CPU."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.tensor.wire_format import FORMATS

from .conftest import FOLDER

PHASES = "smoke", "decode", "overlap", "train", "state", "bits", "plan", "nccl", "mesh"


def gpu() -> Any:
    return import_module("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    gpu().main()
    assert "sees no GPU here" in capsys.readouterr().out


def test_no_phase_is_left_out_here() -> None:
    assert set(gpu().PHASES) == set(PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "plan"])
def test_each_phase_runs_on_a_cpu(phase: str) -> None:
    found: list[dict[str, Any]] = []
    gpu().run_phase(phase, "cpu", 300.0, found.append)
    assert "error" not in found[-1]


@pytest.mark.slow
def test_the_command_keeps_what_a_phase_has_found(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, f"{FOLDER}/gpu.py", "--device=cpu", "--only=plan", f"--out={out}", "--deadline=300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=330)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in json.dumps(json.loads(out.read_text())["phases"]["plan"])


def test_two_ranks_parts_are_the_converted_whole_in_every_format() -> None:
    right = {"parts_are_the_whole": True, "as_on_the_cpu": True}
    assert import_module("gpu_phases").conversion("cpu") == dict.fromkeys(FORMATS, right)


@pytest.mark.slow
def test_a_phase_that_is_not_over_in_time_says_so_beside_what_it_has_found(monkeypatch: Any, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    script = tmp_path / "gpu_phases.py"
    script.write_text("import time\nprint('{\"found\": 1}', flush=True)\ntime.sleep(120)\n")
    monkeypatch.setattr(gpu(), "__file__", str(tmp_path / "gpu.py"))
    gpu().run_phase("smoke", "cpu", 8.0, kept.append)
    assert kept[-1]["found"] == 1
    assert "not over after 8 s" in kept[-1]["error"]


def test_a_phase_that_fails_keeps_what_was_written_of_others(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    gpu().Record(path, "cpu").put("decode", {"ms": 1.0})
    gpu().Record(path, "cpu").put("smoke", {"error": "no"})
    assert json.loads(path.read_text())["phases"] == {"decode": {"ms": 1.0}, "smoke": {"error": "no"}}


def test_a_process_that_ends_early_is_named_with_its_status(tmp_path: Path) -> None:
    rank = import_module("gpu_phases").Rank("source", tmp_path, "no such device")
    try:
        with pytest.raises(RuntimeError, match="source: ended with 'status 1'"):
            rank.answer()
    finally:
        rank.end()
