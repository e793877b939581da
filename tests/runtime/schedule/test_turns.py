"""Turns: two steps that alternate on a group, in one bounded cycle."""

from random import Random

import pytest

from penstock.graph.ir import Firing, Graph, Node
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.events import Begin, Checkpoint, Commit, CommitTurn, Done, Finish, Fire, Free
from penstock.runtime.schedule.scheduler import Scheduler

from .examples import exhaust, finish, fired, is_fire, run_until, world
from .graphs import alternate, broadcast, call, graph, place
from .world import Setting, World

SPEAK, ANSWER = "speak", "answer"


def talking(turns: int = 3, lag: int = 1, *more: Node) -> Graph:
    nodes = (
        broadcast("broadcast", "policy", lag),
        *alternate(SPEAK, ANSWER, ["prompts", "broadcast"], turns),
        *(more or (call("score", [SPEAK, ANSWER]),)),
        call("update", ["policy", (more[-1].name if more else "score")], "trainer", "update"),
    )
    return graph("talking", {"policy": "update"}, ["prompts"], nodes)


def talked(made: Graph, rules: Rules, again: float = 1.0, replicas: int = 1) -> World:
    plan = place(made, {"generator": replicas, "environment": replicas})
    begun = World(Setting(made, plan, rules, {}, {}, again={ANSWER: again}))
    begun.feed(Begin())
    return begun


def said(world: World, kind: type[Fire] | type[CommitTurn] = Fire) -> list[Firing]:
    """What is said of the first group's turns."""
    firings = [
        c.firing for told in world.told for c in told if isinstance(c, Fire | CommitTurn) and isinstance(c, kind)
    ]
    return [firing for firing in firings if firing.node in (SPEAK, ANSWER) and firing.index == 0]


def freed(world: World) -> set[Firing]:
    return {f for told in world.told for c in told if isinstance(c, Free) for f in c.firings}


def test_turns_are_taken_one_after_the_other_up_to_the_bound() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1))
    assert finish(made) == Finish("done")
    assert said(made) == [Firing(node, 0, turn) for turn in range(3) for node in (SPEAK, ANSWER)]


def test_the_answer_ends_the_turns() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1), again=0.0)
    assert finish(made) == Finish("done")
    assert said(made) == [Firing(SPEAK, 0), Firing(ANSWER, 0)]
    assert said(made, CommitTurn) == []


def test_any_rank_may_ask_for_another_turn() -> None:
    made = world(talking(turns=2), Rules(batch=1, end=1), ranks=2)
    made.feed(Begin())
    run_until(made, is_fire(ANSWER, 0))
    answers = [event for event in made.pending if isinstance(event, Done) and event.firing.node == ANSWER]
    for event, again in zip(answers, (True, False), strict=True):
        made.pending.remove(event)
        told = made.feed(Done(event.firing, event.replica, event.rank, again=again))
    assert Fire(Firing(SPEAK, 0, 1), "generator/0", (0,)) in told


def test_what_a_turn_has_made_is_freed_when_the_next_one_has_spoken() -> None:
    made = talked(talking(turns=2), Rules(batch=1, end=1))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(SPEAK, 0, 1))
    assert not freed(made) & {Firing(SPEAK, 0), Firing(ANSWER, 0)}
    told = made.step(made.find(SPEAK, 0, turn=1))
    assert {f for c in told if isinstance(c, Free) for f in c.firings} == {Firing(SPEAK, 0), Firing(ANSWER, 0)}


def test_the_last_turn_is_settled_once_and_then_read() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(ANSWER, 0, 2))
    assert fired(made, "score") == []
    told = made.step(made.find(ANSWER, 0, turn=2))
    score = Fire(Firing("score", 0), "scorer/0", (0,))
    assert told.index(CommitTurn(Firing(SPEAK, 0, 2), "generator/0")) < told.index(score)
    assert told.index(CommitTurn(Firing(ANSWER, 0, 2), "environment/0")) < told.index(score)
    assert finish(made) == Finish("done")
    assert said(made, CommitTurn) == [Firing(SPEAK, 0, 2), Firing(ANSWER, 0, 2)]


def test_a_turn_that_failed_is_taken_again() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1, retries=1))
    for node in (SPEAK, ANSWER):
        run_until(made, lambda c, node=node: isinstance(c, Fire) and c.firing == Firing(node, 0, 1))  # type: ignore[misc]
        told = made.fail(made.find(node, 0, turn=1))
        replica = "generator/0" if node == SPEAK else "environment/0"
        assert told == [Free((Firing(node, 0, 1),), replica), Fire(Firing(node, 0, 1), replica, (0,))]
    assert finish(made) == Finish("done")


def test_a_group_that_fails_in_the_middle_frees_its_turns_and_is_replaced() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1, on_failure="replace"))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(ANSWER, 0, 1))
    told = made.fail(made.find(ANSWER, 0, turn=1))
    lost = {Firing("prompts", 0), Firing(SPEAK, 0, 1), Firing(ANSWER, 0, 1)}
    assert {f for c in told if isinstance(c, Free) for f in c.firings} == lost
    assert finish(made) == Finish("done")
    assert [c.groups for c in fired(made, "update")] == [(1,)]


def with_its_own(turns: int = 3, *, recalls: bool = True) -> Graph:
    """The node that answers reads what another node makes, other weights, and what it made in the turn before."""
    nodes = (
        broadcast("broadcast", "policy", 1),
        broadcast("frozen", "judge", 0, "environment"),
        call("persona", ["prompts"]),
        *alternate(SPEAK, ANSWER, ["prompts", "broadcast"], turns, own=["persona", "frozen"], recalls=recalls),
        call("score", [SPEAK, ANSWER]),
        call("update", ["policy", "score"], "trainer", "update"),
    )
    return graph("with_its_own", {"policy": "update", "judge": "judge"}, ["prompts"], nodes)


def test_turns_begin_when_the_inputs_of_both_are_there() -> None:
    made = talked(with_its_own(), Rules(batch=1, end=1))
    run_until(made, is_fire("persona", 0))
    exhaust(made, "persona")
    assert fired(made, SPEAK) == []
    made.step(made.find("persona", 0))
    assert finish(made) == Finish("done")
    assert said(made) == [Firing(node, 0, turn) for turn in range(3) for node in (SPEAK, ANSWER)]
    assert Firing("persona", 0) in freed(made)


def test_what_the_answering_node_recalls_is_freed_when_it_has_answered_again() -> None:
    made = talked(with_its_own(turns=2), Rules(batch=1, end=1))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(ANSWER, 0, 1))
    assert Firing(SPEAK, 0) in freed(made)
    assert Firing(ANSWER, 0) not in freed(made)
    told = made.step(made.find(ANSWER, 0, turn=1))
    free = next(c for c in told if isinstance(c, Free) and Firing(ANSWER, 0) in c.firings)
    assert told.index(free) < told.index(CommitTurn(Firing(ANSWER, 0, 1), "environment/0"))
    assert finish(made) == Finish("done")


@pytest.mark.parametrize("node", [SPEAK, ANSWER])
def test_a_group_can_be_dropped_at_any_turn(node: str) -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(node, 0, 1))
    made.drop(made.find(node, 0, turn=1))
    assert finish(made) == Finish("done")
    assert said(made)[-1] == Firing(node, 0, 1)
    assert made.scheduler.ledger.outcomes == {"consumed": 1, "dropped": 1, "failed": 0}


def test_a_group_lost_elsewhere_frees_its_turns_when_nobody_works_on_it() -> None:
    beside = call("judge", ["prompts"]), call("both", [SPEAK, "judge"])
    made = talked(talking(2, 1, *beside), Rules(batch=1, end=1))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(SPEAK, 0, 1), but=["judge"])
    made.drop(made.find("judge", 0))
    assert not freed(made) & {Firing(SPEAK, 0), Firing(ANSWER, 0)}
    told = made.step(made.find(SPEAK, 0, turn=1))
    gone = {f for c in told if isinstance(c, Free) for f in c.firings}
    assert gone >= {Firing(SPEAK, 0), Firing(ANSWER, 0), Firing(SPEAK, 0, 1)}
    assert finish(made) == Finish("done")


def test_every_turn_keeps_the_lag() -> None:
    for seed in range(10):
        made = talked(talking(turns=3, lag=1), Rules(batch=2, end=5), replicas=2)
        made.run(Random(seed))
        assert made.finish == Finish("done")
        used = {k: v for k, v in made.checker.books.versions.items() if k[1] == SPEAK}
        assert len(used) == 30
        assert all(g // 2 - 1 <= v <= g // 2 for (g, *_), v in used.items())


def test_turns_are_shared_by_replicas_as_they_have_room() -> None:
    made = talked(talking(turns=4), Rules(batch=4, end=1), replicas=2)
    made.run(Random(0))
    assert {c.replica for c in fired(made, SPEAK)} == {"generator/0", "generator/1"}


def test_a_group_in_the_middle_of_its_turns_starts_again_after_a_resume() -> None:
    made = talked(talking(turns=3), Rules(batch=2, end=2))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(SPEAK, 0, 2))
    made.feed(Checkpoint(final=True))
    run_until(made, lambda c: isinstance(c, Commit))
    resumed = made.resumed()
    assert finish(resumed) == Finish("done")
    assert said(resumed) == [Firing(node, 0, turn) for turn in range(3) for node in (SPEAK, ANSWER)]


def test_a_checkpoint_does_not_end_the_turns_under_way() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=2))
    run_until(made, lambda c: isinstance(c, Fire) and c.firing == Firing(SPEAK, 0, 1))
    made.feed(Checkpoint())
    assert finish(made) == Finish("done")
    assert said(made) == [Firing(node, 0, turn) for turn in range(3) for node in (SPEAK, ANSWER)]


def test_pinned_groups_take_all_their_turns_with_one_version_over_any_stop() -> None:
    stateful = call("note", [SPEAK, ANSWER], stateful=True)
    for seed in range(20):
        rng = Random(seed)
        made = talked(talking(3, 2, stateful), Rules(batch=2, end=5, versions="pinned"), again=0.6, replicas=2)
        made.run(rng, steps=rng.randrange(1, 150))
        if made.finish is None:
            made.feed(Checkpoint(final=True))
            made.run(rng)
        resumed = made.resumed() if made.finish == Finish("stopped") else made
        resumed.run(rng)
        assert resumed.finish == Finish("done")
        used = {k: v for k, v in resumed.checker.books.versions.items() if k[1] == SPEAK}
        assert all(v == max(0, g // 2 - 2) for (g, *_), v in used.items())


def test_steps_in_a_cycle_know_each_other() -> None:
    made = talking(turns=3)
    steps = Tables(made, place(made)).steps
    assert (steps[SPEAK].partner, steps[ANSWER].partner) == (ANSWER, SPEAK)
    assert (steps[SPEAK].answers, steps[ANSWER].answers) == (False, True)
    assert (steps[SPEAK].groups, steps[ANSWER].groups) == (("prompts",), ())
    assert steps[SPEAK].readers == steps[ANSWER].readers == ("score",)
    assert Scheduler(Tables(made, place(made)), Rules(1, 1)).handle(Begin())
