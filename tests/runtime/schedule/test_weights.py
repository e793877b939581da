"""How versions get from the pool that makes them to those that read them."""

from random import Random

from penstock.graph.ir import Firing
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Begin, Finish, Fire, Publish, Send, Swap

from .examples import begun, exhaust, finish, fired, is_fire, published, run_until, world
from .graphs import actor_critic, aipo, broadcast, call, evaluate, graph, place
from .world import Setting, World


def test_a_version_is_published_before_the_update_that_donates_it() -> None:
    made = world(aipo(lag=1), Rules(batch=1, end=4))
    finish(made)
    order = [c for told in made.told for c in told]
    updates = [order.index(c) for c in fired(made, "update")]
    for version in range(4):
        assert order.index(Publish("policy>generator", version, "trainer/0")) < updates[version]


def test_a_broadcast_is_skipped_while_the_one_before_is_under_way() -> None:
    made = begun(aipo(lag=3), Rules(batch=1, end=6))
    run_until(made, lambda c: isinstance(c, Send) and c.version == 1)
    run_until(made, is_fire("update", 3), but=["Arrived"])
    finish(made)
    versions = published(made, "policy>generator")
    assert 2 not in versions
    assert 3 not in versions
    assert versions == sorted(versions)


def test_pinned_versions_skip_no_broadcast() -> None:
    made = world(aipo(lag=2), Rules(batch=1, end=6, versions="pinned"))
    finish(made)
    assert published(made, "policy>generator")[:4] == [0, 1, 2, 3]


def test_the_last_version_is_not_published_for_training() -> None:
    made = world(aipo(lag=0), Rules(batch=1, end=3))
    finish(made)
    assert published(made, "policy>generator") == [0, 1, 2]


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
    for live, versions in (({}, [7]), ({channel: 5}, [7]), ({channel: 7}, [])):
        setting = Setting(evaluate(), place(evaluate()), rules, {}, {})
        made = World(setting, live=live)
        finish(made)
        assert published(made, "policy>generator") == versions
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
    assert published(made, "reference>scorer") == [0]


def test_a_value_is_read_before_the_update_that_donates_it() -> None:
    made = world(actor_critic(lag=1), Rules(batch=2, end=3))
    finish(made)
    for update in range(3):
        nodes = ["targets", "update_policy", "update_critic"]
        order = [c.firing for told in made.told for c in told if isinstance(c, Fire) and c.firing.node in nodes]
        assert [f.node for f in order[3 * update : 3 * update + 3]] == nodes


def test_a_per_update_reader_of_weights_never_reads_newer_ones_than_its_update() -> None:
    nodes = (*aipo(1).nodes, broadcast("mine", "policy", 0), call("watch", ["generate", "mine"], "generator", "update"))
    watched = graph("watched", {"policy": "update"}, ["prompts"], nodes)
    for seed in range(10):
        made = world(watched, Rules(batch=2, end=5))
        made.run(Random(seed))
        assert made.finish == Finish("done")


def test_a_version_that_a_per_update_reader_needs_is_published_before_it_is_donated() -> None:
    nodes = (*aipo(3).nodes, broadcast("mine", "policy", 0), call("watch", ["generate", "mine"], "generator", "update"))
    made = world(graph("watched", {"policy": "update"}, ["prompts"], nodes), Rules(batch=1, end=4), replicas=2)
    made.feed(Begin())
    exhaust(made, but="generator/1")
    assert len(fired(made, "update")) == 1
    assert finish(made) == Finish("done")


def test_a_retry_does_not_go_where_its_pinned_version_is_being_swapped_out() -> None:
    made = world(aipo(lag=1), Rules(batch=1, end=4, versions="pinned", retries=1), replicas=2, capacity=1)
    made.feed(Begin())
    run_until(made, is_fire("generate", 1), but=["node='generate', index=0"])
    swap = run_until(made, lambda c: isinstance(c, Swap) and c.version == 1, but=["node='generate', index=1"])
    assert swap == Swap("policy>generator", 1, "generator/0")
    told = made.fail(made.find("generate", 1))
    assert Fire(Firing("generate", 1), "generator/1", (1,)) in told
    made.run(Random(0))
    assert made.finish == Finish("done")


def test_a_pinned_version_stays_live_for_a_retry() -> None:
    made = world(aipo(lag=1), Rules(batch=1, end=4, versions="pinned", retries=1), replicas=2, capacity=1)
    made.feed(Begin())
    run_until(made, is_fire("generate", 1), but=["node='generate', index=0"])
    exhaust(made, but="node='generate', index=1")
    assert made.scheduler.channels["policy>generator"].receivers["generator/1"].staged == 1
    told = made.fail(made.find("generate", 1))
    assert told[1:] == [Fire(Firing("generate", 1), "generator/1", (1,))]
    made.run(Random(0))
    assert made.finish == Finish("done")
