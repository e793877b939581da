import ast
import errno
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from penstock.runtime.record import folder as module
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import LogWriter
from penstock.runtime.record.folder import RunFolder, absolute, default_path, replacing
from penstock.runtime.record.metrics import MetricsFile
from tests.runtime.control.sockets import until


def test_a_new_or_empty_folder_becomes_its_owners_only(tmp_path: Path) -> None:
    for path in (tmp_path / "a" / "b", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        folder = RunFolder.create(path)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.checkpoints.is_dir()
        assert folder.logs.is_dir()


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_json("config.json", {})
    folder.unlock()
    with pytest.raises(RecordError, match=r"holds a run already.*penstock resume"):
        RunFolder.create(tmp_path / "run")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", r"holds files already \(thesis.tex\)"),
        ("thesis.tex", "given a file"),
        ("thesis.tex/run", "a part of the path is a file"),
        ("x" * 300, "too long"),
    ],
)
def test_a_path_that_cannot_be_a_new_folder_is_refused(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RecordError, match=said):
        RunFolder.create(tmp_path / path)


def test_an_unwritable_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RecordError, match=r"the file system is read-only.*--out DIR"):
        RunFolder.create(tmp_path / "run")


def test_only_one_process_uses_a_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(RecordError, match=rf"a run is alive there \(process {os.getpid()}\)"):
        RunFolder.create(tmp_path / "run")
    folder.unlock()
    RunFolder(folder.path).lock()


def test_a_lock_outlives_its_process_in_the_children_that_inherit_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from penstock.runtime.record.folder import RunFolder\n"
        "folder = RunFolder.create(sys.argv[1])\n"
        "none = subprocess.DEVNULL\n"
        "child = subprocess.Popen(['sleep', '600'], pass_fds=[folder.lock_fd], stdout=none, stderr=none)\n"
        "print(child.pid)"
    )
    path = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=120)
    with pytest.raises(RecordError, match="a run is alive there"):
        RunFolder(path).lock()
    os.kill(int(done.stdout), 9)

    until(lambda: not RunFolder(path).alive)
    RunFolder(path).lock()


def test_somebody_who_looks_whether_a_run_is_alive_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.unlock()
    looking = os.open(folder.path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # `alive` holds it for a moment
    monkeypatch.setattr(module, "sleep", lambda seconds: os.close(looking))
    RunFolder(folder.path).lock()
    assert folder.alive


def test_only_a_folder_with_a_run_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(RecordError, match="holds no run"):
        RunFolder.open(tmp_path)
    RunFolder(tmp_path).write_json("config.json", {"a": 1})
    assert RunFolder.open(tmp_path).read_json("config.json") == {"a": 1}


def test_an_infinite_option_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder, options = RunFolder(tmp_path), {"rho": float("inf"), "bounds": [-float("inf"), 2.0], "text": "Infinity"}
    folder.write_json("graph.json", {"options": options})
    assert folder.read_json("graph.json") == {"options": options}
    with pytest.raises(ValueError, match="JSON"):
        folder.write_json("graph.json", {"rho": float("nan")})


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("summary.json", {"old": 1})

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match=r"summary.json: cannot be written: the disk is full"):
            folder.write_json("summary.json", {"new": 1})
    assert folder.read_json("summary.json") == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_damaged_file_is_named_and_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{\n oops")
    with pytest.raises(RecordError, match=r"plan.json: given something that is not JSON \(.*line 2"):
        RunFolder(tmp_path).read_json("plan.json")
    with pytest.raises(RecordError, match=r"cannot be written: .*needed a folder .*\(run --out DIR, resume DIR\)"):
        RunFolder(tmp_path / "none").write_json("summary.json", {})


def test_default_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2025, 3, 4, 5, 6, 7)
    first = default_path("aipo", now)
    assert first == Path("runs/aipo-20250304-050607")
    first.mkdir(parents=True)
    assert default_path("aipo", now) == Path("runs/aipo-20250304-050607-2")


def test_a_path_is_shown_without_dots_and_keeps_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "here" / "deep")
    monkeypatch.chdir(tmp_path / "here")
    assert RunFolder.create("../run").path == tmp_path / "run"
    assert absolute("../link/../x") == tmp_path / "here" / "x"  # the same path as in a shell
    assert absolute(tmp_path / "link" / "run") == tmp_path / "link" / "run"


def state_of(folder: Path) -> object:
    """Everything in a folder that a refusal could have changed."""
    files = {p: (p.lstat().st_mode, p.lstat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}
    return folder.stat().st_mode, folder.stat().st_mtime_ns, files


def test_a_refused_folder_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, strange, stale, empty = (tmp_path / name for name in ("full", "strange", "stale", "empty"))
    for folder in (full, strange, stale, empty):
        folder.mkdir()
        folder.chmod(0o1777)
    (full / "thesis.tex").write_text("all of it")
    (stale / "lock").write_text("77\n")
    (stale / "thesis.tex").write_text("all of it")
    before = state_of(tmp_path)
    for folder in (full, stale):
        with pytest.raises(RecordError, match="holds files already"):
            RunFolder.create(folder)
        with pytest.raises(RecordError, match="part of the path is a file"):
            RunFolder.create(folder / "thesis.tex" / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(RecordError, match="given a folder of user"):
        RunFolder.create(strange)
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("full", [True, False])
def test_a_run_that_comes_to_nothing_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)

    def refuse(path: Path, *, fresh: bool = False) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    for path in (tmp_path / "empty", tmp_path / "new" / "run"):
        if full:  # creation fails halfway
            monkeypatch.setattr(module, "make_folder", refuse)
            with pytest.raises(RecordError, match="the disk is full"):
                RunFolder.create(path)
        else:
            folder = RunFolder.create(path)
            (folder.logs / "controller.err").write_text("")
            folder.write_json("graph.json", {})
            folder.discard()
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_took_the_place_of_a_run_is_not_touched_by_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.path.rename(tmp_path / "moved")
    folder.path.mkdir(mode=0o755)
    (folder.path / "thesis.tex").write_text("all of it")
    before = state_of(folder.path)
    folder.discard()
    assert state_of(folder.path) == before


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "pipe", "folder"])
def test_what_is_planted_in_a_folder_is_not_written_through(tmp_path: Path, kind: str) -> None:
    victim, planted = tmp_path / "authorized_keys", tmp_path / "planted"
    if kind != "dangling":
        victim.write_text("mine\n")
    if kind in ("link", "dangling"):
        planted.symlink_to(victim)
    elif kind == "hard link":
        planted.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.mkdir()
    ways: list[Callable[[Path], object]] = [
        module.open_append,
        MetricsFile,
        LogWriter,
        lambda path: module.open_regular(path, os.O_RDWR | os.O_CREAT),
    ]
    for way in ways:
        with pytest.raises(RecordError, match="planted"):
            way(planted)
    with pytest.raises(FileExistsError):
        module.create_file(planted, b"theirs\n")
    if kind != "folder":
        with pytest.raises(RecordError, match="needed a folder"):
            module.make_folder(planted)
        module.write_atomic(planted, b"theirs\n")  # replaces the planted file
        assert planted.read_bytes() == b"theirs\n"
        assert not planted.is_symlink()
    assert victim.exists() == (kind != "dangling")
    assert kind == "dangling" or victim.read_text() == "mine\n"


def test_a_new_files_name_cannot_be_guessed(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with module.replacing(tmp_path / "report.html") as file:
            names.add(file.name)
    assert len(names) == 2
    assert all(len(Path(name).suffix) >= 17 and not Path(name).exists() for name in names)


def test_a_folder_that_is_a_link_is_no_part_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="symbolic link"):
        module.make_folder(tmp_path / "logs")


RUNTIME = Path(__file__).resolve().parents[3] / "runtime"
OPENERS = {
    "record/folder.py": "it is the place",
    "tensor/shm.py": "shared memory, exclusively and without links",
    "cli/main.py": "/dev/null",
}
"""Files that may open files for writing themselves, and why."""


def writes(call: ast.Call) -> bool:
    """True if a call creates a file or opens it for writing, judged by its name and literal arguments."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_text", "write_bytes", "touch", "mkstemp", "NamedTemporaryFile", "copyfile", "copy", "copy2"):
        return name not in ("copy",) or ast.unparse(call.func).startswith("shutil.")
    if name == "open":
        words = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
        flags = any(f in ast.unparse(call) for f in ("O_WRONLY", "O_RDWR", "O_CREAT"))
        return flags or any(isinstance(w, str) and re.fullmatch(r"(?=.*[wax+])[rwaxbt+]{1,3}", w) for w in words)
    return False


def test_only_one_place_opens_files_for_writing() -> None:
    found = [
        f"{path.relative_to(RUNTIME)}:{node.lineno}"
        for path in sorted(RUNTIME.rglob("*.py"))
        if str(path.relative_to(RUNTIME)) not in OPENERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and writes(node)
    ]
    assert found == []


def test_files_that_a_killed_process_was_writing_are_swept(tmp_path: Path) -> None:
    """As if `replacing` was killed before its last step."""
    folder = RunFolder.create(tmp_path / "run")
    folder.write_json("config.json", {})
    kept = {path.name for path in folder.path.iterdir()}
    for name in ("summary.json", "trace.json"):
        with replacing(folder.path / name):
            (half,) = (path for path in folder.path.iterdir() if path.name.startswith(f".{name}"))
            os.link(half, folder.path / f".{name}.{'0' * 16}")
        (folder.path / name).unlink()
    report = folder.path / f".report.html.{'0' * 16}"
    report.touch()  # `penstock report` may be about to rename it
    folder.sweep()
    assert {path.name for path in folder.path.iterdir()} == kept | {report.name}
