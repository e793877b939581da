import json
from pathlib import Path

import pytest

from penstock.graph import trace
from penstock.programs.aipo import aipo
from penstock.runtime.plan.cluster import Cluster, ClusterError, Host
from penstock.runtime.plan.lengths import Lognormal
from penstock.runtime.plan.local_plan import LocalPlan, local_plan
from penstock.runtime.plan.machine import Cpu
from penstock.runtime.plan.measured import cluster_facts, toml
from penstock.runtime.plan.roles import PlanError
from penstock.runtime.plan.shape import SHAPES, Shape
from penstock.runtime.plan.spec import read_cluster
from penstock.runtime.plan.workload import Workload

from .machines import cpu

SHAPE = Shape("small", 128, 256, 4, 4, 4, 64, 672, tied=True)


def planned(lag: int, machine: Cpu | None = None, shape: Shape = SHAPE) -> LocalPlan:
    kinds = {"this": machine or cpu()}
    cluster = Cluster(hosts=(Host(name="local", cores=2, cpu="this"),), cpus=kinds)
    work = Workload(shape, 16, 8, Lognormal(40, 0.5, 64), 6)
    graph = trace(aipo, {"lag": lag})
    return local_plan(graph, cluster, work, slots=128, micro_tokens=2048, precision="fp32")


def test_without_a_lag_an_update_is_the_sum_of_its_stages() -> None:
    found = planned(0)
    stages = found.generation.seconds + found.training.seconds + found.sync.seconds
    assert found.period_s == pytest.approx(stages)


def test_stages_that_share_cores_evenly_take_the_seconds_of_all_cores_over_the_cores() -> None:
    """Three threads on two cores: each gets two thirds of one."""
    found = planned(1)
    train, generate = found.training.seconds + found.sync.seconds, found.generation.seconds
    assert found.period_s == pytest.approx((2 * train + generate) / 2)


def test_stages_that_do_not_slow_each_other_down_take_as_long_as_the_longer_one() -> None:
    found = planned(1, cpu(crowded={"trainer": 1.0, "generator": 1.0}))
    train, generate = found.training.seconds + found.sync.seconds, found.generation.seconds
    assert found.period_s == pytest.approx(max(train, generate))


def test_the_json_has_what_plans_have() -> None:
    found = json.loads(json.dumps(planned(1).to_json()))
    assert {"period_s", "optimal", "gap", "pools", "alternatives", "bound"} <= set(found)
    assert [pool["name"] for pool in found["pools"]] == ["trainer", "generator", "scorer"]
    assert found["pools"][0]["memory"]["weights"] == 4 * SHAPE.parameters


def test_a_plan_draws_itself_in_a_notebook() -> None:
    shown = planned(1)._repr_html_()
    assert "<th>threads</th>" in shown
    assert "<td>aipo_update</td><td>2</td><td>fp32</td>" in shown


def test_a_model_with_experts_is_refused() -> None:
    with pytest.raises(PlanError, match="qwen3-30b-a3b"):
        planned(0, shape=SHAPES["qwen3-30b-a3b"])


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"given 17.2 GB, needed \d+.* GB \(trainer weights 32") as caught:
        planned(0, shape=SHAPES["llama-8b"])
    assert " 0.0" not in str(caught.value)


def test_a_machine_that_was_not_measured_is_refused() -> None:
    cluster = Cluster(hosts=(Host(name="local", cores=2),))
    work = Workload(SHAPE, 16, 8, Lognormal(40, 0.5, 64), 6)
    with pytest.raises(PlanError, match=r"doctor --measure"):
        local_plan(trace(aipo), cluster, work, slots=128, micro_tokens=2048, precision="fp32")


def test_a_profile_is_a_cluster_file_that_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(toml(cluster_facts({}, cpu())))
    assert read_cluster(str(path)).cpus == {"this": cpu()}
    assert read_cluster("this", path) == read_cluster(str(path))


def test_this_machine_has_to_be_measured_first(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="doctor --measure"):
        read_cluster("this", tmp_path / "missing.toml")


def test_a_kind_of_cpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="given cpu 'thi'; did you mean 'this'"):
        Cluster(hosts=(Host(name="local", cores=2, cpu="thi"),), cpus={"this": cpu()})
