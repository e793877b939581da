"""Fixtures of the tests of nodes."""

import pytest
import torch

from penstock.graph import Context
from tests.nodes.tiny_model import TOKENIZER, model, save


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: tiny tensors gain nothing from more, and lose much where cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Return the context of a generator with the tiny model."""
    folder = tmp_path_factory.mktemp("model")
    save(model(), folder)
    TOKENIZER.save(folder)
    return Context(node="generate", seed=3, model=str(folder), slots=32, max_tokens=8, max_prompt=64)
