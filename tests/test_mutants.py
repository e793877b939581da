"""Every mutant of `scripts/mutants.py` still applies to the product's text, and its tests exist."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_mutant_of_the_list_has_its_text_in_the_product_and_its_tests() -> None:
    command = [sys.executable, "scripts/mutants.py", "--dry"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
