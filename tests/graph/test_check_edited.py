"""Faults of graphs that no program wrote, such as edited JSON."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.graph import Graph, Policy, Prompts, check, load, program, trace
from penstock.graph.ir import Argument, Input, Node, Output, Ref

NODES = Path(__file__).with_name("nodes_for_tests.py")
learn, samples_of = load(f"{NODES}:learn"), load(f"{NODES}:samples_of")


def only(graph: Graph, *words: str) -> None:
    """The graph has one fault, which holds all the words."""
    faults = check(graph)
    assert len(faults) == 1, "\n".join(map(str, faults))
    for word in words:
        assert word in str(faults[0])


@program
def sound(policy: Policy, prompts: Prompts, *, lag: int = 1) -> Any:
    rollouts, rewards = samples_of(prompts, policy, lag)
    return learn(policy, rollouts, rewards)


def edited(graph: Graph, name: str, **changes: Any) -> Graph:
    return graph.replace(nodes=tuple(replace(n, **changes) if n.name == name else n for n in graph.nodes))


def test_a_reference_to_nothing() -> None:
    graph = trace(sound)
    inputs = (Input("rollouts", graph["score"].inputs[0].type, Ref("genrate")),)
    words = ("score: input 'rollouts'", "'genrate', which is nowhere in the graph", "the nearest: generate")
    only(edited(graph, "score", inputs=inputs), *words)
    inputs = (Input("rollouts", graph["score"].inputs[0].type, Ref("generate", "1")),)
    only(edited(graph, "score", inputs=inputs), "'generate.1', an output that generate does not have", "generate: out")


def test_a_result_that_is_nowhere() -> None:
    graph = trace(sound).replace(results=(("policy", Ref("lern")),))
    faults = check(graph)
    assert sorted(f.what for f in faults) == ["learn: output 'out'", "the next 'policy'"]
    assert "'lern', which is nowhere in the graph" in [f.given for f in faults]


def test_two_things_of_one_name() -> None:
    graph = trace(sound)
    twice = graph.replace(nodes=(*graph.nodes, graph["score"]))
    only(twice, "score", "the name a second time", "two producers of one value")


def test_two_results_for_one_carried_value() -> None:
    graph = trace(sound)
    only(graph.replace(results=graph.results * 2), "the next 'policy'", "two producers of one value")


def test_results_for_what_is_not_carried() -> None:
    graph = trace(sound)
    faults = check(graph.replace(results=(*graph.results, ("prompts", Ref("prompts")), ("polcy", Ref("learn")))))
    assert [(f.given, f.needed) for f in faults if "the next" in f.what] == [
        ("'prompts', which is a source", "a carried value; there are: policy"),
        ("'polcy', which is no argument", "a carried value; the nearest: policy"),
    ]


def test_a_carried_value_without_a_next_one() -> None:
    graph = trace(sound).replace(results=())
    whats = [(f.what, f.given) for f in check(graph)]
    assert ("carried 'policy'", "no next value") in whats


def test_a_cycle_of_data() -> None:
    graph = trace(sound)
    loop = (*graph["generate"].inputs, Input("rewards", "penstock.graph.types:Rewards", Ref("score")))
    only(edited(graph, "generate", inputs=loop), "generate waits for itself", "generate → score → generate")
    own = (*graph["score"].inputs, Input("again", "penstock.graph.types:Rewards", Ref("score")))
    only(edited(graph, "score", inputs=own), "score waits for itself", "score → score")


def test_words_that_the_language_does_not_have() -> None:
    graph = trace(sound)
    only(edited(graph, "score", clock="weekly"), "score: clock", "'weekly'")
    only(edited(graph, "score", construct="goto"), "score: construct", "'goto'")
    only(edited(graph, "score", lag=1), "score: lag", "a lag belongs to a broadcast")
    only(edited(graph, "learn", every=0), "learn: every", "given   0")
    twice = edited(graph, "broadcast", inputs=graph["broadcast"].inputs * 2)
    only(twice, "broadcast", "2 inputs", "a broadcast of one value")


def test_any_graph_can_be_checked() -> None:
    inputs = (Input("x", "m:X", Ref("a", "no")), Input("y", "", Ref("")))
    nonsense = Node("a", "", inputs, (Output("out", ""),), clock="update")
    nobody = Argument("", "carried", "", "", "")
    graph = Graph("", "", (nobody, nobody), (nonsense, nonsense), (("", Ref("a")), ("b", Ref(""))))
    assert len(check(graph, batch=0)) > 5
    assert check(Graph("empty", "", (), (), ())) == []
