"""Meshes that a model cannot take are refused by the command line, before any rank is there."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Graph, Policy, Program, Prompts, broadcast, load, program, trace, types
from penstock.graph.requires import opened
from penstock.graph.types import Model, Teacher
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score
from penstock.runtime.cli.children import answer, check_meshes
from penstock.runtime.cli.tracing import CommandError, require_inputs
from penstock.runtime.cluster.cluster import ClusterError
from penstock.runtime.control.run_config import RunOptions


@program
def taught(policy: Policy, teacher: Teacher, prompts: Prompts, *, teacher_model: str = "") -> dict[str, object]:
    """The teacher writes, and the policy learns it."""
    rollouts = generate(prompts, broadcast(teacher), samples=2)
    learnt = aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
    return {"policy": learnt, "teacher": teacher}


def graph(name: str, **options: Any) -> Graph:
    found = load(name)
    assert isinstance(found, Program)
    return trace(found, options)


def model_dir(folder: Path, **facts: Any) -> str:
    shape = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **heads, **facts}))
    return str(folder)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("trainer=tp3", "tensor parallelism: given 4 attention heads, 2 key-value heads, .*needed numbers that tp 3"),
        ("trainer=fsdp2xtp4", "given 2 key-value heads, needed numbers that tp 4 divides$"),
        ("generator=tp8", "given 4 attention heads, needed numbers that tp 8 divides"),
        ("generator=fsdp2", "given a mesh of fsdp 2, needed the axis tp alone: replicas are more of its pool"),
        ("trainer=pp9", "pipeline: given 9 stages, needed 1 to 2, the number of layers"),
    ],
)
def test_a_mesh_that_the_model_cannot_take_is_told_with_what_it_needs(mesh: str, said: str) -> None:
    with pytest.raises(ClusterError, match=rf"^--mesh {mesh}: .*{said}"):
        check_meshes([graph("aipo")], RunOptions(mesh=(mesh,)))


@pytest.mark.parametrize(
    "meshes", [("trainer=fsdp7", "generator=tp4"), ("trainer=dp2xfsdp3xtp2",), ("trainer=pp2xtp2",), ("scorer=1",)]
)
def test_a_mesh_that_fits_is_not_refused(meshes: tuple[str, ...]) -> None:
    check_meshes([graph("aipo"), graph("evaluate")], RunOptions(mesh=meshes))


def test_the_shape_is_that_of_the_model_directory(tmp_path: Path) -> None:
    folder = model_dir(tmp_path / "m")
    check_meshes([graph("aipo")], RunOptions(model=folder, mesh=("trainer=tp3xpp3", "generator=tp3")))
    with pytest.raises(ClusterError, match=r"trainer=tp2: .*given 3 key-value heads"):
        check_meshes([graph("aipo")], RunOptions(model=folder, mesh=("trainer=tp2",)))
    tied = model_dir(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ClusterError, match="given tied embeddings over 3 stages"):
        check_meshes([graph("aipo")], RunOptions(model=tied, mesh=("trainer=pp3",)))


def test_a_teachers_own_shape_decides_for_its_pool(tmp_path: Path) -> None:
    found = graph("distill", teacher_model=model_dir(tmp_path / "m"))
    pool = next(a.pool for a in found.carried if a.name == "teacher")
    check_meshes([found], RunOptions(mesh=(f"{pool}=tp3",)))
    with pytest.raises(ClusterError, match=f"{pool}=tp2: .*given 3 key-value heads"):
        check_meshes([found], RunOptions(mesh=(f"{pool}=tp2",)))


def test_a_generator_is_as_large_as_the_value_whose_weights_it_is_given(tmp_path: Path) -> None:
    found = trace(taught, {"teacher_model": model_dir(tmp_path / "m")})
    check_meshes([found], RunOptions(mesh=("generator=tp3",)))
    with pytest.raises(ClusterError, match=r"generator=tp2: .*given 3 key-value heads"):
        check_meshes([found], RunOptions(mesh=("generator=tp2",)))


def test_every_model_of_the_package_says_which_it_opens() -> None:
    makers = {
        vars(type_)["maker"]
        for type_ in vars(types).values()
        if isinstance(type_, type) and issubclass(type_, Model) and "maker" in vars(type_)
    }
    assert len(makers) > 6
    assert not [maker for maker in makers if opened(maker) is None]


@pytest.mark.parametrize(("name", "base"), [("aipo", True), ("reward_model", True), ("toy", False)])
def test_a_maker_says_whether_its_run_begins_with_the_base_model(name: str, base: bool) -> None:
    assert answer("run", name, ["--eval-groups", "0"])["base"] is base


def test_a_run_says_it_before_anything_starts() -> None:
    found = answer("run", "aipo", ["--mesh", "generator=tp8"])
    assert found["error"].startswith("--mesh generator=tp8: tensor parallelism: given 4 attention heads")
    assert "mesh" in answer("run", "aipo", ["--mesh", "generator=tp2", "trainer=fsdp2xtp2"])["flags"]


def test_a_command_without_torch_asks_a_child() -> None:
    require_inputs([graph("toy")], RunOptions(mesh=("trainer=dp2",)))
    with pytest.raises(CommandError, match=r"^--mesh trainer=tp3: tensor parallelism: given 4 attention heads"):
        require_inputs([graph("aipo")], RunOptions(mesh=("trainer=tp3",)))
