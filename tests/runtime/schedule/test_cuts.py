"""Checkpoints, stops, and resuming from what was saved."""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Begin, Checkpoint, Commit, Finish, Free, Save
from penstock.runtime.schedule.scheduler import Scheduler

from .examples import begun, exhaust, finish, fired, is_fire, run_until, versions, world
from .graphs import aipo, call, graph, place
from .world import World


def test_a_final_checkpoint_lets_the_update_in_flight_finish_and_starts_nothing_else() -> None:
    made = begun(aipo(lag=1), Rules(batch=2, end=9))
    run_until(made, is_fire("update", 0))
    told = made.feed(Checkpoint(final=True))
    assert told == []
    run_until(made, lambda c: isinstance(c, Save))
    assert finish(made) == Finish("stopped")
    assert made.commit is not None
    assert made.commit.update == 1
    assert len(fired(made, "update")) == 1


def test_a_checkpoint_does_not_stop_generation() -> None:
    made = begun(aipo(lag=1), Rules(batch=2, end=9), capacity=1)
    run_until(made, is_fire("generate", 0))
    saves = [c for c in made.feed(Checkpoint()) if isinstance(c, Save)]
    assert {s.replica for s in saves} == {"generator/0", "scorer/0", "trainer/0"}
    run_until(made, is_fire("generate", 1), but=["Saved"])


def test_a_cut_saves_what_the_resumed_run_reads_and_it_goes_on_exactly() -> None:
    made = begun(aipo(lag=0), Rules(batch=3, end=4))
    run_until(made, is_fire("advantage", 4))
    made.feed(Checkpoint(final=True))
    finish(made)
    resumed = made.resumed()
    assert resumed.scheduler.update == 1
    assert finish(resumed).status == "done"
    assert [c.groups for w in (made, resumed) for c in fired(w, "update")] == [
        (0, 1, 2),
        (3, 4, 5),
        (6, 7, 8),
        (9, 10, 11),
    ]


def test_a_pinned_cut_finishes_the_groups_whose_version_cannot_be_made_again() -> None:
    for seed in range(20):
        rng = Random(seed)
        made = world(aipo(lag=2), Rules(batch=2, end=6, versions="pinned"), replicas=2)
        made.run(rng, steps=rng.randrange(1, 90))
        made.feed(Checkpoint(final=True))
        made.run(rng)
        resumed = made.resumed()
        resumed.run(rng)
        assert versions(resumed) == {g: max(0, g // 2 - 2) for g in range(12)}


def test_a_final_checkpoint_turns_one_that_is_under_way_into_the_last() -> None:
    made = begun(aipo(), Rules(batch=1, end=9))
    made.feed(Checkpoint())
    made.feed(Checkpoint(final=True))
    made.feed(Checkpoint())
    assert finish(made) == Finish("stopped")


def test_a_finished_run_can_be_saved() -> None:
    made = world(aipo(), Rules(batch=1, end=2))
    finish(made)
    cut = {"update": 2, **made.scheduler.ledger.to_json()}
    tables = Tables(aipo(), place(aipo()))
    told = Scheduler(tables, Rules(batch=1, end=2, start=2), json.loads(json.dumps(cut))).handle(Checkpoint(final=True))
    assert told == [Save(2, replica) for replica in tables.replicas]


def resumed_at(made: World, complete: Mapping[str, Any] | None) -> World:
    """The run that goes on from the last commit, with its sources read and its weights published, and nothing more."""
    resumed = made.resumed()
    resumed.scheduler.complete = complete
    resumed.feed(Begin())
    while found := [i for i, event in enumerate(resumed.pending) if "prompts" in str(event) or ">" in str(event)]:
        resumed.step(found[0])
    return resumed


def test_a_final_cut_is_written_only_if_it_has_more_in_it_than_the_newest_checkpoint() -> None:
    made = begun(aipo(lag=1), Rules(batch=3, end=9))
    run_until(made, is_fire("advantage", 1))
    made.feed(Checkpoint())
    run_until(made, lambda c: isinstance(c, Commit))
    assert made.commit is not None
    cut = json.loads(made.commit.state)
    opened = [group for group in cut["groups"] if group[1].keys() == {"prompts"}]
    assert opened != []
    worked = {**cut, "groups": [group for group in cut["groups"] if group not in opened]}
    for complete in (cut, worked):
        assert resumed_at(made, complete).scheduler.handle(Checkpoint(final=True)) == [Finish("stopped")]
    more = resumed_at(made, cut)
    more.step(more.find("generate", next(f.index for f in more.scheduler.running if f.node == "generate")))
    for asked in (more, resumed_at(made, {}), resumed_at(made, None), resumed_at(made, {**cut, "groups": []})):
        assert {type(command) for command in asked.feed(Checkpoint(final=True))} == {Save}


def test_a_checkpoint_is_the_newest_from_its_commit_on() -> None:
    made = begun(aipo(lag=1), Rules(batch=3, end=9))
    made.scheduler.complete = {}
    exhaust(made, "node='generate'")
    made.feed(Checkpoint())
    run_until(made, lambda c: isinstance(c, Commit), but=["node='generate'"])
    assert made.feed(Checkpoint(final=True)) == [Finish("stopped")]


def test_state_is_not_saved_while_it_changes() -> None:
    nodes = (call("pack", ["texts"], "scorer", stateful=True), call("update", ["policy", "pack"], "trainer", "update"))
    made = begun(graph("stateful", {"policy": "update"}, ["texts"], nodes), Rules(batch=2, end=9))
    run_until(made, is_fire("pack", 0))
    assert made.feed(Checkpoint()) == []
    told = made.step(made.find("pack", 0))
    assert {type(c) for c in told} == {Free, Save}
    finish(made)
    assert [c.firing.index for c in fired(made, "pack")] == list(range(18))
