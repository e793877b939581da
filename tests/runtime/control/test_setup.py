"""What graphs and plan say about names is looked up in one place."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import Rewards
from penstock.graph.ir import Firing
from penstock.nodes.fake import FakePrompts
from penstock.runtime.cluster.placement import Plan, Rank
from penstock.runtime.control.rank_setup import RankSetup

from .nodes_for_tests import make_setup


def test_the_names_of_nodes_and_arguments_are_found_in_all_graphs(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    assert (setup.pool, setup.holds) == ("worker", ("policy", "prompts", "basket", "doubled", "learn"))
    assert set(setup.outputs) == {"policy", "prompts", "basket", "doubled", "learn"}
    assert setup.declared(Firing("basket", 3), "out") is Rewards
    assert setup.declared(Firing("prompts", 3), "out") is FakePrompts
    assert setup.makes == {"learn": {"policy": "out"}}
    with pytest.raises(KeyError, match="'judge'"):
        setup.declared(Firing("judge", 0), "out")


def test_only_what_another_process_reads_is_exported(tmp_path: Path) -> None:
    assert make_setup(tmp_path).exported == frozenset()
    assert make_setup(tmp_path, replicas=2).exported >= {"prompts", "basket", "doubled"}


def test_a_rank_is_asked_from_afar_if_its_readers_are_on_other_hosts(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, replicas=2)
    (pool,) = setup.plan.pools

    def spread(*hosts: str) -> RankSetup:
        replicas = tuple(replace(r, ranks=(Rank(h),)) for r, h in zip(pool.replicas, hosts, strict=True))
        return replace(setup, plan=Plan((replace(pool, replicas=replicas),)))

    assert spread("a", "b").asked_from_afar
    assert not spread("b", "b").asked_from_afar
    assert not make_setup(tmp_path).asked_from_afar


def test_an_edge_is_typed_by_a_class(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    (graph,) = setup.graphs
    wrong = [replace(n, outputs=tuple(replace(o, type="math:pi") for o in n.outputs)) for n in graph.nodes]
    with pytest.raises(TypeError, match="math:pi: given a float, needed the class of an edge"):
        replace(setup, graphs=(replace(graph, nodes=tuple(wrong)),)).declared(Firing("basket", 0), "out")
