"""What holds for all tests: nothing of Hypothesis goes by the clock, for a shared machine is slow at any moment; with
several workers, what takes longest begins first.
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# Files and tests that would be waited for at the end if they began there, the longest first. Of tests that are marked
# slow, those of a file are apart, unless a mark `xdist_group` keeps them together; of others, they are together.
LONGEST = (
    "test_ray",
    "test_slurm",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    place = {name: number for number, name in enumerate(LONGEST)}

    def order(item: pytest.Item) -> int:
        names = item.path.stem, item.name.partition("[")[0]
        return min(place.get(name, len(LONGEST)) for name in names)

    items.sort(key=order)
