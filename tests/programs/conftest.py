"""What short runs of programs start from."""

import pytest

from penstock.runtime.cli.base_model import base_model


@pytest.fixture(scope="session")
def base() -> str:
    """The demo's base model: built once, and kept in the user's cache until what makes it changes."""
    return str(base_model("", lambda line: None))
