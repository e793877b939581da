"""The fate of groups: which an update takes, which are dropped or fail, what is freed, and when the run ends."""

import json
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from penstock.graph.ir import Firing, Graph
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Abort, Begin, Done, Failed, Finish, Fire, Free, Unread
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.state import Ledger
from penstock.runtime.schedule.transitions import holders_of_past

from .graphs import actor_critic, aipo, broadcast, call, graph, keep
from .world import World, freed, world

# Dropped ----------------------------------------------------------------------------------------------------


def filtered(lag: int = 0) -> Graph:
    nodes = (
        broadcast("broadcast", "policy", lag),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate"]),
        keep("keep", ["generate", "score"]),
        call("update", ["policy", "keep"], "trainer", "update"),
    )
    return graph("filtered", {"policy": "update"}, ["prompts"], nodes)


def test_a_dropped_group_leaves_its_place_to_the_next_one() -> None:
    made = world(aipo(lag=0), Rules(batch=2, end=1))
    made.drop(made.until_fired("score", 0))
    made.end()
    assert made.batches() == [(1, 2)]
    assert made.outcomes == {"consumed": 2, "dropped": 1, "failed": 0}


def test_an_update_takes_the_next_kept_groups_in_order() -> None:
    made = world(filtered(), Rules(batch=2, end=2))
    while made.finish is None:
        keeps = [event for event in made.pending if isinstance(event, Done) and event.firing.node == "keep"]
        if keeps and keeps[0].firing.index % 2 == 0:
            assert freed(made.drop(keeps[0])) >= {
                keeps[0].firing._replace(node=n) for n in ("generate", "score", "keep")
            }
        else:
            made.step(keeps[0] if keeps else None)
    assert made.batches() == [(1, 3), (5, 7)]
    assert made.outcomes == {"consumed": 4, "dropped": 4, "failed": 0}


def test_pinned_versions_refuse_a_filter() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=3, versions="pinned"), drops={"score": 1.0})
    assert made.end("failed").error.endswith("given --versions pinned; needed --versions free for a filter")


def test_groups_that_take_the_place_of_dropped_ones_keep_the_lag() -> None:
    for seed in range(10):
        made = world(filtered(lag=1), Rules(batch=2, end=6), drops={"keep": 0.5})
        made.end(rng=Random(seed))
        used, consumed = made.versions(), made.checker.books.consumed
        assert len(consumed) == 12
        assert all(update - 1 <= used[g] <= update for g, update in consumed.items())


def test_a_filter_that_drops_too_much_ends_the_run_with_its_counts() -> None:
    made = world(filtered(), Rules(batch=2, end=3, drops=2))
    made.step(made.until_fired("keep", 0))
    for ordinal in (1, 2, 3):
        made.exhaust(but="keep")
        made.drop(made.at("keep", ordinal))
    made.exhaust(but="keep")
    assert made.drop(made.at("keep", 4))[-1] == Finish(
        "failed",
        "given 4 groups dropped for update 0, the last by keep[4], and 1 kept; needed 2 kept ones before 2 batches are "
        "dropped (--drops of a run), or a filter that keeps more",
    )


def test_a_resumed_run_remembers_what_was_dropped() -> None:
    made = world(filtered(lag=1), Rules(batch=2, end=6), drops={"keep": 0.4})
    made.run(Random(1), steps=60)
    resumed = made.stop()
    resumed.end(rng=Random(1))
    fates = resumed.checker.books.fates
    lost = [g for g, fate in fates.items() if fate == "dropped"]
    assert lost == [g for g in sorted(fates) if Random(f"{Firing('keep', g)}").random() < 0.4]
    assert resumed.outcomes["dropped"] == len(lost)


# Failed -----------------------------------------------------------------------------------------------------


def test_a_failure_stops_the_run_by_default() -> None:
    made = world(aipo(), Rules(batch=2, end=3))
    assert made.fail(made.until_fired("score", 1)) == [Finish("failed", "score[1] raised")]
    assert made.scheduler.handle(Begin()) == []
    assert world(aipo(), Rules(batch=1, end=2)).feed(Abort("a rank died")) == [Finish("failed", "a rank died")]


def test_a_failed_firing_is_tried_again() -> None:
    made = world(aipo(), Rules(batch=2, end=4, retries=1))
    told = made.fail(made.until_fired("score", 1))
    assert told[:2] == [Free((Firing("score", 1),), "scorer/0"), Fire(Firing("score", 1), "scorer/0", (1,))]
    resumed = made.stop()
    assert resumed.scheduler.ledger.retried == 1
    resumed.end()


def test_a_retry_waits_until_all_ranks_have_answered() -> None:
    made = world(aipo(), Rules(batch=1, end=1, retries=1), ranks=2)
    first = made.until_fired("score", 0)
    assert made.fail(first) == []
    again = made.step(made.at("score", 0))
    assert isinstance(again[1], Fire)
    assert again[1].firing == Firing("score", 0)


def test_a_group_that_failed_for_good_is_replaced() -> None:
    made = world(aipo(), Rules(batch=2, end=1, on_failure="replace"))
    made.fail(made.until_fired("score", 1))
    made.end()
    assert made.batches() == [(0, 2)]
    assert made.outcomes == {"consumed": 2, "dropped": 0, "failed": 1}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("retries", [0, 1, 99])
def test_failures_without_an_update_between_them_end_the_run_with_the_last_one(lag: int, retries: int) -> None:
    made = world(aipo(lag), Rules(batch=2, end=3, retries=retries, on_failure="replace", failures=2))
    while made.finish is None:
        scored = [event for event in made.pending if isinstance(event, Done) and event.firing.node == "score"]
        if scored:
            made.fail(scored[0])
        else:
            made.step()
    failed = [event for event in made.heard if isinstance(event, Failed)]
    assert len(failed) == max(2 * 2 * (1 + lag), retries + 1)
    assert made.finish.status == "failed"
    assert "(--failures 2" in made.finish.error
    assert (f"for each of {1 + lag} updates" in made.finish.error) == (lag > 0)
    assert failed[-1].error in made.finish.error


def test_a_failed_update_stops_the_run_in_spite_of_retries() -> None:
    made = world(aipo(), Rules(batch=1, end=2, retries=5, on_failure="replace"))
    assert made.fail(made.until_fired("update", 0))[-1] == Finish("failed", "update[0] raised")


# The ledger -------------------------------------------------------------------------------------------------


def opened(count: int) -> Ledger:
    ledger = Ledger()
    for _ in range(count):
        ledger.finish(ledger.open())
    return ledger


def test_an_unfinished_group_holds_up_those_after_it() -> None:
    ledger = opened(6)
    ledger.lose(1, "dropped")
    ledger.groups[2].finished = False
    assert ledger.take(3) is None
    ledger.groups[2].finished = True
    assert ledger.take(3) == (0, 2, 3)
    assert ledger.take(3) is None


def test_groups_that_are_ready_overtake_while_all_others_can_be_in_time() -> None:
    rng = Random(3)
    for _ in range(400):
        batch, update = rng.randint(1, 3), rng.randint(0, 5)
        ledger = opened(rng.randint(batch, 7))
        deadlines = {g: update + rng.randint(0, 3) for g in ledger.groups}
        for group in ledger.groups.values():
            group.finished = rng.random() < 0.7
        ledger.finished = sum(group.finished for group in ledger.groups.values())
        finished = [g for g, group in ledger.groups.items() if group.finished]
        # The update may have taken some groups already.
        before = tuple(rng.sample(finished, rng.randint(0, min(batch - 1, len(finished)))))
        count = rng.randint(1, batch - len(before))
        room = batch - len(before) - count
        # Exhaustively: choices of finished groups after which all others meet their deadlines, given the room left in
        # this update and `batch` in each later one.
        able = [
            taken
            for taken in combinations([g for g in finished if g not in before], count)
            if all(
                sum(deadlines[g] <= update + k for g in ledger.groups if g not in (*before, *taken)) <= room + k * batch
                for k in range(5)
            )
        ]
        taken = ledger.take_ready(count, batch, update, lambda group, d=deadlines: d[group.ordinal], before)  # type: ignore[misc]
        assert (taken in able) if able else taken is None


def test_a_long_response_is_overtaken_until_its_weights_would_be_too_old() -> None:
    made = world(aipo(lag=2), Rules(batch=1, end=6, order="ready"), capacity=8)
    made.until_fired("generate", 0)
    made.exhaust(but="node='generate', index=0")
    assert made.checker.books.consumed == {1: 0, 2: 1}  # group 0 used version 0, so that update 2 is its deadline
    made.end()
    assert made.checker.books.consumed[0] == 2
    assert sorted(made.checker.books.consumed) == list(range(6))


def test_a_group_that_pauses_goes_on_before_later_ones_where_there_is_room() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=4), replicas=2, capacity=1, pauses={"generate": 0.9})
    made.end(rng=Random(5))
    fired = [c for told in made.told for c in told if isinstance(c, Fire) and c.firing.node == "generate"]
    segments = {g: [(c.firing.segment, c.replica) for c in fired if c.firing.index == g] for g in range(8)}
    for pieces in segments.values():
        assert [segment for segment, _ in pieces] == list(range(len(pieces)))
    assert any(len({replica for _, replica in pieces}) > 1 for pieces in segments.values())
    # A segment's output is freed when the next segment ends; the whole has the name of an unbroken firing.
    left = {c.firing for c in fired if c.firing.segment}
    assert left == {firing for told in made.told for firing in freed(told) if firing.segment}


def test_a_lost_group_no_longer_stands_before_others() -> None:
    ledger = opened(5)
    assert ledger.before(4) == 4
    ledger.groups[2].working = 1
    lost = ledger.lose(2, "dropped")
    assert (ledger.before(2), ledger.before(3), ledger.before(4)) == (2, 2, 3)
    assert ledger.find(2) is lost  # it is removed when no work on it is left
    assert 2 not in ledger.groups


def test_lost_groups_below_the_last_consumed_one_are_only_counted() -> None:
    rng = Random(1)
    ledger, lost = Ledger(), 0
    for ordinal in range(400):
        ledger.finish(ledger.open())
        if rng.random() < 0.4:
            ledger.lose(ordinal, "dropped")
            lost += 1
        if batch := ledger.take(5):
            ledger.consume(batch)
        assert ledger.before(ordinal + 1) == ordinal + 1 - lost
    assert len(ledger.lost) < 20 < lost


def test_groups_of_earlier_updates_stand_before_all() -> None:
    ledger = Ledger(earlier=12)
    ledger.open()
    assert ledger.before(0) == 12


def test_a_ledger_survives_json() -> None:
    ledger = opened(7)
    ledger.lose(1, "dropped")
    batch = ledger.take(2)
    assert batch == (0, 2)
    ledger.consume(batch)
    ledger.lose(4, "failed")
    ledger.groups[3].made, ledger.groups[3].readers = {"generate": "generator/0"}, {"generate": 2}
    ledger.groups[3].place, ledger.groups[3].deadlines = 2, {"generate": 5}
    ledger.groups[5].place, ledger.groups[5].deadlines = 4, {"generate": 6}  # in progress, so that it begins again
    restored = Ledger()
    restored.restore(json.loads(json.dumps(ledger.to_json())))
    assert restored.to_json() == ledger.to_json()
    assert restored.before(6) == ledger.before(6) == 4
    assert (restored.groups[3].place, restored.groups[3].deadlines) == (2, {"generate": 5})
    assert (restored.groups[5].place, restored.groups[5].deadlines) == (None, {})
    assert restored.first == 3


# Lost -------------------------------------------------------------------------------------------------------


def at_a_loss(graph: Graph, node: str, versions: str) -> World:
    """In update 1, a node has started when a generator is lost that holds values which it is to read."""
    rules = Rules(batch=2, end=3, versions=versions, lost_replica="replace")  # type: ignore[arg-type]
    made = world(graph, rules, replicas=2, ranks=2)
    made.until_fired(node, 1)
    held = made.scheduler.ledger.groups[made.scheduler.taken[0]].made["generate"]
    made.lose(held)
    made.join(held)
    return made


def find_nothing(made: World, node: str) -> list[Finish]:
    """Let all ranks answer that they cannot read the node's input; return the end if this ends the run."""
    made.blind.add(Firing(node, 1))
    while Firing(node, 1) in made.blind:
        made.step(made.at(node, 1))
    return [made.finish] if made.finish else []


@pytest.mark.parametrize("versions", ["free", "pinned"])
def test_an_update_that_could_read_nothing_of_a_lost_value_gives_its_groups_back(versions: str) -> None:
    made = at_a_loss(aipo(), "update", versions)
    assert find_nothing(made, "update") == []
    assert made.scheduler.taken == ()
    made.end()
    assert made.batches() == [(0, 1), (2, 3), (2, 3), (4, 5)]
    assert made.outcomes == {"consumed": 6, "dropped": 0, "failed": 0}


def test_groups_that_another_step_of_the_update_has_read_are_made_again_for_it_alone() -> None:
    """Pinned versions give equal bits. With free versions the two nodes would train on different groups."""
    made = at_a_loss(actor_critic(), "update_policy", "pinned")
    assert find_nothing(made, "update_policy") == []
    made.end()
    assert made.batches("update_policy") == [(0, 1), (2, 3), (2, 3), (4, 5)]
    assert made.batches("targets") == [(0, 1), (2, 3), (4, 5)]
    made = at_a_loss(actor_critic(), "update_policy", "free")
    assert [end.status for end in find_nothing(made, "update_policy")] == ["failed"]


@pytest.mark.parametrize("case", ["one rank has read it", "nothing is lost"])
def test_an_update_that_cannot_be_taken_back_ends_the_run(case: str) -> None:
    made = at_a_loss(aipo(), "update", "pinned")
    if case == "nothing is lost":
        made = world(aipo(), Rules(batch=2, end=3, versions="pinned", lost_replica="replace"), replicas=2)
        made.until_fired("update", 1)
    else:
        made.step(made.at("update", 1))
    made.feed(Unread(Firing("update", 1), "trainer/0", len(made.tables.replicas["trainer/0"].ranks) - 1, "gone"))
    assert made.finish is not None
    assert (made.finish.status, "gone" in made.finish.error) == ("failed", True)


def test_groups_of_a_checkpoint_whose_replica_is_not_there_are_made_again_if_they_can_be() -> None:
    """With pinned versions and a lag, groups that need older weights than the checkpoint's cannot be made again."""
    made = world(aipo(lag=1), Rules(batch=2, end=5, lost_replica="replace"), replicas=2)
    made.until_fired("update", 1)
    made.exhaust("update")
    cut = made.stop()
    state = cut.scheduler
    held = {holder for group in state.ledger.groups.values() for holder in group.made.values()}
    assert {"generator/0", "generator/1"} <= held
    for versions, lost in (("free", set[str]()), ("pinned", {"generator/0", "generator/1"})):
        rules = replace(state.rules, versions=versions)  # type: ignore[arg-type]
        assert holders_of_past(Scheduler(made.tables, rules, cut.cut)) - {"scorer/0"} == lost
    again = Scheduler(made.tables, state.rules, cut.cut, absent={"generator/1"})
    told = again.handle(Begin())
    kept = {(value, free.replica) for free in told if isinstance(free, Free) for value in free.firings}
    assert kept
    for ordinal, group in again.ledger.groups.items():
        whole = "generator/1" not in state.ledger.groups[ordinal].made.values()
        assert (group.made == state.ledger.groups[ordinal].made) is whole
