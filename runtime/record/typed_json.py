"""The types of a run folder's JSON files, and readers that refuse a value of another type.

Another user may have written a run folder, or a disk may have damaged it. So `parse_json` refuses JSON that is nested
too deep, and `require_shape` checks a value against a type by msgspec's rules: a TypedDict names the keys that are
read, and other keys are allowed. Readers raise RecordError, which names the file and the place in it.
"""

import json
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from penstock.runtime.record.errors import RecordError

# The deepest nesting of objects and lists that is accepted, so that code may recurse through a value.
DEPTH = 64
NEEDED = "needed what the run wrote"

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
# Of a figure, either way: squares and differences of figures are drawn, and JSON has no infinity.
LARGEST = 1e300
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)] | None
Text = Annotated[str, Meta(max_length=1 << 24)]


class Asked(TypedDict, total=False):
    """What the user typed, in `config.json`."""

    program: Text
    command: list[Text]
    folder: Text
    digests: dict[str, Text]
    cluster: dict[str, Any]
    agents: list[Text]
    penstock: Text


class ConfigFile(TypedDict):
    """`config.json`; `RunConfig.from_json` reads the rest of it."""

    asked: NotRequired[Asked]


class Coming(TypedDict):
    """A replica that joined or was lost."""

    replica: Text
    event: Text
    time_s: Number
    reason: NotRequired[Text]


class Summary(TypedDict):
    """`summary.json`. Older runs wrote less. The documentation shows the docstrings of the fields."""

    status: Text
    """`done`, `stopped` or `failed`"""
    error: NotRequired[Text]
    """why the run failed or was stopped; "" for others"""
    cause: NotRequired[Text]
    """code of a failure (below); `preempted` where an engine wanted the run to stop"""
    lost_host: NotRequired[Text]
    """host of what failed; only where something of one host was lost"""
    last_failure: NotRequired[Text]
    """traceback of the last firing that failed, also where it was tried again; at most 9,000 characters"""
    accuracy_before: NotRequired[Number]
    """share of held-out problems solved before the first update, 0 to 1; null if not measured"""
    accuracy_after: NotRequired[Number]
    """the same after the last update"""
    evaluated: NotRequired[dict[str, dict[str, Number]]]
    """all metrics of the evaluation `before` and `after`, as columns of rows"""
    reward_mean: NotRequired[Number]
    """that of the last row of `metrics.jsonl`"""
    accuracy: NotRequired[Number]
    """that of a program that measures itself, as `evaluate`"""
    updates: NotRequired[Count]
    """updates that are done, of all lives of the run"""
    groups: NotRequired[Count]
    """prompt groups that these took"""
    fates: NotRequired[dict[str, Count]]
    """prompt groups by outcome: `consumed`, `dropped` by a filter, `failed`"""
    retried: NotRequired[Count]
    """firings that failed and were tried again"""
    wall_s: NotRequired[Annotated[float, Meta(ge=0, le=LARGEST)]]
    """seconds of all lives: from the controller's start, or of the command of one that was killed"""
    command_s: NotRequired[Annotated[float, Meta(ge=0, le=LARGEST)]]
    """seconds of the last command, which ran or resumed it"""
    measured: NotRequired[list[dict[str, Number]] | dict[str, Number]]
    """metrics that came after the last row, as columns of rows"""
    not_finite: NotRequired[dict[str, dict[str, Any]]]
    """by metric that was no number: the first such `value`, the `first` and `last` update of them, and how many"""
    warnings: NotRequired[list[Text]]
    """the first 200 of all lives"""
    dropped_frames: NotRequired[dict[str, Count]]
    """messages that the controller refused in the last life, by reason"""
    replicas: NotRequired[list[Coming]]
    """replicas that were lost or joined: `replica`, `event`, `time_s` of the run, `reason`; only where there are any"""
    tracked: NotRequired[dict[str, dict[str, Any]]]
    """by tracker: `where` it is, `updates` that it has, whether it is `complete`, a `warning`; only with trackers"""
    checkpoint: NotRequired[Count]
    """update that a resume does next, once the `damaged` ones are moved away"""
    damaged: NotRequired[list[Text]]
    """newer checkpoints that cannot be read, by folder; only where there are any"""
    records: NotRequired[Count]
    """records of `events.log`"""
    folder: NotRequired[Text]
    """the run folder"""


class RowColumns(TypedDict):
    """The columns of `metrics.jsonl` that are not plain numbers, or that all rows have."""

    update: Count
    version: NotRequired[Count]
    groups: NotRequired[Count]
    pools: NotRequired[dict[str, dict[str, Number]]]
    not_finite: NotRequired[dict[str, Text]]


Figures = dict[str, Number]


class KeptResponse(TypedDict):
    """A response in a line of `samples.jsonl`."""

    text: NotRequired[Text]
    turns: NotRequired[list[Text]]
    tokens: Count
    finished: bool
    versions: NotRequired[list[int]]


class KeptTexts(TypedDict):
    """The responses that a node sampled for a prompt, in a line of `samples.jsonl`."""

    node: Text
    prompt: Text
    answer: Text
    responses: list[KeptResponse]


class SampleLine(TypedDict):
    """A line of `samples.jsonl`."""

    update: Count
    group: Count
    texts: list[KeptTexts]
    rewards: dict[str, list[Number]]


class TrackerMemory(TypedDict):
    """`trackers/NAME.json`."""

    kept: dict[str, Text]
    logged: Annotated[int, Meta(ge=-1, le=1 << 53)]
    began: NotRequired[Annotated[float, Meta(ge=0, le=LARGEST)]]


class NoteLine(TypedDict):
    """A line of `notes.jsonl`."""

    level: Text
    text: Text


class Reading(TypedDict):
    """What a group keeps that has read weights, in order "ready" (`schedule.state.GroupState`)."""

    place: Count
    deadlines: dict[str, Count]


class Cut(TypedDict):
    """A scheduler's state in a checkpoint, as `schedule.transitions.save` makes it."""

    update: Count
    earlier: Count
    next: Count
    lost: list[Count]
    fates: dict[Literal["consumed", "dropped", "failed"], Count]
    retried: NotRequired[Count]
    groups: list[tuple[Count, dict[str, str], dict[str, Count]]]
    reading: NotRequired[dict[str, Reading]]
    trailing: NotRequired[dict[str, Count]]


def parse_json(data: bytes, what: str) -> Any:
    """Parse a JSON text in UTF-8. Raises RecordError, which names `what` was read, for a text that is not JSON, or
    nested more than `DEPTH` deep."""
    # With json, not msgspec: paths in a run's files may have lone surrogates, for names that are not UTF-8.
    try:
        value = json.loads(data.decode(), parse_constant=_refuse)
        deep = isinstance(value, dict | list) and _depth(value) > DEPTH
    except RecursionError:
        deep = True
    except ValueError as error:
        raise RecordError(f"{what}: given something that is not JSON ({error}); {NEEDED}") from None
    if deep:
        raise RecordError(f"{what}: given JSON that is more than {DEPTH} deep; {NEEDED}")
    return value


def require_shape(value: Any, shape: Any, what: str) -> None:
    """Raises RecordError, which names `what` was read and the place in it, for a value that is not of type `shape`."""
    try:
        msgspec.convert(value, shape)
    except ValueError as error:
        raise RecordError(f"{what}: {error}; {NEEDED}") from None


def _depth(value: Any) -> int:
    """How deep objects and lists are nested."""
    children = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(child) for child in children if isinstance(child, dict | list)), default=0)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
