"""Groups that are dropped or fail, and what becomes of their values."""

import pytest

from penstock.graph.ir import Firing
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Abort, Begin, Checkpoint, Done, Event, Failed, Finish, Fire, Free

from .examples import begun, finish, fired, is_fire, run_until, world
from .graphs import aipo, broadcast, call, graph


def test_a_dropped_group_leaves_its_place_to_the_next_one() -> None:
    made = begun(aipo(lag=0), Rules(batch=2, end=1))
    run_until(made, is_fire("score", 0))
    made.drop(made.find("score", 0))
    assert finish(made).status == "done"
    assert [c.groups for c in fired(made, "update")] == [(1, 2)]
    assert made.scheduler.ledger.outcomes == {"consumed": 2, "dropped": 1, "failed": 0}


def test_pinned_versions_refuse_a_filter() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=3, versions="pinned"), drops={"score": 1.0})
    ended = finish(made)
    assert ended.status == "failed"
    assert ended.error.endswith(' dropped its group: a filter needs versions="free", given "pinned"')


def test_a_failure_stops_the_run_by_default() -> None:
    made = begun(aipo(), Rules(batch=2, end=3))
    run_until(made, is_fire("score", 1))
    index = made.find("score", 1)
    assert made.fail(index) == [Finish("failed", "score[1] raised")]
    assert made.scheduler.handle(Begin()) == []


def test_a_failed_firing_is_tried_again() -> None:
    made = begun(aipo(), Rules(batch=2, end=1, retries=1))
    run_until(made, is_fire("score", 1))
    index = made.find("score", 1)
    told = made.fail(index)
    assert told[0] == Free((Firing("score", 1),), "scorer/0")
    assert told[1] == Fire(Firing("score", 1), "scorer/0", (1,))
    assert finish(made).status == "done"


def test_a_group_that_failed_for_good_is_replaced() -> None:
    made = begun(aipo(), Rules(batch=2, end=1, on_failure="replace"))
    run_until(made, is_fire("score", 1))
    made.fail(made.find("score", 1))
    assert finish(made).status == "done"
    assert [c.groups for c in fired(made, "update")] == [(0, 2)]
    assert made.scheduler.ledger.outcomes == {"consumed": 2, "dropped": 0, "failed": 1}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("retries", [0, 1, 99])
def test_failures_without_an_update_between_them_end_the_run_with_the_last_one(lag: int, retries: int) -> None:
    made = begun(aipo(lag), Rules(batch=2, end=3, retries=retries, on_failure="replace", failures=2))
    failures = 0
    while made.finish is None:
        scored = [i for i, event in enumerate(made.pending) if isinstance(event, Done) and event.firing.node == "score"]
        (made.fail if scored else made.step)(scored[0] if scored else 0)
        failures += bool(scored)
    assert failures == max(2 * 2 * (1 + lag), retries + 1)
    assert made.finish.status == "failed"
    assert "(--failures)" in made.finish.error
    last = next(event for event in reversed(made.heard) if isinstance(event, Failed))
    assert last.error in made.finish.error


def test_failures_between_which_updates_are_made_end_nothing() -> None:
    made = begun(aipo(lag=0), Rules(batch=1, end=9, on_failure="replace", failures=2))
    for ordinal in range(0, 18, 2):
        run_until(made, is_fire("score", ordinal))
        made.fail(made.find("score", ordinal))
    assert finish(made).status == "done"
    assert made.scheduler.ledger.outcomes == {"consumed": 9, "dropped": 0, "failed": 9}


def test_a_cut_counts_the_firings_that_were_tried_again() -> None:
    made = begun(aipo(), Rules(batch=2, end=4, retries=1))
    run_until(made, is_fire("score", 1))
    made.fail(made.find("score", 1))
    made.feed(Checkpoint(final=True))
    assert finish(made).status == "stopped"
    assert made.resumed().scheduler.ledger.retried == 1


def test_a_retry_waits_until_all_ranks_have_answered() -> None:
    made = world(aipo(), Rules(batch=1, end=1, retries=1), ranks=2)
    made.feed(Begin())
    run_until(made, is_fire("score", 0))
    first, second = (i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 0))
    assert made.fail(first) == []
    assert is_fire("score", 0)(made.step(second - 1)[1])


def test_a_failed_update_stops_the_run_in_spite_of_retries() -> None:
    made = begun(aipo(), Rules(batch=1, end=2, retries=5, on_failure="replace"))
    run_until(made, is_fire("update", 0))
    assert made.fail(made.find("update", 0))[-1] == Finish("failed", "update[0] raised")


def test_values_of_a_lost_group_are_freed_when_nobody_reads_them_any_more() -> None:
    nodes = (
        broadcast("broadcast", "policy", 1),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate"]),
        call("judge", ["generate"]),
        call("update", ["policy", "score", "judge"], "trainer", "update"),
    )
    made = begun(graph("judged", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=1))
    run_until(made, is_fire("judge", 0))
    lost = made.drop(made.find("score", 0))
    assert not [c for c in lost if isinstance(c, Free) and Firing("generate", 0) in c.firings]
    index = made.find("judge", 0)
    assert Free((Firing("generate", 0),), "generator/0") in made.step(index)


def test_an_abort_ends_the_run_with_its_reason() -> None:
    made = begun(aipo(), Rules(batch=1, end=2))
    assert made.feed(Abort("generator/0 rank 0 died")) == [Finish("failed", "generator/0 rank 0 died")]


def test_an_answer_nobody_awaits_is_refused_and_changes_nothing() -> None:
    made = begun(aipo(), Rules(batch=1, end=2))
    strays: list[Event] = [
        Done(Firing("score", 7), "scorer/0"),
        Done(Firing("prompts", 0), "generator/0", rank=3),
        Failed(Firing("prompts", 0), "scorer/0", 0, "not mine"),
    ]
    for stray in strays:
        with pytest.raises(ValueError, match="nobody awaits"):
            made.scheduler.handle(stray)
    assert finish(made).status == "done"
