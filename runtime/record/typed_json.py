"""The types of a run folder's files, and readers that refuse what has another form.

Another user may have written a run folder, or a disk may have damaged it. So `parse_json` and `parse_record` refuse
what is nested too deep, and `require_shape` compares a value with a type as msgspec reads one: a TypedDict names the
keys that are read, others are let through. Readers raise RecordError, which names the file and the place in it.
"""

import json
import re
from itertools import accumulate
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from penstock.runtime.record.errors import RecordError

DEPTH = 64
"""Objects and lists within each other, at most."""
NEEDED = "needed what the run wrote"

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)] | None
Text = Annotated[str, Meta(max_length=1 << 24)]


class Asked(TypedDict, total=False):
    """What the user typed, in `config.json`."""

    program: Text
    command: list[Text]
    folder: Text
    digests: dict[str, Text]
    cluster: dict[str, Any]
    penstock: Text


class ConfigFile(TypedDict):
    """`config.json`; `RunConfig.from_json` reads the rest of it."""

    asked: NotRequired[Asked]


class Summary(TypedDict):
    """`summary.json`. Older runs wrote less."""

    status: Text
    error: NotRequired[Text]
    cause: NotRequired[Text]
    accuracy_before: NotRequired[Number]
    accuracy_after: NotRequired[Number]
    updates: NotRequired[Count]
    groups: NotRequired[Count]
    fates: NotRequired[dict[str, Count]]
    retried: NotRequired[Count]
    last_failure: NotRequired[Text]
    not_finite: NotRequired[dict[str, dict[str, Any]]]
    wall_s: NotRequired[Annotated[float, Meta(ge=0, le=1e300)]]
    command_s: NotRequired[Annotated[float, Meta(ge=0, le=1e300)]]
    reward_mean: NotRequired[Number]
    measured: NotRequired[list[dict[str, Number]] | dict[str, Number]]
    dropped_frames: NotRequired[dict[str, Count]]
    warnings: NotRequired[list[Text]]
    records: NotRequired[Count]
    checkpoint: NotRequired[Count]


class RowColumns(TypedDict):
    """The columns of `metrics.jsonl` that are no figures, or that all rows have."""

    update: Count
    version: NotRequired[Count]
    groups: NotRequired[Count]
    pools: NotRequired[dict[str, dict[str, Number]]]
    not_finite: NotRequired[dict[str, Text]]


Figures = dict[str, Number]


class Cut(TypedDict):
    """A scheduler's state, as `Ledger.to_json` and `cuts.save` write it."""

    update: Count
    earlier: Count
    next: Count
    lost: list[Count]
    fates: dict[Literal["consumed", "dropped", "failed"], Count]
    retried: NotRequired[Count]
    groups: list[tuple[Count, dict[str, str], dict[str, Count]]]
    trailing: NotRequired[dict[str, Count]]


class CutFile(TypedDict):
    """`cut.json` of a checkpoint; who goes on from it requires a `Cut` in it."""

    update: Count
    cut: dict[str, Any]
    accuracy: dict[str, Number]
    figures: NotRequired[dict[str, Any]]
    written: NotRequired[Text]


class SegmentFacts(TypedDict):
    """Where a run begins or goes on, in `events.log`."""

    cut: NotRequired[Count | None]


class StageFacts(TypedDict, total=False):
    """How a scheduler was made; `Origin.from_json` reads it."""

    stage: Text
    graph: dict[str, Any]
    plan: dict[str, Any]
    rules: dict[str, Any]
    cut: Cut | None
    live: list[tuple[str, str, int]]
    complete: dict[str, Any] | None
    accuracy: dict[str, Number]


class EndFacts(TypedDict):
    """How a run ended."""

    status: Text
    error: NotRequired[Text]


Seconds = Annotated[float, Meta(ge=0, le=1e10)]
RECORDS = {
    "segment": tuple[str, SegmentFacts],
    "stage": tuple[str, StageFacts],
    "event": tuple[str, Seconds, bytes, bytes],
    "end": tuple[str, EndFacts],
}


def parse_record(payload: bytes, what: str) -> list[Any]:
    """A record of `events.log`, by its kind one of `RECORDS`. Raises RecordError, which names `what` was read."""
    try:
        record: Any = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what}: given something that is not MessagePack ({error}); {NEEDED}") from None
    kind = record[0] if isinstance(record, list) and record else None
    if not isinstance(record, list) or not isinstance(kind, str) or kind not in RECORDS:
        raise RecordError(f"{what}: given {record!r:.60}; needed one of {', '.join(RECORDS)}")
    require_shape(record, RECORDS[kind], what)
    # An event is flat by its type; there are too many of them to measure each.
    if kind != "event" and (deep := _deep(record)) > DEPTH:
        raise RecordError(f"{what}: given a value of depth {deep}; {NEEDED}, which is {DEPTH} deep at most")
    return record


def parse_json(data: bytes, what: str) -> Any:
    """The value of a JSON text in UTF-8. Raises RecordError, which names `what` was read, for a text that is none or
    more than `DEPTH` deep."""
    # Before it is parsed: the parser recurses, and a text of a million brackets would overflow its stack.
    if (deep := _depth(data)) > DEPTH:
        raise RecordError(f"{what}: given JSON of depth {deep}; {NEEDED}, which is {DEPTH} deep at most")
    try:
        return json.loads(data.decode(), parse_constant=_refuse)
    except ValueError as error:
        raise RecordError(f"{what}: given something that is not JSON ({error}); {NEEDED}") from None


def require_shape(value: Any, shape: Any, what: str) -> None:
    """Raises RecordError, which names `what` was read and where in it, for a value that has another form."""
    try:
        msgspec.convert(value, shape)
    except ValueError as error:
        raise RecordError(f"{what}: {error}; {NEEDED}") from None


def require_row(row: Any, what: str) -> None:
    """The same for a row of `metrics.jsonl`: what is not among `RowColumns` is a number, or null."""
    require_shape(row, RowColumns, what)
    figures = {name: value for name, value in row.items() if name not in ("pools", "not_finite")}
    require_shape(figures, Figures, what)


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def _depth(data: bytes) -> int:
    """How deep the brackets outside of strings are nested."""
    # By regular expression and table: a loop over the characters would take longer than the parser.
    brackets = _STRING.sub(b"", data).translate(None, _BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def _deep(value: Any) -> int:
    """How deep lists and maps are nested."""
    level, layer = 0, [value]
    while layer := [
        item
        for one in layer
        if isinstance(one, dict | list)
        for item in (one.values() if isinstance(one, dict) else one)
    ]:
        level += 1
    return level


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
