"""The history of a run, read once from its folder: stages followed event by event, rows, end. Pure except for reading.

A folder may be incomplete: a killed run has no summary and no end record in its log, and perhaps half a frame. `notes`
say what is missing or damaged; the rest is read as usual.

`accounts` divides each rank's time into busy and idle by cause, in integer nanoseconds that add up exactly to the wall
time. Failed work counts as idle, and so does the trainer's snapshot of its weights, which is part of the sync. Empty
slots of a stream lower its occupancy and do not count as idle time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from penstock.runtime.control.messages import read_record
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.event_log import (
    FORMAT,
    MAGIC,
    EndFacts,
    LogError,
    Segment,
    StageLog,
    num_records,
    read_segments,
)
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import LOST, HalfRow, Row, read_undamaged
from penstock.runtime.record.samples import read_samples
from penstock.runtime.record.timeline import Utilisation, pool_of
from penstock.runtime.record.typed_json import ConfigFile, SampleLine, Summary
from penstock.runtime.report.follow import NS, Follow, Followed, RankId, Work, lanes, streams
from penstock.runtime.schedule.compile import Tables
from penstock.runtime.schedule.events import Event
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.replay import SegmentOrigin

# Nanoseconds by "busy" and by cause.
Account = dict[str, int]


# The name of the training stage.
TRAIN = "train"

# How many times a stage's queue depths are sampled.
SAMPLES = 400


class ReportError(RecordError):
    """No report can be made of a run folder. The message says what was found and what is needed."""


@dataclass(frozen=True)
class Depth:
    """Queue depths at `time`: groups that are finished and not consumed, waiting groups by node, and firings in work by
    pool."""

    time: int
    finished: int
    ready: dict[str, int]
    in_work: dict[str, int]


@dataclass
class StageHistory:
    """A stage, with one scheduler, from `begin` to `end` on the report's clock."""

    name: str
    origin: SegmentOrigin
    tables: Tables
    begin: int
    end: int
    followed: Followed
    accounts: dict[RankId, Account] = field(default_factory=dict)
    depths: list[Depth] = field(default_factory=list)


@dataclass
class Life:
    """The part of a run from its start, or a resume, to its end. `starting` are the nanoseconds until its first stage
    begins. `ended` is None after a kill. `cut` is the update with which a resume began. `accuracy` has the accuracies
    known when the last stage began."""

    begin: int
    end: int
    stages: list[StageHistory]
    starting: int
    ended: EndFacts | None
    cut: int | None
    accuracy: Mapping[str, float | None]


@dataclass
class Facts:
    """All input of a report. Times are nanoseconds since the run began, without the pauses between lives."""

    folder: str
    config: RunConfig
    asked: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    rows: list[Row]
    lives: list[Life]
    notes: list[str]
    samples: Sequence[SampleLine] = ()

    @property
    def stages(self) -> list[StageHistory]:
        return [stage for life in self.lives for stage in life.stages]

    @property
    def training(self) -> list[StageHistory]:
        return [stage for stage in self.stages if stage.name == TRAIN]

    @property
    def end(self) -> int:
        return self.lives[-1].end if self.lives else 0

    @cached_property
    def updates(self) -> int:
        """How many updates were completed. One that a resume repeated counts once."""
        return len({update for stage in self.training for update in stage.followed.ends})

    @cached_property
    def training_ns(self) -> dict[RankId, Account]:
        """The account of each rank during training."""
        return _added(self.training)

    @cached_property
    def whole_ns(self) -> dict[RankId, Account]:
        """The account of each rank in the whole run. While processes start, all ranks are idle."""
        starting = sum(life.starting for life in self.lives)
        return {
            lane: {**account, "starting": account.get("starting", 0) + starting}
            for lane, account in _added(self.stages).items()
        }

    @cached_property
    def pool_shares(self) -> dict[str, dict[str, float]]:
        """For each pool, the share of training by state: the mean over its ranks."""
        pools = defaultdict[str, Counter[str]](Counter)
        for (replica, _), account in self.training_ns.items():
            pools[pool_of(replica)].update(account)
        return {
            pool: {state: time / account.total() for state, time in account.items()}
            for pool, account in pools.items()
            if account.total()
        }

    @property
    def accuracy(self) -> dict[str, float]:
        """The accuracy "before" and "after" training, as far as known."""
        found = {when: value for life in self.lives for when, value in life.accuracy.items()}
        for when in ("before", "after"):
            found[when] = (self.summary or {}).get(f"accuracy_{when}", found.get(when))
        return {when: value for when, value in found.items() if value is not None}

    @property
    def error(self) -> str:
        """Why the run failed or was stopped; "" if neither, or if it said nothing."""
        return str(self._end.get("error", ""))

    @property
    def was_stopped(self) -> bool:
        """True if it was stopped, by its user or by a cluster manager."""
        return self._end.get("status") == "stopped"

    @property
    def _end(self) -> Mapping[str, Any]:
        """How the run ended, by its summary or else by its log; empty for one that goes on or was killed."""
        return self.summary or (self.lives[-1].ended if self.lives else None) or {}

    @property
    def failures(self) -> tuple[str, str]:
        """How many groups failed and firings were tried again, in words, and the error of the last one; "" for none."""
        summary = self.summary or {}
        failed, again = (summary.get("fates") or {}).get("failed"), summary.get("retried")
        said = [f"{failed:,} group{'s' * (failed != 1)} failed"] if failed else []
        said += [f"{again:,} firing{'s were' if again != 1 else ' was'} tried again"] if again else []
        return ", ".join(said), str(summary.get("last_failure") or "") if said else ""


def _added(stages: Iterable[StageHistory]) -> dict[RankId, Account]:
    """The sum of the accounts of several stages."""
    total = defaultdict[RankId, Counter[str]](Counter)
    for stage in stages:
        for lane, account in stage.accounts.items():
            total[lane].update(account)
    return {lane: dict(account) for lane, account in total.items()}


def read_facts(folder: RunFolder, *, alive: bool = False) -> Facts:
    """Read the history of the run in `folder`. If the run is `alive`, files that are not written yet are not noted as
    missing, and the summary of an earlier life is ignored. Raises RecordError for a folder without its configuration,
    or one that a newer version wrote."""
    notes: list[str] = []
    asked = folder.read_json("config.json", ConfigFile).get("asked", {})
    config = RunConfig.load(folder)
    summary = None if alive else _summary(folder, notes)
    lives = _lives(folder, summary or {}, notes, alive)
    rows = _rows(folder, lives, notes, alive)
    if alive:
        sums = {name: sum(row[name] for row in rows if isinstance(row.get(name), int)) for name in ("groups", *LOST)}
        fates = {"consumed": sums["groups"], "dropped": sums["dropped"], "failed": sums["failed"]}
        told = [note["text"] for note in folder.read_notes()[0] if note["level"] == "warning"]
        summary = {"status": "running", "groups": sums["groups"], "fates": fates, "retried": sums["retried"]}
        summary = {**summary, "warnings": told}
    notes += _not_finite(rows, summary)
    samples: Sequence[SampleLine] = ()
    try:
        samples = read_samples(folder.samples)
    except RecordError as error:
        notes.append(f"samples.jsonl cannot be read: {error}")
    return Facts(str(folder.path), config, asked, summary, rows, lives, notes, samples)


def _summary(folder: RunFolder, notes: list[str]) -> Mapping[str, Any] | None:
    if not (folder.path / "summary.json").exists():
        notes.append("There is no summary.json: nothing was left to write one.")
        return None
    try:
        return cast(Mapping[str, Any], folder.read_json("summary.json", Summary))
    except RecordError as error:
        notes.append(f"summary.json cannot be read: {error}")
        return None


def _rows(folder: RunFolder, lives: Sequence[Life], notes: list[str], alive: bool) -> list[Row]:
    rows, damage = read_undamaged(folder.metrics)
    # A live run may be writing its last row.
    if damage is not None and not (alive and isinstance(damage, HalfRow)):
        notes.append(f"metrics.jsonl is damaged; what comes before the damage is shown. {damage}")
    elif not rows and not alive:
        notes.append("There are no rows in metrics.jsonl: no update was completed, or the file is gone.")
    elif not alive and (missing := sorted(_updates(lives) - {row["update"] for row in rows})):
        which = f"{len(missing)} updates, {missing[0]} and later" if len(missing) > 1 else f"update {missing[0]}"
        notes.append(f"metrics.jsonl has no rows of {which}, which the event log has: their figures are not shown.")
    return rows


def _not_finite(rows: Sequence[Row], summary: Mapping[str, Any] | None) -> list[str]:
    """Notes on metrics that were infinite or NaN, which charts leave out."""
    found: dict[str, tuple[str, list[int]]] = {}
    for row in rows:
        for name, value in row.get("not_finite", {}).items():
            found.setdefault(name, (value, []))[1].append(row["update"])
    said = [
        f"{name} was no number in {len(updates)} updates, in {updates[0]} first ({value})"
        for name, (value, updates) in found.items()
    ]
    known = (summary or {}).get("not_finite", {})
    accuracies = [name for name in ("accuracy_before", "accuracy_after") if name in known]
    return said + [f"{name.replace('_', ' ')} training was no number" for name in accuracies]


def _updates(lives: Sequence[Life]) -> set[int]:
    """The updates that must have a row: those in the event log, except those that a resume discarded."""
    found: set[int] = set()
    for life in lives:
        found = {update for update in found if life.cut is not None and update < life.cut}
        done = {update for stage in life.stages if stage.name == TRAIN for update in stage.followed.ends}
        # The process may have been killed between the last update and its row.
        found |= done if life.ended is not None else done - {max(done, default=0)}
    return found


def _lives(folder: RunFolder, summary: Mapping[str, Any], notes: list[str], alive: bool) -> list[Life]:
    if not folder.events.exists() or not folder.events.stat().st_size:
        if not alive:
            what = "Nothing was written into events.log" if folder.events.exists() else "There is no events.log"
            notes.append(f"{what}: no schedule can be shown.")
        return []
    try:
        segments, damage = read_segments(folder.events)
    except LogError as error:
        if not folder.events.read_bytes().startswith(MAGIC):
            raise
        notes.append(f"The event log has no record that can be read: no schedule can be shown. {error}")
        return []
    if damage is not None:
        notes.append(f"The event log is damaged; what comes before the damage is shown. {damage}")
    # A run counts its records at its end, and a killed one does not: a log with fewer was cut later.
    found, counted = num_records(segments), summary.get("records", 0)
    cut = damage is None and found < counted
    if cut:
        given = f"it has {found:,} of the {counted:,} records that the run wrote"
        notes.append(f"The event log ends early: {given}. Its summary says {summary['status']}.")
    lives: list[Life] = []
    for number, segment in enumerate(segments):
        lives.append(_life(segment, lives, notes))
        if segment.ended is None and damage is None and not ((alive or cut) and number == len(segments) - 1):
            part = "The event log" if len(segments) == 1 else f"Part {number + 1} of the event log"
            notes.append(f"{part} has no end: its process was killed.")
    return lives


def _life(segment: Segment, before: Sequence[Life], notes: list[str]) -> Life:
    logs, begin = [log for log in segment.stages if log.steps], before[-1].end if before else 0
    versions: dict[int, dict[str, int]] = {}
    for stage in (stage for life in before for stage in life.stages if stage.name == TRAIN):
        versions |= stage.followed.versions
    begins = [begin + round(log.steps[0].time * NS) for log in logs]
    # A life lasts until its last record: a killed process has written no end.
    last = max((log.steps[-1].time for log in logs), default=0.0)
    end = max(begin + round(last * NS), *begins, begin)
    # A stage lasts until the next one begins.
    ends = [*begins[1:], end]
    stages = [_stage(log, begin, until, versions, notes) for log, until in zip(logs, ends, strict=False)]
    # Processes start before the first stage begins.
    starting = (begins[0] if begins else end) - begin
    accuracy = segment.stages[-1].facts.get("accuracy", {}) if segment.stages else {}
    return Life(begin, end, stages, starting, segment.ended, segment.facts.get("cut"), accuracy)


def _stage(
    log: StageLog, zero: int, end: int, versions: Mapping[int, dict[str, int]], notes: list[str]
) -> StageHistory:
    """Replay the scheduler of a stage, and note the work of its ranks, their causes of idle time, and queue depths.
    `versions` are those that the groups of earlier lives read: the stage's checkpoint may have some of these groups."""
    try:
        origin = SegmentOrigin.from_json(log.facts)
        tables = Tables(origin.graph, origin.plan)
        made = {ordinal: nodes for ordinal, nodes, *_ in (origin.saved or {}).get("groups", ())}
        kept = {g: {n: v for n, v in versions.get(g, {}).items() if n in nodes} for g, nodes in made.items()}
        scheduler, follow = origin.scheduler(tables), Follow(tables, streams(origin.graph), origin.live, kept)
    except ValueError as error:
        raise ReportError(f"events.log: given a stage of another format ({error}); needed format {FORMAT}") from None
    time = begin = due = zero + round(log.steps[0].time * NS)
    until, every = end, max((end - begin) // SAMPLES, 1)
    reasons: dict[RankId, list[tuple[int, str]]] = {lane: [] for lane in lanes(tables)}
    depths: list[Depth] = []

    def sample() -> None:
        """Note the queue depths since the last event."""
        in_work: defaultdict[str, int] = defaultdict(int)
        for replica, rank in reasons:
            # All ranks of a replica have the same firings: count those of the first one.
            if rank == 0:
                in_work[tables.pool_of[replica]] += follow.in_work[replica, rank]
        steps = tables.steps.values()
        ready = {s.name: len(scheduler.ready[s.name]) for s in steps if not s.per_update and not s.source}
        depths.append(Depth(time, scheduler.ledger.finished, ready, in_work))

    for step in log.steps:
        now = zero + round(step.time * NS)
        if now >= due:
            sample()
            due = now - (now - due) % every + every
        try:
            event = cast(Event, read_record(step.event))
            commands = scheduler.handle(event)
        except ValueError as error:
            # What was read so far is right: a shorter report is better than none.
            notes.append(
                f"Stage {origin.stage!r} is shown up to record {step.record} of the event log: the scheduler of this "
                f"version decides otherwise than the one that wrote it ({error})."
            )
            until = time
            break
        time = max(now, time)
        follow.step(time, event, commands)
        # Why each rank without work is idle. Ranks of one replica share a cause, which is expensive to find.
        found: dict[str, str] = {}
        for (replica, rank), changes in reasons.items():
            if follow.in_work[replica, rank]:
                continue
            if replica not in found:
                loaded = scheduler.load[replica] > 0
                found[replica] = "straggler" if loaded else cause(scheduler, replica, detailed=True)
            if not changes or changes[-1][1] != found[replica]:
                changes.append((time, found[replica]))
    sample()
    followed = follow.close(until)
    spent = accounts(followed.work, reasons, begin, end)
    return StageHistory(origin.stage, origin, tables, begin, end, followed, spent, depths)


def accounts(
    work: Iterable[Work], reasons: Mapping[RankId, Sequence[tuple[int, str]]], begin: int, end: int
) -> dict[RankId, Account]:
    """For each rank, the nanoseconds between `begin` and `end` by "busy" and by cause. `reasons` has (time, cause) by
    rank: from that time on, the rank is idle for this cause while it has no work."""
    # All changes of all ranks in one sweep over time.
    edges: list[tuple[int, RankId, str, int]] = []
    for item in work:
        state = "syncing" if item.kind == "publish" else ""
        if item.kind in ("group", "update"):
            state = "failed" if item.outcome == "failed" else "busy"
        start, stop = min(max(item.start, begin), end), min(max(item.end, begin), end)
        if state and stop > start and item.rank_id in reasons:
            edges += [(start, item.rank_id, state, 1), (stop, item.rank_id, state, -1)]
    for lane, changes in reasons.items():
        edges += [(min(max(time, begin), end), lane, cause, 0) for time, cause in changes]
    # By precedence: a rank that does two things at once is busy if one of them is a firing that succeeds.
    counts = {lane: {"busy": 0, "failed": 0, "syncing": 0} for lane in reasons}
    idle = dict.fromkeys(reasons, "starting")
    found = Utilisation(reasons, begin, "starting")
    for time, lane, state, change in sorted(edges, key=lambda edge: edge[0]):
        found.let(time)
        if change:
            counts[lane][state] += change
        else:
            idle[lane] = state
        found.change(lane, next((name for name, count in counts[lane].items() if count), idle[lane]))
    found.let(end)
    return cast(dict[RankId, Account], found.take())
