"""What the scheduler does, by example. Ranks answer in the order in which they were asked, unless a test says so."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from penstock.graph.ir import Firing, Graph
from penstock.runtime.schedule.events import (
    Abort,
    Begin,
    Checkpoint,
    Command,
    Done,
    Event,
    Failed,
    Finish,
    Fire,
    Free,
    Save,
    Send,
    Swap,
)
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.tables import Rules, compile_tables

from .graphs import actor_critic, aipo, broadcast, call, evaluate, graph, place, sft
from .world import Setting, World


def world(
    graph: Graph,
    rules: Rules,
    replicas: int = 1,
    capacity: int = 4,
    ranks: int = 1,
    drops: dict[str, float] | None = None,
) -> World:
    plan = place(graph, {"generator": replicas}, {"generator": capacity}, ranks)
    return World(Setting(graph, plan, rules, {}, drops or {}))


def begun(graph: Graph, rules: Rules, capacity: int = 4) -> World:
    made = world(graph, rules, capacity=capacity)
    made.feed(Begin())
    return made


def run_until(world: World, until: Callable[[Command], bool], but: Sequence[str] = ()) -> Command:
    """Answers in order, those that name one of `but` kept back, until a command."""
    while True:
        index = next(i for i, event in enumerate(world.pending) if not any(name in str(event) for name in but))
        if found := [command for command in world.step(index) if until(command)]:
            return found[0]


def exhaust(world: World, but: str) -> None:
    """Answers in order until only those that name `but` are left."""
    while others := [i for i, event in enumerate(world.pending) if but not in str(event)]:
        world.step(others[0])


def finish(world: World) -> Finish:
    """Answers in order until the end."""
    world.run(Random(0))
    assert world.finish is not None
    return world.finish


def fired(world: World, node: str) -> list[Fire]:
    return [c for told in world.told for c in told if isinstance(c, Fire) and c.firing.node == node]


def is_fire(node: str, index: int) -> Callable[[Command], bool]:
    return lambda command: isinstance(command, Fire) and command.firing == Firing(node, index)


def versions(world: World) -> dict[int, int]:
    """The version that each consumed group was started with."""
    return {ordinal: v for (ordinal, node, _), v in world.checker.books.versions.items() if node == "generate"}


# Asynchrony -------------------------------------------------------------------------------------------------


def test_lag_zero_is_synchronous() -> None:
    made = world(aipo(lag=0), Rules(batch=2, end=3))
    finish(made)
    assert versions(made) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


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


def test_a_dropped_group_leaves_its_place_to_the_next_one() -> None:
    made = begun(aipo(lag=0), Rules(batch=2, end=1))
    run_until(made, is_fire("score", 0))
    index = next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 0))
    made.pending[index] = replace(made.pending[index], dropped=True)
    assert finish(made).status == "done"
    assert [c.groups for c in fired(made, "update")] == [(1, 2)]
    assert made.scheduler.ledger.fates == {"consumed": 2, "dropped": 1, "failed": 0}


def test_pinned_versions_refuse_a_filter() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=3, versions="pinned"), drops={"score": 1.0})
    assert finish(made) == Finish(
        "failed", 'score[0] dropped its group: a filter needs versions="free", given "pinned"'
    )


def test_no_group_past_the_last_update_starts() -> None:
    made = world(aipo(lag=4), Rules(batch=3, end=2), capacity=50)
    finish(made)
    assert len(fired(made, "generate")) == len(fired(made, "prompts")) == 6


def test_a_graph_without_weights_runs_ahead_of_its_updates() -> None:
    made = world(sft(), Rules(batch=2, end=3))
    assert finish(made).status == "done"
    assert made.scheduler.ways == {}


def test_no_updates_are_done_at_once() -> None:
    scheduler = Scheduler(compile_tables(aipo(), place(aipo())), Rules(batch=2, end=3, start=3))
    assert scheduler.handle(Begin()) == [Finish("done")]


# Weights ----------------------------------------------------------------------------------------------------


def test_a_version_is_published_before_the_update_that_donates_it() -> None:
    made = world(aipo(lag=1), Rules(batch=1, end=4))
    finish(made)
    order = [c.firing for told in made.told for c in told if isinstance(c, Fire)]
    for version in range(4):
        published = order.index(Firing("policy>generator", version))
        assert published < order.index(Firing("update", version))


def test_a_broadcast_is_skipped_while_the_one_before_is_under_way() -> None:
    made = begun(aipo(lag=3), Rules(batch=1, end=6))
    run_until(made, lambda c: isinstance(c, Send) and c.version == 1)
    run_until(made, is_fire("update", 3), but=["Arrived"])
    finish(made)
    published = [c.firing.index for c in fired(made, "policy>generator")]
    assert 2 not in published
    assert 3 not in published
    assert published == sorted(published)


def test_pinned_versions_skip_no_broadcast() -> None:
    made = world(aipo(lag=2), Rules(batch=1, end=6, versions="pinned"))
    finish(made)
    assert [c.firing.index for c in fired(made, "policy>generator")][:4] == [0, 1, 2, 3]


def test_the_last_version_is_not_published_for_training() -> None:
    made = world(aipo(lag=0), Rules(batch=1, end=3))
    finish(made)
    assert [c.firing.index for c in fired(made, "policy>generator")] == [0, 1, 2]


def test_each_replica_receives_and_swaps_and_waits_for_all_its_ranks() -> None:
    made = world(aipo(lag=0), Rules(batch=1, end=1), replicas=2, ranks=2)
    made.feed(Begin())
    while not any(isinstance(c, Send) for told in made.told for c in told):
        made.step()
    arrivals = [i for i, e in enumerate(made.pending) if "Arrived" in str(e) and "generator/0" in str(e)]
    assert len(arrivals) == 2
    assert made.step(arrivals[1]) == []
    assert made.step(arrivals[0]) == [Swap("policy>generator", 0, "generator/0")]


def test_an_evaluation_publishes_the_policy_that_its_replicas_lack() -> None:
    rules = Rules(batch=3, end=8, start=7)
    channel = ("policy>generator", "generator/0")
    for live, published in (({}, [7]), ({channel: 5}, [7]), ({channel: 7}, [])):
        setting = Setting(evaluate(), place(evaluate()), rules, {}, {})
        made = World(setting, live=live)
        finish(made)
        assert [c.firing.index for c in fired(made, "policy>generator")] == published
        assert [c.groups for c in fired(made, "evaluate.accuracy")] == [(0, 1, 2)]


def test_a_value_that_never_changes_is_sent_once() -> None:
    nodes = (
        broadcast("broadcast", "reference", 0, "scorer"),
        call("refer", ["texts", "broadcast"]),
        call("update", ["policy", "refer"], "trainer", "update"),
    )
    referred = graph("referred", {"policy": "update", "reference": "reference"}, ["texts"], nodes)
    made = world(referred, Rules(batch=1, end=4))
    assert finish(made).status == "done"
    assert [c.firing.index for c in fired(made, "reference>scorer")] == [0]


def test_a_value_is_read_before_the_update_that_donates_it() -> None:
    made = world(actor_critic(lag=1), Rules(batch=2, end=3))
    finish(made)
    for update in range(3):
        nodes = ["targets", "update_policy", "update_critic"]
        order = [c.firing for told in made.told for c in told if isinstance(c, Fire) and c.firing.node in nodes]
        assert [f.node for f in order[3 * update : 3 * update + 3]] == nodes


def test_a_per_update_reader_of_weights_never_reads_newer_ones_than_its_update() -> None:
    nodes = (*aipo(1).nodes, broadcast("mine", "policy", 0), call("watch", ["mine"], "generator", "update"))
    watched = graph("watched", {"policy": "update"}, ["prompts"], nodes)
    for seed in range(10):
        made = world(watched, Rules(batch=2, end=5))
        made.run(Random(seed))
        assert made.finish == Finish("done")


# Failures ---------------------------------------------------------------------------------------------------


def test_a_failure_stops_the_run_by_default() -> None:
    made = begun(aipo(), Rules(batch=2, end=3))
    run_until(made, is_fire("score", 1))
    index = next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 1))
    assert made.fail(index) == [Finish("failed", "score[1] raised")]
    assert made.scheduler.handle(Begin()) == []


def test_a_failed_firing_is_tried_again() -> None:
    made = begun(aipo(), Rules(batch=2, end=1, retries=1))
    run_until(made, is_fire("score", 1))
    index = next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 1))
    told = made.fail(index)
    assert told[0] == Free((Firing("score", 1),), "scorer/0")
    assert told[1] == Fire(Firing("score", 1), "scorer/0", (1,))
    assert finish(made).status == "done"


def test_a_group_that_failed_for_good_is_replaced() -> None:
    made = begun(aipo(), Rules(batch=2, end=1, on_failure="replace"))
    run_until(made, is_fire("score", 1))
    made.fail(next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 1)))
    assert finish(made).status == "done"
    assert [c.groups for c in fired(made, "update")] == [(0, 2)]
    assert made.scheduler.ledger.fates == {"consumed": 2, "dropped": 0, "failed": 1}


def test_a_retry_waits_until_all_ranks_have_answered() -> None:
    made = world(aipo(), Rules(batch=1, end=1, retries=1), ranks=2)
    made.feed(Begin())
    run_until(made, is_fire("score", 0))
    first, second = (i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 0))
    assert made.fail(first) == []
    assert is_fire("score", 0)(made.step(second - 1)[1])


@pytest.mark.parametrize("node", ["update", "policy>generator"])
def test_a_failed_update_or_broadcast_stops_the_run_in_spite_of_retries(node: str) -> None:
    made = begun(aipo(), Rules(batch=1, end=2, retries=5, on_failure="replace"))
    if node == "update":
        run_until(made, is_fire("update", 0))
    index = next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing.node == node)
    assert made.fail(index)[-1] == Finish("failed", f"{node}[0] raised")


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
    index = next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("score", 0))
    made.pending[index] = replace(made.pending[index], dropped=True)
    lost = made.step(index)
    assert not [c for c in lost if isinstance(c, Free) and Firing("generate", 0) in c.firings]
    index = next(i for i, e in enumerate(made.pending) if isinstance(e, Done) and e.firing == Firing("judge", 0))
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


# Checkpoints ------------------------------------------------------------------------------------------------


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
    nodes = (
        call("pack", ["texts"], "scorer", stateful=True),
        call("update", ["policy", "pack"], "trainer", "update"),
    )
    made = begun(graph("stateful", {"policy": "update"}, ["texts"], nodes), Rules(batch=2, end=9))
    run_until(made, is_fire("pack", 0))
    assert made.feed(Checkpoint()) == []
    told = made.step(next(i for i, e in enumerate(made.pending) if "pack" in str(e)))
    assert {type(c) for c in told} == {Free, Save}
    finish(made)
    assert [c.firing.index for c in fired(made, "pack")] == list(range(18))


# Rules ------------------------------------------------------------------------------------------------------


def test_pinned_versions_need_one_lag() -> None:
    nodes = (
        broadcast("broadcast", "policy", 0),
        broadcast("older", "policy", 2, "scorer"),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("judge", ["generate", "older"]),
        call("update", ["policy", "judge"], "trainer", "update"),
    )
    two_lags = graph("two_lags", {"policy": "update"}, ["prompts"], nodes)
    tables = compile_tables(two_lags, place(two_lags))
    with pytest.raises(ValueError, match="given generate lag=0, judge lag=2; needed one lag"):
        Scheduler(tables, Rules(batch=1, end=2, versions="pinned"))
    Scheduler(tables, Rules(batch=1, end=2))


def test_why_a_replica_is_idle() -> None:
    made = begun(aipo(lag=0), Rules(batch=1, end=2))
    assert made.scheduler.cause("generator/0") == "start"
    assert made.scheduler.cause("scorer/0") == "data"
    run_until(made, is_fire("update", 0))
    exhaust(made, but="'update'")
    assert made.scheduler.cause("generator/0") == "weights"
    made.feed(Checkpoint(final=True))
    assert made.scheduler.cause("generator/0") == "saving"
    finish(made)
    assert made.scheduler.cause("generator/0") == "done"
