"""A plan on the virtual clock: where the planner is exact the two agree; elsewhere the schedule says what is left."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import load, trace
from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.planner import plan as planned
from penstock.runtime.plan.roles import Models, PlanError
from penstock.runtime.plan.simulate import Costed, Decoding, DecodingReplica, Reader, Responses, Scene, read_costed
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import Lengths, Listed, Lognormal, Workload

LLAMA = SHAPES["llama-8b"]
TAILED = Lognormal(400, 0.8, 2048)


def costed(
    lengths: Lengths = TAILED, *, slots: int = 64, replicas: int = 1, lag: int = 1, shared: bool = False, tp: int = 2
) -> Costed:
    """A plan by hand: 8B on H100s, batches of 16 prompts with 4 samples."""
    work = Workload(LLAMA, 16, 4, lengths, prompt_tokens=100)
    trainer = Trainer(LLAMA, GPUS["H100"], Parallel(fsdp=4))
    generator = Generator(LLAMA, GPUS["H100"], Parallel(tp=tp), slots)
    return Costed(
        "aipo", work, lag, 4 + tp * replicas, trainer, generator, replicas, (), shared, 0.1,
        0.25 if shared else 0.0, 0.5 if shared else 0.0, 1.0, "",
    )  # fmt: skip


def graph(name: str = "aipo", lag: int = 1) -> Graph:
    return trace(load(name), {"lag": lag})


def parts(plan: Costed) -> tuple[float, float]:
    """Seconds of a batch by the planner: its rollout, and the steps."""
    work = plan.work
    rollout = plan.generator.rollout(work.response_tokens, work.prompt_tokens, work.samples, plan.replicas)
    return float(rollout.max()), plan.trainer.update(work.sequence_tokens, work.epochs, work.minibatches).seconds


@pytest.mark.parametrize("slots", [8, 24, 64])
def test_at_lag_0_one_replica_takes_the_planners_sum(slots: int) -> None:
    plan = costed(slots=slots)
    rollout, steps = parts(plan)
    result = Scene(graph(lag=0), plan, seed=None).run(8).result
    assert result.period_s == pytest.approx(plan.sync_s + rollout + steps, rel=1e-6)


def test_gpus_that_are_shared_take_turns_at_any_lag() -> None:
    plan = costed(shared=True)
    rollout, steps = parts(plan)
    for lag in (0, 3):
        found = Scene(graph(lag=lag), plan, seed=None).run(8).result
        assert found.period_s == pytest.approx(0.25 + plan.sync_s + rollout + 0.5 + steps, rel=1e-6)
        assert set(found.lags) == {0}


def test_several_replicas_with_slots_for_all_agree_within_a_tenth() -> None:
    """A group's rows are on one replica, the planner's anywhere: the longest row is the same, its company is not."""
    plan = costed(slots=64, replicas=4)
    rollout, steps = parts(plan)
    result = Scene(graph(lag=0), plan, seed=None).run(8).result
    assert result.period_s == pytest.approx(plan.sync_s + rollout + steps, rel=0.1)


def test_where_lengths_are_equal_the_stream_is_the_planners_steady_state() -> None:
    """At a lag that hides the tail the generator's period is its work; slots stay full but for the swap of groups."""
    plan = costed(Listed((500,)), slots=16)
    work = plan.work
    batches = (np.tile(work.response_tokens, count) for count in (2, 3))
    two, three = (plan.generator.rollout(each, work.prompt_tokens, work.samples).max() for each in batches)
    found = Scene(graph(lag=3), plan, seed=None).run(24)
    assert found.result.steady_s == pytest.approx(three - two, rel=0.02)
    assert found.filling.occupancy == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("lag", range(4))
def test_no_lag_takes_less_than_the_pools_work(lag: int) -> None:
    plan = costed()
    result = Scene(graph(lag=lag), plan, seed=None).run(24).result
    steady = plan.generator.rollout(np.tile(plan.work.response_tokens, 24), 100, plan.work.samples).max() / 24
    assert result.steady_s >= max(parts(plan)[1], steady * 0.99)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 30)), min_size=1, max_size=8), st.integers(2, 6))
def test_groups_that_come_at_any_time_go_from_step_to_step(arrivals: list[tuple[float, int]], slots: int) -> None:
    """Against a replica that takes one step after the other, with a sample per group."""
    arrivals.sort(key=lambda each: each[0])
    lengths = [length for _, length in arrivals]
    work = Workload(LLAMA, len(arrivals), 1, Listed(tuple(lengths)), prompt_tokens=7)
    generator = Generator(LLAMA, GPUS["H100"], Parallel(), slots)
    engine = Decoding(generator, Responses(work, None, {0: np.array(lengths)[:, None]})).engine()
    ends: dict[int, float] = {}
    waiting = [(now, index) for index, (now, _) in enumerate(arrivals)]
    while waiting or engine.due < np.inf:
        if waiting and waiting[0][0] <= engine.due:
            now, index = waiting.pop(0)
            engine.begin(Firing("generate", index), now)
        else:
            time = engine.due
            ends |= {firing.index: time for firing in engine.finish()}
    assert ends == pytest.approx(_step_by_step(generator, arrivals, 7), rel=1e-6)


def _step_by_step(generator: Generator, arrivals: list[tuple[float, int]], prompt: int) -> dict[int, float]:
    """Responses join between two steps, in order, if a slot is free."""
    prefill = generator.prefill_s(prompt)
    waiting = [(now, index, length) for index, (now, length) in enumerate(arrivals)]
    rows: list[list[int]] = []
    ends: dict[int, float] = {}
    now = 0.0
    while waiting or rows:
        if not rows:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now and len(rows) < generator.slots:
            _, index, length = waiting.pop(0)
            now += prefill
            rows.append([index, length, prompt])
        fixed, million = generator.step(len(rows), 0).seconds, generator.step(len(rows), 1e6).seconds
        now += fixed + (million - fixed) * sum(held for _, _, held in rows) / 1e6
        ends |= {index: now for index, left, _ in rows if left == 1}
        rows = [[index, left - 1, held + 1] for index, left, held in rows if left > 1]
    return ends


def test_lengths_are_drawn_by_the_ordinal_alone() -> None:
    work = costed().work
    forwards, backwards = Responses(work), Responses(work)
    first = [forwards.of(ordinal) for ordinal in range(40)]
    assert [backwards.of(ordinal) for ordinal in reversed(range(40))] == first[::-1]
    assert Responses(work, seed=1).of(0) != first[0]
    many = np.concatenate([forwards.batch(number).reshape(-1) for number in range(100)])
    assert many.mean() == pytest.approx(work.lengths.mean, rel=0.05)
    assert many.max() <= 2048


def test_a_group_takes_as_long_as_its_longest_response_and_no_two_the_same() -> None:
    found = Scene(graph(), costed()).run(6)
    bars = [bar.seconds for bar in found.result.bars if bar.name == "generate"]
    assert len(set(bars)) > len(bars) * 0.9
    spans = found.result.spans["generate"]
    assert len(spans.ends) == 6 * 16 * 4
    for bar in found.result.bars:
        if bar.name == "generate":
            last = max(end for end, index in zip(spans.ends, spans.indices, strict=True) if index == bar.index)
            assert bar.end == pytest.approx(last)


def test_slots_are_fuller_over_a_period_than_in_the_tail() -> None:
    filling = Scene(graph(lag=0), costed()).run(12).filling
    assert 0 < filling.tail_occupancy < filling.occupancy < 1


def test_more_lag_is_never_slower_by_much_and_the_first_step_gains_most() -> None:
    runs = Scene(graph(), costed(replicas=2)).effect_of_lag(16)
    effect = {lag: result.steady_s for lag, result in runs}
    assert list(effect) == [0, 1, 2, 3, 4]
    assert effect[1] < effect[0] * 0.9
    assert min(effect.values()) > 0.2 * effect[0]


def test_a_frozen_model_reads_on_gpus_of_its_own_or_beside_the_trainer() -> None:
    made = trace(load("distill"), {})
    teacher = Reader(("teacher",), Models(1), costed().trainer, True)
    plans = [replace(costed(), program="distill", readers=(replace(teacher, apart=way),)) for way in (True, False)]
    apart, beside = (Scene(made, each).run(6).result for each in plans)
    assert set(apart.busy) - set(beside.busy) == {"teacher/0"}
    assert sum(beside.busy.values()) == pytest.approx(sum(apart.busy.values()), rel=0.5)


def test_a_plan_goes_through_its_json(tmp_path: Path) -> None:
    made, work = graph(), Workload(SHAPES["qwen3-0.6b"], 8, 8, Lognormal(300, 0.7, 1024))
    found = planned(made, read_cluster("1x2xH100"), work)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(found.to_json()))
    assert read_costed(file, "aipo") == found.costed
    with pytest.raises(PlanError, match="given a plan of aipo, needed what `penstock plan grpo --json` prints"):
        read_costed(file, "grpo")
    file.write_text('{"costed": {"program": "aipo"}}')
    with pytest.raises(PlanError, match=r"given costed\.work: Field required"):
        read_costed(file, "aipo")
    with pytest.raises(PlanError, match="No such file"):
        read_costed(tmp_path / "none.json", "aipo")


def test_plans_graphs_and_schedules_draw_themselves() -> None:
    made, work = graph(), Workload(SHAPES["qwen3-0.6b"], 8, 8, Lognormal(300, 0.7, 1024))
    found = planned(made, read_cluster("1x2xH100"), work)
    assert "<table>" in found._repr_html_()
    assert "trainer" in found._repr_html_()
    assert "<svg" in made._repr_html_()
    scene = Scene(made, found.costed)
    assert "<table>" in scene.places(made)._repr_html_()
    shown = scene.run(3)._repr_html_()
    assert "<svg" in shown
    assert "aipo, qwen3-0.6b" in shown


def test_an_idle_replica_has_nothing_due() -> None:
    engine = DecodingReplica(costed().generator, Responses(costed().work), {})
    assert engine.due == np.inf
    engine.begin(Firing("generate", 0), 5.0)
    assert 5.0 < engine.due < np.inf
