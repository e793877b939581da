"""Replay: feed recorded events to the scheduler again. If other commands follow, the log is not of this run.

Pure: `runtime.record.event_log` reads the file and its chain of hashes.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from penstock.graph.ir import Graph
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.record.event_log import Step
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Command, Commit, Finish
from penstock.runtime.schedule.scheduler import Scheduler

# Computes what a log stores of the commands of one step.
Digest = Callable[[Sequence[Command]], bytes]


class ReplayError(ValueError):
    """The scheduler's decision differs from the log; names the record. `status` is the exit status of the command."""

    status: ClassVar[int] = 1


@dataclass(frozen=True)
class SegmentOrigin:
    """The arguments with which a scheduler was made (see `Scheduler`), to make it again. A log has one at the beginning
    of each stage.

    `complete` is None in the logs of versions that wrote every checkpoint.
    """

    stage: str
    graph: Graph
    plan: Plan
    rules: Rules
    saved: Mapping[str, Any] | None = None
    live: Mapping[tuple[str, str], int] = field(default_factory=dict)
    complete: Mapping[str, Any] | None = None
    absent: tuple[str, ...] = ()
    lives: Mapping[str, int] = field(default_factory=dict)

    def scheduler(self, tables: Tables | None = None) -> Scheduler:
        """Make the scheduler. `tables` are the compiled graph and plan, if the caller has them already."""
        tables = tables or Tables(self.graph, self.plan)
        return Scheduler(tables, self.rules, self.saved, self.live, self.complete, self.absent, self.lives)

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "graph": self.graph.to_json(),
            "plan": self.plan.to_json(),
            "rules": msgspec.to_builtins(self.rules),
            "cut": self.saved,
            "live": [[channel, replica, version] for (channel, replica), version in self.live.items()],
            "complete": self.complete,
            **({"absent": list(self.absent)} if self.absent else {}),
            **({"lives": dict(self.lives)} if any(self.lives.values()) else {}),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "SegmentOrigin":
        """Raises ValueError for what `to_json` did not make."""
        try:
            rules = msgspec.convert(data["rules"], Rules)
            # A rule that this version does not know may have changed a decision: refuse it here, or the replay would
            # differ later without a known reason.
            if unknown := sorted(data["rules"].keys() - msgspec.to_builtins(rules).keys()):
                raise TypeError(f"unknown rules {', '.join(unknown)}")
            return SegmentOrigin(
                stage=data["stage"],
                graph=Graph.from_json(data["graph"]),
                plan=Plan.from_json(data["plan"]),
                rules=rules,
                saved=data["cut"],
                live={(channel, replica): version for channel, replica, version in data["live"]},
                complete=data.get("complete"),
                absent=tuple(data.get("absent", ())),
                lives=dict(data.get("lives", {})),
            )
        except (KeyError, TypeError) as error:
            given = ", ".join(data)
            needed = "stage, graph, plan, rules, cut, live"
            raise ValueError(f"stage of a log: given the fields {given}; needed {needed} ({error!r})") from None


@dataclass
class Replayed:
    """The result of a stage. `states` are those from which it can be continued: its checkpoints and its end."""

    stage: str
    events: int = 0
    commands: int = 0
    updates: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    finish: Finish | None = None
    states: list[Any] = field(default_factory=list)


def replay(stages: Iterable[tuple[SegmentOrigin, Iterable[Step]]], digest: Digest) -> list[Replayed]:
    """Feed the events of a run's stages, in order and over all its resumes, to fresh schedulers.

    Raises ReplayError at the first step whose commands differ, and for a stage that continues from a state which no
    stage before it reached.
    """
    results: list[Replayed] = []
    for origin, steps in stages:
        # Through JSON, as checkpoints are: tuples become lists, and numbers that are keys become strings.
        saved = json.loads(json.dumps(origin.saved))
        if saved is not None and not any(saved in result.states for result in results):
            raise ReplayError(
                f"stage {origin.stage!r} continues from the cut before update {saved['update']}, never made"
            )
        scheduler, result = origin.scheduler(), Replayed(origin.stage)
        for step in steps:
            where = f"record {step.record}, at {step.time:.6f} s in stage {origin.stage!r}, after {step.event}"
            try:
                commands = scheduler.handle(step.event)
            except ValueError as error:
                raise ReplayError(f"{where}: {error}") from None
            if (computed := digest(commands)) != step.digest:
                raise ReplayError(
                    f"{where}: recorded commands with digest {step.digest.hex()}, computed {computed.hex()} for "
                    f"{commands}; needed the log, graph and version of penstock of one run"
                )
            result.events += 1
            result.commands += len(commands)
            result.states += [json.loads(command.state) for command in commands if isinstance(command, Commit)]
            result.finish = next((command for command in commands if isinstance(command, Finish)), result.finish)
        result.updates, result.outcomes = scheduler.update - origin.rules.start, dict(scheduler.ledger.outcomes)
        # An evaluation or a save after training continues from the end of the stage, which has no checkpoint.
        result.states.append({"update": scheduler.update, **scheduler.ledger.to_json()})
        results.append(result)
    return results
