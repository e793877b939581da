"""Replicas of several ranks: what they compute together is what one rank computes."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from penstock.nodes.model import Llama, load_model
from penstock.runtime.control.run_config import RunOptions

from .plain import toy_loop
from .running import FAULTS, assert_equal_bits, final_state, make_run, rows, run_here, run_to_end, summary

pytestmark = pytest.mark.timeout(480)
UPDATES, BATCH = 5, 4
DELAYS = {"generate_ms": 4.0, "score_ms": 1.0, "update_ms": 4.0, "sync_ms": 0.0, "jitter_ms": 20.0}


@pytest.mark.slow
@pytest.mark.parametrize("generators", [1, 2])
def test_toy_on_meshes_is_toy_to_the_bit(tmp_path: Path, generators: int) -> None:
    """Nodes that know nothing of ranks do the same on each, in step: streams too, whenever their orders arrive."""
    flags = RunOptions(updates=UPDATES, batch=BATCH, slots=16, deadline=60.0, versions="pinned")
    meshes = ("trainer=dp2", "generator=tp2")
    run = make_run(tmp_path / "r", "toy", {"lag": 2, **DELAYS}, flags, generators=generators, meshes=meshes)
    assert_equal_bits(final_state(run_to_end(run), UPDATES), toy_loop(UPDATES, BATCH, lag=2))
    assert summary(run)["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 0}
    assert [row["groups"] for row in rows(run)] == [BATCH] * UPDATES


REAL = RunOptions(updates=UPDATES, batch=2, max_tokens=6, slots=16, seed=3, data="arithmetic", deadline=60.0)
LEARNING = {"samples": 4, "lr": 1e-3}


def reads_back(folder: Path) -> dict[str, Tensor]:
    """The exported policy, whole whatever the mesh that wrote it."""
    model = load_model(Llama, folder / "checkpoints" / f"{UPDATES:08d}" / "policy")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """In the 2-norm: Adam makes a whole step of a gradient that is nothing but rounding. Weights moved by a tenth."""
    assert first.keys() == second.keys()
    far = {n: float((t - second[n]).norm() / t.norm()) for n, t in first.items()}
    assert {n: distance for n, distance in far.items() if distance > 1e-4} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [("trainer=fsdp2",), ("trainer=tp2", "generator=tp2"), ("trainer=fsdp2xtp2",), ("trainer=pp2",)],
    ids=" ".join,
)
def test_learning_on_a_mesh_is_learning_on_one_rank_within_rounding(tmp_path: Path, meshes: tuple[str, ...]) -> None:
    """At lag 0 the samples are the same, so that the weights are, but for the order of sums."""
    alone = make_run(tmp_path / "alone", f"{FAULTS}digits", {"lag": 0, **LEARNING}, REAL)
    together = make_run(tmp_path / "together", f"{FAULTS}digits", {"lag": 0, **LEARNING}, REAL, meshes=meshes)
    assert_close(reads_back(run_here(alone)), reads_back(run_to_end(together)))
    assert [row["tokens"] for row in rows(alone)] == [row["tokens"] for row in rows(together)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks"), [("trainer=fsdp3", 3), ("trainer=pp2", 2)])
def test_a_run_goes_on_on_another_mesh(tmp_path: Path, mesh: str, ranks: int) -> None:
    """What four ranks wrote, two take over: the optimizer too, or the weights would differ."""
    alone = make_run(tmp_path / "alone", f"{FAULTS}digits", {"lag": 0, **LEARNING}, REAL)
    before = replace(REAL, updates=2)
    meshes = ("trainer=fsdp2xtp2", "generator=tp2")
    moved = run_to_end(make_run(tmp_path / "r", f"{FAULTS}digits", {"lag": 0, **LEARNING}, before, meshes=meshes))
    go_on = ["resume", str(moved), "--updates", str(UPDATES), "--mesh", mesh, "generator=1", "--plain"]
    done = subprocess.run([sys.executable, "-m", "penstock.runtime.cli.main", *go_on], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert_close(reads_back(run_here(alone)), reads_back(moved))
    assert len(list((moved / "checkpoints" / f"{UPDATES:08d}").glob("trainer-0-*.safetensors"))) == ranks


def test_ranks_that_work_together_need_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", "--in-process", "--mesh", "trainer=dp2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "r")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--in-process with trainer/0 of 2 ranks (dp2), needed one rank for each" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_mesh_that_cannot_work_is_not_what_the_run_goes_on_with(tmp_path: Path) -> None:
    """Three ranks cannot share four heads: it is said before anything starts."""
    flags = replace(REAL, updates=2)
    folder = run_to_end(make_run(tmp_path / "r", f"{FAULTS}digits", {"lag": 0, **LEARNING}, flags))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    go_on = ["resume", str(folder), "--updates", "4", "--mesh", "trainer=tp3", "--plain"]
    done = subprocess.run([sys.executable, "-m", "penstock.runtime.cli.main", *go_on], capture_output=True, timeout=300)
    assert done.returncode == 1
    assert b"--mesh trainer=tp3: tensor parallelism: given 4 attention heads, 2 key-value heads" in done.stderr
    assert {path: path.read_bytes() for path in before} == before
