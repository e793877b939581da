"""The search finds what trying everything finds, says "optimal" only when it has proved it, and refuses in numbers."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from penstock.graph import load, trace
from penstock.graph.ir import Graph
from penstock.graph.passes import period_bound
from penstock.runtime.plan.cluster import Cluster, Host
from penstock.runtime.plan.found import Split
from penstock.runtime.plan.gpus import GPUS
from penstock.runtime.plan.islands import Island, islands
from penstock.runtime.plan.layouts import slot_counts, trainer_meshes
from penstock.runtime.plan.lengths import Lognormal
from penstock.runtime.plan.memory import Memory
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.period import Times, bounds, period
from penstock.runtime.plan.planner import plan
from penstock.runtime.plan.roles import PlanError, Roles, roles_of
from penstock.runtime.plan.search import Search
from penstock.runtime.plan.shape import SHAPES
from penstock.runtime.plan.sides import Sides
from penstock.runtime.plan.spec import read_cluster
from penstock.runtime.plan.syncing import switch_cost, sync_cost, traffic
from penstock.runtime.plan.workload import Workload

LATER = 1e12


def _graph(name: str, lag: int) -> Graph:
    return trace(load(name), {"lag": lag})


def _work(model: str = "qwen3-4b", prompts: int = 8) -> Workload:
    return Workload(SHAPES[model], prompts, 8, Lognormal(300, 0.7, 1024), micro_tokens=2048)


def _everything(roles: Roles, sides: Sides, found: tuple[Island, ...]) -> Iterator[float]:
    """The period of every plan there is, each evaluated in full."""
    work = sides.work
    for t, g in product(found, found):
        for n, m in product(t.sizes, g.sizes):
            split = Split(False, (t, g, t), n, m)
            for apart in {0, *(t.sizes if roles.reader else ())}:
                whole = replace(split, reader=apart)
                reading = sides.reader(t, apart) if apart else None
                if (apart and reading is None) or whole.hosts() is None:
                    continue
                trainers = sides.trainers(t, n, bool(roles.reader) and not apart)
                for train, decode in product(trainers, sides.generators(g, m)):
                    sync = _sync(train, decode, t, g, together=False)
                    times = Times(train.seconds, decode.steady, sides.rollout(decode), sync)
                    times = replace(times, read=reading.seconds if reading else 0.0)
                    yield period(roles, times, sides.lag, work.prompts, shared=False)
    for t in found:
        for n in t.sizes:
            for train in sides.trainers(t, n, bool(roles.reader)):
                stays = {p: train.memory.parts[p] for p in ("weights", "frozen model") if p in train.memory.parts}
                for beside, moved in ((train.memory, 0.0), (Memory(stays), train.memory.parts["moments"])):
                    for decode in sides.decoders(t, n, 1, beside):
                        sync = _sync(train, decode, t, t, together=True)
                        switch = switch_cost(t.gpu, moved, moved).seconds
                        times = Times(train.seconds, decode.steady, sides.rollout(decode), sync, switch)
                        yield period(roles, times, sides.lag, work.prompts, shared=True)


def _sync(train, decode, t: Island, g: Island, *, together: bool) -> float:  # type: ignore[no-untyped-def]
    generator = decode.generator
    moved = traffic(generator.shape, train.trainer.mesh, generator.mesh, decode.replicas, generator.precision)
    return sync_cost(moved, t.gpu, g.gpu, together=together).seconds


@pytest.mark.parametrize(
    ("name", "lag", "cluster"),
    [("aipo", 0, "1x4xH100"), ("aipo", 1, "2x2xH100"), ("aipo", 2, "1x2xA100+1x2xH100"), ("online_dpo", 1, "1x4xH100")],
)
def test_the_search_finds_the_optimum_of_trying_everything(name: str, lag: int, cluster: str) -> None:
    roles, found = roles_of(_graph(name, lag)), islands(read_cluster(cluster))
    sides = Sides(_work("qwen3-1.7b", 4), lag, slots=32)
    outcome = Search(roles, sides, found).run(LATER)
    assert outcome.proved
    assert outcome.best is not None
    assert outcome.best.period_s == pytest.approx(min(_everything(roles, sides, found)), rel=1e-12)


def test_every_lower_bound_is_below_what_it_bounds() -> None:
    sides, (island,) = Sides(_work(), 1), islands(read_cluster("1x8xH100"))
    for gpus in island.sizes:
        work, longest = sides.generate_least(island)
        least = sides.train_least(island.gpu, False) / gpus * (1 - 1e-9)
        assert all(train.seconds >= least for train in sides.trainers(island, gpus, False))
        for decode in sides.generators(island, gpus):
            assert decode.steady >= work / gpus * (1 - 1e-9)
            assert sides.rollout(decode) >= max(decode.least, work / gpus, longest) * (1 - 1e-9)


def test_two_searches_give_the_same_plan() -> None:
    graph, cluster = _graph("aipo", 1), read_cluster("2x4xH100")
    first, second = (plan(graph, cluster, _work()).to_json() for _ in range(2))
    for said in (first, second):
        del said["search_s"], said["search_cpu_s"]
    assert first == second
    assert json.loads(json.dumps(first)) == first


def test_a_plan_says_optimal_only_when_it_is_proved() -> None:
    roles, found = roles_of(_graph("aipo", 1)), islands(read_cluster("2x4xH100"))
    whole = Search(roles, Sides(_work(), 1), found).run(LATER)
    over = Search(roles, Sides(_work(), 1), found).run(time.monotonic() - 1)
    assert whole.proved
    assert whole.gap == 0
    assert whole.best is not None
    assert not over.proved
    assert over.best is None
    assert over.floor <= whole.best.period_s
    with pytest.raises(PlanError, match="which found no plan; needed more"):
        plan(_graph("aipo", 1), read_cluster("2x4xH100"), _work(), time_limit=1e-9)


def test_no_plan_set_by_hand_beats_the_optimum() -> None:
    said = plan(_graph("aipo", 1), read_cluster("2x4xH100"), _work())
    assert said.optimal
    assert [other.name for other in said.alternatives] == [
        "runner-up", "half and half", "75:25 (generator : trainer)", "all shared, synchronous",
    ]  # fmt: skip
    assert all(o.found is None or o.found.period_s >= said.best.period_s for o in said.alternatives)
    assert all(pool.memory.bytes <= pool.room for pool in said.pools if pool.devices)
    assert {node for pool in said.pools for node in pool.nodes} == {
        "generate", "score", "group_advantage", "aipo_update",
    }  # fmt: skip


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_period_is_the_bound_of_the_graph_for_whole_batches(lag: int) -> None:
    graph = _graph("aipo", lag)
    seconds = {"generate": 3.0, "score": 0.0, "group_advantage": 0.0, "aipo_update": 2.0, "broadcast": 0.5}
    expected = period_bound(graph, seconds, batch=1).seconds
    times = Times(train=2.0, steady=3.0, rollout=3.0, sync=0.5)
    assert period(roles_of(graph), times, lag, 1, shared=False) == pytest.approx(expected)


def test_shared_gpus_gain_nothing_from_a_lag() -> None:
    times = Times(train=2.0, steady=3.0, rollout=4.0, sync=0.5)
    roles = roles_of(_graph("aipo", 3))
    assert [bounds(roles, times, lag, 8, shared=True)[0].seconds for lag in (0, 3)] == [6.5, 6.5]


def test_meshes_are_all_those_that_the_model_can_be_cut_by() -> None:
    (island,) = islands(read_cluster("2x8xH100"))
    shape = SHAPES["qwen3-0.6b"]
    sizes = (1, 2, 4, 8, 16)
    every = {
        Parallel(dp=dp, fsdp=fsdp, tp=tp, pp=pp)
        for dp, fsdp, tp, pp in product(sizes, sizes, (1, 2, 4, 8), sizes)
        if dp * fsdp * tp * pp == 16
    }
    assert set(trainer_meshes(shape, island, 16)) == {mesh for mesh in every if not mesh.faults(shape)}
    assert slot_counts(100, 1000) == [8, 16, 32, 64, 100]
    assert slot_counts(100, 20) == [8, 16, 32]
    assert slot_counts(5, 20) == [5]
    assert slot_counts(0, 20) == []


def test_parts_of_hosts_are_packed_beside_each_other() -> None:
    island = Island("H100", GPUS["H100"], ("a", "b"), 8)
    assert island.sizes == (1, 2, 4, 8, 16)
    assert island.share_out([8, 4, 4]) == [("a",), ("b",), ("b",)]
    assert island.share_out([4, 2, 1]) == [("a",), ("a",), ("a",)]
    assert island.share_out([16, 1]) is None


def test_a_model_that_fits_nowhere_is_refused_with_numbers_and_a_change() -> None:
    with pytest.raises(PlanError, match=r"llama-405b does not fit on 8 GPUs") as error:
        plan(_graph("aipo", 1), read_cluster("1x8xH100"), _work("llama-405b"))
    assert "trainer: given 85.5 GB of memory on each GPU, needed" in str(error.value)
    assert "It would fit with" in str(error.value)


def test_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(PlanError, match="given 1 hosts without GPUs"):
        plan(_graph("aipo", 1), Cluster(hosts=(Host(name="a", cores=4),)), _work())


@pytest.mark.parametrize(
    ("pool", "axes", "fault"),
    [
        ("trainer", (("fsdp", 16),), "given 16 ranks, needed at most the 8 GPUs"),
        ("generator", (("tp", 3),), "given 3 ranks for qwen3-4b, needed"),
        ("scorer", (("tp", 2),), "no such pool with a model, needed one of: trainer, generator"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(pool: str, axes: tuple[tuple[str, int], ...], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        plan(_graph("aipo", 1), read_cluster("1x8xH100"), _work(), meshes={pool: axes})


def test_a_mesh_that_is_given_is_kept() -> None:
    said = plan(_graph("aipo", 1), read_cluster("1x8xH100"), _work(), meshes={"generator": (("tp", 2),)})
    assert said.best.generating.generator.mesh == Parallel(tp=2)


@pytest.mark.parametrize(
    ("name", "what"),
    [("ppo", "critic: models that change"), ("tool_use", "takes turns"), ("dapo", "drops an unknown share"),
     ("sft", "0 nodes that decode"), ("evaluate", "weights that no node updates"), ("replay", "other groups")],
)  # fmt: skip
def test_a_program_that_plans_do_not_cover_is_refused_by_name(name: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        roles_of(trace(load(name)))
