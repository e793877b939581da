"""Slower clocks: steps and broadcasts that take part in some updates only, and steps that trail behind them."""

from collections.abc import Sequence
from random import Random

import pytest

from penstock.graph.ir import Firing, Graph, Node
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Checkpoint, Commit, Finish, Fire, Publish, Save, Send
from penstock.runtime.schedule.idle_causes import cause

from .examples import begun, exhaust, finish, fired, is_fire, published, run_until, versions, world
from .graphs import aipo, broadcast, call, graph, place


def indices(fires: list[Fire]) -> list[int]:
    return [c.firing.index for c in fires]


def watched(lag: int, every: int = 1, pool: str = "evaluator", stateful: bool = False) -> Graph:
    """`aipo` with a step that trails."""
    nodes = (
        *aipo(1).nodes,
        broadcast("mine", "policy", lag, pool),
        call("watch", ["mine"], pool, "update", stateful, every),
    )
    return graph("watched", {"policy": "update"}, ["prompts"], nodes)


def averaged(every: int) -> Graph:
    """A second carried value that changes at some updates only, from a value that is made then, and that is sent."""
    nodes = (
        broadcast("broadcast", "policy", 1),
        broadcast("averages", "average", 0, "scorer"),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate", "averages"]),
        call("update", ["policy", "score"], "trainer", "update"),
        call("measure", ["update"], "trainer", "update", every=every),
        call("blend", ["average", "update", "measure"], "trainer", "update", every=every),
    )
    return graph("averaged", {"policy": "update", "average": "blend"}, ["prompts"], nodes)


def seldom(lag: int, every: int) -> Graph:
    nodes = [n for n in aipo(lag).nodes if n.construct != "broadcast"]
    sent = broadcast("broadcast", "policy", lag, every=every)
    return graph("seldom", {"policy": "update"}, ["prompts"], [sent, *nodes])


# Steps ------------------------------------------------------------------------------------------------------


def test_a_step_fires_at_each_kth_update() -> None:
    made = world(averaged(every=3), Rules(batch=2, end=8))
    assert finish(made) == Finish("done")
    assert indices(fired(made, "blend")) == indices(fired(made, "measure")) == [2, 5]
    assert indices(fired(made, "update")) == list(range(8))


def test_a_value_between_steps_is_freed_with_its_update() -> None:
    made = begun(averaged(every=2), Rules(batch=1, end=4))
    run_until(made, is_fire("blend", 1))
    held = made.checker.books.values
    assert Firing("measure", 1) in held
    made.step(made.find("blend", 1))
    assert Firing("measure", 1) not in held


def test_a_value_that_is_left_as_it_is_has_a_new_version_all_the_same() -> None:
    made = world(averaged(every=3), Rules(batch=1, end=5))
    finish(made)
    assert published(made, "average>scorer") == [0, 1, 2, 3, 4]
    used = {g: v for (g, node, *_), v in made.checker.books.versions.items() if node == "score"}
    assert used == {g: g for g in range(5)}


def test_updates_at_which_nothing_is_due_are_over_when_they_come() -> None:
    nodes = (call("update", ["policy"], "trainer", "update", every=3),)
    lonely = graph("lonely", {"policy": "update"}, [], nodes)
    made = world(lonely, Rules(batch=1, end=8))
    assert finish(made) == Finish("done")
    assert indices(fired(made, "update")) == [2, 5]


def test_a_run_of_steps_that_trail_only_ends() -> None:
    nodes = (broadcast("mine", "policy", 0, "evaluator"), call("watch", ["mine"], "evaluator", "update", every=2))
    made = world(graph("frozen", {"policy": "policy"}, [], nodes), Rules(batch=1, end=5))
    assert finish(made) == Finish("done")
    assert indices(fired(made, "watch")) == [1, 3]


# Broadcasts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lag", "every"), [(1, 2), (2, 2), (3, 2), (4, 5)])
def test_only_each_mth_version_is_sent_and_the_lag_holds(lag: int, every: int) -> None:
    for seed in range(5):
        made = world(seldom(lag, every), Rules(batch=2, end=9), replicas=2)
        made.run(Random(seed))
        assert made.finish == Finish("done")
        assert all(index % every == 0 for index in published(made, "policy>generator"))
        assert all(v % every == 0 and g // 2 - lag <= v <= g // 2 for g, v in versions(made).items())


def test_a_version_is_not_given_up_if_the_next_one_to_be_sent_came_too_late() -> None:
    made = world(seldom(lag=2, every=2), Rules(batch=1, end=9), replicas=2)
    made.run(Random(0), steps=1)
    exhaust(made, but="Arrived(channel='policy>generator', version=0, replica='generator/1'")
    # Version 2 cannot be sent while version 0 is on its way, and update 3 can have no other: so update 2 waits.
    assert indices(fired(made, "update")) == [0, 1]
    assert finish(made) == Finish("done")


def test_a_resumed_run_sends_the_version_that_it_starts_with() -> None:
    made = begun(seldom(lag=2, every=3), Rules(batch=1, end=9))
    run_until(made, is_fire("update", 3))
    made.feed(Checkpoint(final=True))
    finish(made)
    resumed = made.resumed()
    assert finish(resumed) == Finish("done")
    assert published(resumed, "policy>generator") == [4, 6]


def test_two_broadcasts_to_a_pool_share_its_channel() -> None:
    nodes = (
        broadcast("often", "policy", 3, every=4),
        broadcast("seldom", "policy", 5, every=6),
        call("generate", ["prompts", "often"], "generator"),
        call("judge", ["generate", "seldom"], "generator"),
        call("update", ["policy", "judge"], "trainer", "update"),
    )
    made = graph("shared", {"policy": "update"}, ["prompts"], nodes)
    assert Tables(made, place(made)).channels["policy>generator"].every == 2


@pytest.mark.parametrize(("lag", "every", "sent"), [(0, 1, range(8)), (0, 3, [2, 5]), (1, 4, [2, 3, 6, 7]), (0, 9, [])])
def test_only_versions_that_a_step_fires_with_are_sent_to_its_pool(lag: int, every: int, sent: Sequence[int]) -> None:
    made = world(watched(lag, every), Rules(batch=1, end=8))
    assert finish(made) == Finish("done")
    assert set(published(made, "policy>evaluator")) <= set(sent)
    assert len(published(made, "policy>evaluator")) >= len(fired(made, "watch")) == 8 // every
    assert published(made, "policy>generator") == list(range(8))


def test_a_pool_of_several_steps_is_sent_what_any_of_them_fires_with() -> None:
    nodes = (
        *watched(lag=0, every=2).nodes,
        broadcast("older", "policy", 1, "evaluator"),
        call("check", ["older"], "evaluator", "update", every=5),
    )
    made = world(graph("both", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=10))
    assert finish(made) == Finish("done")
    assert set(published(made, "policy>evaluator")) <= {1, 3, 4, 5, 7, 8, 9}
    assert {1, 3, 5, 7, 9} <= set(published(made, "policy>evaluator"))


def test_a_resumed_run_sends_its_first_version_only_to_who_is_behind_or_due() -> None:
    made = begun(watched(lag=0, every=4), Rules(batch=1, end=12))
    run_until(made, is_fire("update", 5), but=["watch"])
    made.feed(Checkpoint(final=True))
    run_until(made, lambda c: isinstance(c, Commit), but=["watch"])
    behind = made.resumed()
    assert finish(behind) == Finish("done")
    assert published(behind, "policy>evaluator") == [6, 7, 11]
    made = begun(watched(lag=0, every=4), Rules(batch=1, end=12))
    run_until(made, is_fire("update", 5))
    made.feed(Checkpoint(final=True))
    finish(made)
    on_time = made.resumed()
    assert finish(on_time) == Finish("done")
    assert published(on_time, "policy>evaluator") == [7, 11]


def test_a_pool_whose_first_weights_are_not_due_waits_for_data_and_not_for_its_start() -> None:
    made = begun(watched(lag=0, every=3), Rules(batch=1, end=6))
    assert cause(made.scheduler, "evaluator/0") == "data"
    assert cause(made.scheduler, "generator/0") == "start"
    run_until(made, lambda c: isinstance(c, Publish) and (c.channel, c.version) == ("policy>evaluator", 2))
    assert cause(made.scheduler, "evaluator/0") == "start"


# Trailing ---------------------------------------------------------------------------------------------------


def test_updates_do_not_wait_for_a_step_that_trails() -> None:
    made = begun(watched(lag=8), Rules(batch=1, end=6))
    exhaust(made, but="watch")
    assert indices(fired(made, "update")) == list(range(6))
    assert indices(fired(made, "watch")) == [0]
    assert made.finish is None
    assert finish(made) == Finish("done")
    assert indices(fired(made, "watch")) == list(range(6))


def test_a_step_that_trails_fires_at_each_kth_update_with_a_version_of_its_lag() -> None:
    for lag, every in ((0, 2), (1, 1), (2, 3)):
        for seed in range(5):
            made = world(watched(lag, every), Rules(batch=2, end=7), replicas=2)
            made.run(Random(seed))
            assert made.finish == Finish("done")
            assert indices(fired(made, "watch")) == [u for u in range(7) if (u + 1) % every == 0]


def test_an_update_waits_for_the_snapshot_that_a_step_behind_it_still_needs() -> None:
    made = begun(watched(lag=0), Rules(batch=1, end=9))
    exhaust(made, but="watch")
    # Version 0 is live, 1 in the shadow, 2 in the snapshot: version 3 could go nowhere, and so it may not be changed.
    assert indices(fired(made, "update")) == [0, 1, 2]
    assert finish(made) == Finish("done")


def test_a_version_is_kept_for_a_step_that_will_trail_past_the_next_one_sent() -> None:
    nodes = (
        *aipo(3).nodes,
        broadcast("mine", "policy", 1, "evaluator", every=2),
        call("watch", ["mine"], "evaluator", "update", every=2),
    )
    made = begun(graph("watched", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=8))
    run_until(made, lambda c: isinstance(c, Send) and c.channel == "policy>evaluator")
    exhaust(made, but="policy>evaluator")
    assert indices(fired(made, "update")) == [0, 1]
    assert finish(made) == Finish("done")


def test_a_cut_does_not_wait_for_a_step_that_trails_and_it_fires_again_after_it() -> None:
    made = begun(watched(lag=8), Rules(batch=1, end=6))
    run_until(made, is_fire("update", 3), but=["watch"])
    made.feed(Checkpoint(final=True))
    run_until(made, lambda c: isinstance(c, Commit), but=["watch"])
    assert made.finish == Finish("stopped")
    resumed = made.resumed()
    assert finish(resumed) == Finish("done")
    assert indices(fired(resumed, "watch")) == list(range(6))
    assert min(published(resumed, "policy>evaluator")) == 4


def test_a_cut_waits_for_the_state_of_a_step_that_trails() -> None:
    made = begun(watched(lag=8, stateful=True), Rules(batch=1, end=6))
    run_until(made, is_fire("update", 1), but=["watch"])
    made.feed(Checkpoint())
    exhaust(made, but="watch")
    assert not [c for told in made.told for c in told if isinstance(c, Save)]
    assert any(isinstance(c, Save) for c in made.step(made.find("watch", 0)))


def test_an_update_in_flight_at_a_cut_may_have_to_wait_for_a_step_that_trails() -> None:
    nodes = (
        *aipo(1).nodes,
        broadcast("mine", "policy", 0, "evaluator"),
        call("note", ["policy", "generate"], "trainer", "update"),
        call("watch", ["mine"], "evaluator", "update"),
    )
    made = begun(graph("noted", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=9))
    exhaust(made, but="watch")
    assert [c.firing for c in fired(made, "note")][-1] == Firing("note", 3)
    assert len(fired(made, "update")) == 3
    made.feed(Checkpoint(final=True))
    assert finish(made) == Finish("stopped")
    assert len(fired(made, "update")) == 4


def test_a_run_stopped_after_its_last_update_goes_on_with_what_trails() -> None:
    made = begun(watched(lag=8), Rules(batch=1, end=3))
    exhaust(made, but="watch")
    made.feed(Checkpoint(final=True))
    run_until(made, lambda c: isinstance(c, Commit), but=["watch"])
    resumed = made.resumed()
    assert resumed.scheduler.update == 3
    assert finish(resumed) == Finish("done")
    assert indices(fired(resumed, "watch")) == [0, 1, 2]


def test_a_step_is_waited_for_as_soon_as_it_reads_or_is_read() -> None:
    def trails(*nodes: Node) -> list[str]:
        made = graph(
            "some", {"policy": "update"}, ["prompts"], [*aipo(1).nodes, broadcast("mine", "policy", 0), *nodes]
        )
        return [s.name for s in Tables(made, place(made)).steps.values() if s.off_path]

    assert trails(call("watch", ["mine"], "generator", "update")) == ["watch"]
    assert trails(call("watch", ["mine", "generate"], "generator", "update")) == []
    assert trails(call("watch", ["mine", "update"], "generator", "update")) == []
    both = call("watch", ["mine"], "generator", "update"), call("note", ["watch"], "generator", "update")
    assert trails(*both) == []


def test_no_update_starts_without_weights_however_large_the_lag() -> None:
    nodes = (
        call("generate", ["prompts"], "generator"),
        broadcast("mine", "policy", 4, "scorer"),
        call("watch", ["generate", "mine"], "scorer", "update"),
        call("update", ["policy", "generate"], "trainer", "update"),
    )
    made = begun(graph("early", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=2))
    exhaust(made, but="Swapped")
    assert fired(made, "watch") == []
    assert finish(made) == Finish("done")
