"""The graph as a value: equality, digest, JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Firing, Graph, load, trace
from penstock.graph.show import dumps

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")


@pytest.mark.parametrize("name", ["aipo", "actor_critic", "anchored", "evaluate"])
def test_traced_graphs_load_back_equal(name: str) -> None:
    graph = trace(load(f"{PROGRAMS}:{name}"))
    again = Graph.from_json(json.loads(dumps(graph)))
    assert again == graph
    assert hash(again) == hash(graph)
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


GOOD = trace(load(f"{PROGRAMS}:aipo")).to_json()


@pytest.mark.parametrize(
    "data",
    [
        {"format": 2},
        {"format": 1},
        [],
        {**GOOD, "name": 3},
        {**GOOD, "options": []},
        {**GOOD, "nodes": [{**GOOD["nodes"][0], "later": 1}]},
        {**GOOD, "nodes": [{**GOOD["nodes"][0], "clock": "weekly"}]},
        {**GOOD, "nodes": [{**GOOD["nodes"][0], "inputs": [["value", 1, "policy", "out"]]}]},
        {**GOOD, "nodes": [{**GOOD["nodes"][0], "inputs": [["value"]]}]},
        {**GOOD, "nodes": GOOD["nodes"][1:]},
    ],
)
def test_other_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"given|Expected|not enough values|missing|Invalid"):
        Graph.from_json(data)


def test_firings_are_named_by_node_index_turn_and_segment() -> None:
    assert str(Firing("generate", 3)) == "generate[3]"
    assert str(Firing("generate", 3, 1)) == "generate[3.1]"
    assert str(Firing("generate", 3, 0, 2)) == "generate[3.0.2]"
    assert Firing("generate", 3).index == 3
