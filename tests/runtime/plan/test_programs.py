"""Every program that generates has a plan and a schedule, with the work of filters, baselines, buffers and copies."""

import pkgutil
from dataclasses import replace

import numpy as np
import pytest

from penstock import programs
from penstock.graph import broadcast, keep, load, program, trace
from penstock.graph.types import Logprobs, Policy, Prompts, Reference, Rewards, Rollouts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, mixed, score
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Generator, rollout_s
from penstock.runtime.plan.memory import trainer_memory
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.planner import Planned, plan
from penstock.runtime.plan.roles import Models, PlanError, Roles, assumptions, roles_of
from penstock.runtime.plan.simulate import Scene, Simulated
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import Lognormal, Workload

WITHOUT = ("evaluate", "reward_model", "sft", "tool_sft")
"""Programs without generation, and one that is a part of others."""
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
    )  # fmt: skip


def _planned(name: str, **options: object) -> Planned:
    graph = trace(load(name), options)
    return plan(graph, read_cluster("1x2xH100"), _work(roles_of(graph)))


def _simulated(name: str, updates: int = 10, **options: object) -> Simulated:
    return Scene(trace(load(name), options), _planned(name, **options).costed).run(updates)


@pytest.mark.parametrize("name", NAMES)
def test_every_program_that_generates_has_a_plan(name: str) -> None:
    found = _planned(name)
    assert found.optimal
    fired = {node.name for node in trace(load(name)).nodes if node.fires}
    assert {node for pool in found.pools for node in pool.nodes} == fired


@pytest.mark.parametrize("name", ["dapo", "remax", "replay", "curriculum", "ema", "moving_reference", "guessing"])
def test_a_program_is_simulated_with_about_the_planners_period(name: str) -> None:
    found = _simulated(name)
    assert 0.7 < found.result.steady_s / found.scene.plan.period_s < 1.4


def test_what_a_program_does_not_say_of_its_work_is_said_with_its_plan() -> None:
    said = {name: " ".join(_planned(name).assumptions) for name in ("aipo", "dapo", "remax", "replay", "curriculum")}
    assert said["aipo"] == ""
    assert "70% of the groups (--kept), so that 12 are drawn for the 8 of an update" in said["dapo"]
    assert "generate_2 makes 1 more response to each prompt" in said["remax"]
    assert "adds 16 past groups" in said["replay"]
    assert "examiner decodes on machines of its own" in said["curriculum"]
    assert assumptions(_roles("ema"), _work(_roles("ema"))) == ()


def test_groups_are_generated_and_learnt_from_in_different_numbers() -> None:
    dapo, remax, replay = (_work(_roles(name)) for name in ("dapo", "remax", "replay"))
    assert (dapo.drawn, dapo.responses, dapo.learnt) == (12, 12 * 8, 8 * 8)
    assert (remax.rows, remax.responses, remax.learnt) == (5, 8 * 5, 8 * 4)
    assert (replay.responses, replay.learnt) == (8 * 8, (8 + 16) * 8)
    assert _roles("replay", take=500, capacity=20).buffer.adds(8) == 20  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="given kept 0, needed a share above 0"):
        replace(dapo, kept=0.0)


def test_a_dropped_group_is_replaced_only_once_it_is_done() -> None:
    """With slots for all, a batch takes as long as the longest chain of groups at the least."""
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
    close = 1e-6 if name == "aipo" else 0.05  # of the others an update's own lengths are no quantiles by themselves
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


def test_baselines_share_the_slots_and_are_not_learnt_from() -> None:
    found = _simulated("remax", 4)
    assert len(found.result.spans["generate"].ends) == 4 * 8 * 5
    assert all(len(found.scene.responses.sequences(update)) == 8 * 4 for update in range(4))


def test_copies_of_the_policy_take_memory_and_a_read_and_a_write_of_the_weights() -> None:
    assert _roles("ema").models == Models(frozen=0, copies=1, followed=1.0)
    assert _roles("moving_reference").models == Models(frozen=0, rereads=1, copies=1, followed=0.1)
    trainer = Trainer(SHAPE, GPUS["H100"], Parallel(fsdp=2))
    assert trainer_memory(trainer, 1).parts["copies"] == pytest.approx(6 * SHAPE.parameters / 2)
    assert trainer.followed().seconds == pytest.approx(14 * SHAPE.parameters / 2 / GPUS["H100"].bandwidth)
    plain, more = _planned("aipo"), _planned("ema")
    assert more.best.training.memory.parts["copies"] > 0
    assert more.best.training.seconds > plain.best.training.seconds


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
