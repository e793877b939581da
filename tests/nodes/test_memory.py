"""The planner's memory model has the bytes that a rank of a trainer holds in a step."""

import pkgutil
from pathlib import Path

import pytest

from penstock.nodes import trainable
from penstock.runtime.plan import train_cost

from .ranked import spawn

# By its path: its file imports torch's tracker, for seconds, which workers without these tests do not need.
AGREES = "tests.nodes.memory_cases:agrees"

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "tied", "groups", "dtype", "lora"),
    [
        pytest.param("", "untied", "4", "float32", "0", marks=slow),
        pytest.param("", "tied", "4", "bfloat16", "0", marks=slow),
        ("", "untied", "2", "float32", "0"),
        pytest.param("tp=2", "untied", "2", "bfloat16", "0", marks=slow),
        pytest.param("fsdp=2", "untied", "2", "float32", "0", marks=slow),
        pytest.param("fsdp=2", "tied", "2", "bfloat16", "0", marks=slow),
        pytest.param("pp=2", "untied", "2", "bfloat16", "0", marks=slow),
        pytest.param("", "untied", "2", "bfloat16", "8", marks=slow),
        pytest.param("fsdp=2", "untied", "2", "bfloat16", "8", marks=slow),
    ],
    ids=["dense", "tied", "gqa", "tp", "fsdp", "fsdp-tied", "pp", "lora", "fsdp-lora"],
)
def test_the_memory_model_says_what_torchs_tracker_counts(
    mesh: str, tied: str, groups: str, dtype: str, lora: str, tmp_path: Path
) -> None:
    case = (mesh, tied, groups, dtype, lora)
    if mesh:
        # A thread of gloo may still hold a buffer that the rank has freed. But stages need the values that are sent.
        backend = "gloo" if mesh == "pp=2" else "fake"
        spawn(2, AGREES, *case, folder=tmp_path, backend=backend)
    else:
        pkgutil.resolve_name(AGREES)(0, tmp_path, *case)


def test_the_memory_model_knows_the_norms_of_branches(tmp_path: Path) -> None:
    pkgutil.resolve_name(AGREES)(0, tmp_path, "", "untied", "2", "float32", "0", "gemma3_text")


def test_the_moments_that_are_on_the_device_at_once_are_those_of_the_memory_model() -> None:
    assert trainable.BUCKET_BYTES == train_cost.BUCKET_BYTES
