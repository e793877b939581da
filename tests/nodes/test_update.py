"""An update is AdamW steps on the loss's gradient, however its tokens are packed and its batch is cut."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_type

import pytest
import torch
from torch import Tensor

from penstock.graph import Policy, Prompts, broadcast, check, program, trace
from penstock.graph.types import Advantages, Logprobs, Rollouts, TokenAdvantages
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.batching import minibatch_rows, optimizer_steps
from penstock.nodes.learn.losses import (
    Loss,
    Sampled,
    aipo,
    cispo,
    decoupled_ppo,
    gspo,
    importance_weighted,
    ppo,
    reinforce,
    tis,
)
from penstock.nodes.learn.update import aipo_update, policy_update
from penstock.nodes.policy import make_reference
from penstock.nodes.score import math_answer, score

from .updating import (
    CONTEXT,
    FREE,
    LENGTHS,
    assert_same,
    batch,
    by_autograd,
    conversation,
    equal,
    gradients,
    policy,
    unpacked,
)

RHO = 1.1
Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(log π, log μ, log π_old of a response's tokens, its advantage) → each token's loss."""


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def response_ratio(lp: Tensor, mu: Tensor) -> Tensor:
    return (lp - mu).detach().sum().exp()


OBJECTIVES: dict[str, tuple[Loss, Formula]] = {
    "reinforce": (reinforce, lambda lp, mu, old, a: -a * lp),
    "aipo": (partial(aipo, rho=RHO), lambda lp, mu, old, a: -(lp - mu).exp().detach().clamp(max=RHO) * a * lp),
    "cispo": (
        partial(cispo, clip_low=0.1, clip_high=0.05),
        lambda lp, mu, old, a: -(lp - mu).exp().detach().clamp(0.9, 1.05) * a * lp,
    ),
    "ppo": (
        partial(ppo, clip_low=0.1, clip_high=0.2),
        lambda lp, mu, old, a: clipped((lp - mu).exp(), a, 0.1, 0.2),
    ),
    "dual clip": (
        partial(ppo, clip_low=0.1, clip_high=0.2, dual_clip=1.2),
        lambda lp, mu, old, a: (
            clipped((lp - mu).exp(), a, 0.1, 0.2).clamp(max=float(-1.2 * a))
            if a < 0
            else clipped((lp - mu).exp(), a, 0.1, 0.2)
        ),
    ),
    "gspo": (
        partial(gspo, clip_low=0.05, clip_high=0.1),
        lambda lp, mu, old, a: clipped((lp - mu).mean().exp(), a, 0.05, 0.1).expand(len(lp)),
    ),
    "decoupled_ppo": (
        partial(decoupled_ppo, clip_low=0.1, clip_high=0.2),
        lambda lp, mu, old, a: (old - mu).exp() * clipped((lp - old).exp(), a, 0.1, 0.2),
    ),
    "tis": (
        partial(tis, cap=1.05, clip_low=0.1, clip_high=0.2),
        lambda lp, mu, old, a: (old - mu).exp().clamp(max=1.05) * clipped((lp - old).exp(), a, 0.1, 0.2),
    ),
    "by token, masked": (
        partial(importance_weighted, level="token", bound="mask", cap=1.2, floor=0.8),
        lambda lp, mu, old, a: (
            -(lp - mu).exp().detach() * (((lp - mu).exp() >= 0.8) & ((lp - mu).exp() <= 1.2)) * a * lp
        ),
    ),
    "by sequence, truncated": (
        partial(importance_weighted, level="sequence", bound="truncate", cap=1.2),
        lambda lp, mu, old, a: -response_ratio(lp, mu).clamp(max=1.2) * a * lp,
    ),
}


def proximal_of(learner: Rollouts) -> Logprobs:
    """π_old as made-up numbers near μ: what matters is that the loss reads them."""
    shift = torch.linspace(-0.3, 0.3, learner.logprobs_NT.numel()).reshape(learner.logprobs_NT.shape)
    return Logprobs(learner.logprobs_NT + shift)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "constant"])
def test_an_update_steps_along_its_formula(name: str, average: str) -> None:
    learner, (rollouts, advantage) = policy(max_tokens=7), batch()
    proximal = proximal_of(rollouts)
    total = torch.tensor(0.0)
    for row, lp in enumerate(unpacked(learner, rollouts)):
        mu, old = (t[row, : len(lp)] for t in (rollouts.logprobs_NT, proximal.logprobs_NT))
        loss = OBJECTIVES[name][1](lp, mu, old, advantage.values_N[row])
        total = total + (loss.mean() if average == "sequence_mean" else loss.sum())
    mean = total / {"token_mean": 13, "sequence_mean": 5, "constant": 5 * 7}[average]
    needed = by_autograd(learner, mean)
    options = {"loss": OBJECTIVES[name][0], "average": average, "clip_norm": FREE, "micro_tokens": 20}
    _, metrics = policy_update.fn(learner, rollouts, advantage, None, proximal, **options)
    assert_same(gradients(learner), needed)
    assert metrics["loss"] == pytest.approx(mean.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["aipo", "gspo", "by sequence, truncated"])
@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_packing_changes_nothing(name: str, micro_tokens: int) -> None:
    one, other = policy(), policy()
    loss = OBJECTIVES[name][0]
    policy_update.fn(one, *batch(), loss=loss, clip_norm=FREE, micro_tokens=20)
    policy_update.fn(other, *batch(), loss=loss, clip_norm=FREE, micro_tokens=micro_tokens)
    assert_same(gradients(one), gradients(other))


def test_samples_and_demonstrations_are_joined_and_only_samples_have_ratios() -> None:
    rollouts, advantage = batch()
    shown = replace(rollouts, logprobs_NT=None, ordinals=tuple(range(5, 10)))
    both = Rollouts.concat([rollouts, shown])
    twice = Advantages(torch.cat([advantage.values_N, torch.ones(5)]))
    _, alone = policy_update.fn(policy(), rollouts, advantage, loss=reinforce, lr=0.0)
    _, found = policy_update.fn(policy(), both, twice, loss=reinforce, lr=0.0, micro_tokens=20)
    assert (found["tokens"], alone["tokens"]) == (26, 13)
    for name in ("ratio_mean", "ratio_max", "ess", "kl", "lag_mean", "tokens_lag_0"):
        assert found[name] == pytest.approx(alone[name], rel=1e-4)
    with pytest.raises(FloatingPointError, match="gradient of norm nan"):
        policy_update.fn(policy(), both, twice, loss=aipo)


def test_aipo_update_is_the_update_with_its_loss_to_the_bit() -> None:
    one, other = policy(), policy()
    _, ours = aipo_update.fn(one, *batch(), rho=RHO, lr=1e-3)
    _, theirs = policy_update.fn(other, *batch(), loss=partial(aipo, rho=RHO), lr=1e-3)
    assert equal(one, other)
    assert ours == theirs


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
def test_only_what_the_policy_sampled_counts(average: str) -> None:
    learner, (rollouts, advantage) = policy(), conversation()
    rows = {0: [0, 1, 2], 2: [0, 3], 3: [0, 1], 4: [0, 1, 2]}
    logprobs = unpacked(learner, rollouts)
    losses = [-advantage.values_N[row] * logprobs[row][steps] for row, steps in rows.items()]
    whole = (
        torch.cat(losses).sum() / 10
        if average == "token_mean"
        else sum((x.mean() for x in losses), torch.zeros(())) / 5
    )
    needed = by_autograd(learner, whole)
    learner.version = 3
    _, metrics = policy_update.fn(learner, rollouts, advantage, loss=reinforce, average=average, clip_norm=FREE)
    assert_same(gradients(learner), needed)
    assert (metrics["tokens"], metrics["lag_mean"], metrics["lag_max"]) == (10, 3, 3)


def test_an_advantage_for_each_token_is_read_at_that_token() -> None:
    learner, (rollouts, _) = policy(), batch()
    values_NT = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    logprobs = unpacked(learner, rollouts)
    total = -sum((values_NT[row, : len(lp)] * lp).sum() for row, lp in enumerate(logprobs))
    needed = by_autograd(learner, torch.as_tensor(total) / 13)
    policy_update.fn(learner, rollouts, TokenAdvantages(values_NT), loss=reinforce, clip_norm=FREE)
    assert_same(gradients(learner), needed)


def test_kl_pulls_only_a_policy_that_has_left_the_reference() -> None:
    rollouts, advantage = batch()
    reference = reference_logprobs.fn(make_reference(CONTEXT), rollouts)
    plain, same, far = policy(), policy(), policy()
    _, before = policy_update.fn(plain, rollouts, advantage, loss=ppo, clip_norm=FREE)
    policy_update.fn(same, rollouts, advantage, reference, loss=ppo, kl=0.5, clip_norm=FREE)
    assert_same(gradients(same), gradients(plain))
    lower = Logprobs(reference.logprobs_NT - 1)
    _, after = policy_update.fn(far, rollouts, advantage, lower, loss=ppo, kl=0.5, clip_norm=FREE)
    # Each token's estimate is 1 / e: q − 1 − log q at log q = −1.
    assert after["loss"] - before["loss"] == pytest.approx(0.5 / math.e, rel=1e-4)
    assert any(not torch.allclose(g, gradients(plain)[name], rtol=1e-2) for name, g in gradients(far).items())


# Several steps ------------------------------------------------------------------------------------------------


def test_equal_rollouts_make_equal_weights_to_the_bit() -> None:
    learners = [policy(), policy()]
    for learner in learners:
        for _ in range(2):
            policy_update.fn(learner, *batch(), loss=aipo, epochs=2, minibatches=5, micro_tokens=20)
    assert equal(*learners)
    assert not torch.equal(learners[0].weights()["model.norm.weight"], policy().weights()["model.norm.weight"])


def test_one_epoch_of_one_minibatch_is_the_plain_update() -> None:
    plain, cut = policy(), policy()
    policy_update.fn(plain, *batch(), loss=aipo)
    policy_update.fn(cut, *batch(), loss=aipo, epochs=1, minibatches=1)
    assert equal(plain, cut)


def test_epochs_are_updates_on_the_same_batch_but_make_one_version() -> None:
    twice, epochs = policy(), policy()
    for _ in range(2):
        policy_update.fn(twice, *batch(), loss=aipo)
    _, metrics = policy_update.fn(epochs, *batch(), loss=aipo, epochs=2)
    assert equal(twice, epochs)
    assert (twice.version, epochs.version) == (2, 1)
    assert (metrics["optimizer_steps"], metrics["tokens"]) == (2, 13)


def test_minibatches_are_updates_on_whole_prompt_groups_in_the_keyed_order() -> None:
    rollouts, advantage = batch()
    rollouts = replace(rollouts, ordinals=(7, 7, 8, 8, 8))
    step_by_step, cut = policy(), policy()
    parts = minibatch_rows(rollouts.ordinals, 2, cut.context.key("minibatches", 0, 0))
    assert sorted(parts) == [[0, 1], [2, 3, 4]]
    for rows in parts:
        policy_update.fn(step_by_step, rollouts.take(rows), advantage.take(rows), loss=aipo)
    policy_update.fn(cut, rollouts, advantage, loss=aipo, minibatches=2)
    assert equal(step_by_step, cut)
    assert cut.version == 1


def test_an_update_draws_nothing_from_the_global_generators() -> None:
    before, torch_before = random.getstate(), torch.get_rng_state()
    policy_update.fn(policy(), *batch(), loss=aipo, epochs=2, minibatches=5)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_each_epoch_and_each_update_cuts_its_own_minibatches() -> None:
    """What `policy_update` and `critic_update` take their steps on."""

    def cut(version: int) -> list[frozenset[frozenset[int]]]:
        steps = optimizer_steps(CONTEXT, version, range(12), epochs=4, minibatches=3)
        epochs = [[frozenset(rows) for epoch, rows in steps if epoch == number] for number in range(4)]
        assert all(sorted(row for rows in epoch for row in rows) == list(range(12)) for epoch in epochs)
        return [frozenset(epoch) for epoch in epochs]

    assert cut(0) == cut(0)
    assert len({*cut(0), *cut(1), *cut(2)}) == 12  # of 5775 ways to cut twelve groups in three


def test_the_seed_draws_the_minibatches() -> None:
    def first(seed: int) -> list[list[list[int]]]:
        learner = policy(seed=seed)
        return [minibatch_rows(range(5), 5, learner.context.key("minibatches", 0, epoch)) for epoch in range(3)]

    assert first(1) == first(1) != first(2)
    assert first(1)[0] != first(1)[1] or first(1)[1] != first(1)[2]


@pytest.mark.parametrize("minibatches", [0, 6])
def test_minibatches_without_a_group_are_refused(minibatches: int) -> None:
    learner = policy()
    needed = f"given minibatches={minibatches} for a batch of 5 prompt groups, needed at least 1, and a prompt group"
    with pytest.raises(ValueError, match=needed):
        policy_update.fn(learner, *batch(), loss=aipo, minibatches=minibatches)
    assert equal(learner, policy())


def test_no_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="given epochs=0, needed 1 or more"):
        policy_update.fn(policy(), *batch(), loss=aipo, epochs=0)


# Steps --------------------------------------------------------------------------------------------------------


def test_the_gradient_is_clipped_and_its_norm_reported_as_it_was() -> None:
    free, tight = policy(), policy()
    _, before = aipo_update.fn(free, *batch(), clip_norm=FREE)
    _, metrics = aipo_update.fn(tight, *batch(), clip_norm=0.01)
    norm = torch.stack([g.norm() for g in gradients(tight).values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(before["grad_norm"]) != pytest.approx(0.01)


def test_bfloat16_computes_in_bfloat16_and_learns_in_float32() -> None:
    learner, exact = policy(dtype="bfloat16"), policy()
    for each in (learner, exact):
        aipo_update.fn(each, *batch(), lr=1e-4, clip_norm=FREE, micro_tokens=20)
    for name, master in learner.masters.items():
        assert learner.weights()[name].dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(learner.weights()[name], master.detach().bfloat16())
    ours = torch.cat([g.flatten() for g in gradients(learner).values()])
    theirs = torch.cat([g.flatten() for g in gradients(exact).values()])
    assert float(torch.cosine_similarity(ours, theirs, 0)) > 0.99


def test_a_gradient_that_is_not_finite_stops_the_update_before_the_weights_change() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    before = {name: w.clone() for name, w in learner.weights().items()}
    advantage.values_N[2] = float("inf")
    with pytest.raises(FloatingPointError, match="update of version 0: given a gradient of norm"):
        aipo_update.fn(learner, rollouts, advantage)
    assert all(torch.equal(w, before[name]) for name, w in learner.weights().items())


# Figures ------------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_sampled_tokens() -> None:
    learner = policy()
    learner.version = 5
    rollouts, advantage = batch(versions=3)
    rollouts.versions_NT[0, 0] = 5
    expected = torch.cat([lp.detach() for lp in unpacked(learner, rollouts)]).double()
    behaviour = torch.cat([rollouts.logprobs_NT[row, :length] for row, (_, length) in enumerate(LENGTHS)]).double()
    ratio = (expected - behaviour).exp()
    _, metrics = aipo_update.fn(learner, rollouts, advantage, rho=RHO)
    assert learner.version == 6
    assert metrics["lag_max"] == 2
    assert metrics["lag_mean"] == pytest.approx(2 * 12 / 13)
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)
    assert metrics["ratio_clipped"] == pytest.approx(float((ratio > RHO).float().mean()))
    assert 0 < metrics["ratio_clipped"] < 1
    assert metrics["ess"] == pytest.approx(float(ratio.sum() ** 2 / ratio.square().sum() / 13), rel=1e-4)
    assert metrics["kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-4)
    assert 0 < metrics["entropy"] < 3


def test_kl_is_the_last_epochs() -> None:
    options = {"loss": aipo, "lr": 1e-3}
    _, one = policy_update.fn(policy(), *batch(), epochs=1, **options)
    learner = policy()
    policy_update.fn(learner, *batch(), epochs=1, **options)
    _, second = policy_update.fn(learner, *batch(), epochs=1, **options)
    _, both = policy_update.fn(policy(), *batch(), epochs=2, **options)
    assert both["kl"] == second["kl"] != one["kl"]
    assert both["ratio_mean"] == pytest.approx((one["ratio_mean"] + second["ratio_mean"]) / 2)
    assert both["grad_norm"] == pytest.approx((one["grad_norm"] + second["grad_norm"]) / 2)


# What does not fit --------------------------------------------------------------------------------------------


def test_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="given a str, needed a LanguagePolicy"):
        aipo_update.fn("policy", *batch())


def test_a_loss_that_needs_what_is_not_there_says_so() -> None:
    rollouts, advantage = batch()
    with pytest.raises(ValueError, match=r"given no proximal_P .*there are: behaviour.*needed the trainer's own"):
        policy_update.fn(policy(), rollouts, advantage, loss=decoupled_ppo)
    with pytest.raises(ValueError, match=r"given no reference_P .*needed a frozen policy's"):
        policy_update.fn(policy(), rollouts, advantage, loss=reinforce, kl=0.1)


def test_a_loss_that_needs_mu_refuses_rollouts_without_it_and_others_take_them() -> None:
    rollouts, advantage = batch()
    bare = replace(rollouts, logprobs_NT=None)
    with pytest.raises(ValueError, match=r"given no behaviour_P .*none.*needed rollouts whose logprobs_NT"):
        policy_update.fn(policy(), bare, advantage, loss=aipo)
    one, other = policy(), policy()
    _, metrics = policy_update.fn(one, bare, advantage, loss=reinforce, minibatches=5)
    policy_update.fn(other, rollouts, advantage, loss=reinforce, minibatches=5)
    assert equal(one, other)
    assert not metrics.keys() & {"ratio_mean", "ratio_max", "ess", "kl"}


def test_a_batch_that_nobody_sampled_is_refused() -> None:
    rollouts, advantage = batch(versions=-1)
    with pytest.raises(ValueError, match=r"given 5 responses without a sampled token .* needed at least one"):
        policy_update.fn(policy(), replace(rollouts, versions_NT=rollouts.versions_NT - 1), advantage, loss=reinforce)


def test_inputs_of_other_rows_are_refused() -> None:
    rollouts, advantage = batch()
    with pytest.raises(
        ValueError, match=r"advantage: given values of shape \[3\], needed \[5\], one for each response"
    ):
        policy_update.fn(policy(), rollouts, Advantages(advantage.values_N[:3]), loss=aipo)
    with pytest.raises(ValueError, match=r"reference: given log-probabilities of shape \[5, 2\], needed \[5, 4\], one"):
        policy_update.fn(policy(), rollouts, advantage, Logprobs(rollouts.logprobs_NT[:, :2]), loss=aipo)
    with pytest.raises(
        ValueError, match=r"advantage: given values of shape \[5, 3\], needed \[5, 4\], one for each token"
    ):
        policy_update.fn(policy(), rollouts, TokenAdvantages(rollouts.logprobs_NT[:, :3]), loss=aipo)


def my_loss(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """What a user writes: here, learn only from what was better than its group."""
    return -sampled.advantages_P.clamp(min=0) * logprobs_P


def test_a_loss_of_ones_own_is_one_function() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    logprobs = unpacked(learner, rollouts)
    better = [advantage.values_N[row] * lp.sum() for row, lp in enumerate(logprobs) if advantage.values_N[row] > 0]
    needed = by_autograd(learner, -torch.stack(better).sum() / 13)
    _, metrics = policy_update.fn(learner, rollouts, advantage, loss=my_loss, clip_norm=FREE)
    assert_same(gradients(learner), needed)
    assert metrics["ratio_clipped"] == 0


def summed(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    return my_loss(logprobs_P, sampled).sum()


def test_a_loss_that_sums_over_tokens_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"loss summed: given a result of shape \[\], needed a loss for each token"):
        policy_update.fn(policy(), *batch(), loss=summed)


# A policy of one's own type -----------------------------------------------------------------------------------


class Proposer(Policy):
    """One of two policies of a program."""


class Solver(Policy):
    """The other one."""


@program
def two_players(proposer: Proposer, solver: Solver, prompts: Prompts) -> dict[str, Policy]:
    """Each learns from its own responses to the same prompts."""
    proposed = generate(prompts, broadcast(proposer), samples=2)
    solved = generate(prompts, broadcast(solver), samples=2)
    proposing = policy_update(proposer, proposed, group_advantage(score(proposed, by=math_answer)), loss=aipo)
    solving = aipo_update(solver, solved, group_advantage(score(solved, by=math_answer)))
    return {"proposer": assert_type(proposing, Proposer), "solver": assert_type(solving, Solver)}


@program
def swapped(proposer: Proposer, solver: Solver, prompts: Prompts) -> dict[str, Policy]:
    made = two_players.fn(proposer, solver, prompts)
    return {"proposer": made["solver"], "solver": made["proposer"]}


def test_an_update_of_a_users_own_policy_is_of_that_type() -> None:
    graph = trace(two_players)
    assert not check(graph, batch=2)
    types = {name: graph[ref.node].outputs[0].type.rpartition(":")[2] for name, ref in graph.results}
    assert types == {"proposer": "Proposer", "solver": "Solver"}


def test_one_policy_is_not_taken_for_the_other() -> None:
    assert {(f.what, f.needed) for f in check(trace(swapped)) if f.what.startswith("the next")} == {
        ("the next 'proposer'", "Proposer"),
        ("the next 'solver'", "Solver"),
    }
