"""`penstock doctor`: what a machine has, the consequences of what it lacks, and which measurements are stored."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.graph.machine import usable_memory_gib
from penstock.host import cache_folder
from penstock.nodes.calibrate import decoding_steps, installed
from penstock.runtime.cli import doctor
from penstock.runtime.cli.base_model import PROFILE
from penstock.runtime.cli.doctor import Finding
from penstock.runtime.cli.main import _answer
from penstock.runtime.cli.tracing import CommandError, ask_child
from penstock.runtime.cluster.cluster import Cluster, Host, read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import KERNELS
from penstock.runtime.record import trackers

from .conftest import Output, Patch

TORCH: dict[str, Any] = {
    "version": "2.13.0+cpu", "cuda": None, "threads": 2, "cpu": "AVX512", "gloo": True, "triton": "", "gpus": [],
}  # fmt: skip
CPU = {
    "torch": "2.13.0", "seconds": 60.0, "launch_us": 1.0, "memory": {"read": 20.0, "copy": 20.0, "cached": 80.0},
    "links": {"gloo_gb_s": 2.0, "latency_us": 80.0, "shared_gb_s": 8.0},
}  # fmt: skip
GPU = {
    "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "capability": [9, 0],
    "memory": {"read": 2900.0, "copy": 2700.0}, "launch_us": 4.5, "host_gb_s": 55.0,
    "products": {"bf16": [[16, 1024, 1e13], [8192, 8192, 7e14]]},
    "torch": "2.13.0", "seconds": 20.0,
    # 2 ms, plus 5 us per row and 4 us per operation.
    "steps": [[n, rows, 2e-3 + 5e-6 * rows + n * KERNELS * 4e-6] for n in (2, 18) for rows in (16, 256)],
}  # fmt: skip


@pytest.fixture(autouse=True)
def children(monkeypatch: Patch, tmp_path: Path) -> dict[str, Any]:
    """The answers of the children of `doctor` by function name; an exception is raised instead of returned."""
    said = {"installed": TORCH, "described_isolation": (True, "bubblewrap"), "cpu": CPU, "cuda": GPU}

    def ask(function: str, *arguments: object, **_: object) -> Any:
        found = said[function.partition(":")[2]]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(doctor, "ask_child", ask)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Cluster, "local", lambda: Cluster(hosts=(Host(name="local", cores=2),)))
    return said


def found(name: str) -> Finding:
    return next(finding for check in doctor.CHECKS for finding in check() if finding.name == name)


def test_a_machine_that_has_all_is_told_so(capsys: Output) -> None:
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "torch", "cores", "memory", "/dev/shm", "ZeroMQ", "loopback", "sandbox", "cache", "trust"):
        assert name in shown
    assert doctor.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert {finding["verdict"] for finding in said["findings"]} <= {"ok", "note"}


def test_a_lack_is_named_with_what_follows(capsys: Output, children: dict[str, Any]) -> None:
    children["installed"] = CommandError("Traceback\nModuleNotFoundError: No module named 'torch'")
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "No module named 'torch'" in shown
    assert "pip install" in shown


class Usage(NamedTuple):
    total: int = 64 << 20
    used: int = 0
    free: int = 64 << 20


OLD = [["NVIDIA H200", 139.81, 9, 0], ["Old", 8.0, 7, 0]]
OLD_TORCH = {"installed": {**TORCH, "version": "2.1.0", "cuda": "13.0", "gloo": False, "gpus": OLD}}


@pytest.mark.parametrize(
    ("answers", "name", "verdict", "follows"),
    [
        ({"described_isolation": (False, "no bwrap")}, "sandbox", "note", "bubblewrap"),
        (OLD_TORCH, "torch", "note", "tested with"),
        (OLD_TORCH, "gloo", "lack", "weights"),
        (OLD_TORCH, "cuda:0", "ok", ""),
        (OLD_TORCH, "cuda:1", "note", "no bfloat16"),
        (OLD_TORCH, "Triton", "ok", ""),
        ({"installed": {**OLD_TORCH["installed"], "triton": "a C compiler"}}, "Triton", "lack", "gcc python3-dev"),
        ({}, "/dev/shm", "lack", "--shm-size"),
        ({}, "cache", "note", "nearly full"),
        ({}, "trackers", "note", "penstock[tensorboard,wandb,trackio,mlflow]"),
    ],
)
def test_what_is_lacking_has_a_verdict_and_what_follows(
    answers: dict[str, Any], name: str, verdict: str, follows: str, children: dict[str, Any], monkeypatch: Patch
) -> None:
    children |= answers
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    finding = found(name)
    assert (finding.verdict, follows in finding.follows) == (verdict, True)


def test_triton_needs_a_compiler_and_the_headers_of_this_python(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr("penstock.nodes.calibrate.find_spec", lambda name: None)
    assert installed()["triton"] == "triton"
    monkeypatch.setattr("penstock.nodes.calibrate.find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed()["triton"] == "a C compiler"
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    assert installed()["triton"] == str(tmp_path / "Python.h")
    (tmp_path / "Python.h").touch()
    assert installed()["triton"] == ""


def test_a_cache_that_cannot_be_written_is_a_lack(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    assert found("cache").verdict == "lack"
    assert "PENSTOCK_CACHE" in found("cache").follows


def test_the_cache_is_where_it_is_asked_for(monkeypatch: Patch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "penstock"


def test_a_user_without_a_home_has_the_cache_in_a_folder_of_its_own_or_is_told_what_is_needed(
    monkeypatch: Patch, tmp_path: Path, capsys: Output
) -> None:
    for name in ("PENSTOCK_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)  # a user ID that the system does not know
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"penstock-{os.geteuid()}"
    assert (cache_folder(), own.stat().st_mode & 0o777) == (own / "cache", 0o700)
    own.chmod(0o755)
    assert found("cache").verdict == "lack"
    assert _answer(["doctor", "--measure"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("penstock doctor: ", str(own), "PENSTOCK_CACHE=DIR"))


def test_what_was_measured_is_this_machine_from_then_on(capsys: Output, monkeypatch: Patch) -> None:
    assert doctor.main(["--measure"]) == 0
    assert "measured in 60 s" in capsys.readouterr().out
    host = read_cluster("this", cache_folder() / PROFILE)
    assert (host.cpus["this"].read_gb_s, host.cpus["this"].shared_gb_s) == (20.0, 8.0)
    assert host.cpus["this"].memory_gib == pytest.approx(usable_memory_gib(), rel=1e-4)
    with_gpu = Host(name="local", cores=2, devices=("cuda:0",))
    monkeypatch.setattr(Cluster, "local", lambda: Cluster(hosts=(with_gpu,)))
    assert doctor.main(["--measure"]) == 0
    assert "700 TFLOP/s in bf16" in capsys.readouterr().out
    planned = read_cluster("this", cache_folder() / PROFILE)
    kind = planned.gpu_of(planned.hosts[0])
    assert kind is not None
    # The measured rates, and the links of the known GPU kind.
    assert kind.flops("bf16") == pytest.approx(7e14, rel=1e-4)
    assert kind.bandwidth == pytest.approx(2.7e12, rel=1e-4)
    assert kind.nvlink_gb_s == GPUS["H100"].nvlink_gb_s
    assert kind.flops("fp8") == pytest.approx(GPUS["H100"].flops("fp8"), rel=1e-4)
    engine = kind.engine
    assert (engine.step_ms, engine.row_us, engine.eager_us) == pytest.approx((2.0, 5.0, 4.0), rel=1e-3)


def test_it_can_be_kept_elsewhere_and_said_as_json(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "elsewhere.toml"
    assert doctor.main(["--measure", "--json", "--out", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["cpus"]["this"]["latency_us"]) == (str(path), 80.0)
    assert Cluster.read(path).cpus
    assert not (cache_folder() / PROFILE).exists()


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--out", "machine.toml"], r"--out.*without --measure", 2),
        (["--measure", "--out", "{}"], "given a folder, needed a file", 2),
        (["--measure", "--out", "{}/file/x.toml"], r"\(--out FILE\)", 2),
        (["--measure"], "no room", 1),
    ],
)
def test_what_cannot_be_measured_or_kept_is_said_with_what_is_needed(
    words: list[str], said: str, status: int, tmp_path: Path, children: dict[str, Any]
) -> None:
    children["cpu"] = CommandError("no room", 1)
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=said) as error:
        doctor.main([word.format(tmp_path) for word in words])
    assert error.value.status == status


def test_steps_of_the_engine_are_measured_by_layers_and_rows() -> None:
    found = decoding_steps("cpu", layers=(1, 2), rows=(16,))
    assert [(layers, rows) for layers, rows, _ in found] == [(1, 16), (2, 16)]
    assert all(seconds > 0 for *_, seconds in found)


@pytest.mark.slow
def test_this_machine_can_be_asked_and_measured(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "ask_child", ask_child)
    assert found("torch").verdict in ("ok", "note")
    assert found("sandbox").found
    path = tmp_path / "machine.toml"
    assert doctor.main(["--measure", "--out", str(path)]) == 0
    measured = read_cluster(str(path)).cpus["this"]
    assert measured.latency_us > measured.call_us
