"""What users see of the programs is what it was; `python tests/golden.py --write` keeps what is changed on purpose."""

import pytest

from .golden import ROOT, built_in, compared

FAST = ("penstock", "toy")


def test_what_the_command_and_a_program_print_is_what_it_was() -> None:
    assert compared(FAST)[:5000] == ""


@pytest.mark.slow
def test_what_all_programs_print_is_what_it_was() -> None:
    assert compared([name for name in built_in(ROOT) if name not in FAST])[:5000] == ""
