"""A run accepts what is planned: it can be placed, it survives its file, and differences are named."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import load, trace
from penstock.graph.ir import Graph
from penstock.graph.protocols import num_ranks
from penstock.runtime.cluster.capabilities import Kind, axis_lack, cut_lack, model_lack
from penstock.runtime.cluster.cluster import Cluster, read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.cluster.placement import place_as
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.plan import planner
from penstock.runtime.plan.model_shape import SHAPES
from penstock.runtime.plan.planner import Planned, plan
from penstock.runtime.plan.roles import PlanError, roles_of
from penstock.runtime.plan.run_plan import KEY, RunPlan, pool_layouts, run_plan
from penstock.runtime.plan.search import Solution
from penstock.runtime.plan.workload import Lognormal, Workload

CASES, FAST = 44, 4
"""The number of random cases, and how many of them every test run includes."""
PROGRAMS = ("aipo", "grpo", "ppo", "rlhf", "dapo", "online_dpo", "moving_reference", "tool_use", "ema", "remax")
DENSE = sorted(name for name, shape in SHAPES.items() if not model_lack(shape))
EXPERTS = sorted(SHAPES.keys() - set(DENSE))


@cache
def _graph(name: str, lag: int) -> Graph:
    return trace(load(name), {"lag": lag})


def _drawn(number: int) -> tuple[Graph, Cluster, Workload]:
    """Draw a case: a few hosts of one or two kinds, a model (one in ten has experts), and a program with a lag."""
    draw = random.Random(number)
    kinds = draw.sample(sorted(GPUS), draw.choice((1, 1, 2)))
    word = "+".join(f"{draw.choice((1, 1, 2, 3, 6))}x{draw.choice((1, 2, 4, 8, 8))}x{kind}" for kind in kinds)
    longest = draw.choice((512, 2048, 4096))
    graph = _graph(draw.choice(PROGRAMS), draw.randrange(3))
    roles = roles_of(graph)
    lengths = Lognormal(longest / draw.choice((4, 8)), 0.7, longest)
    size: dict[str, Any] = {"prompts": draw.choice((8, 16, 64)), "micro_tokens": draw.choice((4096, 16384))}
    model = draw.choice(DENSE if number % 10 else EXPERTS)
    work = Workload(SHAPES[model], samples=roles.samples, lengths=lengths, **size)
    return graph, read_cluster(word), replace(work, slot_tokens=2048 + longest, kept=0.7 if roles.filters else 1.0)


def _solutions(found: Planned) -> Iterator[Solution]:
    yield found.best
    yield from (other.found for other in found.alternatives if other.found)


def _as_run(found: Planned, graph: Graph, cluster: Cluster) -> RunPlan:
    return run_plan(found, [graph], cluster, program=graph.op, source="drawn", max_tokens=512, words={})


@pytest.mark.parametrize(
    ("first", "last"), [(0, FAST), pytest.param(FAST, CASES, marks=pytest.mark.slow)], ids=["a few", "all"]
)
def test_whatever_is_planned_the_placement_takes(first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan and its alternatives can be placed for random clusters, models and programs. A run on these machines
    accepts the plan; the plan of a model that runs do not support is refused."""
    # Do not spend time on what would make an infeasible case fit.
    monkeypatch.setattr(planner, "ENOUGH_S", 0.0)
    planned = 0
    for number in range(first, last):
        graph, cluster, work = _drawn(number)
        try:
            found = plan(graph, cluster, work, time_limit=0.5)
        except PlanError:
            continue
        if model_lack(work.shape):
            with pytest.raises(PlanError, match="model-kind"):
                _as_run(found, graph, cluster)
            continue
        made = _as_run(found, graph, cluster)
        assert made.lacks([graph], work.shape, cluster) == []
        assert made.on([graph], cluster) == made.plan
        RunOptions.from_json(made.options)
        for solution in _solutions(found):
            layouts = pool_layouts(found.roles, solution, cluster)
            slots = solution.generating.generator.slots
            placed = place_as([graph], cluster, layouts, slots=slots, tp_over_hosts=solution.tp_over_hosts)
            planned += 1
            for pool in placed.pools:
                kind: Kind = "generator" if pool.name == found.roles.generator else "trainer"
                for replica in pool.replicas:
                    assert len(set(replica.ranks)) == len(replica.ranks) == num_ranks(replica.mesh)
                    assert axis_lack(kind, replica.mesh) is None
                    assert cut_lack(kind, work.shape, replica.mesh) is None
            used = {rank for pool in placed.pools for r in pool.replicas for rank in r.ranks if rank.device != "cpu"}
            assert len({(rank.host, rank.device) for rank in used}) == solution.split.gpus
    # A third of the cases is infeasible; without any plan the test would prove nothing.
    assert planned >= last - first


def _planned(cluster: str = "1x8xH100", program: str = "ppo", lag: int = 1, model: str = "llama-8b") -> RunPlan:
    graph, machines = _graph(program, lag), read_cluster(cluster)
    work = Workload(SHAPES[model], 64, roles_of(graph).samples, Lognormal(500, 0.7, 2048), micro_tokens=4096)
    found = plan(graph, machines, work, time_limit=5.0)
    return run_plan(
        found, [graph], machines, program=f"penstock.programs.{program}:{program}", source=cluster,
        max_tokens=2048, words={"lag": ["--lag", str(lag)]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def ppo() -> RunPlan:
    return _planned()


def _codes(of: RunPlan, graph: Graph | None = None, model: str = "llama-8b", here: str = "1x8xH100") -> list[str]:
    return [lack.code for lack in of.lacks([graph or _graph("ppo", 1)], SHAPES[model], read_cluster(here))]


def test_a_plan_goes_through_its_file_and_lacks_nothing_on_its_machines(ppo: RunPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({KEY: ppo.to_json()}))
    read = RunPlan.read(path)
    assert read.to_json() == ppo.to_json()
    assert (_codes(read), read.plan) == ([], ppo.plan)
    assert read.on([_graph("ppo", 1)], read_cluster("1x8xH100")) == ppo.plan


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"run": {"format": 2}}', '{"run": {"format": 1, "program": 3}}', '{"run": 1}']
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match="plan-file"):
        RunPlan.read(tmp_path / "plan.json")


def _rank(run: Any) -> Any:
    return run["plan"]["pools"][0]["replicas"][0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: run["options"].pop("dtype"),
        lambda run: run["options"].pop("batch"),
        lambda run: run["options"].update(slots=0),
        lambda run: run["words"].update(lag=3),
        lambda run: _rank(run)["ranks"].pop(),
        lambda run: _rank(run)["ranks"][0].update(threads=0),
        lambda run: _rank(run)["mesh"][0].__setitem__(0, "cp"),
    ],
)
def test_a_damaged_plan_is_refused(ppo: RunPlan, tmp_path: Path, damage: Callable[[Any], object]) -> None:
    run = json.loads(json.dumps(ppo.to_json()))
    damage(run)
    (tmp_path / "plan.json").write_text(json.dumps({KEY: run}))
    with pytest.raises(PlanError, match="plan-file"):
        RunPlan.read(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("here", "codes"),
    [
        ("1x8xH100", []),
        ("2x8xH100", []),
        ("1x4xH100", ["plan-devices", "plan-cores"]),
        ("1x8xA100", ["plan-gpus"]),
        ("1x4xA100", ["plan-devices", "plan-cores"]),
    ],
)
def test_machines_that_differ_are_named(ppo: RunPlan, here: str, codes: list[str]) -> None:
    assert _codes(ppo, here=here) == codes


def _moved(cluster: Cluster, **changes: Any) -> Cluster:
    """Return the cluster with fields of its hosts set by functions of the host's number."""
    hosts = tuple(
        host.model_copy(update={name: value(number) for name, value in changes.items()})
        for number, host in enumerate(cluster.hosts)
    )
    return cluster.model_copy(update={"hosts": hosts})


def test_hosts_with_names_of_their_own_are_taken_in_order_and_addresses_have_to_be_as_planned() -> None:
    """No host name is the same; a missing host is reported."""
    found = _planned("3x8xH100", "aipo", 1, "qwen3-32b")
    graph, here = _graph("aipo", 1), _moved(read_cluster("3x8xH100"), name=lambda n: "abc"[n])
    assert len(found._used()) == 3
    assert found.lacks([graph], SHAPES["qwen3-32b"], here) == []
    hosts = {rank.host for replica in found.on([graph], here).replicas for rank in replica.ranks}
    assert hosts == {"a", "b", "c"}
    fewer = here.model_copy(update={"hosts": here.hosts[:2]})
    (lack,) = found.lacks([graph], SHAPES["qwen3-32b"], fewer)
    assert lack.code == "plan-hosts"
    placed = replace(found, cluster=_moved(found.cluster, address=lambda n: f"10.0.0.{n}"))
    others = _moved(here, address=lambda n: f"10.0.1.{n}")
    assert {lack.code for lack in placed.lacks([graph], SHAPES["qwen3-32b"], others)} == {"plan-address"}
    # The plan has a replica that spans hosts, and not all of these hosts can reach each other.
    alone = _moved(here, address=lambda n: "10.0.0.1" if n == 1 else "")
    assert {lack.code for lack in found.lacks([graph], SHAPES["qwen3-32b"], alone)} == {"plan-address"}


def test_another_program_or_model_is_named(ppo: RunPlan) -> None:
    assert set(_codes(ppo, _graph("ppo", 2))) == {"plan-program"}
    assert set(_codes(ppo, trace(load("ppo"), {"samples": 2}))) == {"plan-program"}
    assert set(_codes(ppo, _graph("aipo", 1))) == {"plan-program"}
    assert _codes(ppo, model="qwen3-8b") == ["plan-model"]
    assert [lack.code for lack in ppo.lacks([_graph("ppo", 1)], None, ppo.cluster)] == ["plan-model"]


def test_pools_that_share_gpus_take_turns_at_lag_zero() -> None:
    shared = _planned("1x1xH100", "aipo", 2, "qwen3-0.6b")
    assert shared.lag == 0
    assert {rank.device for r in shared.plan.replicas for rank in r.ranks} == {"cuda:0", "cpu"}
    assert _planned("1x1xH100", "aipo", 0, "qwen3-0.6b").lag is None


def test_a_model_that_no_run_has_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="model-kind"):
        _planned("4x8xH200", "aipo", 1, "glm-4.5-air")
