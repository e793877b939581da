import errno
import fcntl
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from penstock.runtime.record import folder as module
from penstock.runtime.record.faults import RecordError
from penstock.runtime.record.folder import RunFolder, absolute, default_path
from tests.runtime.control.sockets import until


def test_a_new_folder_is_its_owners_only(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.checkpoints.is_dir()
    assert folder.logs.is_dir()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path).path.stat().st_mode & 0o777 == 0o700


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_json("config.json", {})
    folder.unlock()
    with pytest.raises(RecordError, match=r"holds a run already.*penstock resume"):
        RunFolder.create(tmp_path / "run")


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RecordError, match=r"holds files already \(thesis.tex\)"):
        RunFolder.create(tmp_path)


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="given a file"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(RecordError, match="a part of the path is a file"):
        RunFolder.create(tmp_path / "file" / "run")
    with pytest.raises(RecordError, match="too long"):
        RunFolder.create(tmp_path / ("x" * 300))


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

    def free() -> bool:
        try:
            RunFolder(path).lock()
        except RecordError:
            return False
        return True

    until(free)


def test_somebody_who_looks_whether_a_run_is_alive_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.unlock()
    looking = os.open(folder.path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `alive` has it between two of its lines
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


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{\n oops")
    with pytest.raises(RecordError, match=r"plan.json: given something that is not JSON \(.*line 2"):
        RunFolder(tmp_path).read_json("plan.json")


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
    assert absolute("../link/../x") == tmp_path / "here" / "x"  # where the shell's commands would find it, too
    assert absolute(tmp_path / "link" / "run") == tmp_path / "link" / "run"


def test_a_disk_fault_names_what_each_verb_calls_its_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot be written: .*needed a folder .*\(run --out DIR, resume DIR\)"):
        RunFolder(tmp_path / "none").write_json("summary.json", {})
