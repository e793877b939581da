"""A model over several ranks learns and samples what it does on one, within rounding, and every rank says the same."""

from pathlib import Path

import pytest

from .ranked import spawn

slow = pytest.mark.slow
CASES, LESSONS, PARTS = "tests.nodes.rank_cases", "tests.nodes.lesson_cases", "tests.nodes.part_cases"


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "fsdp=2"),
        (2, "tp=2"),
        (2, "dp=2"),
        (2, "pp=2"),
        pytest.param(4, "fsdp=2,tp=2", marks=slow),
        pytest.param(4, "dp=2,fsdp=2", marks=slow),
        pytest.param(4, "tp=2,dp=2", marks=slow),
        pytest.param(4, "pp=2,fsdp=2", marks=slow),
        pytest.param(4, "tp=2,pp=2", marks=slow),
    ],
)
def test_an_update_over_ranks_is_one_ranks(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{CASES}:update", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("dp=2", marks=slow)])
def test_a_rank_without_work_of_its_own_changes_nothing(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{CASES}:few_rows", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("tp=2", marks=slow), pytest.param("pp=2", marks=slow)])
def test_all_models_of_a_run_can_be_in_parts(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{CASES}:other_models", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("tp=2", marks=slow), pytest.param("pp=2", marks=slow)])
def test_masters_in_parts_are_float32(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{CASES}:half_precision", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("tp=2", marks=slow)])
def test_every_kind_of_update_can_be_over_ranks(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:lessons", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("tp=2", marks=slow), pytest.param("pp=2", marks=slow)])
def test_a_frozen_model_of_a_directory_is_read_in_parts(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:frozen", mesh, folder=tmp_path)


@pytest.mark.slow
def test_a_stage_in_the_middle_passes_on(tmp_path: Path) -> None:
    spawn(3, f"{LESSONS}:three_stages", "pp=3", folder=tmp_path)


def test_a_gradient_that_is_no_number_is_refused_by_all_ranks(tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:no_number", "fsdp=2", folder=tmp_path)


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2", marks=slow)])
def test_replicas_stay_equal_to_the_bit(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:replicas", mesh, folder=tmp_path)


@pytest.mark.parametrize(("ranks", "groups", "tied"), [(2, 2, "untied"), (2, 1, "tied")])
def test_an_engine_over_ranks_samples_one_ranks_tokens(ranks: int, groups: int, tied: str, tmp_path: Path) -> None:
    spawn(ranks, f"{PARTS}:engine", str(groups), tied, "float32", folder=tmp_path)


@pytest.mark.slow
def test_an_engine_over_ranks_in_bfloat16(tmp_path: Path) -> None:
    spawn(2, f"{PARTS}:engine", "2", "untied", "bfloat16", folder=tmp_path)


@pytest.mark.slow
def test_an_engine_over_more_ranks_than_key_value_heads(tmp_path: Path) -> None:
    spawn(4, f"{PARTS}:engine", "2", "untied", "float32", folder=tmp_path)
