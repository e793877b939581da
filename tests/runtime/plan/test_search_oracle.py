"""The search finds what the one before it found (`tests/oracles/plan_search`): the same plan, runner-up and proof."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import load, trace
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.plan.candidates import LayoutCandidates, Pins, node_groups
from penstock.runtime.plan.model_shape import SHAPES
from penstock.runtime.plan.roles import PlanError, roles_of
from penstock.runtime.plan.search import Allocation, GpuSplit, Outcome, Search, Solution
from penstock.runtime.plan.workload import Lognormal, Workload
from tests.oracles.plan_search import found as oracle
from tests.oracles.plan_search.islands import islands
from tests.oracles.plan_search.search import Search as OracleSearch
from tests.oracles.plan_search.sides import Pins as OraclePins
from tests.oracles.plan_search.sides import Sides

FAST = [
    ("aipo", 0, "1x4xH100", "qwen3-1.7b", 4), ("aipo", 1, "2x2xH100", "qwen3-1.7b", 4),
    ("aipo", 2, "1x2xA100+1x2xH100", "qwen3-1.7b", 4), ("online_dpo", 1, "1x4xH100", "qwen3-1.7b", 4),
    ("ppo", 1, "1x4xH100", "qwen3-1.7b", 4), ("rlhf", 0, "1x4xH100", "qwen3-1.7b", 4),
    ("tis", 1, "1x4xH100", "qwen3-1.7b", 4), ("tool_use", 2, "1x4xH100", "qwen3-1.7b", 4),
    ("ema", 1, "1x4xH100", "qwen3-1.7b", 4), ("moving_reference", 0, "1x4xH100", "qwen3-1.7b", 4),
    ("ppo", 1, "1x4xH100+1x4xA100", "qwen3-1.7b", 4), ("ppo", 0, "1x1xGB200+2x2xA100", "qwen3-1.7b", 4),
    ("aipo", 1, "8x8xH100", "llama-8b", 256), ("dapo", 1, "2x8xH100", "qwen3-4b", 64),
    ("rlhf", 1, "2x8xH100", "qwen3-4b", 64), ("aipo", 1, "1x8xH100", "llama-405b", 8),
]  # fmt: skip
SLOW = [
    (name, lag, cluster, model, prompts)
    for name in sorted(path.stem for path in Path(__file__).parents[3].glob("programs/[a-z]*.py"))
    for lag in (0, 1, 3)
    for cluster, model, prompts in (
        ("1x8xH100", "qwen3-4b", 16), ("4x8xH100", "llama-8b", 256), ("1x8xH100+1x8xA100", "qwen3-4b", 16),
        ("2x8xH100+2x4xB200", "llama-8b", 128), ("16x8xH100", "llama-70b", 256),
    )
]  # fmt: skip


def _both(
    name: str, lag: int, cluster: str, model: str, prompts: int, gpus: tuple[int, int] | None = None, **pins: Any
) -> tuple[oracle.Outcome, Outcome]:
    """What both find; with `gpus`, of the split of so many GPUs for the trainer and the generator of one kind."""
    roles = roles_of(trace(load(name), {"lag": lag}))
    work = Workload(SHAPES[model], prompts, 8, Lognormal(300, 0.7, 1024), micro_tokens=4096)
    old, new = islands(read_cluster(cluster)), node_groups(read_cluster(cluster))
    sides = Sides(work, lag, 64, OraclePins(**pins), roles.models)
    candidates = LayoutCandidates(work, lag, 64, Pins(**pins), roles.models)
    if gpus is None:
        return OracleSearch(roles, sides, old).run(1e12), Search(roles, candidates, new).run(1e12)
    given = oracle.Split(False, (old[0], old[0]), *gpus)
    split = GpuSplit(Allocation(new[0], gpus[0]), Allocation(new[0], gpus[1]))
    return (
        OracleSearch(roles, sides, old, (given,)).run(1e12, second=False),
        Search(roles, candidates, new, split).run(1e12, second=False),
    )


def _same(old: oracle.Outcome, new: Outcome) -> None:
    assert old.proved == new.proved
    assert old.floor == new.floor
    for one, other in ((old.best, new.best), (old.runner_up, new.runner_up)):
        assert (one is None) == (other is None)
        if one and other:
            assert _old(one) == _new(other)


def _old(found: oracle.Found) -> list[Any]:
    split = found.split
    kinds = [island.kind for island in split.islands] + [each.island.kind for each in split.apart]
    return [split.shared, split.sizes, kinds, [each.pools for each in split.apart], split.hosts(), *_costs(found)]


def _new(found: Solution) -> list[Any]:
    split = found.split
    kinds = [each.nodes.kind for each in (split.trainer, split.decodes, *split.dedicated)]
    return [split.shared, split.sizes, kinds, [each.pools for each in split.dedicated], split.hosts(), *_costs(found)]


def _costs(found: Any) -> list[Any]:
    """Trainers that are equal but for their micro-batches may make the same period to the bit: either may be found, and
    their own seconds differ by rounding."""
    trainer = replace(found.training.trainer, micro_tokens=0)
    trained = [trainer, f"{found.training.seconds:.12g}", [each.trainer for each in found.readings], found.offloads]
    decodes = [found.generating.generator, found.generating.replicas, found.generating.memory, found.rollout_s]
    bounds = [(f"{bound.seconds:.12g}", bound.cause) for bound in found.bounds]
    return [*trained, *decodes, found.sync, found.switch, bounds, found.alone_s, found.period_s, found.rank]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_plan_runner_up_and_proof_are_those_of_the_search_before(case: tuple[str, int, str, str, int]) -> None:
    _same(*_both(*case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_on_all_programs_and_larger_clusters_too(case: tuple[str, int, str, str, int]) -> None:
    try:
        roles_of(trace(load(case[0]), {"lag": case[1]}))
    except (PlanError, ValueError):
        pytest.skip("no plan covers it")
    _same(*_both(*case))


@pytest.mark.parametrize("gpus", [(8, 8), (4, 2), (1, 8), (8, 4)])
def test_a_given_split_has_the_same_plan(gpus: tuple[int, int]) -> None:
    _same(*_both("aipo", 1, "2x8xH100", "qwen3-4b", 16, gpus))


@pytest.mark.parametrize(
    "pins",
    [{"trainer": (("fsdp", 4),)}, {"generator": (("tp", 2),)}, {"beside": {"critic": (("fsdp", 2),)}},
     {"trainer": (("fsdp", 3), ("tp", 7))}],
)  # fmt: skip
def test_given_meshes_have_the_same_plan(pins: dict[str, Any]) -> None:
    _same(*_both("ppo", 1, "1x8xH100", "qwen3-4b", 16, None, **pins))


def test_what_fits_nowhere_has_no_plan_in_either() -> None:
    old, new = _both("aipo", 1, "1x8xH100", "llama-405b", 8)
    assert old.best is None
    assert new.best is None
    assert old.floor == new.floor == inf
