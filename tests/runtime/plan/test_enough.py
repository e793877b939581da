"""What is said to make a workload fit does, and less of it does not."""

import re

import pytest

from penstock.graph import load, trace
from penstock.graph.protocols import Axes
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.plan.model_shape import SHAPES
from penstock.runtime.plan.planner import Planned, plan
from penstock.runtime.plan.roles import PlanError
from penstock.runtime.plan.workload import Lognormal, Workload

AIPO = trace(load("aipo"))


def _plan(cluster: str, model: str, longest: int = 4096, meshes: dict[str, Axes] | None = None) -> Planned:
    work = Workload(SHAPES[model], 32, 8, Lognormal(1000, 0.7, longest))
    return plan(AIPO, read_cluster(cluster), work, time_limit=0.1, meshes=meshes)


def _refused(cluster: str, model: str, meshes: dict[str, Axes] | None = None) -> str:
    with pytest.raises(PlanError, match=f"{model} does not fit") as error:
        _plan(cluster, model, meshes=meshes)
    return str(error.value).splitlines()[-1]


@pytest.mark.parametrize(("cluster", "model"), [("2x8xH100", "llama-70b"), ("1x1xA100", "llama-8b")])
def test_so_many_hosts_are_enough_and_one_less_is_not(cluster: str, model: str) -> None:
    found = re.match(r"All of it would fit on (\d+) hosts of (\d) (\w+), ", _refused(cluster, model))
    assert found is not None
    hosts, each, kind = found.groups()
    assert _plan(f"{hosts}x{each}x{kind}", model).best.period_s > 0
    _refused(f"{int(hosts) - 1}x{each}x{kind}", model)


def test_so_short_responses_are_enough() -> None:
    found = re.search(r"or with --max-tokens (\d+)$", _refused("2x8xH100", "llama-70b"))
    assert found is not None
    assert _plan("2x8xH100", "llama-70b", int(found[1])).best.period_s > 0


def test_a_mesh_that_is_given_is_what_has_to_go_where_others_fit() -> None:
    said = _refused("1x8xH100", "llama-8b", {"trainer": (("dp", 8),)})
    assert said == "All of it would fit without --mesh"
    assert _plan("1x8xH100", "llama-8b").best.period_s > 0
