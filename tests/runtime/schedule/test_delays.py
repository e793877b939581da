"""Delayed values: which update a group is for, and what it waits for."""

from random import Random

import pytest

from penstock.graph.ir import Graph
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Begin, Finish
from penstock.runtime.schedule.scheduler import Scheduler

from .examples import exhaust, finish, fired, is_fire, world
from .graphs import aipo, broadcast, call, delay, graph, place
from .world import Setting, World


def curriculum(lag: int, every: int = 1, weights: int = 3) -> Graph:
    """What is chosen depends on what was remembered `lag` updates before."""
    nodes = (
        delay("past", "history", lag),
        call("choose", ["problems", "past"], "trainer"),
        broadcast("broadcast", "policy", weights),
        call("generate", ["choose", "broadcast"], "generator"),
        call("score", ["generate"]),
        call("update", ["policy", "score"], "trainer", "update"),
        call("remember", ["history", "update"], "trainer", "update", every=every),
    )
    return graph("curriculum", {"policy": "update", "history": "remember"}, ["problems"], nodes)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_group_waits_for_the_version_of_its_update_less_the_lag(lag: int) -> None:
    plan = place(curriculum(lag), capacity={"trainer": 2})
    made = World(Setting(curriculum(lag), plan, Rules(batch=2, end=6), {}, {}))
    made.feed(Begin())
    exhaust(made, but="remember")
    assert [c.firing.index for c in fired(made, "choose")] == list(range(2 * (lag + 1)))
    assert any(map(is_fire("choose", 2 * (lag + 1)), made.step(made.find("remember", 0))))
    assert finish(made) == Finish("done")


def test_a_group_is_told_the_update_that_it_is_for() -> None:
    made = world(curriculum(1), Rules(batch=2, end=4))
    made.run(Random(3))
    assert {c.firing.index: c.update for c in fired(made, "choose")} == {g: g // 2 for g in range(8)}
    assert {c.update for c in fired(made, "generate")} == {0}


def test_a_group_that_moves_up_is_for_the_earlier_update() -> None:
    made = world(curriculum(1), Rules(batch=1, end=4))
    made.run(Random(0), steps=1)
    exhaust(made, but="'score'")
    made.drop(made.find("score", 0))
    exhaust(made, but="'update'")
    slots = {c.firing.index: c.update for c in fired(made, "choose")}
    assert slots == {0: 0, 1: 1, 2: 1}
    assert finish(made) == Finish("done")


def test_a_value_that_is_left_as_it_is_holds_no_group_up() -> None:
    made = world(curriculum(0, every=3), Rules(batch=1, end=5))
    assert finish(made) == Finish("done")
    assert [c.update for c in fired(made, "choose")] == [0, 1, 2, 3, 4]


def test_pinned_versions_need_a_delay_of_at_least_the_lag() -> None:
    def scheduler(lag: int) -> Scheduler:
        made = curriculum(lag, weights=2)
        return Scheduler(Tables(made, place(made)), Rules(batch=1, end=3, versions="pinned"))

    scheduler(2)
    with pytest.raises(
        ValueError, match="given choose, which reads 'history' with a delay of 1 before weights are read w"
    ):
        scheduler(1)


def test_groups_that_read_something_delayed_are_not_replaced() -> None:
    def scheduler(made: Graph) -> Scheduler:
        return Scheduler(Tables(made, place(made)), Rules(batch=1, end=3, on_failure="replace"))

    scheduler(aipo())
    with pytest.raises(
        ValueError, match="given choose, which reads 'history' delayed; needed no delay, which is exact"
    ):
        scheduler(curriculum(1))


def test_pinned_versions_allow_any_delay_after_the_weights_are_read() -> None:
    nodes = (
        broadcast("broadcast", "policy", 2),
        call("generate", ["prompts", "broadcast"], "generator"),
        delay("past", "policy", 0),
        call("compare", ["generate", "past"], "trainer"),
        call("update", ["policy", "compare"], "trainer", "update"),
    )
    compared = graph("compared", {"policy": "update"}, ["prompts"], nodes)
    made = world(compared, Rules(batch=2, end=4, versions="pinned"))
    made.run(Random(0))
    assert made.finish == Finish("done")
