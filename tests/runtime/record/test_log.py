import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.graph.ir import Firing
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import MAGIC, LogError, LogWriter, commands_digest, read_log, segment_seconds
from penstock.runtime.schedule.events import Begin, Done, Fire


def encode(item: object) -> bytes:
    return repr(item).encode()


def write(path: Path, steps: int = 5) -> LogWriter:
    writer = LogWriter(path)
    writer.segment(None, {"run": "a"})
    writer.stage({"name": "train"})
    writer.step(0.0, encode(Begin()), [])
    for index in range(steps):
        firing = Firing("generate", index)
        fire = Fire(firing, "scorer/0", (index,))
        writer.step(0.1 * index, encode(Done(firing, "generator/0")), [encode(fire)])
    return writer


def spans(path: Path) -> list[tuple[int, int]]:
    """Start and end of each frame."""
    data, at, found = path.read_bytes(), len(MAGIC), []
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "little") + 16
        found.append((at, end))
        at = end
    return found


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "events.log").end({"status": "done"})
    (segment,) = read_log(tmp_path / "events.log")
    assert segment.facts == {"run": "a", "cut": None}
    assert segment.ended == {"status": "done"}
    (stage,) = segment.stages
    assert [step.event for step in stage.steps[:2]] == [
        encode(Begin()),
        encode(Done(Firing("generate", 0), "generator/0")),
    ]
    assert stage.steps[1].digest == commands_digest([encode(Fire(Firing("generate", 0), "scorer/0", (0,)))])
    assert [step.record for step in stage.steps] == list(range(2, 8))


def test_commands_digest_knows_order_and_boundaries() -> None:
    first, second = encode(Fire(Firing("a", 0), "p/0")), encode(Fire(Firing("b", 0), "p/0"))
    assert commands_digest([first, second]) != commands_digest([second, first])
    assert commands_digest([]) != commands_digest([first])


def test_a_resume_adds_a_segment_that_names_its_cut(tmp_path: Path) -> None:
    write(tmp_path / "events.log").close()
    writer = LogWriter(tmp_path / "events.log")
    writer.segment(3, {})
    writer.end({"status": "done"})
    first, second = read_log(tmp_path / "events.log")
    assert first.ended is None
    assert second.facts["cut"] == 3


def test_a_segment_lasts_to_its_last_event(tmp_path: Path) -> None:
    write(tmp_path / "events.log", steps=5).close()
    writer = LogWriter(tmp_path / "events.log")
    writer.segment(3, {})
    writer.close()
    assert segment_seconds(tmp_path / "events.log") == [pytest.approx(0.4), 0.0]


@pytest.mark.parametrize("record", [0, 3, 7])
def test_an_edited_byte_is_refused_with_the_record(tmp_path: Path, record: int) -> None:
    path = tmp_path / "events.log"
    write(path).close()
    start, end = spans(path)[record]
    for place in (start, start + 5, start + 9, end - 1):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        (tmp_path / "edited.log").write_bytes(data)
        with pytest.raises(LogError, match=f"record {record} "):
            read_log(tmp_path / "edited.log")


def remove(frames: list[bytes]) -> list[bytes]:
    return frames[:3] + frames[4:]


def reorder(frames: list[bytes]) -> list[bytes]:
    return [*frames[:3], frames[4], frames[3], *frames[5:]]


def repeat(frames: list[bytes]) -> list[bytes]:
    return [*frames[:3], frames[2], *frames[3:]]


@pytest.mark.parametrize("change", [remove, reorder, repeat])
def test_a_record_that_is_missing_or_moved_is_refused(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    path = tmp_path / "events.log"
    write(path).close()
    data = path.read_bytes()
    frames = [data[start:end] for start, end in spans(path)]
    path.write_bytes(MAGIC + b"".join(change(frames)))
    with pytest.raises(LogError, match="record 3 "):
        read_log(path)


def test_half_a_frame_at_the_end_is_what_a_kill_leaves(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    write(path).close()
    data, last = path.read_bytes(), spans(path)[-1]
    for size in (last[0] + 1, last[0] + 8, last[1] - 1):
        path.write_bytes(data[:size])
        assert len(read_log(path)[0].stages[0].steps) == 5
    writer = LogWriter(path)
    writer.segment(1, {})
    writer.close()
    assert len(read_log(path)) == 2


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"hello")
    with pytest.raises(LogError, match="another kind"):
        read_log(tmp_path / "x.log")
    with pytest.raises(LogError, match="another kind"):
        LogWriter(tmp_path / "x.log")
    (tmp_path / "newer.log").write_bytes(b"penstock events 12\nhello")
    with pytest.raises(LogError, match=r"given one of format 12, which another version wrote, needed .* format 3$"):
        read_log(tmp_path / "newer.log")
    (tmp_path / "empty.log").touch()
    with pytest.raises(LogError, match="given an empty file"):
        read_log(tmp_path / "empty.log")
    with pytest.raises(LogError, match="cannot be read"):
        read_log(tmp_path / "none.log")


def test_records_are_on_disk_a_second_after_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    writer = LogWriter(path)
    writer.segment(None, {})
    writer.stage({})
    writer.step(10.0, encode(Begin()), [])
    size = path.stat().st_size
    writer.step(10.5, encode(Begin()), [])
    assert path.stat().st_size == size
    writer.tick(11.1)
    assert path.stat().st_size > size
    assert len(read_log(path)[0].stages[0].steps) == 2


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write(tmp_path / "events.log")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        said = r"events.log: cannot be written: the disk is full; needed \d+ bytes of free space there, where \d+ are"
        with pytest.raises(RecordError, match=said):
            writer.flush()
