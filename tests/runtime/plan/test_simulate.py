"""A plan on the virtual clock: where the planner is exact, both agree; elsewhere the schedule shows the difference.
Every generating program has a plan and a schedule that include filters, baselines, buffers and copies."""

import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import programs
from penstock.graph import broadcast, keep, load, node, program, trace
from penstock.graph.ir import Firing, Graph
from penstock.graph.types import Logprobs, Policy, Prefixes, Prompts, Reference, Rewards, Rollouts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.prefixes import after_tokens, cut
from penstock.nodes.score import math_answer, mixed, score
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Generator, rollout_s
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.planner import Planned
from penstock.runtime.plan.planner import plan as planned
from penstock.runtime.plan.roles import Models, PlanError, Roles, roles_of
from penstock.runtime.plan.simulate import (
    Costed,
    Decoding,
    Reader,
    Responses,
    Scene,
    Simulated,
    read_costed,
)
from penstock.runtime.plan.train_cost import Trainer, trainer_memory
from penstock.runtime.plan.workload import Lengths, Listed, Lognormal, Workload

LLAMA = SHAPES["llama-8b"]
TAILED = Lognormal(400, 0.8, 2048)


def costed(
    lengths: Lengths = TAILED, *, slots: int = 64, replicas: int = 1, lag: int = 1, shared: bool = False, tp: int = 2
) -> Costed:
    """A hand-made plan: 8B on H100s, batches of 16 prompts with 4 samples each."""
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
    """The planner's seconds for a batch: its rollout, and the optimizer steps."""
    work = plan.work
    rollout = plan.generator.rollout(work.response_tokens, work.prompt_tokens, work.samples, plan.replicas)
    return float(rollout.max()), plan.trainer.update(work.sequence_tokens, work.epochs, work.minibatches).seconds


@pytest.mark.parametrize(("slots", "shared", "lag"), [(8, False, 0), (24, False, 0), (64, True, 0), (64, True, 3)])
def test_where_pools_take_turns_one_replica_takes_the_planners_sum(slots: int, shared: bool, lag: int) -> None:
    """At lag 0, and at any lag if the pools share GPUs."""
    plan = costed(slots=slots, shared=shared)
    rollout, steps = parts(plan)
    result = Scene(graph(lag=lag), plan, seed=None).run(8).result
    assert result.period_s == pytest.approx(plan.leaves_s + plan.sync_s + rollout + plan.returns_s + steps, rel=1e-6)
    assert set(result.lags) == {0}


@pytest.mark.parametrize("shared", [False, True])
def test_an_update_in_parts_takes_them_beside_generation_but_on_shared_gpus(shared: bool) -> None:
    made = trace(load("grpo"), {"lag": 0, "accumulate": 4})
    plan = costed(slots=8, shared=shared)
    plan = replace(plan, work=replace(plan.work, parts=4))
    result = Scene(made, plan, seed=None).run(8).result
    bars = [bar for bar in result.bars if bar.name == "policy_update" and bar.index == 3]
    seconds, once = [bar.end - bar.start for bar in bars], plan.trainer.once().seconds
    work = plan.work
    whole = plan.trainer.update(work.sequence_tokens, parts=1 if shared else 4).seconds + plan.returns_s
    if shared:
        assert seconds == pytest.approx([whole])
        return
    assert seconds == pytest.approx([(whole - once) / 4] * 3 + [(whole - once) / 4 + once])
    rollout, _ = parts(plan)
    assert result.period_s == pytest.approx(plan.sync_s + rollout + seconds[-1], rel=1e-6)


def test_no_lag_takes_less_than_the_pools_work() -> None:
    plan = costed()
    steady = plan.generator.rollout(np.tile(plan.work.response_tokens, 24), 100, plan.work.samples).max() / 24
    for lag in range(4):
        result = Scene(graph(lag=lag), plan, seed=None).run(24).result
        assert result.steady_s >= max(parts(plan)[1], steady * 0.99)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 30)), min_size=1, max_size=8), st.integers(2, 6))
def test_groups_that_come_at_any_time_go_from_step_to_step(arrivals: list[tuple[float, int]], slots: int) -> None:
    """Compared with a replica simulated step by step, with one sample per group."""
    arrivals.sort(key=lambda each: each[0])
    lengths = [length for _, length in arrivals]
    work = Workload(LLAMA, len(arrivals), 1, Listed(tuple(lengths)), prompt_tokens=7)
    generator = Generator(LLAMA, GPUS["H100"], Parallel(), slots)
    engine = Decoding(generator, Responses(work, None, _batches={0: np.array(lengths)[:, None]})).engine()
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
    """Responses join between steps, in order, when a slot is free."""
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


def test_a_frozen_model_reads_on_gpus_of_its_own_or_beside_the_trainer() -> None:
    plans = [
        replace(costed(), readers=(Reader(("teacher",), Models(1), costed().trainer, way),)) for way in (True, False)
    ]
    apart, beside = (Scene(trace(load("distill"), {}), each).run(6).result.busy for each in plans)
    assert set(apart) - set(beside) == {"teacher/0"}
    assert sum(beside.values()) == pytest.approx(sum(apart.values()), rel=0.5)


def test_a_plan_goes_through_its_json(tmp_path: Path) -> None:
    found, file = _planned("aipo"), tmp_path / "plan.json"
    file.write_text(json.dumps(found.to_json()))
    assert read_costed(file, "aipo") == found.costed
    wrong = {"grpo": file.read_text(), "aipo": '{"costed": {"program": "aipo"}}'}
    said = {
        "grpo": "given a plan of aipo, needed what `penstock plan grpo",
        "aipo": r"given costed\.work: Field required",
    }
    for name, text in wrong.items():
        file.write_text(text)
        with pytest.raises(PlanError, match=said[name]):
            read_costed(file, name)
    with pytest.raises(PlanError, match="No such file"):
        read_costed(tmp_path / "none.json", "aipo")


def test_plans_graphs_and_schedules_draw_themselves() -> None:
    made, found = graph(), _planned("aipo")
    scene = Scene(made, found.costed)
    assert all(part in found._repr_html_() for part in ("<table>", "trainer"))
    assert "<svg" in made._repr_html_()
    assert "<table>" in scene.places(made)._repr_html_()
    assert all(part in scene.run(3)._repr_html_() for part in ("<svg", "aipo, qwen3-0.6b"))


WITHOUT = ("evaluate", "reward_model", "sft", "tool_sft")
"""Programs without generation, and one that is part of others."""
NAMES = sorted({module.name for module in pkgutil.iter_modules(programs.__path__)} - set(WITHOUT))
SHAPE = SHAPES["qwen3-0.6b"]


def _roles(name: str, **options: object) -> Roles:
    return roles_of(trace(load(name), options))


def _work(roles: Roles, prompts: int = 8) -> Workload:
    return Workload(
        SHAPE, prompts, roles.samples, Lognormal(100, 0.7, 256), 64, roles.epochs, roles.minibatches, 2048,
        kept=0.7 if roles.filters else 1.0,
        baselines=sum(samples for _, samples in roles.baselines),
        replayed=roles.buffer.adds(prompts) if roles.buffer else 0,
        begun=roles.begun,
    )  # fmt: skip


def _planned(name: str, **options: object) -> Planned:
    graph = trace(load(name), options)
    return planned(graph, read_cluster("1x2xH100"), _work(roles_of(graph)))


def _simulated(name: str, updates: int = 10, **options: object) -> Simulated:
    return Scene(trace(load(name), options), _planned(name, **options).costed).run(updates)


@pytest.mark.parametrize("name", NAMES)
def test_every_program_that_generates_has_a_plan(name: str) -> None:
    found = _planned(name)
    assert found.optimal
    fired = {node.name for node in trace(load(name)).nodes if node.fires}
    assert {node for pool in found.pools for node in pool.nodes} == fired


@pytest.mark.parametrize(
    "name", ["dapo", "remax", "replay", "curriculum", "ema", "moving_reference", "guessing", "vineppo"]
)
def test_a_program_is_simulated_with_about_the_planners_period(name: str) -> None:
    found = _simulated(name)
    assert 0.7 < found.result.steady_s / found.scene.plan.period_s < 1.4


def test_groups_are_generated_and_learnt_from_in_different_numbers() -> None:
    dapo, remax, replay = (_work(_roles(name)) for name in ("dapo", "remax", "replay"))
    assert (dapo.drawn, dapo.responses, dapo.learnt) == (12, 12 * 8, 8 * 8)
    assert (remax.rows, remax.responses, remax.learnt) == (5, 8 * 5, 8 * 4)
    assert (replay.responses, replay.learnt) == (8 * 8, (8 + 16) * 8)
    assert _roles("replay", take=500, capacity=20).buffer.adds(8) == 20  # type: ignore[union-attr]


def test_what_goes_on_from_prefixes_is_generated_behind_them() -> None:
    """Each of 8 responses is cut twice, at its thirds, and 4 responses continue from each cut."""
    roles = _roles("vineppo", samples=8, states=2, vines=4)
    work = _work(roles, 16)
    thirds = [0.0] * 8 + [third for _ in range(8) for third in (1 / 3, 2 / 3) for _ in range(4)]
    assert roles.begun == pytest.approx(tuple(thirds))
    assert (work.rows, work.responses, work.learnt) == (8 + 64, 16 * 72, 16 * 8)
    assert work.response_tokens.min() >= 1
    whole = work.response_tokens + work.prefix_tokens
    assert (np.sort(whole) == np.sort(work.lengths.take(work.responses))).all()
    shares = (work.prefix_tokens / whole).reshape(16, 72)
    assert not shares[:, :8].any()
    assert (np.abs(shares - np.array(roles.begun)) <= 1 / whole.reshape(16, 72)).all()
    generator = Generator(SHAPE, GPUS["H100"], Parallel(), 64)
    none, some, all_ = (rollout_s(work_, generator, 1) for work_ in (_alone(work), work, replace(work, begun=())))
    assert none < some < all_
    spoken = Responses(work).spoken(3, 0)
    assert [before for _, before in spoken[:8]] == [0] * 8
    assert all(new > 0 < before for new, before in spoken[8:] if new + before > 2)


def _alone(work: Workload) -> Workload:
    """Return the work without continuations of prefixes."""
    return replace(work, baselines=0, begun=())


@node(pool="scorer")
def unbounded(rollouts: Rollouts) -> Prefixes:
    prefixes: Prefixes = cut.fn(rollouts, at=after_tokens)[0]
    return prefixes


@program
def branches(policy: Policy, prompts: Prompts, *, bounded: bool = True, depth: int = 1) -> Policy:
    """Trains on continuations of prefixes, or of prefixes of these."""
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=2)
    for _ in range(depth):
        prefixes = cut(rollouts, at=after_tokens, most=3) if bounded else unbounded(rollouts)
        rollouts = generate(prompts, behaviour, after=prefixes, samples=2)
    advantage = group_advantage(score(rollouts, by=math_answer), rollouts)
    return policy_update(policy, rollouts, advantage, loss=ppo)


def test_a_tree_is_planned_and_prefixes_without_a_bound_are_not() -> None:
    one = roles_of(trace(branches))
    assert (one.samples, one.baselines) == (2 * 3 * 2, (("generate", 2),))
    assert one.begun == pytest.approx((0.25, 0.25, 0.5, 0.5, 0.75, 0.75) * 2 + (0.0, 0.0))
    two = roles_of(trace(branches, {"depth": 2}))
    assert two.samples == 2 * 3 * 2 * 3 * 2
    assert max(two.begun) == pytest.approx(1 - 1 / 16)
    with pytest.raises(PlanError, match="given unbounded, which makes prefixes, without an option `most`"):
        roles_of(trace(branches, {"bounded": False}))


def test_a_dropped_group_is_replaced_only_once_it_is_done() -> None:
    """Even with slots for all groups, a batch takes at least as long as the longest chain of replacements."""
    work = _work(_roles("dapo"), 32)
    generator = Generator(SHAPE, GPUS["H100"], Parallel(), 512)
    seconds = rollout_s(work, generator, 1)
    at_once = generator.rollout(work.response_tokens, work.prompt_tokens, work.rows).max()
    assert len(work.replacements) == work.drawn - work.prompts
    assert all(later > dropped for dropped, later in work.replacements.items())
    assert work.longest > work.response_tokens.max()
    assert seconds > max(at_once, work.longest * generator.step(1, 0).seconds)
    assert rollout_s(replace(work, kept=1.0), generator, 1) < at_once


@pytest.mark.parametrize("name", ["aipo", "remax", "replay"])
def test_at_lag_0_with_the_planners_lengths_the_period_is_its_sum(name: str) -> None:
    graph = trace(load(name), {"lag": 0})
    found = _planned(name, lag=0).costed
    found = replace(found, replicas=1, generator=replace(found.generator, slots=64))
    work, work_s = found.work, rollout_s(found.work, found.generator, 1)
    steps = found.trainer.update(work.sequence_tokens, work.epochs, work.minibatches).seconds
    result = Scene(graph, found, seed=None).run(8).result
    moved = found.leaves_s + found.returns_s + found.sync_s
    close = 1e-6 if name == "aipo" else 0.05  # in the other programs, an update's own lengths are not exact quantiles
    assert result.steady_s == pytest.approx(work_s + steps + moved, rel=close)


def test_each_update_learns_from_the_groups_that_it_consumes() -> None:
    found = _simulated("dapo", 10, lag=1)
    responses, consumed = found.scene.responses, [found.scene.responses.consumed(update) for update in range(10)]
    ordinals = [ordinal for batch in consumed for ordinal in batch]
    assert ordinals == sorted(set(ordinals))
    assert [responses.update_of(batch[0]) for batch in consumed] == list(range(10))
    assert responses.drawn(0)[1] == responses.drawn(1)[0] == consumed[0][-1] + 1
    fresh = [length for ordinal in consumed[3] for length in responses.of(ordinal)]
    assert (responses.sequences(3) - 64).tolist() == fresh
    assert found.result.dropped >= ordinals[-1] + 1 - len(ordinals)


def test_a_buffer_adds_what_there_is_and_then_as_much_as_it_takes() -> None:
    responses = _simulated("replay", 2).scene.responses
    assert [len(responses.sequences(update)) // 8 for update in range(4)] == [8, 16, 24, 24]
    assert np.array_equal(responses.sequences(2)[64:128] - 64, responses.fresh(1))


def test_copies_of_the_policy_take_memory_and_a_read_and_a_write_of_the_weights() -> None:
    assert _roles("ema").models == Models(frozen=0, copies=1, followed=1.0)
    assert _roles("moving_reference").models == Models(frozen=0, rereads=1, copies=1, followed=0.1)
    trainer = Trainer(SHAPE, GPUS["H100"], Parallel(fsdp=2))
    assert trainer_memory(trainer, 1).parts["copies"] == pytest.approx(4 * SHAPE.parameters / 2)
    assert trainer_memory(replace(trainer, mesh=Parallel()), 1).parts["copies"] == pytest.approx(6 * SHAPE.parameters)
    assert trainer.followed().seconds == pytest.approx(14 * SHAPE.parameters / 2 / GPUS["H100"].bandwidth)


def _mixed(rollouts: Rollouts, rewards: Rewards, _close: Logprobs) -> bool:
    return mixed(rollouts, rewards)


@program
def _late(policy: Policy, reference: Reference, prompts: Prompts) -> dict[str, Policy]:
    rollouts = generate(prompts, broadcast(policy, lag=1), samples=8)
    close = reference_logprobs(reference, rollouts)
    kept, rewards, close = keep(rollouts, score(rollouts, by=math_answer), close, when=_mixed)
    learnt = policy_update(policy, kept, group_advantage(rewards), close, loss=ppo)
    return {"policy": learnt, "reference": reference}


def test_a_model_that_reads_groups_before_they_are_dropped_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="given reference_logprobs, which reads groups that are dropped later"):
        roles_of(trace(_late))
