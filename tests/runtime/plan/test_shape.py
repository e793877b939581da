"""A shape's counts are those of the models, whose config.json it reads."""

import json
from pathlib import Path

import pytest

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.tensor_parallel import parameter_shapes, pipeline_stages, tensor_parallel
from penstock.runtime.plan.model_shape import SHAPES, ShapeError, read_shape, shape_of
from penstock.runtime.plan.sync_cost import rules, stages, tensors

LLAMA = ModelConfig(128256, 4096, 14336, 32, 32, 8, 128)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-8b", 8.03, 7.5),
        ("llama-70b", 70.55, 69.5),
        ("llama-405b", 405.85, 403.8),
        ("qwen3-0.6b", 0.596, 0.596),
        ("qwen3-30b-a3b", 30.53, 3.04),
        ("qwen3-235b-a22b", 235.09, 21.6),
        ("deepseek-v3", 671.03, 36.6),
        ("glm-4.5-air", 106.85, 12.8),
    ],
)
def test_parameters_are_those_that_the_makers_say(name: str, billions: float, active: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert SHAPES[name].active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_a_models_own_config_gives_the_same_parameters_tensors_and_rules() -> None:
    shape = shape_of(LLAMA.to_json(), "here")
    assert shape.parameters == SHAPES["llama-8b"].parameters
    assert tensors(shape) == parameter_shapes(LLAMA)
    assert stages(shape, 4) == pipeline_stages(LLAMA, 4)
    own = tensor_parallel(LLAMA)
    assert {key: rule for key, rule in rules(shape).items() if key in own} == {
        key: rule for key, rule in own.items() if key in rules(shape)
    }


def test_the_tensors_of_a_mixture_hold_all_its_parameters() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    total = 0
    for size in tensors(shape).values():
        count = 1
        for part in size:
            count *= part
        total += count
    assert total == shape.parameters


def test_a_directory_and_its_file_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_json()))
    assert read_shape(str(tmp_path)).parameters == read_shape(str(tmp_path / "config.json")).parameters


def test_a_mixtures_config_is_read(tmp_path: Path) -> None:
    data = {**LLAMA.to_json(), "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    shape = shape_of(data, "moe")
    assert (shape.experts, shape.active, shape.expert_inner, shape.moe_layers) == (8, 2, 1024, 32)


def test_what_is_no_model_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"given 'llama-8', needed .*did you mean 'llama-8b'\?"):
        read_shape("llama-8")
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(ShapeError, match=r"config\.json: given no num_attention_heads, needed a positive whole"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ShapeError, match="not JSON"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, 2], "given list, needed an object"),
        ({"num_key_value_heads": "x"}, "given num_key_value_heads 'x', needed a positive whole number"),
        ({"num_key_value_heads": 5}, "given num_key_value_heads 5, needed a divisor of the 32 heads"),
        ({"head_dim": 64.5}, "given head_dim 64.5, needed a positive whole number"),
        ({"num_experts": "x"}, "given num_experts 'x', needed a positive whole number"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": -1}, "given n_shared_experts -1"),
    ],
)
def test_a_size_that_is_none_is_named(given: object, said: str) -> None:
    with pytest.raises(ShapeError, match=f"config.json: {said}"):
        shape_of({**LLAMA.to_json(), **given} if isinstance(given, dict) else given, "wrong")


def test_a_model_of_several_parts_is_told_where_its_sizes_are() -> None:
    with pytest.raises(ShapeError, match=r"given no num_attention_heads, .*; text_config has one"):
        shape_of({"text_config": LLAMA.to_json()}, "parts")
