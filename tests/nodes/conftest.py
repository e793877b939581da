"""Set-up of the tests of nodes."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and lose much where cores are shared."""
    torch.set_num_threads(1)
