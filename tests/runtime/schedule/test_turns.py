"""Turns: two nodes that alternate on a group, in one bounded cycle."""

from random import Random

import pytest

from penstock.graph.ir import Firing, Graph, Node
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Checkpoint, CommitTurn, Done, Fire

from .graphs import alternate, broadcast, call, graph
from .world import World, freed, world

SPEAK, ANSWER = "speak", "answer"
THREE = [Firing(node, 0, turn) for turn in range(3) for node in (SPEAK, ANSWER)]


def talking(turns: int = 3, lag: int = 1, *more: Node) -> Graph:
    nodes = (
        broadcast("broadcast", "policy", lag),
        *alternate(SPEAK, ANSWER, ["prompts", "broadcast"], turns),
        *(more or (call("score", [SPEAK, ANSWER]),)),
        call("update", ["policy", (more[-1].name if more else "score")], "trainer", "update"),
    )
    return graph("talking", {"policy": "update"}, ["prompts"], nodes)


def with_its_own(turns: int = 3) -> Graph:
    """The node that answers reads another node's output, other weights, and its own output of the previous turn."""
    nodes = (
        broadcast("broadcast", "policy", 1),
        broadcast("frozen", "judge", 0, "environment"),
        call("persona", ["prompts"]),
        *alternate(SPEAK, ANSWER, ["prompts", "broadcast"], turns, own=["persona", "frozen"], recalls=True),
        call("score", [SPEAK, ANSWER]),
        call("update", ["policy", "score"], "trainer", "update"),
    )
    return graph("with_its_own", {"policy": "update", "judge": "judge"}, ["prompts"], nodes)


def talked(made: Graph, rules: Rules | None = None, again: float = 1.0, replicas: int = 1, ranks: int = 1) -> World:
    return world(made, rules or Rules(batch=1, end=1), replicas, ranks=ranks, again={ANSWER: again})


def said(world: World, kind: type[Fire] | type[CommitTurn] = Fire) -> list[Firing]:
    """The firings in commands about the first group's turns."""
    asked = [c.firing for told in world.told for c in told if isinstance(c, Fire | CommitTurn) and isinstance(c, kind)]
    return [firing for firing in asked if firing.node in (SPEAK, ANSWER) and firing.index == 0]


@pytest.mark.parametrize(("again", "taken"), [(1.0, 6), (0.0, 2)])
def test_turns_are_taken_one_after_the_other_up_to_the_bound_or_the_answer_that_ends_them(
    again: float, taken: int
) -> None:
    made = talked(talking(turns=3), again=again)
    made.end()
    assert said(made) == THREE[:taken]
    assert said(made, CommitTurn) == (THREE[4:] if again else [])


def test_any_rank_may_ask_for_another_turn() -> None:
    made = talked(talking(turns=2), ranks=2)
    made.until_fired(ANSWER, 0)
    for event in [event for event in made.pending if isinstance(event, Done) and event.firing.node == ANSWER]:
        made.pending.remove(event)
        told = made.feed(Done(event.firing, event.replica, event.rank, again=event.rank == 0))
    assert Fire(Firing(SPEAK, 0, 1), "generator/0", (0,)) in told


def test_the_last_turn_is_settled_once_and_then_read() -> None:
    made = talked(talking(turns=3))
    last = made.until_fired(ANSWER, 0, 2)
    assert made.fired("score") == []
    told = made.step(last)
    score = told.index(Fire(Firing("score", 0), "scorer/0", (0,)))
    assert told.index(CommitTurn(Firing(SPEAK, 0, 2), "generator/0")) < score
    assert told.index(CommitTurn(Firing(ANSWER, 0, 2), "environment/0")) < score
    made.end()
    assert said(made, CommitTurn) == THREE[4:]


def test_a_group_that_fails_in_the_middle_frees_its_turns_and_is_replaced() -> None:
    made = talked(talking(turns=3), Rules(batch=1, end=1, on_failure="replace"))
    told = made.fail(made.until_fired(ANSWER, 0, 1))
    assert freed(told) == {Firing("prompts", 0), Firing(SPEAK, 0, 1), Firing(ANSWER, 0, 1)}
    made.end()
    assert made.batches() == [(1,)]


def test_turns_begin_when_the_inputs_of_both_are_there() -> None:
    made = talked(with_its_own())
    persona = made.until_fired("persona", 0)
    made.exhaust("persona")
    assert made.fired(SPEAK) == []
    made.step(persona)
    made.end()
    assert said(made) == THREE


def test_every_turn_keeps_the_lag() -> None:
    replicas = set()
    for seed in range(10):
        made = talked(talking(turns=3, lag=1), Rules(batch=2, end=5), replicas=2)
        made.end(rng=Random(seed))
        used = {k: v for k, v in made.checker.books.versions.items() if k[1] == SPEAK}
        assert len(used) == 30
        assert all(g // 2 - 1 <= v <= g // 2 for (g, *_), v in used.items())
        replicas |= {c.replica for c in made.fired(SPEAK) if c.firing.turn}
    assert replicas == {"generator/0", "generator/1"}


def test_a_group_in_the_middle_of_its_turns_starts_again_after_a_resume() -> None:
    made = talked(talking(turns=3), Rules(batch=2, end=2))
    made.until_fired(SPEAK, 0, 2)
    resumed = made.stop()
    resumed.end()
    assert said(resumed) == THREE
    # A checkpoint that is not final does not end the turns in progress.
    made = talked(talking(turns=3), Rules(batch=1, end=2))
    made.until_fired(SPEAK, 0, 1)
    made.feed(Checkpoint())
    made.end()
    assert said(made) == THREE
