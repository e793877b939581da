"""Ranks that have parts of a generator's model say what one rank says."""

from pathlib import Path

import pytest

from .ranked import spawn

CASES = "tests.nodes.part_cases"


@pytest.mark.parametrize(("ranks", "groups", "tied"), [(2, 2, "untied"), (2, 1, "tied")])
def test_an_engine_over_ranks_samples_one_ranks_tokens(ranks: int, groups: int, tied: str, tmp_path: Path) -> None:
    spawn(ranks, f"{CASES}:engine", str(groups), tied, "float32", folder=tmp_path)


@pytest.mark.slow
def test_an_engine_over_ranks_in_bfloat16(tmp_path: Path) -> None:
    spawn(2, f"{CASES}:engine", "2", "untied", "bfloat16", folder=tmp_path)


@pytest.mark.slow
def test_an_engine_over_more_ranks_than_key_value_heads(tmp_path: Path) -> None:
    spawn(4, f"{CASES}:engine", "2", "untied", "float32", folder=tmp_path)
