"""The table of what a run can do agrees with what nodes refuse, and a lack names what is needed."""

from itertools import product

import pytest

from penstock.graph.protocols import Axes
from penstock.nodes.model.config import ModelConfig, ModelError
from penstock.nodes.open_model import ModelSpec
from penstock.runtime.cluster.capabilities import (
    CAPABILITIES,
    Kind,
    axis_lack,
    cut_lack,
    model_lack,
    precision_lack,
    spread_lack,
)
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.model_shape import SHAPES, Shape

SMALL = [
    Shape("few groups", 100, 64, 4, 8, 2, 8, 96),
    Shape("tied", 100, 64, 4, 8, 8, 8, 96, tied=True),
    Shape("odd width", 100, 64, 3, 8, 4, 8, 90),
    Shape("few words", 5, 64, 2, 4, 4, 16, 64),
    Shape("mixture", 100, 64, 4, 8, 4, 8, 96, False, 6, 2, 32, family="qwen3_moe"),
]
SIZES = (1, 2, 3, 4, 8)


def _config(shape: Shape) -> ModelConfig:
    return ModelConfig.from_json(
        {
            "model_type": shape.family,
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "tie_word_embeddings": shape.tied,
            "max_position_embeddings": 128,
            **({"num_experts": shape.experts, "num_experts_per_tok": shape.active} if shape.experts else {}),
            **({"moe_intermediate_size": shape.expert_inner} if shape.experts else {}),
        }
    )


def _nodes_take(shape: Shape, kind: Kind, mesh: Axes) -> bool:
    spec = ModelSpec(_config(shape), None)  # type: ignore[arg-type]
    try:
        spec.check_mesh(mesh, decodes=kind == "generator")
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("shape", SMALL, ids=[shape.name for shape in SMALL])
@pytest.mark.parametrize("kind", ["trainer", "generator"])
def test_nodes_take_exactly_the_meshes_of_the_table(shape: Shape, kind: Kind) -> None:
    taken = set()
    axes = ("pp", "dp", "fsdp", "ep", "tp")
    for sizes in product(SIZES, (1, 2), (1, 2), (1, 2, 3, 4), SIZES):
        mesh = tuple(zip(axes, sizes, strict=True))
        mesh = tuple(axis for axis in mesh if axis[1] > 1)
        lack = axis_lack(kind, mesh) or cut_lack(kind, shape, mesh)
        assert (lack is None) == _nodes_take(shape, kind, mesh), (mesh, lack)
        taken |= {mesh} if lack is None else set()
    # Both accept some meshes and refuse others.
    assert {(), (("tp", 2),)} <= taken or shape.name == "few words"
    assert len(taken) < len(SIZES) * 4 * 4 * len(SIZES) / 2
    assert {dict(mesh).get("ep", 1) for mesh in taken} == ({1, 2, 3} if shape.experts else {1})


@pytest.mark.parametrize(
    ("kind", "mesh", "hosts", "over", "code"),
    [
        ("trainer", (("fsdp", 4),), "aabb", False, None),
        ("trainer", (("pp", 2), ("tp", 2)), "aabb", False, None),
        ("trainer", (("pp", 2), ("tp", 2)), "abab", False, "mesh-hosts"),
        ("trainer", (("tp", 2), ("fsdp", 2)), "aabb", False, "mesh-hosts"),
        ("trainer", (("tp", 4),), "aabb", True, None),
        ("generator", (("tp", 4),), "aaaa", False, None),
        ("generator", (("tp", 4),), "aabb", False, "mesh-hosts"),
        ("trainer", (("fsdp", 2), ("ep", 2)), "aabb", False, None),
        ("trainer", (("fsdp", 2), ("ep", 2)), "abab", False, None),
        ("generator", (("ep", 4),), "aabb", False, "mesh-hosts"),
    ],
)
def test_tensor_parallel_ranks_stay_within_a_host(
    kind: Kind, mesh: Axes, hosts: str, over: bool, code: str | None
) -> None:
    lack = spread_lack(kind, mesh, list(hosts), over)
    assert (lack and lack.code) == code


def test_a_generator_has_tensor_parallelism_or_experts_alone_and_small_work_no_mesh() -> None:
    for kind, mesh in (
        ("generator", (("fsdp", 2),)),
        ("generator", (("pp", 2), ("tp", 2))),
        ("generator", (("ep", 2), ("tp", 2))),
        ("small", (("dp", 2),)),
    ):
        lack = axis_lack(kind, mesh)  # type: ignore[arg-type]
        assert lack is not None
        assert lack.code == "mesh-axis"


def test_a_precision_that_runs_or_a_device_lack_is_named() -> None:
    (first, *_) = CAPABILITIES["generator"].precisions
    assert precision_lack("generator", first, GPUS["A100"]) is None
    for lack in (precision_lack("generator", "fp4"), precision_lack("generator", "fp8", GPUS["A100"], "A100")):
        assert lack is not None
        assert lack.code == "no-precision"


def test_models_that_runs_do_not_have_are_named() -> None:
    lacking = {name for name, shape in SHAPES.items() if model_lack(shape)}
    assert lacking == {"glm-4.5-air", "deepseek-v3"}
