"""Experts that are sharded over ranks: the same bits in the forward pass, the same update within rounding."""

from pathlib import Path

import pytest

from tests.nodes.ranked import spawn
from tests.nodes.test_eight_bit import needs_int8

CASES, OWN = "tests.nodes.family_cases", "tests.nodes.expert_cases"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "ep=2"),
        pytest.param(3, "ep=3", marks=slow),
        pytest.param(4, "fsdp=2,ep=2", marks=slow),
        (4, "ep=2,fsdp=2"),
        pytest.param(4, "dp=2,ep=2", marks=slow),
        pytest.param(4, "ep=2,tp=2", marks=slow),
        pytest.param(4, "pp=2,ep=2", marks=slow),
    ],
)
def test_experts_over_ranks_learn_what_they_do_on_one(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{CASES}:update", mesh, "qwen3_moe", folder=tmp_path)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float32"), pytest.param(3, "bfloat16", marks=slow)])
def test_a_generator_with_a_share_of_the_experts_samples_the_bits_of_one_rank(
    ranks: int, dtype: str, tmp_path: Path
) -> None:
    spawn(ranks, f"{OWN}:engine", dtype, folder=tmp_path)


@needs_int8
def test_a_generator_with_a_share_of_the_experts_computes_in_int8(tmp_path: Path) -> None:
    spawn(2, f"{OWN}:in_int8", folder=tmp_path)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
def test_log_probabilities_have_the_bits_of_one_rank(dtype: str, tmp_path: Path) -> None:
    spawn(2, f"{OWN}:logprobs", "ep=2", dtype, folder=tmp_path)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "ep=2"), pytest.param(4, "pp=2,ep=2", marks=slow)])
def test_routing_is_replayed_where_experts_are_dealt_out(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{CASES}:replayed", mesh, folder=tmp_path)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "ep=2"), pytest.param(4, "fsdp=2,ep=2", marks=slow)])
def test_experts_over_ranks_go_with_all_that_a_trainer_has(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{OWN}:other_ways", mesh, folder=tmp_path)
