"""What holds for all tests: nothing of Hypothesis goes by the clock, for a shared machine is slow at any moment; with
several workers, what takes longest begins first.
"""

import tempfile
from collections.abc import Iterator

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


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests, libraries and their processes put into the machine's folder of temporary files is in pytest's, which
    removes it: many of them are killed, and remove nothing."""
    folder = tmp_path_factory.getbasetemp() / "t"  # short, since the paths of Unix sockets are
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
