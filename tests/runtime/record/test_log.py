"""The event log: it is read back as written, and any change is refused with the number of the record."""

import errno
import os
from pathlib import Path

import pytest

from penstock.graph.ir import Firing
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import (
    MAGIC,
    EndRecord,
    EventRecord,
    LogError,
    LogWriter,
    commands_digest,
    new_records,
    read_log,
)
from penstock.runtime.schedule.events import Begin, Done, Fire


def encode(item: object) -> bytes:
    return repr(item).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.log"


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


def spans(data: bytes) -> list[tuple[int, int]]:
    """The start and end of each frame."""
    at, found = len(MAGIC), []
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "little") + 16
        found.append((at, end))
        at = end
    return found


def test_reads_back_what_was_written(path: Path) -> None:
    write(path).end({"status": "done"})
    (segment,) = read_log(path)
    assert (segment.facts, segment.ended) == ({"run": "a", "cut": None}, {"status": "done"})
    (stage,) = segment.stages
    assert [step.event for step in stage.steps[:2]] == [
        encode(Begin()),
        encode(Done(Firing("generate", 0), "generator/0")),
    ]
    assert stage.steps[1].digest == commands_digest([encode(Fire(Firing("generate", 0), "scorer/0", (0,)))])
    assert [step.record for step in stage.steps] == list(range(2, 8))


def test_commands_digest_knows_order_and_boundaries() -> None:
    given: list[list[bytes]] = [[], [b"ab", b"c"], [b"c", b"ab"], [b"a", b"bc"], [b"abc"]]
    assert len(set(map(commands_digest, given))) == len(given)


def test_a_resume_adds_a_segment_that_names_its_cut_and_each_lasts_to_its_last_event(path: Path) -> None:
    write(path).close()
    writer = LogWriter(path)
    writer.segment(3, {})
    writer.end({"status": "done"})
    first, second = read_log(path)
    assert (first.ended, second.facts["cut"]) == (None, 3)
    assert [first.seconds, second.seconds] == pytest.approx([0.4, 0.0])


@pytest.mark.parametrize("record", [0, 3, 7])
def test_an_edited_byte_is_refused_with_the_record(path: Path, record: int) -> None:
    write(path).close()
    written = path.read_bytes()
    start, end = spans(written)[record]
    for place in (start, start + 5, start + 9, end - 1):
        data = bytearray(written)
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(LogError, match=f"record {record} "):
            read_log(path)


@pytest.mark.parametrize("order", [[0, 1, 2, 4, 5], [0, 1, 2, 4, 3, 5], [0, 1, 2, 2, 3, 4]], ids=str)
def test_a_record_that_is_missing_or_moved_is_refused(path: Path, order: list[int]) -> None:
    write(path).close()
    data = path.read_bytes()
    frames = [data[start:end] for start, end in spans(data)]
    path.write_bytes(MAGIC + b"".join(frames[number] for number in order))
    with pytest.raises(LogError, match="record 3 "):
        read_log(path)


def test_half_a_frame_at_the_end_is_what_a_kill_leaves(path: Path) -> None:
    write(path).close()
    data = path.read_bytes()
    start, end = spans(data)[-1]
    for size in (start + 1, start + 8, end - 1):
        path.write_bytes(data[:size])
        assert len(read_log(path)[0].stages[0].steps) == 5
    writer = LogWriter(path)
    writer.segment(1, {})
    writer.close()
    assert len(read_log(path)) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello", "another kind"),
        (b"penstock events 12\nhello", r"given one of format 12, which another version wrote, needed .* format 4$"),
        (b"", "given an empty file"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_another_kind_is_refused(path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        path.write_bytes(content)
        with pytest.raises(LogError, match=said):
            LogWriter(path)
    with pytest.raises(LogError, match=said):
        read_log(path)


def test_a_reader_of_a_log_that_grows_goes_on_behind_what_it_has_read(path: Path) -> None:
    writer = write(path)
    writer.flush()
    *_, (_, mark) = new_records(path)
    assert list(new_records(path, mark)) == []
    writer.step(1.0, encode(Done(Firing("generate", 9), "generator/0")), [])
    writer.end({"status": "done"})
    *_, whole = new_records(path)
    # What was already read is not read again: its bytes may even be lost.
    path.write_bytes(bytes(mark.nbytes) + path.read_bytes()[mark.nbytes :])
    found = list(new_records(path, mark))
    assert ([type(record) for record, _ in found], found[-1]) == ([EventRecord, EndRecord], whole)


def test_records_are_on_disk_a_second_after_they_were_made(path: Path) -> None:
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


def test_a_full_disk_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write(path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    said = r"events.log: cannot be written: the disk is full; needed \d+ bytes of free space there, where \d+ are"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match=said):
        writer.flush()
