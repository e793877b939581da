"""Slower clocks, nodes that no update waits for, and checkpoints between updates."""

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from penstock.graph.ir import Firing, Graph, Node, Output
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Abort, Checkpoint, Commit, Copied, Done, Finish, Fire, Free, Publish, Save
from penstock.runtime.schedule.idle_causes import cause
from penstock.runtime.schedule.scheduler import Scheduler

from .graphs import POLICY, aipo, broadcast, call, graph, keep, place
from .world import Setting, World, world


def beside(*nodes: Node, lag: int = 1) -> Graph:
    """`aipo` with more nodes."""
    return graph("beside", {"policy": "update"}, ["prompts"], [*aipo(lag).nodes, *nodes])


def watched(lag: int, every: int = 1, stateful: bool = False) -> Graph:
    """`aipo` with a node off the critical path."""
    mine = broadcast("mine", "policy", lag, "evaluator")
    return beside(mine, call("watch", ["mine"], "evaluator", "update", stateful, every))


def averaged(every: int) -> Graph:
    """A second carried value that is sent; it changes at some updates only, by a value made in these."""
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
    made.end()
    assert made.indices("blend") == made.indices("measure") == [2, 5]
    assert made.indices("update") == list(range(8))


def test_a_value_between_steps_is_freed_with_its_update() -> None:
    made = world(averaged(every=2), Rules(batch=1, end=4))
    blend, held = made.until_fired("blend", 1), made.checker.books.values
    assert Firing("measure", 1) in held
    made.step(blend)
    assert Firing("measure", 1) not in held


def test_a_value_that_is_left_as_it_is_has_a_new_version_all_the_same() -> None:
    made = world(averaged(every=3), Rules(batch=1, end=5))
    made.end()
    assert made.published("average>scorer") == [0, 1, 2, 3, 4]
    assert made.versions("score") == {g: g for g in range(5)}


def test_updates_at_which_nothing_is_due_are_over_when_they_come() -> None:
    update = call("update", ["policy"], "trainer", "update", every=3)
    made = world(graph("lonely", {"policy": "update"}, [], [update]), Rules(batch=1, end=8))
    made.end()
    assert made.indices("update") == [2, 5]
    nodes = (broadcast("mine", "policy", 0, "evaluator"), call("watch", ["mine"], "evaluator", "update", every=2))
    made = world(graph("frozen", {"policy": "policy"}, [], nodes), Rules(batch=1, end=5))
    made.end()
    assert made.indices("watch") == [1, 3]


# Broadcasts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lag", "every"), [(1, 2), (2, 2), (3, 2), (4, 5)])
def test_only_each_mth_version_is_sent_and_the_lag_holds(lag: int, every: int) -> None:
    for seed in range(5):
        made = world(seldom(lag, every), Rules(batch=2, end=9), replicas=2)
        made.end(rng=Random(seed))
        assert all(index % every == 0 for index in made.published("policy>generator"))
        assert all(v % every == 0 and g // 2 - lag <= v <= g // 2 for g, v in made.versions().items())


@pytest.mark.parametrize(("lag", "every", "sent"), [(0, 1, range(8)), (0, 3, [2, 5]), (1, 4, [2, 3, 6, 7]), (0, 9, [])])
def test_only_versions_that_a_step_fires_with_are_sent_to_its_pool(lag: int, every: int, sent: Sequence[int]) -> None:
    made = world(watched(lag, every), Rules(batch=1, end=8))
    made.end()
    assert set(made.published("policy>evaluator")) <= set(sent)
    assert len(made.published("policy>evaluator")) >= len(made.fired("watch")) == 8 // every
    assert made.published("policy>generator") == list(range(8))


@pytest.mark.parametrize(("behind", "sent"), [(["watch"], [6, 7, 11]), ([], [7, 11])])
def test_a_resumed_run_sends_its_first_version_only_to_who_is_behind_or_due(behind: list[str], sent: list[int]) -> None:
    made = world(watched(lag=0, every=4), Rules(batch=1, end=12))
    made.until_fired("update", 5, but=behind)
    resumed = made.stop(but=behind)
    resumed.end()
    assert resumed.published("policy>evaluator") == sent


def test_a_pool_whose_first_weights_are_not_due_waits_for_data_and_not_for_its_start() -> None:
    made = world(watched(lag=0, every=3), Rules(batch=1, end=6))
    assert cause(made.scheduler, "evaluator/0") == "data"
    assert cause(made.scheduler, "generator/0") == "start"
    made.until(lambda c: isinstance(c, Publish) and (c.channel, c.version) == ("policy>evaluator", 2))
    assert cause(made.scheduler, "evaluator/0") == "start"


# Parts of a batch -----------------------------------------------------------------------------------------------


def parts_of(made: World, node: str = "update") -> list[tuple[int, int, tuple[int, ...]]]:
    """(update, part, groups) of each part that a node was fired for."""
    return [(fire.firing.index, fire.firing.segment, fire.groups) for fire in made.fired(node)]


def test_a_part_fires_as_soon_as_its_groups_and_those_before_them_are_finished() -> None:
    made = world(aipo(lag=0, accumulate=2), Rules(batch=4, end=2))
    made.until_fired("generate", 3)
    made.exhaust(but="node='generate', index=1")
    assert parts_of(made) == []  # groups 2 and 3 are finished, but belong to the second part
    made.step(made.at("generate", 1))
    made.exhaust(but="node='generate', index=1")
    assert parts_of(made)[:2] == [(0, 0, (0, 1)), (0, 1, (2, 3))]
    made.end()
    assert parts_of(made) == [(u, p, (4 * u + 2 * p, 4 * u + 2 * p + 1)) for u in range(2) for p in range(2)]
    assert made.published("policy>generator") == [0, 1]


def test_one_part_is_in_work_at_a_time_and_the_last_one_makes_the_version() -> None:
    made = world(aipo(lag=0, accumulate=1), Rules(batch=3, end=2))
    made.exhaust(but="node='update'")
    assert parts_of(made) == [(0, 0, (0,))]
    for part in range(3):
        assert made.published("policy>generator") == [0]
        made.step(made.pending[0])
        made.exhaust(but="node='update'")
        assert parts_of(made)[-1] == ((0, part + 1, (part + 1,)) if part < 2 else (1, 0, (3,)))
    assert made.published("policy>generator") == [0, 1]


def test_parts_are_of_the_groups_that_a_filter_keeps() -> None:
    nodes = [*aipo(0).nodes[:2], keep("keep", ["generate"]), call("judge", ["keep"])]
    learn = call("update", ["policy", "judge"], "trainer", "update", accumulate=2)
    made = world(graph("kept", {"policy": "update"}, ["prompts"], [*nodes, learn]), Rules(batch=4, end=1))
    for ordinal in (1, 2):
        made.until_fired("keep", ordinal)
        made.drop(made.at("keep", ordinal))
    made.end()
    assert parts_of(made) == [(0, 0, (0, 3)), (0, 1, (4, 5))]


def test_parts_take_what_is_ready_as_long_as_all_others_can_be_in_time() -> None:
    made = world(aipo(lag=1, accumulate=1), Rules(batch=2, end=4, order="ready"), capacity=8)
    made.until_fired("generate", 0)
    made.exhaust(but="node='generate', index=0")
    # Group 0 uses version 0, so that it must be in update 1, which keeps a place for it.
    assert [groups for _, _, groups in parts_of(made)] == [(1,), (2,), (3,)]
    made.end()
    assert made.checker.books.consumed[0] == 1
    assert sorted(made.checker.books.consumed) == list(range(8))


@pytest.mark.parametrize("final", [False, True])
def test_a_checkpoint_falls_between_parts_and_a_run_that_resumes_begins_with_the_first(final: bool) -> None:
    made = world(aipo(lag=0, accumulate=2), Rules(batch=4, end=2))
    made.until(lambda c: isinstance(c, Fire) and c.firing == Firing("update", 0), but=["node='generate', index=3"])
    assert not [c for c in made.feed(Checkpoint(final)) if isinstance(c, Save)]  # not during a part
    found = made.step(next(e for e in made.pending if "node='update'" in str(e)))
    assert len([c for c in found if isinstance(c, Save)]) == 3
    made.until(lambda c: isinstance(c, Commit), but=["node='generate', index=3"])
    assert saved(made) == [0]
    assert len(parts_of(made)) == 1
    resumed = made.resumed()
    resumed.end()
    assert parts_of(resumed)[:2] == [(0, 0, (0, 1)), (0, 1, (2, 3))]
    if not final:  # the run itself continues where it was
        made.end()
        assert parts_of(made)[:2] == [(0, 0, (0, 1)), (0, 1, (2, 3))]


def test_steps_that_take_their_batch_whole_wait_beside_one_in_parts() -> None:
    nodes = [
        *aipo(0).nodes[:4],
        call("measure", ["policy", "generate"], "trainer", "update"),
        call("update", ["policy", "generate", "advantage"], "trainer", "update", accumulate=1),
        call("learn", ["critic", "advantage"], "trainer", "update", accumulate=2),
    ]
    made = world(graph("both", {"policy": "update", "critic": "learn"}, ["prompts"], nodes), Rules(batch=4, end=3))
    made.end()
    of_first = [(c.firing.node, c.firing.segment) for told in made.told for c in told if isinstance(c, Fire)]
    order = [each for each in of_first if each[0] in ("measure", "update", "learn")][:7]
    # `measure` reads the policy that the last part changes.
    assert order.index(("measure", 0)) < order.index(("update", 3))
    assert order.index(("update", 0)) < order.index(("measure", 0))
    assert {parts for parts in parts_of(made, "learn") if parts[0] == 0} == {(0, 0, (0, 1)), (0, 1, (2, 3))}


def test_a_version_is_copied_aside_under_any_part_but_the_one_that_donates_it() -> None:
    """The trainer has room for both. The snapshot becomes free when an earlier version arrives late."""
    for part in range(2):
        made, rules = aipo(lag=3, accumulate=1), Rules(batch=2, end=6)
        run = World(Setting(made, place(made, capacity={"trainer": 2, "generator": 16}), rules))
        run.until(lambda c: isinstance(c, Publish) and c.version == 1)
        late = ["Arrived(channel='policy>generator', version=1"]
        run.until(lambda c, p=part: isinstance(c, Fire) and c.firing == Firing("update", 2, segment=p), but=late)  # type: ignore[misc]
        found = run.step(next(event for event in run.pending if late[0] in str(event)))
        assert [c.version for c in found if isinstance(c, Publish)] == [2][part:]
        run.end()


def test_no_version_is_copied_aside_between_two_updates_that_follow_each_other() -> None:
    """As above; late weights arrive when the first update is over, and a reader of what it returned is at work."""
    base = aipo(lag=3)
    nodes = (
        *base.nodes[:-1],
        replace(base["update"], outputs=(Output("out", POLICY),)),
        call("learn", ["update", "generate", "advantage"], "trainer", "update"),
        call("look", ["update"], "trainer", "update"),
    )
    made = graph("chained", {"policy": "learn"}, ["prompts"], nodes)
    run = World(Setting(made, place(made, capacity={"trainer": 2, "generator": 16}), Rules(batch=2, end=6)))
    run.until(lambda c: isinstance(c, Publish) and c.version == 1)
    late = ["Arrived(channel='policy>generator', version=1"]
    run.until(lambda c: isinstance(c, Fire) and c.firing == Firing("look", 2), but=late)
    found = run.step(next(event for event in run.pending if late[0] in str(event)))
    assert not [c for c in found if isinstance(c, Publish)]
    run.end()


def test_a_part_that_fails_ends_the_run() -> None:
    made = world(aipo(lag=0, accumulate=2), Rules(batch=4, end=2, retries=3, on_failure="replace"))
    made.until(lambda c: isinstance(c, Fire) and c.firing == Firing("update", 0, segment=1))
    failing = next(event for event in made.pending if "node='update'" in str(event))
    assert isinstance(failing, Done)
    assert made.fail(failing) == [Finish("failed", "update[0.0.1] raised")]


# Off the critical path ------------------------------------------------------------------------------------------


def test_updates_do_not_wait_for_a_step_that_trails() -> None:
    made = world(watched(lag=8), Rules(batch=1, end=6))
    made.exhaust(but="watch")
    assert (made.indices("update"), made.indices("watch"), made.finish) == (list(range(6)), [0], None)
    # Stopped after the last update, a resumed run still fires the trailing node.
    resumed = made.stop(but=["watch"])
    assert resumed.scheduler.update == 6
    for each in (made, resumed) if made.finish is None else (resumed,):
        each.end()
        assert each.indices("watch") == list(range(6))


def test_a_cut_does_not_wait_for_a_step_that_trails_and_it_fires_again_after_it() -> None:
    made = world(watched(lag=8), Rules(batch=1, end=6))
    made.until_fired("update", 3, but=["watch"])
    resumed = made.stop(but=["watch"])
    resumed.end()
    assert resumed.indices("watch") == list(range(6))
    assert min(resumed.published("policy>evaluator")) == 4


def test_a_cut_waits_for_the_state_of_a_step_that_trails() -> None:
    made = world(watched(lag=8, stateful=True), Rules(batch=1, end=6))
    made.until_fired("update", 1, but=["watch"])
    made.feed(Checkpoint())
    made.exhaust(but="watch")
    assert not [c for told in made.told for c in told if isinstance(c, Save)]
    assert any(isinstance(c, Save) for c in made.step(made.at("watch", 0)))


# Checkpoints ------------------------------------------------------------------------------------------------


def test_a_final_checkpoint_lets_the_update_in_flight_finish_and_starts_nothing_else() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=9))
    made.until_fired("update", 0)
    assert made.feed(Checkpoint(final=True)) == []
    made.feed(Checkpoint())  # a checkpoint that is not final does not cancel the final one
    made.until(lambda c: isinstance(c, Save))
    made.end("stopped")
    assert made.commit is not None
    assert made.commit.update == len(made.fired("update")) == 1


def test_a_checkpoint_does_not_stop_generation_and_a_final_one_makes_it_the_last() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=9), capacity=1)
    made.until_fired("generate", 0)
    saves = [c for c in made.feed(Checkpoint()) if isinstance(c, Save)]
    assert {s.replica for s in saves} == {"generator/0", "scorer/0", "trainer/0"}
    made.until_fired("generate", 1, but=["Copied", "Saved"])
    made.feed(Checkpoint(final=True))
    made.end("stopped")
    assert saved(made) == [0]


def saved(made: World) -> list[int]:
    """The updates before which a checkpoint was asked for."""
    return sorted({c.update for told in made.told for c in told if isinstance(c, Save)})


def test_updates_go_on_once_a_checkpoint_is_copied_and_the_next_one_waits_until_it_is_written() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=9), ranks=2)
    made.until_fired("update", 0)
    made.feed(Checkpoint())
    made.until(lambda c: isinstance(c, Save))
    made.exhaust(but="trainer/0")
    for rank in range(2):
        assert made.fired("update")[1:] == []
        made.step(Copied(1, "trainer/0", rank))
    made.until_fired("update", 2, but=["Saved"])
    made.feed(Checkpoint())
    made.exhaust(but="Saved")
    assert (len(made.fired("update")), saved(made), made.commit) == (3, [1], None)
    made.end()
    assert saved(made) == [1, 3]


def test_a_run_is_done_when_its_last_checkpoint_is_written() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=2))
    made.until_fired("update", 0)
    made.feed(Checkpoint())
    made.exhaust(but="Saved")
    assert (len(made.fired("update")), made.finish) == (2, None)
    made.end()
    assert made.commit is not None


def test_an_update_that_fails_lets_the_checkpoint_before_it_become_whole_and_starts_nothing() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=9))
    made.until_fired("update", 0)
    made.feed(Checkpoint())
    update = made.until_fired("update", 1, but=["Saved"])
    assert made.fail(update) == []
    assert made.finish is None
    made.end("failed")
    assert made.commit is not None
    assert made.told[-1] == [Commit(1, made.commit.state), Finish("failed", f"{update.firing} raised")]


def test_a_rank_that_is_lost_ends_the_run_whatever_is_being_written() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=9))
    made.until_fired("update", 0)
    made.feed(Checkpoint())
    made.fail(made.until_fired("update", 1, but=["Saved"]))
    assert made.feed(Abort("trainer/0 is gone")) == [Finish("failed", "update[1] raised")]


def test_a_cut_saves_what_the_resumed_run_reads_and_it_goes_on_exactly() -> None:
    made = world(aipo(lag=0), Rules(batch=3, end=4))
    made.until_fired("advantage", 4)
    resumed = made.stop()
    assert resumed.scheduler.update == 1
    resumed.end()
    assert made.batches() + resumed.batches() == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]


def test_a_pinned_cut_finishes_the_groups_whose_version_cannot_be_made_again() -> None:
    for seed in range(20):
        rng = Random(seed)
        made = world(aipo(lag=2), Rules(batch=2, end=6, versions="pinned"), replicas=2)
        made.run(rng, steps=rng.randrange(1, 90))
        made.feed(Checkpoint(final=True))
        made.run(rng)
        resumed = made.resumed()
        resumed.run(rng)
        assert resumed.versions() == {g: max(0, g // 2 - 2) for g in range(12)}


def test_a_finished_run_can_be_saved() -> None:
    made = world(aipo(), Rules(batch=1, end=2))
    made.end()
    cut = json.loads(json.dumps({"update": 2, **made.scheduler.ledger.to_json()}))
    told = Scheduler(made.tables, Rules(batch=1, end=2, start=2), cut).handle(Checkpoint(final=True))
    assert told == [Save(2, replica) for replica in made.tables.replicas]


def test_a_final_cut_is_written_only_if_it_has_more_in_it_than_the_newest_checkpoint() -> None:
    made = world(aipo(lag=1), Rules(batch=3, end=9))
    made.until_fired("advantage", 1)
    made.feed(Checkpoint())
    made.until(lambda c: isinstance(c, Commit))
    assert made.commit is not None
    cut = json.loads(made.commit.state)
    opened = [group for group in cut["groups"] if group[1].keys() == {"prompts"}]
    assert opened != []

    def resumed(complete: dict[str, object] | None) -> World:
        """The run resumed from the commit, after only its sources were read and its weights published."""
        again = made.resumed()
        again.scheduler.complete = complete
        while found := [event for event in again.pending if "prompts" in str(event) or ">" in str(event)]:
            again.step(found[0])
        return again

    for complete in (cut, {**cut, "groups": [group for group in cut["groups"] if group not in opened]}):
        assert resumed(complete).scheduler.handle(Checkpoint(final=True)) == [Finish("stopped")]
    more = resumed(cut)
    more.step(more.at("generate", next(f.index for f in more.scheduler.running if f.node == "generate")))
    for asked in (more, resumed({}), resumed(None), resumed({**cut, "groups": []})):
        assert {type(command) for command in asked.feed(Checkpoint(final=True))} == {Save}


def test_a_checkpoint_is_the_newest_from_its_commit_on() -> None:
    made = world(aipo(lag=1), Rules(batch=3, end=9))
    made.exhaust("node='generate'")
    made.feed(Checkpoint())
    made.until(lambda c: isinstance(c, Commit), but=["node='generate'"])
    assert made.feed(Checkpoint(final=True)) == [Finish("stopped")]


def test_state_is_not_saved_while_it_changes() -> None:
    nodes = (call("pack", ["texts"], "scorer", stateful=True), call("update", ["policy", "pack"], "trainer", "update"))
    made = world(graph("stateful", {"policy": "update"}, ["texts"], nodes), Rules(batch=2, end=9))
    pack = made.until_fired("pack", 0)
    assert made.feed(Checkpoint()) == []
    assert {type(c) for c in made.step(pack)} == {Free, Save}
    made.end()
    assert made.indices("pack") == list(range(18))
