"""A recorded run replays to the same commands; a log that was edited is refused, and the record named."""

import re
from pathlib import Path

import msgpack
import pytest

from penstock.graph.ir import Firing
from penstock.runtime.control.messages import read_record
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.record import event_log
from penstock.runtime.record.event_log import LogError, read_log
from penstock.runtime.schedule.events import Done
from penstock.runtime.schedule.replay import ReplayError

from .replaying import replayed
from .running import make_run, run_to_end

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with processes, two generators and free versions: its decisions hang on the timing."""
    options = {"lag": 2, "generate_ms": 10.0, "score_ms": 1.0, "update_ms": 8.0, "sync_ms": 0.0, "jitter_ms": 10.0}
    flags = RunOptions(updates=8, batch=4, slots=16, deadline=60.0)
    return run_to_end(make_run(tmp_path_factory.mktemp("replay") / "r", "toy", options, flags, generators=2))


def frames(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Start and end of each record's payload."""
    found, at = [], len(event_log.MAGIC)
    while at < len(data):
        (length,) = event_log.LENGTH.unpack_from(data, at)
        found.append((at + event_log.HEAD, at + event_log.HEAD + length))
        at = found[-1][1] + event_log.CHAIN
    return found


def copy(recorded: Path, tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "events.log").write_bytes(content)
    return tmp_path


def test_a_recorded_run_replays_to_identical_commands(recorded: Path) -> None:
    train, save = replayed(recorded)
    assert (train.stage, train.updates, train.outcomes["consumed"]) == ("train", 8, 32)
    assert train.finish is not None
    assert train.finish.status == "done"
    assert train.commands > train.updates
    assert (save.stage, save.updates) == ("save", 0)


def test_a_changed_byte_is_refused_and_its_record_named(recorded: Path, tmp_path: Path) -> None:
    content = bytearray((recorded / "events.log").read_bytes())
    number = 20
    content[frames(content)[number][0] + 3] ^= 1
    with pytest.raises(LogError, match=f"record {number} does not follow"):
        replayed(copy(recorded, tmp_path, bytes(content)))


def test_a_missing_record_is_refused_and_the_next_one_named(recorded: Path, tmp_path: Path) -> None:
    content = (recorded / "events.log").read_bytes()
    start, end = frames(content)[20]
    with pytest.raises(LogError, match="record 20 does not follow"):
        replayed(copy(recorded, tmp_path, content[: start - event_log.HEAD] + content[end + event_log.CHAIN :]))


def test_two_swapped_records_are_refused(recorded: Path, tmp_path: Path) -> None:
    content = (recorded / "events.log").read_bytes()
    (a, b), (c, d) = ((s - event_log.HEAD, e + event_log.CHAIN) for s, e in frames(content)[20:22])
    with pytest.raises(LogError, match="record 20 does not follow"):
        replayed(copy(recorded, tmp_path, content[:a] + content[c:d] + content[a:b] + content[d:]))


def test_an_edited_log_with_a_chain_made_anew_is_refused_by_its_decisions(recorded: Path, tmp_path: Path) -> None:
    """Whoever can compute the chain still has to make the scheduler say what it did not say."""
    content = (recorded / "events.log").read_bytes()
    records = [msgpack.unpackb(content[start:end]) for start, end in frames(content)]
    steps = [(record, read_record(record[2])) for record in records if record[0] == "event"]
    done = {event.firing: record for record, event in steps if isinstance(event, Done)}
    made, scored = done[Firing("fake_generate", 9)], done[Firing("fake_score", 9)]
    made[2], scored[2] = scored[2], made[2]  # two events of which neither needs the other might be told in any order
    path = tmp_path / "events.log"
    writer = event_log.LogWriter(path)
    for record in records:
        writer._append(*record)
    writer.close()
    assert len(read_log(path)) == 1
    with pytest.raises(ReplayError) as error:
        replayed(tmp_path)
    assert re.match(r"record \d+, at ", str(error.value))
