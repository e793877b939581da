"""What users see of the programs does not change; `python scripts/golden.py --write` keeps a change that is meant."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAST = ("penstock", "toy")
SLOW = sorted(path.stem for path in (ROOT / "programs").glob("[a-z]*.py") if path.stem not in FAST)


@pytest.mark.parametrize("programs", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_what_the_command_and_all_programs_print_is_what_it_was(programs: tuple[str, ...]) -> None:
    command = [sys.executable, "scripts/golden.py", "--only", *programs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout[:5000], done.stderr[:5000]) == (0, "", "")
