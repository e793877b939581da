from pathlib import Path

import pytest

from penstock.runtime.cli.tracing import CommandError, ask_child, trace_program

pytestmark = pytest.mark.timeout(200)


def test_a_program_whose_import_does_not_end_meets_the_deadline(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(CommandError, match=r"X has not answered within 0\.5 s"):
        ask_child("penstock.runtime.cli.children:traced", "run", f"{file}:mine", [], what="X", deadline=0.5)


def test_a_program_that_ends_its_process_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nos._exit(3)\n")
    with pytest.raises(CommandError, match=r"mine\.py:mine: .* ended with exit status 3"):
        trace_program("run", [f"{file}:mine"])
