"""What is said of an exception: where it was raised, unless the library refuses what it was given."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from penstock.graph import Rewards
from penstock.nodes.advantage import group_advantage
from penstock.nodes.fake import fault
from penstock.runtime.control.process import told

REFUSED = Rewards(torch.tensor([1.0]))
"""A group of one."""


def caught(call: Callable[[], Any], within: int = 0) -> Exception:
    """What a call raises, without so many frames of the caller, as the executor that called it would see it."""
    with pytest.raises(Exception) as found:  # noqa: PT011
        call()
    for _ in range(within):
        assert found.value.__traceback__ is not None
        found.value.__traceback__ = found.value.__traceback__.tb_next
    return found.value


def test_a_refusal_of_the_library_is_its_message() -> None:
    said = told(caught(lambda: group_advantage.fn(REFUSED), 2))
    assert said.startswith("ValueError: group_advantage: given 1 sample for a prompt, needed 2 or more")
    assert len(said.splitlines()) == 1


def test_a_refusal_in_a_thread_is_its_message() -> None:
    with ThreadPoolExecutor(1) as threads:
        said = told(caught(threads.submit(group_advantage.fn, REFUSED).result, 1))
    assert "Traceback" not in said


def test_a_refusal_beneath_a_users_function_shows_where_he_called() -> None:
    said = told(caught(lambda: group_advantage.fn(REFUSED), 1))
    assert "Traceback" in said
    assert "test_raised.py" in said


def test_whatever_else_is_raised_has_its_traceback() -> None:
    assert "fake.py" in told(caught(lambda: fault("node", 3, 3, -1), 2))
    assert "Traceback" in told(caught(lambda: torch.zeros(2) + torch.zeros(3), 1))


def test_half_a_character_is_told_by_its_number() -> None:
    assert "ValueError: \\ud800" in told(ValueError("\ud800"))
