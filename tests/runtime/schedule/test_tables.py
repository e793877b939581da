"""What tables derive from a graph and a plan, and which plans and rules are refused."""

from dataclasses import replace

import pytest

from penstock.graph import load, trace
from penstock.graph.ir import Graph, Node
from penstock.runtime.cluster.placement import Plan, Pool, Rank
from penstock.runtime.schedule.compile import Rules, Tables, check_rules

from .graphs import actor_critic, aipo, broadcast, call, delay, evaluate, graph, keep, place, sft


def tables(made: Graph) -> Tables:
    return Tables(made, place(made))


def test_steps_know_what_they_read_and_who_reads_them() -> None:
    steps = tables(aipo(lag=3)).steps
    assert steps["prompts"].source
    assert steps["generate"].weights == (("policy>generator", 3),)
    assert steps["generate"].readers == ("score", "update")
    assert steps["update"].groups == ("generate", "advantage")
    assert steps["update"].carried == steps["update"].makes == ("policy",)
    assert steps["update"].publishes == ("policy>generator",)
    # Readers of a carried value come before the node that donates it.
    steps = tables(actor_critic()).steps
    assert steps["update_critic"].after == steps["update_critic"].updates == ("targets",)
    assert "reference" not in steps["refer"].carried
    # A value that never changes has no lag.
    generate = tables(evaluate()).steps["evaluate.generate"]
    assert (generate.weights, generate.fixed) == ((), ("policy>generator",))


def test_two_broadcasts_to_a_pool_share_its_channel() -> None:
    nodes = (
        broadcast("often", "policy", 3, every=4),
        broadcast("seldom", "policy", 5, every=6),
        call("generate", ["prompts", "often"], "generator"),
        call("judge", ["generate", "seldom"], "generator"),
        call("update", ["policy", "judge"], "trainer", "update"),
    )
    made = graph("shared", {"policy": "update"}, ["prompts"], nodes)
    assert tables(made).channels["policy>generator"].every == 2


SHORT = Plan(tuple(replace(p, holds=tuple(h for h in p.holds if h != "score")) for p in place(aipo()).pools))
MOVED = Plan((Pool("elsewhere", ("policy",), SHORT.pools[0].replicas), *place(sft()).pools))
MOVED = Plan(tuple(replace(p, holds=("update",)) if p.name == "trainer" else p for p in MOVED.pools))
CROSSED = graph(
    "crossed",
    {"policy": "actor", "critic": "judge"},
    ["texts"],
    [call(name, ["policy", "critic", "texts"], "trainer", "update") for name in ("actor", "judge")],
)


@pytest.mark.parametrize(
    ("made", "plan", "message"),
    [
        (aipo(), SHORT, "no pool holds score; the pools hold advantage, generate"),
        (aipo(), place(aipo(), {"trainer": 2}), "holds the carried value 'policy' and has 2 replicas; needed 1"),
        (sft(), place(sft(), {"trainer": 2}), "holds the carried value 'policy' and has 2 replicas; needed 1"),
        (sft(), MOVED, "update reads the carried value 'policy' and is in pool 'trainer'; needed 'else"),
        (CROSSED, place(CROSSED), "wait for each other"),
    ],
)
def test_plans_and_graphs_that_cannot_work_are_refused(made: Graph, plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tables(made, plan)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"batch": 0, "end": 1}, "batch: given 0, needed at least 1"),
        ({"batch": 1, "end": 1, "start": 2}, "updates: given 1, but 2 are done already"),
        ({"batch": 1, "end": 1, "versions": "pinned", "on_failure": "replace"}, "given --versions pinned; needed"),
        ({"batch": 1, "end": 1, "versions": "pinned", "order": "ready"}, "given --versions pinned; needed"),
    ],
)
def test_rules_that_cannot_work(rules: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(**rules)  # type: ignore[arg-type]


def test_parts_that_do_not_divide_the_batch_are_refused() -> None:
    made = aipo(accumulate=3)
    check_rules(tables(made), Rules(batch=6, end=1))
    with pytest.raises(ValueError, match=r"update: accumulate: given parts of 3 groups of a batch of 4; needed a num"):
        check_rules(tables(made), Rules(batch=4, end=1))


@pytest.mark.parametrize(("lag", "device", "parts"), [(0, "cuda:0", 0), (0, "cpu", 2), (1, "cuda:0", 2)])
def test_an_update_that_takes_turns_with_its_generator_takes_the_batch_whole(lag: int, device: str, parts: int) -> None:
    made = trace(load("grpo"), {"lag": lag, "accumulate": 2})
    ranks = Rank(device=device), Rank(device="cuda:1" if device != "cpu" else "cpu")
    pools = place(made).pools

    def on(rank: Rank) -> Plan:
        """Return the plan with the generator on `rank`, and all else on the first one."""
        return Plan(
            tuple(
                replace(p, replicas=(replace(p.replicas[0], ranks=(rank if p.name == "generator" else ranks[0],)),))
                for p in pools
            )
        )

    assert Tables(made, on(ranks[0])).steps["policy_update"].accumulate == parts
    assert Tables(made, on(ranks[1])).steps["policy_update"].accumulate == 2


def program(lag: int, *nodes: Node, every: int = 1) -> Graph:
    """Groups are generated and pass through `nodes`; the update reads the last one's output."""
    sent = broadcast("broadcast", "policy", lag, every=every)
    made = [sent, call("generate", ["prompts", "broadcast"], "generator"), *nodes]
    learn = call("update", ["policy", made[-1].name], "trainer", "update")
    return graph("ruled", {"policy": "update"}, ["prompts"], [*made, learn])


def delayed(lag: int) -> Graph:
    """Generation depends on the policy of `lag` updates before; its weights are up to 2 updates old."""
    past = delay("past", "policy", lag), call("choose", ["prompts", "past"], "trainer")
    made = [*past, broadcast("broadcast", "policy", 2), call("generate", ["choose", "broadcast"], "generator")]
    learn = call("update", ["policy", "generate"], "trainer", "update")
    return graph("delayed", {"policy": "update"}, ["prompts"], [*made, learn])


OLDER = broadcast("older", "policy", 2, "scorer"), call("judge", ["generate", "older"])
LATE = graph(
    "late",
    {"policy": "update"},
    ["prompts"],
    [*aipo(1).nodes, broadcast("mine", "policy", 2), call("watch", ["mine"], "generator", "update")],
)
COMPARED = program(2, delay("past", "policy", 0), call("compare", ["generate", "past"], "trainer"))


@pytest.mark.parametrize(
    ("made", "rule", "message"),
    [
        (program(0, *OLDER), "pinned", "given generate lag=0, judge lag=2; needed one lag"),
        (LATE, "pinned", "given generate lag=1, watch lag=2"),
        (
            program(1, keep("keep", ["generate"]), every=2),
            "pinned",
            "given the filter keep, broadcast with every=…; needed none",
        ),
        (delayed(1), "pinned", "given choose, which reads 'policy' with a delay of 1 before weights are read w"),
        (delayed(2), "pinned", ""),
        (COMPARED, "pinned", ""),  # it reads the delayed value after the weights
        (delayed(1), "replace", "given choose, which reads 'policy' delayed; needed no delay, which is exact"),
        (aipo(), "replace", ""),
        (delayed(2), "ready", "given choose, which reads 'policy' delayed; needed no delay"),
        (program(1, every=2), "ready", "given broadcast with every=…"),
        (program(0, *OLDER), "ready", "given generate lag=0, judge lag=2"),
        (LATE, "ready", ""),
        (program(1, keep("keep", ["generate"])), "ready", ""),
    ],
)
def test_rules_that_a_graph_does_not_allow(made: Graph, rule: str, message: str) -> None:
    check_rules(tables(made), Rules(batch=1, end=1))
    asked = {"pinned": {"versions": "pinned"}, "replace": {"on_failure": "replace"}, "ready": {"order": "ready"}}
    rules = Rules(1, 1, **asked[rule])  # type: ignore[arg-type]
    if not message:
        check_rules(tables(made), rules)
        return
    with pytest.raises(ValueError, match=message):
        check_rules(tables(made), rules)
