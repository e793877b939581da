import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cli import doctor
from penstock.runtime.cli.base_model import PROFILE, cache_folder
from penstock.runtime.cli.doctor import gpu_of
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster, Host, read_cluster
from penstock.runtime.cluster.gpus import GPUS

RAW: dict[str, Any] = {
    "torch": "2.13.0", "seconds": 60.0, "launch_us": 1.0, "memory": {"read": 20.0, "copy": 20.0, "cached": 80.0},
    "links": {"gloo_gb_s": 2.0, "latency_us": 80.0, "shared_gb_s": 8.0},
}  # fmt: skip
GPU: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "memory": {"read": 2900.0, "copy": 2700.0},
    "launch_us": 4.5, "host_gb_s": 55.0, "products": {"bf16": [[16, 1024, 1e13], [8192, 8192, 7e14]]},
    "torch": "2.13.0", "seconds": 20.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Cluster, "local", lambda: Cluster(hosts=(Host(name="local", cores=2),)))


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child that measures says."""

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        said = GPU if "cuda" in command[-1] else RAW
        return subprocess.CompletedProcess(command, 0, stdout=f"a warning\n{json.dumps(said)}\n")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("child")
def test_what_was_measured_is_this_machine_from_then_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--measure"]) == 0
    assert "measured in 60 s" in capsys.readouterr().out
    found = read_cluster("this", (cache_folder() / PROFILE))
    assert (found.cpus["this"].read_gb_s, found.cpus["this"].shared_gb_s) == (20.0, 8.0)
    assert found.hosts[0].cpu == "this"


@pytest.mark.usefixtures("child")
def test_gpus_that_were_measured_are_planned_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(name="local", cores=2, devices=("cuda:0",))
    monkeypatch.setattr(Cluster, "local", lambda: Cluster(hosts=(host,)))
    assert doctor.main(["--measure"]) == 0
    assert "700 TFLOP/s in bf16" in capsys.readouterr().out
    found = read_cluster("this", (cache_folder() / PROFILE))
    kind = found.gpu_of(found.hosts[0])
    assert kind is not None
    assert kind.flops("bf16") == pytest.approx(7e14, rel=1e-4)


def test_a_gpu_keeps_the_links_of_its_kind_and_reaches_the_measured_rates() -> None:
    found = gpu_of(GPU)
    assert found.flops("bf16") == pytest.approx(7e14)
    assert found.bandwidth == pytest.approx(2.7e12)
    assert found.nvlink_gb_s == GPUS["H100"].nvlink_gb_s
    assert found.flops("fp8") == GPUS["H100"].flops("fp8")


@pytest.mark.usefixtures("child")
def test_it_can_be_kept_elsewhere_and_said_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "elsewhere.toml"
    assert doctor.main(["--measure", "--json", "--out", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(path)
    assert said["cpus"]["this"]["latency_us"] == 80.0
    assert Cluster.read(path).cpus
    assert not (cache_folder() / PROFILE).exists()


def test_a_place_for_nothing_is_an_error() -> None:
    with pytest.raises(CommandError, match=r"--out.*without --measure"):
        doctor.main(["--out", "machine.toml"])


def test_a_place_that_takes_no_file_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    (tmp_path / "file").touch()
    for given, said in ((tmp_path, "given a folder, needed a file"), (tmp_path / "file" / "x.toml", r"\(--out FILE\)")):
        with pytest.raises(CommandError, match=said) as error:
            doctor.main(["--measure", "--out", str(given)])
        assert error.value.status == 2


def test_a_child_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="Traceback\nRuntimeError: no room")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CommandError, match="cpu could not be measured: RuntimeError: no room"):
        doctor.main(["--measure"])


@pytest.mark.slow
def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    assert doctor.main(["--measure", "--out", str(path)]) == 0
    found = read_cluster(str(path)).cpus["this"]
    assert found.latency_us > found.call_us
