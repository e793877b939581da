"""`events.log`: every event that a run's scheduler saw, and a digest of its commands, so that a run can be replayed.

The file starts with `MAGIC`; each record follows as a frame

    length of payload (4 bytes, little endian) · check of the length (4) · payload (MessagePack) · chain (16)

where chain = blake2b(chain of the record before, payload), and the check is a digest of that chain and the length. So
a reader finds the place of an edited, moved or missing record, and can tell it from a file that merely ends. A payload
is a `Record`: an array of its kind and its fields.

A killed process leaves no end record, and may leave half a frame, which the next segment cuts off. `LogWriter` is for
the recorder of a run. `read_log` (an undamaged log), `read_segments` (a log up to its first damage) and `new_records`
(a growing log) are for replay, reports and `watch`.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

from msgspec import Meta, Struct, msgpack

from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import AppendFile, read_file
from penstock.runtime.record.typed_json import NEEDED, Count, Cut, Number, Text

FORMAT = 4
MAGIC = b"penstock events %d\n" % FORMAT
CHAIN, CHECK = 16, 4
LENGTH = struct.Struct("<I")
HEAD = LENGTH.size + CHECK
# The chain before the first record.
FIRST = blake2b(MAGIC, digest_size=CHAIN).digest()
# The longest log that is read, in bytes.
LOG_BYTES = 4 << 30
# The buffer is written when it is this large, or when the last write was this long ago.
FLUSH_BYTES, FLUSH_SECONDS = 1 << 16, 1.0


class LogError(RecordError):
    """The log differs from what a run wrote; names the record."""


class SegmentFacts(TypedDict):
    """`cut` is the update of the checkpoint from which a resume goes on; `run` the id of the run."""

    cut: NotRequired[Count | None]
    run: NotRequired[Text]


class SegmentRecord(Struct, array_like=True, tag="segment"):
    """A run begins, or resumes from a checkpoint."""

    facts: SegmentFacts


class StageFacts(TypedDict, total=False):
    """The arguments of the scheduler, to make it again; `SegmentOrigin.from_json` reads them."""

    stage: Text
    graph: dict[str, Any]
    plan: dict[str, Any]
    rules: dict[str, Any]
    cut: Cut | None
    absent: NotRequired[list[str]]
    lives: NotRequired[dict[str, Count]]
    live: list[tuple[str, str, int]]
    complete: dict[str, Any] | None
    accuracy: dict[str, Number]


class StageRecord(Struct, array_like=True, tag="stage"):
    """A scheduler is made."""

    facts: StageFacts


class EventRecord(Struct, array_like=True, tag="event"):
    """A step of the scheduler: the event, and a digest of the commands. Time is in seconds since the segment began."""

    time: Annotated[float, Meta(ge=0, le=1e10)]
    event: bytes
    digest: bytes


class EndFacts(TypedDict):
    status: Text
    error: NotRequired[Text]


class EndRecord(Struct, array_like=True, tag="end"):
    """A run is over."""

    facts: EndFacts


Record = SegmentRecord | StageRecord | EventRecord | EndRecord
_decode = msgpack.Decoder(Record).decode


class Step(NamedTuple):
    """One event as the scheduler saw it, packed or decoded. `record` is its place in the file, `digest` the digest of
    the commands that followed."""

    record: int
    time: float
    event: Any
    digest: bytes


class Mark(NamedTuple):
    """The position of a reader of a log: how many records and bytes it has read, and the chain there."""

    records: int
    nbytes: int
    chain: bytes


@dataclass
class StageLog:
    """The records of one scheduler. `facts` say how it was made."""

    facts: StageFacts
    steps: list[Step] = field(default_factory=list)


@dataclass
class Segment:
    """The part of a log from a run's start or a resume. `ended` has the facts of its end record; None if the process
    was killed."""

    facts: SegmentFacts
    stages: list[StageLog] = field(default_factory=list)
    ended: EndFacts | None = None

    @property
    def seconds(self) -> float:
        """Seconds from its beginning to its last event."""
        return max((stage.steps[-1].time for stage in self.stages if stage.steps), default=0.0)


def commands_digest(commands: Iterable[bytes]) -> bytes:
    """An 8-byte digest of the commands of one step, in order (as packed by `runtime.control.messages.record_bytes`)."""
    state = blake2b(digest_size=8)
    for command in commands:
        # The length keeps ["ab", "c"] apart from ["a", "bc"].
        state.update(LENGTH.pack(len(command)) + command)
    return state.digest()


class LogWriter:
    """Appends to the log at `path`: a new file, or a new segment of an existing one.

    Raises LogError for an existing log that is damaged, RecordError if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = bytearray()
        self._flushed = 0.0
        mark = Mark(0, 0, FIRST)
        if path.exists():
            mark = Mark(0, len(MAGIC), FIRST)
            for _, mark in _frames(path):  # noqa: B007
                pass
        # Cut off half a frame that a kill has left: it would be damage in the middle of the log.
        self._file = AppendFile(path, keep=mark.nbytes)
        self.records, self._chain = mark.records, mark.chain
        if not mark.nbytes:
            self._buffer += MAGIC

    def segment(self, cut: int | None, facts: Mapping[str, Any]) -> None:
        """Record that a run begins (`cut` None), or resumes from the checkpoint before update `cut`."""
        self._append("segment", {**facts, "cut": cut})
        self.flush()

    def stage(self, facts: Mapping[str, Any]) -> None:
        """Record that a scheduler is made. `facts` are all that is needed to make it again."""
        self._append("stage", facts)

    def step(self, time: float, event: bytes, commands: Iterable[bytes]) -> None:
        """Record that the scheduler handled `event` at `time` (seconds since the segment began) with `commands`."""
        self._append("event", time, event, commands_digest(commands))
        self.tick(time)

    def tick(self, now: float) -> None:
        """Write the buffer if it is a second old, or large."""
        if len(self._buffer) >= FLUSH_BYTES or (self._buffer and now - self._flushed >= FLUSH_SECONDS):
            self.flush()
            self._flushed = now

    def end(self, facts: Mapping[str, Any]) -> None:
        """Record that the run is over, and close the log."""
        self._append("end", facts)
        # Synced, because a synced summary that counts the records is written next.
        self.sync()
        self.close()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def flush(self) -> None:
        """Write the buffer to the file. Raises RecordError if the disk is full."""
        self._file.write(self._buffer)

    def sync(self) -> None:
        """Flush, and wait until the disk has it. Raises RecordError."""
        self.flush()
        self._file.sync()

    def _append(self, *record: Any) -> None:
        payload = msgpack.encode(record)
        self._buffer += _head(self._chain, len(payload)) + payload
        self._chain = _next(self._chain, payload)
        self._buffer += self._chain
        self.records += 1


def read_log(path: Path, records: int = 0) -> list[Segment]:
    """The segments of a log.

    Raises LogError with the number of the first damaged record, and for a log with fewer than the `records` that the
    run counted at its end: a log that was cut between two frames has an intact chain.
    """
    segments, damage = read_segments(path)
    if damage is not None:
        raise damage
    if (found := num_records(segments)) < records:
        raise LogError(f"{path}: given {found} records, needed the {records} that the run wrote: it was cut")
    return segments


def num_records(segments: Iterable[Segment]) -> int:
    return sum(1 + len(s.stages) + sum(len(t.steps) for t in s.stages) + (s.ended is not None) for s in segments)


def read_segments(path: Path) -> tuple[list[Segment], LogError | None]:
    """The segments of a log up to its first damage, and that damage. Raises LogError if nothing can be read."""
    segments: list[Segment] = []
    try:
        for record, mark in new_records(path):
            number = mark.records - 1
            match record:
                case SegmentRecord():
                    segments.append(Segment(record.facts))
                case StageRecord() if segments:
                    segments[-1].stages.append(StageLog(record.facts))
                case EventRecord() if segments and segments[-1].stages:
                    segments[-1].stages[-1].steps.append(Step(number, record.time, record.event, record.digest))
                case EndRecord() if segments:
                    segments[-1].ended = record.facts
                case _:
                    kind = type(record).__name__
                    raise LogError(f"{path}: record {number} is a {kind}, before any segment or stage")
    except LogError as damage:
        if not segments:
            raise
        return segments, damage
    if not segments:
        raise LogError(f"{path}: no records; needed the log of a run")
    return segments, None


def new_records(path: Path, mark: Mark | None = None) -> Iterator[tuple[Record, Mark]]:
    """The records of a log after `mark` (None: all), each with the mark after it. A record that is still being written
    is left out. Raises LogError."""
    for payload, after in _frames(path, mark):
        try:
            record = _decode(payload)
        except (ValueError, RecursionError) as error:
            raise LogError(f"{path}: record {after.records - 1}: {error}; {NEEDED}") from None
        yield record, after


def _frames(path: Path, mark: Mark | None = None) -> Iterator[tuple[bytes, Mark]]:
    """The payload of each frame after `mark`, and the mark after it. Half a frame at the file's end is left out."""
    number, begin, chain = mark or Mark(0, 0, FIRST)
    try:
        # Bytes before the mark are checked already: a log of gigabytes is not read again at each look.
        data = read_file(path, LOG_BYTES, begin)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}; {NEEDED}") from error
    if mark is None and not data.startswith(MAGIC):
        given = "a file of another kind" if data else "an empty file"
        words = data[: len(MAGIC) + 8].partition(b"\n")[0].split()
        if words[:2] == MAGIC.split()[:2]:
            version = words[2].decode(errors="replace") if words[2:] else "?"
            given = f"one of format {version}, which another version wrote"
        raise LogError(f"{path}: given {given}, needed an event log of format {FORMAT}")
    at = len(MAGIC) if mark is None else 0
    while at + HEAD <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        start = at + HEAD
        end = start + length + CHAIN
        # The length has its own check: an edited length would look like half a frame at the end of the file.
        if data[at:start] == _head(chain, length):
            if end > len(data):
                return
            payload, chain = data[start : end - CHAIN], _next(chain, data[start : end - CHAIN])
            if chain == data[end - CHAIN : end]:
                number, at = number + 1, end
                yield payload, Mark(number, begin + end, chain)
                continue
        raise LogError(
            f"{path}: record {number} does not follow from the records before it: it was edited or moved, or one "
            "before it is missing; needed the log as the run wrote it"
        )


def _head(chain: bytes, length: int) -> bytes:
    packed = LENGTH.pack(length)
    return packed + blake2b(chain + packed, digest_size=CHECK).digest()


def _next(chain: bytes, payload: bytes) -> bytes:
    return blake2b(chain + payload, digest_size=CHAIN).digest()
