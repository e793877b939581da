"""The base model with which short runs of programs start."""

import pytest

from penstock.runtime.cli.base_model import base_model


@pytest.fixture(scope="session")
def base() -> str:
    """Return the demo's base model: built once, and kept in the user's cache until the code that makes it changes."""
    return str(base_model("", lambda line: None))
