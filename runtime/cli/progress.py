"""What a run has said about itself so far: the lines of its controller, added up for a display. Pure.

A line is a dict with a `kind`: "stage", "status", "row", "accuracy", "note", "error", "external",
"summary". `runtime.control.recorder` makes most of them; unknown kinds are passed over.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.record.faults import visible

Line = dict[str, Any]

STAGES = {
    "": "starting processes",
    "base": "building the base model",
    "before": "measuring accuracy before",
    "train": "training",
    "save": "saving a checkpoint",
    "after": "measuring accuracy after",
    "done": "done",
    "stopped": "stopped",
    "failed": "failed",
}
RECENT = 10
"""Rows that rates are averaged over."""


@dataclass
class Pool:
    """What a pool's replicas are doing; of the last rows' time, the share that they were busy, and idle by cause; and
    their weights."""

    doing: tuple[str, ...] = ()
    busy: float | None = None
    idle: dict[str, float] = field(default_factory=dict)
    version: int | None = None


@dataclass
class Progress:
    """`hear` adds a line. `updates` is what the stage has in all."""

    program: str
    updates: int
    stage: str = ""
    update: int = 0
    row: Line = field(default_factory=dict)
    rows: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    rewards: list[float] = field(default_factory=list)
    pools: dict[str, Pool] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    errors: list[str] = field(default_factory=list)
    lost: Line = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.planned = self.updates

    def hear(self, line: Line) -> None:
        line = shown(line)
        match line["kind"]:
            case "stage":
                if self.stage == "base":
                    self.update, self.updates, self.row = 0, self.planned, {}
                self.stage = line["stage"]
            case "status":
                self._status(line)
            case "base":
                self.update, self.updates, self.row = line["update"], line["updates"], {"loss": line["loss"]}
            case "row":
                self._row(line["row"])
            case "accuracy":
                self._accuracy({line["stage"]: line["accuracy"]})
            case "note":
                self.notes.append(str(line["text"]))
            case "external":
                self.notes.append(external_text(line))
            case "error":
                self._error(str(line["text"]))
            case "summary":
                self.stage = line["status"]
                self._error(str(line.get("error") or ""))

    def _status(self, line: Line) -> None:
        self.stage = line.get("stage", self.stage)
        self.lost = line.get("lost", self.lost)
        self.update, self.updates = line.get("update", self.update), line.get("updates", self.updates)
        self._accuracy(line.get("accuracy") or {})
        for name, said in (line.get("pools") or {}).items():
            pool = self.pools.setdefault(name, Pool())
            doing = said.get("doing", ())
            pool.doing = (doing,) if isinstance(doing, str) else tuple(doing)
            pool.version = said.get("version", pool.version)
        row = line.get("row") or {}
        if row and not self.row:
            self._row(row)

    def _row(self, row: Line) -> None:
        self.row = row
        self.rows.append(row)
        self.update = row.get("version", row["update"] + 1)
        if row.get("reward_mean") is not None:
            self.rewards.append(float(row["reward_mean"]))
        for name, states in (row.get("pools") or {}).items():
            spent: Counter[str] = Counter()
            for recent in self.rows:
                spent.update({state: s or 0.0 for state, s in recent.get("pools", {}).get(name, {}).items()})
            if states:
                pool, seconds = self.pools.setdefault(name, Pool()), spent.total()
                pool.busy = spent["busy"] / seconds if seconds else None
                pool.idle = {state: s / seconds for state, s in spent.items() if state != "busy" and s > 0}

    def _error(self, text: str) -> None:
        if text and text not in self.errors:
            self.errors.append(text)

    def _accuracy(self, found: dict[str, float | None]) -> None:
        self.accuracy.update({when: value for when, value in found.items() if value is not None})

    @property
    def failures(self) -> str:
        """Groups that failed, firings that were tried again, and what the last one raised, in one line; "" for none."""
        counts = [f"{count} groups failed" for count in [self.lost.get("failed", 0)] if count]
        counts += [f"{count} firings tried again" for count in [self.lost.get("retried", 0)] if count]
        raised = str(self.lost.get("raised", "")).strip().splitlines()
        where = raised[0].partition(",")[0].rstrip(":") if raised else ""
        return f"{', '.join(counts)}; the last: {where}: {raised[-1]}" if counts and raised else ", ".join(counts)

    @property
    def updates_per_s(self) -> float | None:
        seconds = sum(float(row.get("seconds") or 0.0) for row in self.rows)
        return len(self.rows) / seconds if seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Response tokens learnt from per second of wall time."""
        seconds = sum(float(row.get("seconds") or 0.0) for row in self.rows)
        tokens = sum(float(row.get("tokens") or 0.0) for row in self.rows)
        return tokens / seconds if seconds and tokens else None


def shown(value: Any) -> Any:
    """A line with all of its text as a terminal may have it: what raised an error, a node or a stranger, wrote it."""
    if isinstance(value, dict):
        return {shown(name): shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return visible(value) if isinstance(value, str) else value


def external_text(line: Line) -> str:
    return f"waiting for `penstock agent {line['join']}` on host {line['host']}"
