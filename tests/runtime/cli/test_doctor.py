import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.runtime.cli import doctor
from penstock.runtime.cli.base_model import cache_folder
from penstock.runtime.cli.doctor import Finding

TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "threads": 2, "cpu": "AVX512", "gloo": True, "gpus": []}
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    tell_torch(monkeypatch, TORCH)


def tell_torch(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> None:
    """What the child that imports torch says."""

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(facts))

    monkeypatch.setattr(subprocess, "run", run)


def found(name: str) -> Finding:
    return next(finding for check in doctor.CHECKS for finding in check() if finding.name == name)


def test_a_machine_that_has_all_is_told_so(capsys: Output) -> None:
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "torch", "cores", "memory", "/dev/shm", "ZeroMQ", "loopback", "cache", "trust"):
        assert name in shown
    assert "This machine can run Penstock." in shown


def test_the_findings_are_json_for_a_machine(capsys: Output) -> None:
    assert doctor.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert {finding["verdict"] for finding in said["findings"]} <= {"ok", "note"}


def test_a_lack_is_named_with_what_follows(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    lack = Finding("/dev/shm", "0.06 of 0.06 GiB free", "lack", "large batches will not fit")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([lack]),))
    assert doctor.main([]) == 1
    assert "large batches will not fit" in capsys.readouterr().out


def test_a_missing_torch_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(
            1, command, stderr="Traceback\nModuleNotFoundError: No module named 'torch'"
        )

    monkeypatch.setattr(subprocess, "run", fail)
    torch = found("torch")
    assert torch.verdict == "lack"
    assert "No module named 'torch'" in torch.found
    assert "pip install" in torch.follows


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "NVIDIA H200", "gib": 139.8, "capability": [9, 0]}
    tell_torch(monkeypatch, {**TORCH, "cuda": "13.0", "gpus": [gpu, {**gpu, "name": "Old", "capability": [7, 0]}]})
    assert found("cuda:0") == Finding("cuda:0", "NVIDIA H200, 139.8 GiB, sm_90")
    assert found("cuda:1").verdict == "note"


def test_a_small_dev_shm_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    assert found("/dev/shm").verdict == "lack"
    assert "--shm-size" in found("/dev/shm").follows


def test_a_cache_that_cannot_be_written_is_a_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    assert found("cache").verdict == "lack"
    assert "PENSTOCK_CACHE" in found("cache").follows


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "penstock"
