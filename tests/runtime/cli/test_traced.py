from pathlib import Path

import pytest

from penstock.runtime.cli import tracing
from penstock.runtime.cli.tracing import CommandError, trace_program

pytestmark = pytest.mark.timeout(200)


def test_a_program_whose_import_does_not_end_meets_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "DEADLINE", 0.5)
    file = tmp_path / "mine.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(CommandError, match=r"mine\.py:mine: the process that .* has not answered within 0\.5 s"):
        trace_program("run", [f"{file}:mine"])


def test_a_program_that_ends_its_process_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nos._exit(3)\n")
    with pytest.raises(CommandError, match=r"mine\.py:mine: the process that imported it ended with exit status 3"):
        trace_program("run", [f"{file}:mine"])
