"""What is looked up of a graph and a plan, and which plans and rules cannot work."""

from dataclasses import replace

import pytest

from penstock.runtime.cluster.placement import Plan, Pool
from penstock.runtime.schedule.compile import Rules, Tables, check_rules

from .graphs import actor_critic, aipo, broadcast, call, evaluate, graph, place, sft


def test_steps_know_what_they_read_and_who_reads_them() -> None:
    steps = Tables(aipo(lag=3), place(aipo())).steps
    assert steps["prompts"].source
    assert steps["generate"].weights == (("policy>generator", 3),)
    assert steps["generate"].readers == ("score", "update")
    assert steps["update"].groups == ("generate", "advantage")
    assert steps["update"].carried == steps["update"].makes == ("policy",)
    assert steps["update"].publishes == ("policy>generator",)


def test_who_reads_a_carried_value_comes_before_who_donates_it() -> None:
    steps = Tables(actor_critic(), place(actor_critic())).steps
    assert steps["update_critic"].after == ("targets",)
    assert steps["update_critic"].updates == ("targets",)
    assert "reference" not in steps["refer"].carried


def test_a_value_that_never_changes_has_no_lag() -> None:
    steps = Tables(evaluate(), place(evaluate())).steps
    assert steps["evaluate.generate"].weights == ()
    assert steps["evaluate.generate"].fixed == ("policy>generator",)


def test_a_plan_must_hold_everything() -> None:
    plan = place(aipo())
    short = Plan(tuple(Pool(p.name, tuple(h for h in p.holds if h != "score"), p.replicas) for p in plan.pools))
    with pytest.raises(ValueError, match="no pool holds score; the pools hold advantage, generate"):
        Tables(aipo(), short)


def test_a_carried_value_is_held_by_one_replica() -> None:
    for made in (aipo(), sft()):
        with pytest.raises(ValueError, match="holds the carried value 'policy' and has 2 replicas; needed 1"):
            Tables(made, place(made, {"trainer": 2}))


def test_a_carried_value_is_held_where_it_is_read() -> None:
    plan = place(sft())
    moved = Plan((Pool("elsewhere", ("policy",), plan.pools[0].replicas), *plan.pools[1:], plan.pools[0]))
    moved = Plan(tuple(replace(p, holds=("update",)) if p.name == "trainer" else p for p in moved.pools))
    with pytest.raises(
        ValueError, match="update reads the carried value 'policy' and is in pool 'trainer'; needed 'else"
    ):
        Tables(sft(), moved)


def test_two_updates_that_donate_what_the_other_reads_have_no_order() -> None:
    nodes = (
        call("actor", ["policy", "critic", "texts"], "trainer", "update"),
        call("judge", ["critic", "policy", "texts"], "trainer", "update"),
    )
    crossed = graph("crossed", {"policy": "actor", "critic": "judge"}, ["texts"], nodes)
    with pytest.raises(ValueError, match="wait for each other"):
        Tables(crossed, place(crossed))


def test_pinned_versions_need_the_current_one_in_per_update_nodes() -> None:
    nodes = (*aipo(1).nodes, broadcast("mine", "policy", 2), call("watch", ["mine"], "generator", "update"))
    watched = graph("watched", {"policy": "update"}, ["prompts"], nodes)
    tables = Tables(watched, place(watched))
    check_rules(tables, Rules(batch=1, end=1))
    with pytest.raises(ValueError, match="given generate lag=1, watch lag=2"):
        check_rules(tables, Rules(batch=1, end=1, versions="pinned"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"batch": 0, "end": 1}, "batch: given 0, needed at least 1"),
        ({"batch": 1, "end": 1, "start": 2}, "updates: given 1, but 2 are done already"),
        ({"batch": 1, "end": 1, "versions": "pinned", "on_failure": "replace"}, 'use versions="free" with it'),
    ],
)
def test_rules_that_cannot_work(rules: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(**rules)  # type: ignore[arg-type]
