"""The search finds what trying everything finds, says "optimal" only when it has proved it, and refuses in numbers."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf

import pytest

from penstock.graph import load, trace
from penstock.graph.analysis import period_bound
from penstock.graph.ir import Graph
from penstock.runtime.cluster.cluster import Cluster, Host, read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan import search
from penstock.runtime.plan.candidates import (
    OWN,
    SHARED,
    Generating,
    Island,
    Pins,
    Sides,
    Training,
    islands,
    slot_counts,
    trainer_meshes,
)
from penstock.runtime.plan.collectives import Cost
from penstock.runtime.plan.memory import Memory, beside_memory, trainer_memory
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.planner import plan
from penstock.runtime.plan.roles import Models, PlanError, Roles, roles_of
from penstock.runtime.plan.search import (
    Apart,
    Frontier,
    Least,
    Opener,
    Search,
    Split,
    Times,
    alone_s,
    bounds,
    groupings,
    least_period,
    period,
)
from penstock.runtime.plan.sync_cost import switch_cost, sync_cost, traffic
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import Lognormal, Workload

LATER = 1e12


def _graph(name: str, lag: int) -> Graph:
    return trace(load(name), {"lag": lag})


def _work(model: str = "qwen3-4b", prompts: int = 8) -> Workload:
    return Workload(SHAPES[model], prompts, 8, Lognormal(300, 0.7, 1024), micro_tokens=2048)


def _everything(roles: Roles, sides: Sides, found: tuple[Island, ...]) -> Iterator[tuple[Split, float]]:
    """Every plan there is, each evaluated in full: its split and its period."""
    wait = roles.turns * sides.work.environment_s if roles.environment else 0.0
    for split, train in _trained(roles, sides, found):
        groups = [
            [(each.reads.seconds, each.learns.seconds) for each in _alone(sides, roles.models_of(own.pools), own)]
            for own in split.apart
        ]
        for apart, (decode, moved) in product(product(*groups), _decoders(sides, split, train)):
            t, g = split.islands
            sync = _sync(train, decode, split)
            switch = switch_cost(t.gpu, moved, moved).seconds
            rollout_s = sides.decoding.rollout(g, decode)
            times = Times(train.seconds, decode.steady, rollout_s, sync, switch, apart, wait=wait)
            times = times if split.shared else replace(times, others=decode.others)
            yield split, period(roles, times, sides.lag, sides.work.prompts, shared=split.shared)


def _trained(roles: Roles, sides: Sides, found: tuple[Island, ...]) -> Iterator[tuple[Split, Training]]:
    """Every split with every trainer: the generator's GPUs are the trainer's or others, and each model beside the
    policy lies on the trainer's or in one of as many groups as there are such pools."""
    for shared, t, g in product((True, False), found, found):
        for n, m in product(t.sizes, g.sizes):
            if shared and (t, n) != (g, m):
                continue
            for group_of in product(range(len(roles.beside) + 1), repeat=len(roles.beside)):
                ids = sorted(set(group_of) - {0})
                groups = [tuple(p for p, own in zip(roles.beside, group_of, strict=True) if own == i) for i in ids]
                free = [p for p, own in zip(roles.beside, group_of, strict=True) if own == 0]
                for places in product([(i, size) for i in found for size in i.sizes], repeat=len(groups)):
                    apart = tuple(Apart(pools, *place) for pools, place in zip(groups, places, strict=True))
                    split = Split(shared, (t, g), n, m, apart)
                    if split.hosts() is not None:
                        for train in sides.training.trainers(t, n, roles.models_of(free)):
                            yield split, train


def _alone(sides: Sides, models: Models, own: Apart) -> list[Training]:
    """All layouts of models on GPUs of their own."""
    found = []
    for trainer in sides.candidates.on(own.island, own.gpus):
        passing = trainer if models.critics else replace(trainer, frozen=True, offload=True)
        others = Models(models.frozen, models.critics - 1) if models.critics else Models(models.frozen - 1)
        memory = trainer_memory(passing) + beside_memory(passing, others)
        if memory.bytes <= own.island.gpu.memory_bytes:
            passes = passing.logprobs(sides.work.sequence_tokens) * (models.frozen + models.critics)
            work = sides.work
            steps = passing.update(work.sequence_tokens, work.epochs, work.minibatches) * models.critics
            found.append(Training(passing, Cost(), passes, steps, memory))
    return found


def _decoders(sides: Sides, split: Split, train: Training) -> Iterator[tuple[Generating, float]]:
    """Every generator, and the bytes of moments that lie on the host while it decodes."""
    island, gpus = split.islands[1], split.generator
    if not split.shared:
        yield from ((decode, 0.0) for decode in sides.decoding.ways(island, gpus, OWN, None))
        return
    parts = train.memory.parts
    stays = {p: parts[p] for p in ("weights", "frozen model", "critic weights", "copies") if p in parts}
    moments = parts["moments"] + parts.get("critic moments", 0.0)
    for beside, moved in ((train.memory, 0.0), (Memory(stays), moments)):
        yield from ((decode, moved) for decode in sides.decoding.ways(island, gpus, SHARED, beside))


def _sync(train: Training, decode: Generating, split: Split) -> float:
    generator, (t, g), hosts = decode.generator, split.islands, split.hosts()
    assert hosts is not None
    moved = traffic(generator.shape, train.trainer.mesh, generator.mesh, generator.precision)
    crosses = len({*hosts[0], *hosts[1]}) > 1
    return sync_cost(moved, decode.replicas, t.gpu, g.gpu, together=split.shared, chained=crosses).seconds


@pytest.mark.parametrize(
    ("name", "lag", "cluster"),
    [("aipo", 0, "1x4xH100"), ("aipo", 1, "2x2xH100"), ("aipo", 2, "1x2xA100+1x2xH100"), ("online_dpo", 1, "1x4xH100"),
     ("ppo", 1, "1x4xH100"), ("rlhf", 0, "1x4xH100"), ("tis", 1, "1x4xH100"), ("tool_use", 2, "1x4xH100"),
     ("ema", 1, "1x4xH100"), ("moving_reference", 0, "1x4xH100"), ("ppo", 1, "1x4xH100+1x4xA100"),
     ("ppo", 0, "1x1xGB200+2x2xA100")],
)  # fmt: skip
def test_the_search_finds_the_optimum_of_trying_everything(name: str, lag: int, cluster: str) -> None:
    roles, found = roles_of(_graph(name, lag)), islands(read_cluster(cluster))
    sides = Sides(_work("qwen3-1.7b", 4), lag, 32, models=roles.models)
    outcome = Search(roles, sides, found).run(LATER)
    assert outcome.proved
    least = defaultdict[object, float](lambda: inf)
    for split, seconds in _everything(roles, sides, found):
        least[_alike(roles, split)] = min(least[_alike(roles, split)], seconds)
    assert outcome.best is not None
    assert outcome.best.period_s == pytest.approx(least.pop(_alike(roles, outcome.best.split)), rel=1e-12)
    assert outcome.best.period_s <= min(least.values()) * (1 + 1e-12)
    assert outcome.runner_up is not None
    assert outcome.runner_up.period_s == pytest.approx(min(least.values()), rel=1e-12)


def _alike(roles: Roles, split: Split) -> object:
    """Pools with the same models may change places."""
    apart = sorted((str(roles.models_of(own.pools)), own.island.kind, own.gpus) for own in split.apart)
    return replace(split, apart=()), tuple(apart)


def test_each_grouping_has_the_optimum_of_trying_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models beside the policy on the trainer's GPUs, or on others, together or apart; a reference and a reward model
    cost the same, so that only one of them has to be tried in each place."""
    roles, found = roles_of(_graph("rlhf", 2)), islands(read_cluster("1x2xH100+1x2xA100"))
    sides, least = (
        Sides(_work("qwen3-0.6b", 4), 2, 32, models=roles.models),
        defaultdict[Set[Set[str]], float](lambda: inf),
    )
    for split, seconds in _everything(roles, sides, found):
        pools = frozenset(frozenset(own.pools) for own in split.apart)
        least[pools] = min(least[pools], seconds)
    every = groupings(roles, sides)
    assert len(every) == 11
    for groups in every:
        monkeypatch.setattr(search, "groupings", lambda *_, groups=groups: (groups,))
        best = Search(roles, sides, found).run(LATER, second=False).best
        own = least[frozenset(map(frozenset, groups))]
        assert (best.period_s if best else inf) == pytest.approx(own, rel=1e-12)
    assert len({seconds for seconds in least.values() if seconds < inf}) > 5
    monkeypatch.undo()
    best = Search(roles, sides, found).run(LATER, second=False).best
    assert best is not None
    assert best.period_s == pytest.approx(min(least.values()), rel=1e-12)
    assert best.split.apart


def test_a_mesh_of_a_model_beside_the_policy_gives_it_gpus_of_its_own() -> None:
    roles = roles_of(_graph("rlhf", 1))
    sides = Sides(_work(), 1, pins=Pins(beside={"critic": (("fsdp", 2),)}), models=roles.models)
    assert all(any("critic" in group for group in groups) for groups in groupings(roles, sides))
    said = plan(_graph("ppo", 1), read_cluster("1x8xH100"), _work(), meshes={"critic": (("fsdp", 2),)})
    critic = next(pool for pool in said.pools if pool.name == "critic")
    assert (critic.devices, critic.mesh, critic.shares) == (2, (("fsdp", 2),), "")


def test_every_lower_bound_is_below_what_it_bounds() -> None:
    sides, (island,) = Sides(_work(), 1), islands(read_cluster("1x8xH100"))
    own, shared = (sides.decoding.fastest(island, shared=shared) for shared in (False, True))
    loose = sides.training.fastest(island, Models(0)).copy()
    for place, gpus in enumerate(island.sizes):
        trains = [train.seconds for train in sides.training.trainers(island, gpus, Models(0))]
        assert min(trains) == sides.training.fastest(island, Models(0))[place] >= loose[place]
        for fastest, arenas in ((own, OWN), (shared, SHARED)):
            for decode in sides.decoding.ways(island, gpus, arenas, None):
                assert decode.others >= fastest.others[place]
                assert decode.steady >= fastest.steady[place]
                assert decode.generator.bytes_each >= fastest.share[place]
                rollout_s = sides.decoding.rollout(island, decode)
                assert rollout_s >= max(decode.least * (1 - 1e-9), fastest.rollout[place])


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
    assert over.best is not None
    assert over.floor <= whole.best.period_s <= over.best.period_s
    assert over.gap == 1 - over.floor / over.best.period_s > 0


def test_however_little_time_there_is_a_plan_comes_with_an_honest_gap() -> None:
    said = plan(_graph("aipo", 1), read_cluster("512x8xH100"), _work(), time_limit=1e-9)
    assert not said.optimal
    assert 0 < said.outcome.gap < 1
    assert said.outcome.opened < 20
    assert all(pool.memory.bytes <= pool.room for pool in said.pools if pool.devices)


def test_a_search_begins_without_a_look_at_each_split() -> None:
    """There are 130,000 pairs of sizes on 4,096 GPUs: their number must not keep a search from its deadline."""
    roles, found = roles_of(_graph("aipo", 1)), islands(read_cluster("512x8xH100"))
    begun = Search(roles, Sides(_work(), 1), found)
    open_ = Frontier(second=True)
    begun.begin(Opener(begun.roles, begun.sides, found, Least(begun.roles, begun.sides, found), open_))
    assert 0 < len(open_.heap) < 2000


@pytest.mark.parametrize(("cluster", "sizes"), [("3x8xH100+5x8xA100", (24, 32)), ("2x8xH100+2x8xA100", (16, 16))])
def test_a_split_set_by_hand_has_gpus_of_several_kinds(cluster: str, sizes: tuple[int, int]) -> None:
    said = plan(_graph("aipo", 1), read_cluster(cluster), _work())
    half = next(other for other in said.alternatives if other.name == "half and half")
    assert half.found is not None
    split = half.found.split
    assert [split.trainer, split.generator] == list(sizes)
    assert [island.kind for island in split.islands[:2]] == ["H100", "A100"]


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


def _packs(free: list[int], parts: Sequence[int]) -> bool:
    """Whether there is any way to put each part into one of the hosts."""
    return not parts or any(
        _packs([*free[:host], left - parts[0], *free[host + 1 :]], parts[1:])
        for host, left in enumerate(free)
        if left >= parts[0]
    )


@pytest.mark.parametrize(("each", "hosts"), [(4, 3), (6, 2), (8, 2), (12, 2)])
def test_pools_are_packed_whenever_they_can_be(each: int, hosts: int) -> None:
    island = Island("H100", GPUS["H100"], tuple(map(str, range(hosts))), each)
    for count in (2, 3, 4, 5):
        for sizes in combinations_with_replacement(island.sizes, count):
            free = hosts - sum(size // each for size in sizes)
            parts = [size for size in sizes if size < each]
            assert (island.share_out(sizes) is not None) == (free >= 0 and _packs([each] * free, parts))


def test_a_single_host_is_shared_out_in_any_parts() -> None:
    island = Island("H100", GPUS["H100"], ("a",), 8)
    assert island.sizes == (1, 2, 3, 4, 5, 6, 7, 8)
    assert island.share_out([5, 3]) == [("a",), ("a",)]
    said = plan(_graph("aipo", 1), read_cluster("1x8xH100"), _work(), meshes={"trainer": (("fsdp", 6),)})
    assert [pool.devices for pool in said.pools if pool.devices] == [6, 2]
    by_hand = next(other for other in said.alternatives if other.name.startswith("75:25"))
    assert by_hand.why == "does not fit"  # with the mesh that is given
    free = plan(_graph("aipo", 1), read_cluster("1x8xH100"), _work())
    found = next(other.found for other in free.alternatives if other.name.startswith("75:25"))
    assert found is not None
    assert found.split.sizes == (2, 6)


@pytest.mark.parametrize("cluster", ["4x8xH100", "2x8xH100+3x4xA100", "5x6xH100"])
def test_a_generator_may_have_all_numbers_of_gpus_that_can_be_packed_beside_the_others(cluster: str) -> None:
    found = islands(read_cluster(cluster))
    for t, g, own in product(found, found, found):
        for trainer, apart in product(t.sizes, own.sizes):
            split = Split(False, (t, g), trainer, 0, (Apart(("critic",), own, apart),))
            if split.has_room:
                packed = [size for size in g.sizes if replace(split, generator=size).hosts() is not None]
                assert list(split.generators()) == packed


def test_a_model_that_fits_nowhere_is_refused_with_numbers_and_a_change() -> None:
    with pytest.raises(PlanError, match=r"llama-405b does not fit on 8 GPUs") as error:
        plan(_graph("aipo", 1), read_cluster("1x8xH100"), _work("llama-405b"))
    assert "trainer (tp 8): given 85.5 GB of memory on each GPU, needed" in str(error.value)
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
    [("sft", "no node that decodes: there is nothing to share GPUs with, needed one that generates"),
     ("tool_sft", "needed one that generates"), ("reward_model", "needed one that generates"),
     ("evaluate", "weights that no node updates, needed a policy that is trained")],
)  # fmt: skip
def test_a_program_that_plans_do_not_cover_is_refused_by_name(name: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        roles_of(trace(load(name)))


def test_models_beside_the_policy_and_turns_are_part_of_the_work() -> None:
    ppo, rlhf = roles_of(trace(load("ppo"))), roles_of(trace(load("rlhf")))
    assert ppo.models == Models(frozen=0, critics=1)
    assert ppo.cycle == ("policy", "broadcast", "generate", "critic_values", "policy_update")
    assert ppo.learners == ("critic_update",)
    assert rlhf.models == Models(frozen=2, critics=1)
    assert rlhf.beside == ("critic", "reference", "reward")
    assert [rlhf.models_of((pool,)) for pool in rlhf.beside] == [Models(0, 1), Models(1, 0), Models(1, 0)]
    assert rlhf.models_of(rlhf.beside) == rlhf.models
    assert roles_of(trace(load("tis"))).models.rereads == 1
    assert roles_of(trace(load("tool_use"))).turns == 3


@pytest.mark.parametrize(("name", "least"), [("ppo", 2), ("rlhf", 4), ("tis", 1)])
def test_models_beside_the_policy_take_seconds_and_memory(name: str, least: int) -> None:
    """A critic learns as the policy does, and each model reads each response once."""
    roles, (island,) = roles_of(trace(load(name))), islands(read_cluster("1x8xH100"))
    plain, more = Sides(_work(), 1, models=Models(0)), Sides(_work(), 1, models=roles.models)
    meshes = {each.trainer: each for each in plain.training.trainers(island, 8, Models(0))}
    for each in more.training.trainers(island, 8, roles.models_of(roles.beside)):
        passed = each.trainer.logprobs(_work().sequence_tokens).seconds
        steps = meshes[each.trainer].seconds
        critics = roles.models.critics
        passes = roles.models.frozen + critics + roles.models.rereads
        assert passes == least - critics
        assert each.seconds == pytest.approx(steps * (1 + critics) + passed * passes)
        assert (each.memory.bytes > meshes[each.trainer].memory.bytes) == bool(roles.beside)


def test_batches_in_work_at_once_slow_each_other_by_what_their_rows_cost() -> None:
    roles = roles_of(_graph("aipo", 1))
    alone = Times(train=1.0, steady=0.0, rollout=4.0)

    def seconds(times: Times, lag: int) -> float:
        return period(roles, times, lag, 8, shared=False)

    assert [seconds(replace(alone, others=2.0), lag) for lag in (0, 1, 2)] == [5.0, (5 + 1.5) / 2, (5 + 3) / 3]
    assert seconds(replace(alone, train=4.0, others=2.0), 1) == seconds(replace(alone, train=4.0), 1) == 4.0
    assert alone_s(roles, replace(alone, others=2.0), 1, 8, shared=False) == 2.5


@pytest.mark.parametrize("others", [0.0, 1.0, 3.5])
@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_no_slower_steps_go_below_the_least_period(lag: int, others: float) -> None:
    roles = roles_of(_graph("aipo", 1))
    times = [Times(train=n / 4, steady=0.5, rollout=4.0, others=others) for n in range(1, 30)]
    for number, each in enumerate(times):
        least = least_period(roles, each, lag, 8, shared=False)
        later = [period(roles, slower, lag, 8, shared=False) for slower in times[number:]]
        assert alone_s(roles, each, lag, 8, shared=False) <= least <= min(later) + 1e-12
        assert later[0] == bounds(roles, each, lag, 8, shared=False)[0].seconds


def test_plans_that_are_known_change_neither_the_best_plan_nor_the_next_one() -> None:
    roles, found = roles_of(_graph("aipo", 1)), islands(read_cluster("2x4xH100"))
    alone = Search(roles, Sides(_work(), 1), found).run(LATER)
    split = Split(False, (found[0], found[0]), 4, 4)
    known = Search(roles, Sides(_work(), 1), found, (split,)).run(LATER, second=False).best
    assert known is not None
    more = Search(roles, Sides(_work(), 1), found, known=(known,)).run(LATER)
    for one, other in ((alone.best, more.best), (alone.runner_up, more.runner_up)):
        assert one is not None
        assert other is not None
        assert one.rank == other.rank
    assert alone.runner_up is not None
    each = [Search(roles, Sides(_work(), 1), found, (s,)).run(LATER, second=False).best for s in _splits(found[0])]
    ranks = sorted(plan.rank for plan in each if plan)
    assert [alone.best.rank, alone.runner_up.rank] == ranks[:2]  # type: ignore[union-attr]


def _splits(island: Island) -> list[Split]:
    here = (island, island)
    apart = [Split(False, here, n, m) for n, m in product(island.sizes, island.sizes)]
    return [split for split in apart if split.hosts()] + [Split(True, here, n, n) for n in island.sizes]


@pytest.mark.parametrize("name", ["aipo", "ppo"])
def test_trainers_come_fastest_first_and_all_that_fit(name: str) -> None:
    roles, (island,) = roles_of(_graph(name, 1)), islands(read_cluster("2x8xH100"))
    sides = Sides(_work(), 1, models=roles.models)
    beside = roles.models_of(roles.beside)
    found = list(sides.training.trainers(island, 16, beside))
    fits = [t for t in sides.candidates.on(island, 16) if _held(t, beside) <= island.gpu.memory_bytes]
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert len(found) == len(fits)
    assert {each.trainer for each in found} == set(fits)


def _held(trainer: Trainer, beside: Models) -> float:
    return (trainer_memory(trainer) + beside_memory(trainer, beside)).bytes
