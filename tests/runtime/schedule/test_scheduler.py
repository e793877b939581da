"""What asynchrony means: which group starts when, with which version, and what is refused."""

from random import Random

import pytest

from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Begin, Checkpoint, Finish, Fire
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.scheduler import Scheduler

from .examples import begun, exhaust, finish, fired, is_fire, run_until, versions, world
from .graphs import aipo, broadcast, call, graph, place, sft


def test_lag_zero_is_synchronous() -> None:
    made = world(aipo(lag=0), Rules(batch=2, end=3))
    finish(made)
    assert versions(made) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


def test_the_first_replica_with_new_weights_leaves_the_others_their_share() -> None:
    made = world(aipo(lag=0), Rules(batch=12, end=3), replicas=3, capacity=20)
    made.feed(Begin())
    for update in range(3):
        run_until(made, is_fire("generate", 12 * update), but=["generator/1", "generator/2"])
        first = [c.replica for c in made.told[-1] if isinstance(c, Fire) and c.firing.node == "generate"]
        assert first == ["generator/0"] * 4
        run_until(made, is_fire("update", update))
    assert finish(made).status == "done"


def test_what_others_are_left_is_taken_when_they_do_not_come() -> None:
    made = world(aipo(lag=0), Rules(batch=12, end=1), replicas=2, capacity=20)
    made.feed(Begin())
    exhaust(made, "generator/1")
    assert {c.replica for c in fired(made, "generate")} == {"generator/0"}
    assert len(fired(made, "update")) == 1


def test_lag_one_generates_the_next_batch_during_an_update() -> None:
    made = begun(aipo(lag=1), Rules(batch=2, end=3))
    run_until(made, is_fire("update", 0))
    exhaust(made, but="'update'")
    assert versions(made) == {0: 0, 1: 0, 2: 0, 3: 0}


def test_groups_beyond_the_lag_wait_for_newer_weights() -> None:
    made = begun(aipo(lag=1), Rules(batch=2, end=5), capacity=20)
    run_until(made, is_fire("update", 0))
    exhaust(made, but="'update'")
    assert [c.firing.index for c in fired(made, "generate")] == [0, 1, 2, 3]


def test_pinned_groups_use_exactly_the_version_of_their_update_less_the_lag() -> None:
    for replicas in (1, 2):
        for seed in range(10):
            made = world(aipo(lag=2), Rules(batch=2, end=6, versions="pinned"), replicas)
            made.run(Random(seed))
            assert versions(made) == {g: max(0, g // 2 - 2) for g in range(12)}


def test_groups_are_consumed_in_ordinal_order_whatever_finishes_first() -> None:
    made = begun(aipo(lag=2), Rules(batch=2, end=2))
    while made.finish is None:
        made.step(len(made.pending) - 1)
    assert [c.groups for c in fired(made, "update")] == [(0, 1), (2, 3)]


def test_no_group_past_the_last_update_starts() -> None:
    made = world(aipo(lag=4), Rules(batch=3, end=2), capacity=50)
    finish(made)
    assert len(fired(made, "generate")) == len(fired(made, "prompts")) == 6


def test_a_graph_without_weights_runs_ahead_of_its_updates() -> None:
    made = world(sft(), Rules(batch=2, end=3))
    assert finish(made).status == "done"
    assert made.scheduler.channels == {}


def test_no_updates_are_done_at_once() -> None:
    scheduler = Scheduler(Tables(aipo(), place(aipo())), Rules(batch=2, end=3, start=3))
    assert scheduler.handle(Begin()) == [Finish("done")]


def test_pinned_versions_need_one_lag() -> None:
    nodes = (
        broadcast("broadcast", "policy", 0),
        broadcast("older", "policy", 2, "scorer"),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("judge", ["generate", "older"]),
        call("update", ["policy", "judge"], "trainer", "update"),
    )
    two_lags = graph("two_lags", {"policy": "update"}, ["prompts"], nodes)
    tables = Tables(two_lags, place(two_lags))
    with pytest.raises(ValueError, match="given generate lag=0, judge lag=2; needed one lag"):
        Scheduler(tables, Rules(batch=1, end=2, versions="pinned"))
    Scheduler(tables, Rules(batch=1, end=2))


def test_why_a_replica_is_idle() -> None:
    made = begun(aipo(lag=0), Rules(batch=1, end=2))
    assert cause(made.scheduler, "generator/0") == "start"
    assert cause(made.scheduler, "scorer/0") == "data"
    run_until(made, is_fire("update", 0))
    exhaust(made, but="'update'")
    assert cause(made.scheduler, "generator/0") == "weights"
    made.feed(Checkpoint(final=True))
    assert cause(made.scheduler, "generator/0") == "saving"
    finish(made)
    assert cause(made.scheduler, "generator/0") == "done"
