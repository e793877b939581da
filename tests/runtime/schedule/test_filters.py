"""Filters: which groups an update takes, and when a run ends because too few are kept."""

import json
from random import Random

import pytest

from penstock.graph.ir import Firing, Graph
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Checkpoint, Finish, Free
from penstock.runtime.schedule.scheduler import Scheduler

from .examples import begun, exhaust, finish, fired, is_fire, run_until, versions, world
from .graphs import broadcast, call, graph, keep, place


def filtered(lag: int = 0) -> Graph:
    nodes = (
        broadcast("broadcast", "policy", lag),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate"]),
        keep("keep", ["generate", "score"]),
        call("update", ["policy", "keep"], "trainer", "update"),
    )
    return graph("filtered", {"policy": "update"}, ["prompts"], nodes)


def test_an_update_takes_the_next_kept_groups_in_order() -> None:
    made = begun(filtered(), Rules(batch=2, end=2))
    while made.finish is None:
        keeps = [i for i, event in enumerate(made.pending) if "node='keep'" in str(event)]
        if keeps and made.pending[keeps[0]].firing.index % 2 == 0:  # type: ignore[union-attr]
            made.drop(keeps[0])
        else:
            made.step(keeps[0] if keeps else 0)
    assert [c.groups for c in fired(made, "update")] == [(1, 3), (5, 7)]
    assert made.scheduler.ledger.outcomes == {"consumed": 4, "dropped": 4, "failed": 0}


def test_what_a_dropped_group_holds_is_freed() -> None:
    made = begun(filtered(), Rules(batch=1, end=1))
    run_until(made, is_fire("keep", 0))
    told = made.drop(made.find("keep", 0))
    freed = {f for c in told if isinstance(c, Free) for f in c.firings}
    assert {Firing("generate", 0), Firing("score", 0), Firing("keep", 0)} <= freed


def test_groups_that_take_the_place_of_dropped_ones_keep_the_lag() -> None:
    for seed in range(10):
        made = world(filtered(lag=1), Rules(batch=2, end=6), drops={"keep": 0.5})
        made.run(Random(seed))
        used, consumed = versions(made), made.checker.books.consumed
        assert len(consumed) == 12
        assert all(update - 1 <= used[g] <= update for g, update in consumed.items())


def test_a_filter_that_drops_too_much_ends_the_run_with_its_counts() -> None:
    made = begun(filtered(), Rules(batch=2, end=3, drops=2))
    exhaust(made, but="keep")
    made.step(made.find("keep", 0))
    for ordinal in (1, 2, 3):
        exhaust(made, but="keep")
        made.drop(made.find("keep", ordinal))
    exhaust(made, but="keep")
    told = made.drop(made.find("keep", 4))
    assert told[-1] == Finish(
        "failed",
        "given 4 groups dropped for update 0, the last by keep[4], and 1 kept; needed 2 kept ones before 2 batches are "
        "dropped (--drops), or a filter that keeps more",
    )
    assert made.finish is told[-1]


def test_a_filter_that_keeps_half_goes_on_at_a_large_lag() -> None:
    made = world(filtered(lag=16), Rules(batch=2, end=30), drops={"keep": 0.5})
    made.run(Random(0))
    assert made.finish == Finish("done")
    assert made.scheduler.ledger.outcomes["dropped"] > 16 * 2


def test_the_bound_on_drops_counts_from_update_to_update() -> None:
    made = begun(filtered(), Rules(batch=1, end=3, drops=2))
    for kept in (1, 3, 5):
        run_until(made, is_fire("keep", kept - 1))
        made.drop(made.find("keep", kept - 1))
        run_until(made, is_fire("keep", kept))
        made.step(made.find("keep", kept))
    assert finish(made) == Finish("done")
    assert made.scheduler.ledger.outcomes["dropped"] == 3


def test_a_resumed_run_remembers_what_was_dropped() -> None:
    made = world(filtered(lag=1), Rules(batch=2, end=6), drops={"keep": 0.4})
    made.run(Random(1), steps=60)
    made.feed(Checkpoint(final=True))
    made.run(Random(1))
    resumed = made.resumed()
    resumed.run(Random(1))
    assert resumed.finish == Finish("done")
    lost = [g for g, fate in resumed.checker.books.fates.items() if fate == "dropped"]
    assert lost == [g for g in sorted(resumed.checker.books.fates) if Random(f"{Firing('keep', g)}").random() < 0.4]
    assert json.loads(json.dumps(resumed.scheduler.ledger.to_json()))["fates"]["dropped"] == len(lost)


def test_pinned_versions_refuse_filters_and_slow_broadcasts_beforehand() -> None:
    nodes = [n for n in filtered(1).nodes if n.construct != "broadcast"]
    slow = graph("slow", {"policy": "update"}, ["prompts"], [broadcast("broadcast", "policy", 1, every=2), *nodes])
    with pytest.raises(ValueError, match="given the filter keep, broadcast with every=…; needed none"):
        Scheduler(Tables(slow, place(slow)), Rules(batch=1, end=1, versions="pinned"))
    Scheduler(Tables(slow, place(slow)), Rules(batch=1, end=1))
