"""Segments live with their owner, are private, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.tensor.shm import SHM, SegmentError, create_segment, open_segment, segment_name, sweep

OWNER = """
import sys
from pathlib import Path
from penstock.runtime.tensor.shm import create_segment
segment = create_segment(sys.argv[1], 8192, [Path(sys.argv[2])])
print("ready", flush=True)
sys.stdin.read()
"""


def start_owner(name: str, folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, name, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_segment_is_private_full_size_and_shared(tmp_path: Path) -> None:
    segment = create_segment(segment_name("run1", "generator/0", 0), 8192, [tmp_path])
    facts = segment.path.stat()
    assert (facts.st_mode & 0o777, facts.st_size) == (0o600, 8192)
    other = open_segment(segment.name, [tmp_path / "absent", tmp_path])
    segment.view[100:105] = b"hello"
    assert bytes(other.view[100:105]) == b"hello"
    with pytest.raises(TypeError):
        other.view[0] = 1
    segment.unlink()
    assert bytes(other.view[100:105]) == b"hello"
    other.close()
    segment.close()


def test_a_taken_name_is_never_reused(tmp_path: Path) -> None:
    segment = create_segment("penstock-run1-a-0", 4096, [tmp_path])
    with pytest.raises(SegmentError, match="penstock-run1-a-0 is there already"):
        create_segment("penstock-run1-a-0", 4096, [tmp_path])
    segment.close()


def test_no_room_is_an_error_with_the_numbers_and_leaves_no_file() -> None:
    name = f"penstock-noroom{os.getpid()}-a-0"
    with pytest.raises(SegmentError, match=rf"of {1 << 50} bytes \(/dev/shm: .*, \d+ of \d+ bytes free\)"):
        create_segment(name, 1 << 50, [SHM])
    assert not (SHM / name).exists()


def test_the_next_folder_serves_where_the_first_is_full(tmp_path: Path) -> None:
    segment = create_segment("penstock-run1-a-0", 4096, [tmp_path / "absent", tmp_path])
    assert segment.path.parent == tmp_path
    segment.close()


@pytest.mark.parametrize("name", ["passwd", "penstock-../x", "penstock-a/../../b"])
def test_only_segment_names_are_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="needed a segment's name"):
        open_segment(name, [tmp_path])


def test_a_file_that_others_may_write_or_a_link_is_not_opened(tmp_path: Path) -> None:
    open_file = tmp_path / "penstock-run1-a-0"
    open_file.write_bytes(bytes(10))
    open_file.chmod(0o666)
    with pytest.raises(SegmentError, match="mode 666"):
        open_segment(open_file.name, [tmp_path])
    (tmp_path / "penstock-run1-a-1").symlink_to(open_file)
    with pytest.raises(OSError, match="symbolic link"):
        open_segment("penstock-run1-a-1", [tmp_path])


def test_an_empty_file_is_not_a_segment(tmp_path: Path) -> None:
    (tmp_path / "penstock-run1-a-0").touch(mode=0o600)
    with pytest.raises(SegmentError, match="0 bytes"):
        open_segment("penstock-run1-a-0", [tmp_path])


@pytest.mark.timeout(300)
def test_sweep_takes_dead_runs_only(tmp_path: Path) -> None:
    mine = create_segment("penstock-mine-a-0", 4096, [tmp_path])
    dead = start_owner("penstock-mixed-a-0", tmp_path)
    alive = start_owner("penstock-mixed-b-0", tmp_path)
    try:
        (tmp_path / "unrelated").touch()
        (tmp_path / "penstock-old-a-0").touch(mode=0o600)
        dead.send_signal(signal.SIGKILL)
        dead.wait(50)
        assert sweep(folders=[tmp_path]) == ["penstock-old-a-0"]
        alive.send_signal(signal.SIGKILL)
        alive.wait(50)
        assert sweep(folders=[tmp_path]) == ["penstock-mixed-a-0", "penstock-mixed-b-0"]
    finally:
        for process in (dead, alive):
            process.kill()
            process.communicate()
    assert sorted(os.listdir(tmp_path)) == ["penstock-mine-a-0", "unrelated"]
    mine.close()


def test_sweep_of_one_run_takes_it_whatever_holds_it(tmp_path: Path) -> None:
    a, b = (create_segment(f"penstock-{run}-x-0", 4096, [tmp_path]) for run in ("a", "b"))
    assert sweep("a", [tmp_path]) == ["penstock-a-x-0"]
    assert os.listdir(tmp_path) == ["penstock-b-x-0"]
    a.close()
    b.close()


def test_what_the_launcher_and_the_controller_use_needs_no_torch() -> None:
    modules = ", ".join(f"penstock.runtime.tensor.{name}" for name in ("shm", "layout", "reshard", "wire_format"))
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=300, check=False).returncode == 0


def test_run_ids_are_plain() -> None:
    with pytest.raises(ValueError, match="needed letters and digits"):
        segment_name("my-run", "a", 0)
