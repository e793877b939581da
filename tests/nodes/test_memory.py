"""What a rank of a trainer holds in a step is what the planner's memory model says."""

from pathlib import Path

import pytest

from .memory_cases import agrees
from .ranked import spawn

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "tied", "groups"),
    [
        pytest.param("", "untied", "4", marks=slow),
        pytest.param("", "tied", "4", marks=slow),
        ("", "untied", "2"),
        pytest.param("tp=2", "untied", "2", marks=slow),
        ("fsdp=2", "untied", "2"),
        pytest.param("pp=2", "untied", "2", marks=slow),
    ],
    ids=["dense", "tied", "gqa", "tp", "fsdp", "pp"],
)
def test_the_memory_model_says_what_torchs_tracker_counts(mesh: str, tied: str, groups: str, tmp_path: Path) -> None:
    if mesh:
        spawn(2, f"{agrees.__module__}:agrees", mesh, tied, groups, folder=tmp_path)
    else:
        agrees(0, tmp_path, mesh, tied, groups)
