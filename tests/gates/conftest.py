from collections.abc import Iterator

import pytest

from .agents import HOSTS
from .network import Network, why_not


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(*HOSTS) as found:
        yield found
