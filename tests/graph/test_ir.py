"""The graph as a value: equality, digest, JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.graph import Firing, Graph, load, trace
from penstock.graph.ir import Argument, Input, Node, Output, Ref
from penstock.graph.show import dumps, loads

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")

NAMES = st.sampled_from(["", "a", "b", "m:a", "/x.py:b", "evaluate.a", "é"])
REFS = st.builds(Ref, NAMES, NAMES)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
OPTIONS = st.dictionaries(NAMES, JSON, max_size=2).map(lambda d: tuple(sorted(d.items())))


def tuples(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(inner, max_size=2).map(tuple)


NODES = st.builds(
    Node,
    name=NAMES,
    op=NAMES,
    inputs=tuples(st.builds(Input, NAMES, NAMES, REFS)),
    outputs=tuples(st.builds(Output, NAMES, NAMES)),
    options=OPTIONS,
    pool=NAMES,
    clock=st.sampled_from(["group", "update"]),
    construct=st.sampled_from(["call", "broadcast"]),
    stateful=st.booleans(),
    lag=st.none() | st.integers(0, 9),
    every=st.integers(1, 3),
    where=NAMES,
    given=tuples(NAMES),
)
GRAPHS = st.builds(
    Graph,
    name=NAMES,
    op=NAMES,
    arguments=tuples(st.builds(Argument, NAMES, st.sampled_from(["carried", "source"]), NAMES, NAMES, NAMES, NAMES)),
    nodes=tuples(NODES),
    results=st.dictionaries(NAMES, REFS, max_size=3).map(lambda d: tuple(d.items())),
    options=OPTIONS,
    types=st.dictionaries(NAMES, tuples(NAMES), max_size=3).map(lambda d: tuple(sorted(d.items()))),
    doc=NAMES,
    where=NAMES,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(GRAPHS)
def test_json_loads_back_to_an_equal_graph_with_an_equal_hash(graph: Graph) -> None:
    again = loads(dumps(graph))
    assert again == graph
    assert again.digest() == graph.digest()
    assert hash(again) == hash(graph)


@pytest.mark.parametrize("name", ["aipo", "actor_critic", "anchored", "evaluate"])
def test_traced_graphs_load_back_equal(name: str) -> None:
    graph = trace(load(f"{PROGRAMS}:{name}"))
    assert loads(dumps(graph)) == graph
    assert Graph.from_json(json.loads(json.dumps(graph.to_json(), sort_keys=True))).digest() == graph.digest()


def test_tracing_twice_gives_equal_graphs() -> None:
    aipo = load(f"{PROGRAMS}:aipo")
    assert trace(aipo) == trace(aipo)
    assert trace(aipo) != trace(aipo, {"lag": 2})


def test_the_digest_depends_on_the_meaning_and_not_on_the_place() -> None:
    graph = trace(load(f"{PROGRAMS}:aipo"))
    moved = graph.replace(where="elsewhere:1", nodes=tuple(replace(n, where="elsewhere:2") for n in graph.nodes))
    assert moved != graph
    assert moved.digest() == graph.digest()
    assert trace(load(f"{PROGRAMS}:aipo"), {"lag": 0}).digest() != graph.digest()
    silent = graph.replace(nodes=tuple(replace(n, given=()) for n in graph.nodes))
    assert silent.digest() == graph.digest()


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="given format 2, needed 1"):
        Graph.from_json({"format": 2})


def test_a_graph_knows_its_parts() -> None:
    graph = trace(load(f"{PROGRAMS}:aipo"))
    assert [a.name for a in graph.carried] == ["policy"]
    assert [a.name for a in graph.sources] == ["prompts"]
    assert graph.producer("policy") == "aipo_update"
    assert graph.pools() == ("trainer", "generator", "scorer")
    assert graph["generate"].option("samples") == 8
    assert "score" in graph
    assert "policy" not in graph
    assert graph.argument("nobody") is None


def test_firings_are_named_by_node_index_turn_and_segment() -> None:
    assert str(Firing("generate", 3)) == "generate[3]"
    assert str(Firing("generate", 3, 1)) == "generate[3.1]"
    assert str(Firing("generate", 3, 0, 2)) == "generate[3.0.2]"
    assert Firing("generate", 3).index == 3
