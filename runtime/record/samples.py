"""`samples.jsonl`: what the model was asked and said, with its rewards, of some prompt groups of each update.

A line is a group: `{"update": 2, "group": 17, "texts": [{"node": "generate", "prompt": …, "answer": …, "responses":
[{"text": …, "tokens": 9, "finished": true, "versions": [1, 2]}]}], "rewards": {"score": [1.0]}}`. `rewards` are one for
each response, in their order, by node; those of a node's second and further outputs of rewards are by node, dot and
output, as rows have a mean of each. `turns` are there instead of `text` where a response is a conversation. A text that
is too long has `…` in its middle.

- `sample` is what a rank tells of a firing.
- `SamplesFile` puts together what the firings of a group have told, and writes it with the update that took the group.
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

# Responses of a group that are kept, and characters of each text; of long conversations, and of texts that are not in
# ASCII, less: what a firing tells has to fit into a message.
MOST_ROWS, MOST_CHARACTERS, MOST_BYTES = 8, 16_000, 512 << 10
# Bytes of what a checkpoint keeps: it cannot be read where all of it is larger than `folder.JSON_BYTES`.
CUT_BYTES = 32 << 20
# Bytes at the end of the file in which the last lines are looked for.
LAST_BYTES = 4 << 20

Sample = dict[str, Any]


def sample(outputs: Mapping[str, Any]) -> str:
    """What is kept of the values that a firing has made, by output, as JSON of `MOST_BYTES` at most; "" if it made
    neither responses nor rewards, or responses without what is kept of them: what is for reading fails no firing."""
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
    # A node of the user's own may leave columns out that its readers do not need.
    except (AttributeError, IndexError, TypeError, ValueError):
        pass
    return ""


def _kept(made: Mapping[str, Rollouts | AnyRewards], longest: int) -> Sample:
    """`texts`, the first `rewards`, and `more` of these by output."""
    kept: Sample = {}
    for name, value in made.items():
        if isinstance(value, Rollouts):
            kept["texts"] = [*kept.get("texts", ()), *_texts(value, longest)]
            continue
        # Where rewards are right and wrong, they are 1 and 0.
        rewards = [float(reward) for reward in value.values_N[:MOST_ROWS].tolist()]
        if "rewards" in kept:
            kept.setdefault("more", {})[name] = rewards
        else:
            kept["rewards"] = rewards
    return kept


def _texts(rollouts: Rollouts, longest: int) -> list[Sample]:
    """The responses, those of one prompt together."""

    def clipped(text: Any) -> str:
        """An answer of a node of the user's own may be no text."""
        text, half = str(text), longest // 2
        return text if len(text) <= longest else f"{text[:half]}…{text[len(text) - half :]}"

    found: list[Sample] = []
    for row in range(min(len(rollouts), MOST_ROWS)):
        length = int(rollouts.response_lengths_N[row])
        turns = rollouts.transcripts[row]
        facts: Sample = {"tokens": length, "finished": bool(rollouts.finished_N[row])}
        if rollouts.versions_NT is not None:
            # Tokens of an environment have none, and are not the response's own.
            versions = [version for version in rollouts.versions_NT[row][:length].tolist() if version >= 0]
            facts |= {"tokens": len(versions), "versions": sorted(set(versions))}
        said = {"text": clipped(turns[0])} if len(turns) == 1 else {"turns": [clipped(turn) for turn in turns]}
        asked = {"prompt": clipped(rollouts.prompts[row]), "answer": clipped(rollouts.answers[row])}
        if not found or any(found[-1][name] != value for name, value in asked.items()):
            found.append({**asked, "responses": []})
        found[-1]["responses"].append({**said, **facts})
    return found


class SamplesFile(AppendFile):
    """Puts samples together and writes them. Of a file that is there, the lines of updates before `start` are kept.
    `pending` is what firings of groups have told that no update has taken yet, by group, then by node, in the graph's
    `order`."""

    def __init__(self, path: Path, order: Sequence[str], start: int = 0) -> None:
        super().__init__(path, _kept_bytes(path, start))
        self.pending: dict[int, dict[str, Sample]] = {}
        self._places = {name: place for place, name in enumerate(order)}

    def tell(self, group: int, node: str, told: str) -> None:
        """What a firing of a node has told of a group: a later turn stands in the place of an earlier one."""
        self.pending.setdefault(group, {})[node] = json.loads(told)

    def take(self, update: int, groups: Sequence[int], overtaken: Container[int] = ()) -> None:
        """Write the groups that an update has taken. Those before its last one are lost, but for those that are
        `overtaken`. Raises RecordError if the disk is full."""
        lines = [_line(update, group, self._ordered(group)) for group in groups if group in self.pending]
        last = groups[-1] if groups else -1
        self.pending = {group: told for group, told in self.pending.items() if group > last or group in overtaken}
        if lines:
            self.write(bytearray("".join(lines).encode()))

    def _ordered(self, group: int) -> list[tuple[str, Sample]]:
        return sorted(self.pending[group].items(), key=lambda item: self._places.get(item[0], -1))

    def to_json(self, cut: Mapping[str, Any]) -> list[tuple[int, str, Sample]]:
        """What a run that resumes from the checkpoint with the scheduler's state `cut` is not told again, up to
        `CUT_BYTES`."""
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
    """Where the last line ends of an update before `start`, from which a resume goes on. One before it that a disk has
    damaged stays as it is."""
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
    """A line as an object; an empty one for half a line and for what is none."""
    try:
        found = json.loads(line) if line.endswith(b"\n") else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_samples(path: Path, most: int = 2) -> list[SampleLine]:
    """The first line and the last ones, `most` of them; none where there is no such file. Raises RecordError for a file
    that cannot be read, and for lines that are none."""
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
    # A run that goes on, or was killed, may leave half a line at the end.
    for line in [line for line in (first, *rest) if line.endswith(b"\n")]:
        said = parse_json(line, str(path))
        require_shape(said, SampleLine, str(path))
        found.append(said)
    return [*found[:1], *found[1:][-most:]]
