"""Asynchrony: which group starts when, where and with which version, and how versions get there."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Rank, Replica
from penstock.runtime.schedule.admission import admitted_groups, needed_version
from penstock.runtime.schedule.channel import ChannelState, LeastLoadedQueue
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Begin, Checkpoint, Finish, Fire, Publish, Send, Swap
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.scheduler import Scheduler

from .graphs import aipo, broadcast, call, delay, evaluate, graph, place
from .world import Setting, World, world

SMALL = st.integers(0, 30)
CHANNEL = "policy>generator"


@given(ordinal=SMALL, lag=st.integers(0, 5), batch=st.integers(1, 5), version=SMALL)
def test_a_version_admits_the_groups_that_need_none_newer(ordinal: int, lag: int, batch: int, version: int) -> None:
    assert (needed_version(ordinal, lag, batch) <= version) == (ordinal < admitted_groups(version, lag, batch))


@given(update=SMALL, lag=st.integers(0, 5), batch=st.integers(1, 5), place=st.integers(0, 4))
def test_a_group_needs_the_version_of_its_update_less_the_lag(update: int, lag: int, batch: int, place: int) -> None:
    """This holds however many groups before it are dropped: its update can only become earlier."""
    ordinal = update * batch + place % batch
    for dropped in range(update * batch):
        assert needed_version(ordinal, lag, batch) >= (ordinal - dropped) // batch - lag
    assert needed_version(ordinal, lag, batch) == max(0, update - lag)


# Groups -----------------------------------------------------------------------------------------------------


def test_lag_zero_is_synchronous() -> None:
    made = world(aipo(lag=0), Rules(batch=2, end=3))
    made.end()
    assert made.versions() == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


def test_lag_one_generates_the_next_batch_during_an_update() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=3))
    made.until_fired("update", 0)
    made.exhaust(but="'update'")
    assert made.versions() == {0: 0, 1: 0, 2: 0, 3: 0}


def test_groups_beyond_the_lag_wait_for_newer_weights() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=5), capacity=20)
    made.until_fired("update", 0)
    made.exhaust(but="'update'")
    assert made.indices("generate") == [0, 1, 2, 3]


def test_no_group_past_the_last_update_starts() -> None:
    made = world(aipo(lag=4), Rules(batch=3, end=2), capacity=50)
    made.end()
    assert len(made.fired("generate")) == len(made.fired("prompts")) == 6
    scheduler = Scheduler(Tables(aipo(), place(aipo())), Rules(batch=2, end=3, start=3))
    assert scheduler.handle(Begin()) == [Finish("done")]


def test_the_first_replica_with_new_weights_leaves_the_others_their_share() -> None:
    made = world(aipo(lag=0), Rules(batch=12, end=3), replicas=3, capacity=20)
    for update in range(3):
        made.until_fired("generate", 12 * update, but=["generator/1", "generator/2"])
        first = [c.replica for c in made.told[-1] if isinstance(c, Fire) and c.firing.node == "generate"]
        assert first == ["generator/0"] * 4
        made.until_fired("update", update)
    made.end()
    # If the others never come, it takes their share.
    made = world(aipo(lag=0), Rules(batch=12, end=1), replicas=2, capacity=20)
    made.exhaust("generator/1")
    assert {c.replica for c in made.fired("generate")} == {"generator/0"}
    assert len(made.fired("update")) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_pinned_groups_use_exactly_the_version_of_their_update_less_the_lag(replicas: int) -> None:
    for seed in range(10):
        made = world(aipo(lag=2), Rules(batch=2, end=6, versions="pinned"), replicas)
        made.end(rng=Random(seed))
        assert made.versions() == {g: max(0, g // 2 - 2) for g in range(12)}


def test_groups_are_consumed_in_ordinal_order_whatever_finishes_first() -> None:
    made = world(aipo(lag=2), Rules(batch=2, end=2))
    while made.finish is None:
        made.step(made.pending[-1])
    assert made.batches() == [(0, 1), (2, 3)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_the_one_with_most_room_that_fits_is_first_and_equals_go_by_the_plans_order(
    sizes: list[int], data: st.DataObject
) -> None:
    replicas = [Replica(f"generator/{i}", (Rank(),), size) for i, size in enumerate(sizes)]
    queue, room = LeastLoadedQueue(replicas), {r.name: r.capacity for r in replicas}
    kinds = dict.fromkeys(room, 0)
    for _ in range(30):
        name = data.draw(st.sampled_from(replicas)).name
        if data.draw(st.booleans()):
            kinds[name] = data.draw(st.integers(0, 2))
            queue.move(name, kinds[name])
        else:
            more = data.draw(st.sampled_from([1, -1]))
            queue.load(name, more)
            room[name] -= more
        fitting = data.draw(st.sets(st.integers(0, 2)))
        wanted = min((n for n in room if room[n] > 0 and kinds[n] in fitting), key=lambda n: -room[n], default=None)
        assert queue.first(lambda n, fitting=fitting: kinds[n] in fitting) == wanted  # type: ignore[misc]


def test_why_a_replica_is_idle() -> None:
    made = world(aipo(lag=0), Rules(batch=1, end=2))
    assert cause(made.scheduler, "generator/0") == "start"
    assert cause(made.scheduler, "scorer/0") == "data"
    made.until_fired("update", 0)
    made.exhaust(but="'update'")
    assert cause(made.scheduler, "generator/0") == "weights"
    made.feed(Checkpoint(final=True))
    assert cause(made.scheduler, "generator/0") == "saving"
    made.end("stopped")
    assert cause(made.scheduler, "generator/0") == "done"


# Delayed values ---------------------------------------------------------------------------------------------


def curriculum(lag: int, every: int = 1, weights: int = 3) -> Graph:
    """A group's prompts are chosen with the history of `lag` updates before."""
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
    made = World(Setting(curriculum(lag), plan, Rules(batch=2, end=6)))
    made.exhaust(but="remember")
    assert made.indices("choose") == list(range(2 * (lag + 1)))
    made.step(made.at("remember", 0))
    assert made.indices("choose")[-1] >= 2 * (lag + 1)
    made.end()


def test_a_group_is_told_the_update_that_it_is_for() -> None:
    made = world(curriculum(1), Rules(batch=2, end=4))
    made.end(rng=Random(3))
    assert {c.firing.index: c.update for c in made.fired("choose")} == {g: g // 2 for g in range(8)}
    assert {c.update for c in made.fired("generate")} == {0}
    # A value that is not due to change delays no group.
    made = world(curriculum(0, every=3), Rules(batch=1, end=5))
    made.end()
    assert [c.update for c in made.fired("choose")] == [0, 1, 2, 3, 4]


# Weights ----------------------------------------------------------------------------------------------------


def test_a_version_is_published_before_the_update_that_donates_it() -> None:
    made = world(aipo(lag=1), Rules(batch=1, end=4))
    made.end()
    order = [c for told in made.told for c in told]
    updates = [order.index(c) for c in made.fired("update")]
    for version in range(4):
        assert order.index(Publish(CHANNEL, version, "trainer/0")) < updates[version]


def test_a_broadcast_is_skipped_while_the_one_before_is_under_way() -> None:
    made = world(aipo(lag=3), Rules(batch=1, end=6))
    made.until(lambda c: isinstance(c, Send) and c.version == 1)
    made.until_fired("update", 3, but=["Arrived"])
    made.end()
    assert not {2, 3} & set(made.published(CHANNEL))


def test_pinned_versions_skip_no_broadcast() -> None:
    made = world(aipo(lag=2), Rules(batch=1, end=6, versions="pinned"))
    made.end()
    assert made.published(CHANNEL)[:4] == [0, 1, 2, 3]
    # The final version is not published in training.
    made = world(aipo(lag=0), Rules(batch=1, end=3))
    made.end()
    assert made.published(CHANNEL) == [0, 1, 2]


@pytest.mark.parametrize(("live", "versions"), [(None, [7]), (5, [7]), (7, [])])
def test_an_evaluation_publishes_the_policy_that_its_replicas_lack(live: int | None, versions: list[int]) -> None:
    held = {} if live is None else {(CHANNEL, "generator/0"): live}
    made = World(Setting(evaluate(), place(evaluate()), Rules(batch=3, end=8, start=7)), live=held)
    made.end()
    assert made.published(CHANNEL) == versions
    assert made.batches("evaluate.accuracy") == [(0, 1, 2)]


def test_a_version_that_a_per_update_reader_needs_is_published_before_it_is_donated() -> None:
    nodes = (*aipo(3).nodes, broadcast("mine", "policy", 0), call("watch", ["generate", "mine"], "generator", "update"))
    made = world(graph("watched", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=4), replicas=2)
    made.exhaust(but="generator/1")
    assert len(made.fired("update")) == 1
    made.end()


def pinned_apart() -> World:
    """Group 0 is in progress on one generator, and group 1, whose attempt is to fail, on the other."""
    made = world(aipo(lag=1), Rules(batch=1, end=4, versions="pinned", retries=1), replicas=2, capacity=1)
    made.until_fired("generate", 1, but=["node='generate', index=0"])
    return made


def test_a_retry_does_not_go_where_its_pinned_version_is_being_swapped_out() -> None:
    made = pinned_apart()
    swap = made.until(lambda c: isinstance(c, Swap) and c.version == 1, but=["node='generate', index=1"])
    assert swap == Swap(CHANNEL, 1, "generator/0")
    assert Fire(Firing("generate", 1), "generator/1", (1,)) in made.fail(made.at("generate", 1))
    made.end()


def test_a_pinned_version_stays_live_for_a_retry() -> None:
    made = pinned_apart()
    made.exhaust(but="node='generate', index=1")
    assert made.scheduler.channels[CHANNEL].receivers["generator/1"].staged == 1
    assert made.fail(made.at("generate", 1))[1:] == [Fire(Firing("generate", 1), "generator/1", (1,))]
    made.end()


NAMES = ["generator/0", "generator/1"]
REPLICAS = tuple(Replica(name, (Rank(),)) for name in NAMES)


def test_a_replica_takes_a_new_version_when_its_shadow_is_free() -> None:
    state = ChannelState(REPLICAS, dict.fromkeys(NAMES, 0))
    state.publish(1)
    for replica in NAMES:
        state.send(replica, 1)
        state.arrive(replica, 1)
    assert state.to_swap() == NAMES
    state.swap("generator/0")
    assert state.to_swap() == ["generator/1"]
    state.publish(2)
    assert state.to_send() == []
    state.swapped("generator/0", 1)
    assert state.to_send() == ["generator/0"]
