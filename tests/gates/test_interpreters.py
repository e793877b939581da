"""A pool with an interpreter of its own: its ranks run this package's code with that interpreter's libraries."""

import json
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.cli.children import answer
from tests.gates.running import HERE, penstock
from tests.nodes.family_cases import directory

NOTING = f"{HERE / 'programs_of_interpreters.py'}:noting"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an interpreter with this one's libraries, but without this package: .pth files are not read there."""
    folder = tmp_path_factory.mktemp("twin")
    venv.create(folder, with_pip=False)
    ours = sysconfig.get_paths()["purelib"]
    Path(sysconfig.get_path("purelib", vars={"base": str(folder)}), "theirs.pth").write_text(f"{ours}\n")
    return folder


def cluster_file(folder: Path, table: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(f'[[hosts]]\nname = "here"\ncores = 1\n\n[pools.generator]\n{table}\n')
    return str(path)


@pytest.mark.slow
def test_a_pools_ranks_run_in_its_interpreter_and_others_in_that_of_the_command(twin: Path, tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, f'python = "{twin / "bin/python"}"')
    notes, run = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    flags = ("--updates", "2", "--batch", "2", "--plain", "--out", str(run))
    ended = penstock("run", NOTING, "--folder", str(notes), "--cluster", cluster, *flags)
    assert ended.returncode == 0, ended.stderr
    found = {pool: json.loads((notes / pool).read_text()) for pool in ("generator", "scorer")}
    assert found["generator"][0] == str(twin)
    assert found["scorer"][0] == sys.prefix
    # Both run the same code, whether or not that interpreter has this package.
    assert found["generator"][1] == found["scorer"][1]
    pools = json.loads((run / "plan.json").read_text())["pools"]
    assert {pool["name"] for pool in pools if "python" in pool} == {"generator"}
    again = penstock("resume", str(run), "--updates", "3", "--plain")
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "summary.json").read_text())["updates"] == 3


def test_one_process_has_one_interpreter(twin: Path, tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, f'python = "{twin / "bin/python"}"')
    ended = penstock("run", "toy", "--cluster", cluster, "--in-process", "--out", str(tmp_path / "run"))
    assert ended.returncode != 0
    assert "pools.generator.python" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_engine_that_is_not_installed_is_refused_with_what_to_install_and_where(twin: Path, tmp_path: Path) -> None:
    python, run = str(twin / "bin/python"), tmp_path / "run"
    there = ("--cluster", cluster_file(tmp_path, f'python = "{python}"'))
    for own, verb, flags in (
        (sys.executable, "check", ()),
        (python, "check", there),
        (python, "run", (*there, "--model", "new", "--out", str(run))),
    ):
        ended = penstock(verb, "aipo", "--engine", "vllm", *flags)
        assert ended.returncode == (1 if verb == "check" else 2)
        assert "[no-engine]" in ended.stdout + ended.stderr
        assert f"{own} -m pip install vllm" in ended.stdout + ended.stderr
    assert not run.exists()
    # A program whose generator has no such option needs no engine.
    assert faults("toy", "--engine", "vllm") == []


def faults(program: str, *words: str) -> list[dict[str, Any]]:
    """Return the faults that `penstock check` reports, in this process."""
    found: list[dict[str, Any]] = answer("check", program, words)["faults"]
    return found


@pytest.mark.parametrize("flags", [("--versions", "pinned"), ("--lora", "4")])
def test_what_an_engine_cannot_do_is_refused(flags: tuple[str, str], tmp_path: Path) -> None:
    """Repeatable bits and adapters, whether or not the engine is installed."""
    cannot = [fault for fault in faults("aipo", "--engine", "vllm", *flags) if fault["code"] == "engine-cannot"]
    # One fault for the generator, and one for that of the evaluation.
    assert [Path(fault["where"]).name.partition(":")[0] for fault in cannot] == ["aipo.py", "evaluate.py"]
    assert faults("aipo", "--engine", "penstock", *flags) == []


def test_a_mixture_of_experts_is_refused_by_an_engine_whose_experts_are_not_proved(tmp_path: Path) -> None:
    """The fault names the family. The engine need not be installed."""
    shape = ("--model", directory("qwen3_moe", tmp_path))
    cannot = [fault for fault in faults("aipo", "--engine", "vllm", *shape) if "qwen3_moe" in fault["given"]]
    assert [fault["code"] for fault in cannot] == ["engine-cannot"] * 2
    assert faults("aipo", "--engine", "penstock", *shape) == []


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_heads_that_an_engine_lacks_on_a_cpu_are_refused_there(device: str, tmp_path: Path) -> None:
    """The fault names their width."""
    here = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    shape = ("--model", directory("mistral", tmp_path), "--device", device)
    cannot = [fault for fault in faults("aipo", "--engine", "vllm", *shape) if fault["code"] == "engine-cannot"]
    assert len(cannot) == 2 * here
    assert all("heads 8 wide on a CPU" in fault["given"] for fault in cannot)
