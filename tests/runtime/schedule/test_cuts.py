"""Checkpoints, stops, and resuming from what was saved."""

import json
from random import Random

from penstock.runtime.schedule.events import Checkpoint, Finish, Free, Save
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.tables import Rules, compile_tables

from .examples import begun, finish, fired, is_fire, run_until, versions, world
from .graphs import aipo, call, graph, place


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
    tables = compile_tables(aipo(), place(aipo()))
    told = Scheduler(tables, Rules(batch=1, end=2, start=2), json.loads(json.dumps(cut))).handle(Checkpoint(final=True))
    assert told == [Save(2, replica) for replica in tables.replicas]


def test_state_is_not_saved_while_it_changes() -> None:
    nodes = (call("pack", ["texts"], "scorer", stateful=True), call("update", ["policy", "pack"], "trainer", "update"))
    made = begun(graph("stateful", {"policy": "update"}, ["texts"], nodes), Rules(batch=2, end=9))
    run_until(made, is_fire("pack", 0))
    assert made.feed(Checkpoint()) == []
    told = made.step(made.find("pack", 0))
    assert {type(c) for c in told} == {Free, Save}
    finish(made)
    assert [c.firing.index for c in fired(made, "pack")] == list(range(18))
