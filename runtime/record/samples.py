"""`samples.jsonl`: prompts, responses and rewards of the groups of each update.

A line is a group: `{"update": 2, "group": 17, "texts": [{"node": "generate", "prompt": …, "answer": …, "responses":
[{"text": …, "tokens": 9, "finished": true, "versions": [1, 2]}]}], "rewards": {"score": [1.0]}}`. `rewards` has by node
one reward for each response, in order. A further output of rewards of the same node is named "node.output", as the
columns of its mean in `metrics.jsonl`. A response that is a conversation has `turns` instead of `text`. A text that is
too long has `…` in its middle.

- `sample` makes what a rank reports of a firing.
- `SamplesFile` collects the reports of a group's firings, and writes them with the update that took the group.
- `read_samples` reads the first and the last lines.
"""

import json
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.graph.ir import label_of
from penstock.graph.types import AnyRewards, Rollouts
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import AppendFile, open_regular
from penstock.runtime.record.typed_json import SampleLine, parse_json, require_shape

# How many responses of a group are kept, and how many characters of each text. Long conversations, and texts that are
# not ASCII, are cut shorter: the report of a firing must fit into a message of `MOST_BYTES`.
MOST_ROWS, MOST_CHARACTERS, MOST_BYTES = 8, 16_000, 512 << 10
# How many bytes of samples a checkpoint keeps: a `cut.json` larger than `folder.JSON_BYTES` could not be read.
CUT_BYTES = 32 << 20
# The last lines are searched for in this many bytes at the end of the file.
LAST_BYTES = 4 << 20

Sample = dict[str, Any]


def sample(outputs: Mapping[str, Any]) -> str:
    """The responses and rewards among a firing's outputs, as JSON of at most `MOST_BYTES`. "" if there are none, or if
    the responses lack a column that is needed here: a sample, which is only for people, must not fail a firing."""
    made = {name: value for name, value in outputs.items() if isinstance(value, Rollouts | AnyRewards)}
    try:
        turns = [
            turn for value in made.values() if isinstance(value, Rollouts) for turn in value.transcripts[:MOST_ROWS]
        ]
        longest = min(MOST_CHARACTERS, MOST_BYTES // max(1, sum(map(len, turns))))
        while made and longest:
            told = json.dumps(_kept(made, longest))
            if len(told) <= MOST_BYTES:
                return told
            longest //= 4
    # A user's own node may leave out columns that its readers do not need.
    except (AttributeError, IndexError, TypeError, ValueError):
        pass
    return ""


def _kept(made: Mapping[str, Rollouts | AnyRewards], longest: int) -> Sample:
    """`texts`, the first output of `rewards`, and further ones under `more` by output."""
    kept: Sample = {}
    for name, value in made.items():
        if isinstance(value, Rollouts):
            kept["texts"] = [*kept.get("texts", ()), *_texts(value, longest)]
            continue
        # float() turns true and false into 1 and 0.
        rewards = [float(reward) for reward in value.values_N[:MOST_ROWS].tolist()]
        if "rewards" in kept:
            kept.setdefault("more", {})[name] = rewards
        else:
            kept["rewards"] = rewards
    return kept


def _texts(rollouts: Rollouts, longest: int) -> list[Sample]:
    """The responses, grouped by prompt."""

    def clipped(text: Any) -> str:
        """`text` cut in its middle. In a user's own node an answer may be something else than a string."""
        text, half = str(text), longest // 2
        return text if len(text) <= longest else f"{text[:half]}…{text[len(text) - half :]}"

    found: list[Sample] = []
    for row in range(min(len(rollouts), MOST_ROWS)):
        length = int(rollouts.response_lengths_N[row])
        turns = rollouts.transcripts[row]
        facts: Sample = {"tokens": length, "finished": bool(rollouts.finished_N[row])}
        if rollouts.versions_NT is not None:
            # Tokens of an environment have version -1, and do not count as the response's own tokens.
            versions = [version for version in rollouts.versions_NT[row][:length].tolist() if version >= 0]
            facts |= {"tokens": len(versions), "versions": sorted(set(versions))}
        said = {"text": clipped(turns[0])} if len(turns) == 1 else {"turns": [clipped(turn) for turn in turns]}
        asked = {"prompt": clipped(rollouts.prompts[row]), "answer": clipped(rollouts.answers[row])}
        if not found or any(found[-1][name] != value for name, value in asked.items()):
            found.append({**asked, "responses": []})
        found[-1]["responses"].append({**said, **facts})
    return found


class SamplesFile(AppendFile):
    """Collects samples and writes them. Of an existing file, the lines of updates before `start` are kept. `pending`
    has the samples of groups that no update has taken yet, by group, then by node. A line has its nodes in the graph's
    `order`."""

    def __init__(self, path: Path, order: Sequence[str], start: int = 0) -> None:
        super().__init__(path, _kept_bytes(path, start))
        self.pending: dict[int, dict[str, Sample]] = {}
        self._places = {name: place for place, name in enumerate(order)}

    def tell(self, group: int, node: str, told: str) -> None:
        """Note the sample of a firing; that of a later turn replaces that of an earlier one."""
        self.pending.setdefault(group, {})[node] = json.loads(told)

    def take(self, update: int, groups: Sequence[int], overtaken: Container[int] = ()) -> None:
        """Write the groups that an update has taken. Other groups before its last one are lost and forgotten, except
        those that are `overtaken`. Raises RecordError if the disk is full."""
        lines = [_line(update, group, self._ordered(group)) for group in groups if group in self.pending]
        last = groups[-1] if groups else -1
        self.pending = {group: told for group, told in self.pending.items() if group > last or group in overtaken}
        if lines:
            self.write(bytearray("".join(lines).encode()))

    def _ordered(self, group: int) -> list[tuple[str, Sample]]:
        return sorted(self.pending[group].items(), key=lambda item: self._places.get(item[0], -1))

    def to_json(self, cut: Mapping[str, Any]) -> list[tuple[int, str, Sample]]:
        """The pending samples, up to `CUT_BYTES`, that a run resuming from the scheduler's state `cut` does not get
        again."""
        made = {group: nodes for group, nodes, *_ in cut["groups"]}
        found, room = [], CUT_BYTES
        for group, parts in self.pending.items():
            for node, told in parts.items():
                if node in made.get(group, ()) and (room := room - len(json.dumps(told))) >= 0:
                    found.append((group, node, told))
        return found

    def restore(self, told: Iterable[tuple[int, str, Sample]]) -> None:
        """The inverse of `to_json`."""
        for group, node, kept in told:
            self.pending.setdefault(group, {})[node] = kept


def _line(update: int, group: int, told: Sequence[tuple[str, Sample]]) -> str:
    texts = [{"node": label_of(node), **text} for node, kept in told for text in kept.get("texts", ())]
    rewards: dict[str, list[float]] = {}
    for node, kept in told:
        if "rewards" in kept:
            label = label_of(node)
            rewards |= {
                label: kept["rewards"],
                **{f"{label}.{name}": more for name, more in kept.get("more", {}).items()},
            }
    return json.dumps({"update": update, "group": group, "texts": texts, "rewards": rewards}) + "\n"


def _kept_bytes(path: Path, start: int) -> int:
    """The byte where the last line of an update before `start` ends; a resume appends there. A damaged line before it
    stays as it is."""
    kept = at = 0
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            for line in file:
                update = _parsed(line).get("update")
                if isinstance(update, int) and update >= start:
                    break
                at += len(line)
                kept = at if isinstance(update, int) else kept
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    return kept


def _parsed(line: bytes) -> Sample:
    """A line as a dict; empty for half a line, and for a line that is not an object."""
    try:
        found = json.loads(line) if line.endswith(b"\n") else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_samples(path: Path, most: int = 2) -> list[SampleLine]:
    """The first line and the last `most` lines; none if there is no such file. Raises RecordError for a file that
    cannot be read, and for damaged lines."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            first = file.readline(LAST_BYTES)
            size = os.fstat(file.fileno()).st_size
            begin = file.seek(max(len(first), size - LAST_BYTES))
            rest = file.read(LAST_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    if begin > len(first) or not first.endswith(b"\n"):
        rest = rest[1:]  # it begins in the middle of a line
    found: list[SampleLine] = []
    # A run that is alive, or was killed, may have left half a line at the end.
    for line in [line for line in (first, *rest) if line.endswith(b"\n")]:
        said = parse_json(line, str(path))
        require_shape(said, SampleLine, str(path))
        found.append(said)
    return [*found[:1], *found[1:][-most:]]
