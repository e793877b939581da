"""`scripts/install.sh` without an argument, without pip, and over another tool's .venv; it installs nothing here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HALF = """#!/bin/sh
# Debian's python3 without python3-venv: the folder is made, then pip cannot be put into it.
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin" "$3/lib/python3/site-packages"
    touch "$3/pyvenv.cfg"
    ln -s /bin/false "$3/bin/python"
    echo "ensurepip is not available" >&2
    exit 1
fi
exec {python} "$@"
"""


def install(folder: Path, *words: str, python: str = sys.executable) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": python, "TORCH_INDEX": ""}
    command = ["sh", "install.sh", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "scripts" / "install.sh", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "half-python").write_text(HALF.format(python=sys.executable))
    (tmp_path / "half-python").chmod(0o755)
    return tmp_path


def test_without_an_argument_it_says_its_usage(folder: Path) -> None:
    done = install(folder)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sh scripts/install.sh WHAT")


@pytest.mark.parametrize("left", [False, True])
def test_a_half_made_environment_is_removed_and_what_is_needed_said(folder: Path, left: bool) -> None:
    python = str(folder / "half-python")
    if left:  # by an earlier try
        subprocess.run([python, "-m", "venv", ".venv"], cwd=folder, check=False, stderr=subprocess.DEVNULL)
        assert (folder / ".venv").exists()
    done = install(folder, ".", python=python)
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert not (folder / ".venv").exists()


def test_an_environment_of_another_tool_is_left_alone(folder: Path) -> None:
    kept = folder / ".venv" / "lib" / "python3" / "site-packages" / "package.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    (folder / ".venv" / "pyvenv.cfg").write_text("uv = 1\n")
    done = install(folder, ".")
    assert done.returncode == 1
    assert "given one without pip" in done.stderr
    assert kept.exists()
