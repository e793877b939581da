"""A plan of cores on the virtual clock: without a lag it is the planner's sum; with one its pools share the cores."""

import pytest

from penstock.graph import load, trace
from penstock.runtime.plan.cluster import Cluster, Host
from penstock.runtime.plan.lengths import Lognormal
from penstock.runtime.plan.local_plan import local_plan
from penstock.runtime.plan.roles import PlanError
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.shape import Shape
from penstock.runtime.plan.simulated_local import LocalScene
from penstock.runtime.plan.workload import Workload

from .machines import cpu

SHAPE = Shape("small", 128, 256, 4, 4, 4, 64, 672, tied=True)
EVEN = {"trainer": 1.0, "generator": 1.0}


def scene(
    lag: int, *, slots: int = 128, seed: int | None = None, crowded: dict[str, float] | None = None, name: str = "aipo"
) -> LocalScene:
    machine = cpu(crowded=crowded) if crowded else cpu()
    cluster = Cluster(hosts=(Host(name="local", cores=2, cpu="this"),), cpus={"this": machine})
    graph = trace(load(name), {"lag": lag})
    roles = roles_of(graph)
    work = Workload(
        SHAPE, 16, roles.samples, Lognormal(40, 0.5, 64), 6, roles.epochs, roles.minibatches,
        kept=0.7 if roles.filters else 1.0,
        baselines=sum(samples for _, samples in roles.baselines),
        replayed=roles.buffer.adds(16) if roles.buffer else 0,
    )  # fmt: skip
    plan = local_plan(graph, cluster, work, slots=slots, micro_tokens=2048, precision="fp32")
    return LocalScene(graph, plan, seed)


def test_without_a_lag_the_period_is_the_planners_sum_exactly() -> None:
    made = scene(0)
    assert made.run(6).result.steady_s == pytest.approx(made.plan.period_s, rel=1e-9)


@pytest.mark.parametrize(("name", "within"), [("remax", 0.01), ("replay", 1e-9), ("ema", 0.01), ("dapo", 0.15)])
def test_baselines_past_groups_copies_and_filters_take_what_the_planner_says(name: str, within: float) -> None:
    """In any order of lengths; a filter's own order of fates is not the planner's, which spreads them evenly."""
    made = scene(0, name=name)
    assert made.run(12).result.steady_s == pytest.approx(made.plan.period_s, rel=within)


def test_a_plan_of_cores_counts_what_is_drawn_added_and_copied() -> None:
    plain, more = scene(0).plan, {name: scene(0, name=name).plan for name in ("dapo", "remax", "replay", "ema")}
    assert (more["dapo"].work.responses, more["remax"].work.responses) == (23 * 8, 16 * (4 + 1))
    assert more["dapo"].generation.seconds > 1.4 * plain.generation.seconds
    assert more["dapo"].training.seconds == pytest.approx(plain.training.seconds)
    assert more["replay"].training.seconds > 1.8 * plain.training.seconds
    assert more["ema"].training.seconds - plain.training.seconds == pytest.approx(more["ema"].followed.seconds)
    assert more["ema"].memory["trainer"]["copies"] == 4 * SHAPE.parameters
    assert plain.to_json()["assumptions"] == []
    assert "70% of the groups" in " ".join(more["dapo"].to_json()["assumptions"])


def test_a_critic_is_refused_on_cores_by_name() -> None:
    with pytest.raises(PlanError, match="ppo: no period is predicted: given critic_values, critic_update, needed"):
        scene(1, name="ppo")


def test_rows_that_wait_for_slots_take_no_less_than_in_the_planners_rollout() -> None:
    """Groups keep their places until their longest response is done, so that slots may stay empty meanwhile."""
    made = scene(0, slots=48)
    assert 1 <= made.run(6).result.steady_s / made.plan.period_s < 1.1


@pytest.mark.parametrize("lag", [1, 2])
def test_with_a_lag_stages_slow_each_other_down_as_the_planner_says(lag: int) -> None:
    made = scene(lag)
    assert made.run(24).result.steady_s == pytest.approx(made.plan.period_s, rel=0.02)


def test_stages_that_do_not_slow_each_other_down_take_as_long_as_the_longer_one() -> None:
    made = scene(1, crowded=EVEN)
    stages = (made.plan.training.seconds + made.plan.sync.parts["snapshot"], made.plan.generation.seconds)
    assert made.run(24).result.steady_s == pytest.approx(max(stages), rel=0.02)


def test_no_more_slots_are_in_use_than_there_are_and_every_row_has_one() -> None:
    found = scene(1, slots=48, seed=0).run(8)
    spans = found.result.spans["generate"]
    assert len(spans.begins) == 8 * 16 * 8
    edges = sorted([(end, -1) for end in spans.ends] + [(begin, 1) for begin in spans.begins])
    used = 0
    for _, change in edges:
        used += change
        assert 0 <= used <= 48
    assert 0 < found.filling.occupancy <= 1


def test_another_lag_has_a_plan_of_its_own() -> None:
    effect = dict(scene(1).effect_of_lag(8))
    assert list(effect) == [0, 1, 2, 3, 4]
    assert effect[0].steady_s == pytest.approx(scene(0).plan.period_s, rel=1e-9)
    assert effect[1].steady_s < effect[0].steady_s
