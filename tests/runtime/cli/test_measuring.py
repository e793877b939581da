import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cli import doctor
from penstock.runtime.cli.measuring import profile_path
from penstock.runtime.cli.traced import CommandError
from penstock.runtime.plan.cluster import Cluster, Host
from penstock.runtime.plan.spec import read_cluster

REFERENCE = {
    "hidden": 192,
    "layers": 2,
    "rows": 16,
    "tokens": 8,
    "vocab": 258,
    "heads": 3,
    "head_dim": 64,
    "inner": 512,
}
RATES = [[16, 128, 1e11], [16, 1024, 1e11], [1024, 128, 1e11], [1024, 1024, 1e11]]
DECODING = {"fp32": {"products": RATES, "decodes": [{**REFERENCE, "steps": [[8, 0.004], [20, 0.005]]}]}}
STEP = {**REFERENCE, "lanes": 2, "seconds": 0.01}
TRAINING = {"products": RATES, "steps": [STEP], "optimizer": [{"parameters": 1000, "seconds": 1e-5}]}
RAW: dict[str, Any] = {
    "cores": 2, "rest": 1, "torch": "2.13.0", "seconds": 60.0, "launch_us": 1.0,
    "memory": {"read": 20.0, "copy": 20.0, "cached": 80.0}, "memory_beside": {"copy": 15.0},
    "links": {"gloo_gb_s": 2.0, "latency_us": 80.0, "shared_gb_s": 8.0},
    "crowded": {"trainer": 1.5, "generator": 1.4},
    "turns": DECODING, "beside": DECODING, "training": {"fp32": TRAINING},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Cluster, "local", lambda: Cluster(hosts=(Host(name="local", cores=2),)))


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child that measures says."""

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 0, stdout=f"a warning\n{json.dumps(RAW)}\n")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("child")
def test_what_was_measured_is_this_machine_from_then_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--measure"]) == 0
    assert "measured in 60 s" in capsys.readouterr().out
    found = read_cluster("this", profile_path())
    assert found.cpus["this"].crowded.generator == 1.4
    assert found.hosts[0].cpu == "this"


@pytest.mark.usefixtures("child")
def test_it_can_be_kept_elsewhere_and_said_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "elsewhere.toml"
    assert doctor.main(["--measure", "--json", "--out", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(path)
    assert said["cpus"]["this"]["latency_us"] == 80.0
    assert Cluster.read(path).cpus
    assert not profile_path().exists()


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
def test_this_machine_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute on most machines; one whose bfloat16 is slow, or that others use, has no fault by that."""
    monkeypatch.setattr("penstock.runtime.cli.measuring.DEADLINE", 240.0)
    path = tmp_path / "machine.toml"
    try:
        assert doctor.main(["--measure", "--out", str(path)]) == 0
    except CommandError as error:
        if "was not measured within" not in str(error):
            raise
        pytest.skip(str(error))
    found = read_cluster(str(path)).cpus["this"]
    assert set(found.precisions) == {"fp32", "bf16"}
    assert found.crowded.trainer >= 1
