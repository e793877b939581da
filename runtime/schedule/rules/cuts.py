"""Checkpoints: a consistent cut between two updates, and the way back from it.

Free-running admissions go on while a cut is due and while it is written; they are later than the cut and do not
change it. A final cut with no more in it than the newest complete checkpoint has is not written. What was in work then
starts again in a run that resumes: groups in the middle of their turns at the first one, a step that trails at the
update it was at, with the oldest version that there is by then: the cut's.
"""

import heapq
import json
from collections.abc import Mapping
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Commit, Save
from penstock.runtime.schedule.state import State


def save(state: State) -> None:
    """When nothing that moves state is in work, have every replica write its part."""
    if state.saving or state.begun() or any(way.publishing for way in state.ways.values()):
        return
    if any(f.node in state.tables.stateful for f in state.running) or not drained(state):
        return
    cut = {"update": state.update, **state.ledger.to_json(), "trailing": state.trailing}
    if state.stopping and state.complete and _done(state, cut) == _done(state, state.complete):
        state.cutting = None
        state.finish("stopped")
        return
    state.saving = json.dumps(cut, sort_keys=True)
    values: dict[str, list[Firing]] = {r: [] for r in state.tables.replicas}
    for group in state.ledger.groups.values():
        for name, replica in group.made.items():
            if group.readers[name]:
                values[replica].append(Firing(name, group.ordinal))
    for replica, firings in values.items():
        state.ask(Save(state.update, replica, tuple(firings)), ("save", state.update, replica), replica)


def commit(state: State) -> None:
    """All parts are written."""
    state.out.append(Commit(state.update, state.saving))
    if state.complete is not None:
        state.complete = json.loads(state.saving)
    final, state.cutting, state.saving = state.stopping, None, ""
    if final:
        state.finish("stopped")


def _done(state: State, cut: Mapping[str, Any]) -> Any:
    """What a run that resumes from this cut need not do again. Sources are read again; so groups that were only opened
    are nothing."""
    made = {
        ordinal: {n: r for n, r in made.items() if not state.tables.steps[n].source}
        for ordinal, made, _ in cut["groups"]
    }
    return cut["update"], cut["fates"], cut.get("trailing", {}), {g: names for g, names in made.items() if names}


def drained(state: State) -> bool:
    """Pinned: have the groups that need an older version than the resumed run can make been through its readers?"""
    readers = [step for step in state.tables.steps.values() if step.weights and not step.per_update]
    return not state.pinned or all(
        step.name in group.made or not state.perishing(group.ordinal)
        for group in state.ledger.groups.values()
        for step in readers
    )


def restore(state: State, cut: Mapping[str, Any]) -> None:
    """Continue from the state that a `Commit` told. Raises ValueError for one that is of another graph or plan."""
    for ordinal, made, readers in cut["groups"]:
        odd = {*made, *readers} - state.tables.steps.keys() | set(made.values()) - state.tables.replicas.keys()
        if odd or made.keys() != readers.keys() or ordinal >= cut["next"]:
            raise ValueError(f"cut: given group {ordinal} of {cut['next']}, made by {made} and read {readers} times")
    if odd := cut.get("trailing", {}).keys() - state.tables.steps.keys():
        raise ValueError(f"cut: given {', '.join(sorted(odd))}, which the graph does not have")
    state.ledger.restore(cut)
    state.trailing.update(cut.get("trailing", {}))
    for ordinal, group in state.ledger.groups.items():
        if len(group.made) == state.tables.num_group_steps:
            state.ledger.finish(group)
        for step in state.tables.steps.values():
            waiting = not step.per_update and not step.answers and step.name not in group.made
            if waiting and all(name in group.made for name in step.waits):
                heapq.heappush(state.ready[step.name], ordinal)
