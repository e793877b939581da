"""The Containerfile: a linter finds nothing, it does not run as root, and it copies the files of the whole package."""

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "Containerfile"
LINTER = Path(sys.executable).parent / "hadolint"

linted = pytest.mark.skipif(not LINTER.exists(), reason="hadolint is not installed beside this Python")


def lint(text: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(LINTER), "-"], input=text, capture_output=True, text=True, timeout=60, check=False)


def instructions() -> list[tuple[str, str]]:
    """Return each instruction and its arguments, joined into one line."""
    text = re.sub(r"(?m)^\s*#.*\n", "", FILE.read_text()).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in lines]


@linted
def test_the_linter_finds_nothing() -> None:
    done = lint(FILE.read_text())
    assert (done.returncode, done.stdout) == (0, "")


BROKEN = {
    "an instruction that there is not": ("USER 1000:1000", "USERS 1000:1000"),
    "root": ("USER 1000:1000", "USER root"),
    "a folder that moves": ("WORKDIR /srv", "WORKDIR srv"),
    "packages that nobody asked for": (" --no-install-recommends python3 gcc", " python3 gcc"),
}


@linted
@pytest.mark.parametrize(("was", "broken"), BROKEN.values(), ids=BROKEN)
def test_the_linter_finds_what_is_wrong(was: str, broken: str) -> None:
    text = FILE.read_text()
    assert was in text
    done = lint(text.replace(was, broken))
    assert done.returncode == 1, done.stdout


def test_both_stages_have_the_base_that_is_asked_for_and_the_last_one_a_user_without_rights() -> None:
    found = instructions()
    assert [words.split()[0] for word, words in found if word == "FROM"] == ["${BASE}", "${BASE}"]
    last = found[max(index for index, (word, _) in enumerate(found) if word == "FROM") :]
    [user] = [words for word, words in last if word == "USER"]
    assert int(user.partition(":")[0]) > 0


def test_nothing_secret_can_be_given_to_the_build() -> None:
    named = [words for word, words in instructions() if word in ("ARG", "ENV")]
    assert {words.partition("=")[0] for words in named} == {"BASE", "TORCH_INDEX", "PATH"}
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert not any(name.startswith((".git", "runs", "keys", ".venv")) for name in kept)


@pytest.mark.slow
def test_what_is_copied_into_the_image_makes_the_whole_package(tmp_path: Path) -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#*"]
    made = {}
    for name, kept in {"image": [line[1:] for line in lines], "here": [path.name for path in ROOT.iterdir()]}.items():
        folder = tmp_path / name
        folder.mkdir()
        for one in kept:
            source = ROOT / one
            if source.is_dir() and not fnmatch.fnmatch(one, ".*"):
                left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
                shutil.copytree(source, folder / one, symlinks=True, ignore=left_out)
            elif source.is_file():
                shutil.copy(source, folder)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
        [wheel] = folder.glob("*.whl")
        made[name] = set(zipfile.ZipFile(wheel).namelist())
    assert made["image"] == made["here"]
