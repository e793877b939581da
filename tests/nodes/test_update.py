"""An update of the policy: AdamW steps on the gradient of a loss, learning rates, imitation, DPO."""

import math
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor

from penstock.graph import (
    Advantages,
    Logprobs,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    broadcast,
    check,
    machine,
    program,
    trace,
)
from penstock.graph.context import BatchPart
from penstock.graph.types import LearningRate, NodeWarning, TokenAdvantages
from penstock.nodes import trainable
from penstock.nodes.advantage import group_advantage
from penstock.nodes.data import Demonstrations
from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.batching import optimizer_steps
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.learn.logprobs import hidden_states
from penstock.nodes.learn.losses import (
    Loss,
    Sampled,
    aipo,
    cispo,
    decoupled_ppo,
    gspo,
    imitate,
    importance_weighted,
    ppo,
    reinforce,
    tis,
)
from penstock.nodes.learn.optimizer import AdamW, Schedule, cosine, linear
from penstock.nodes.learn.sft import demonstrated, rollouts_of, sft_update
from penstock.nodes.learn.update import aipo_update, policy_update, term
from penstock.nodes.model import CausalLM
from penstock.nodes.policy import make_reference
from penstock.nodes.reward_model import best_and_worst, bradley_terry_accuracy, bradley_terry_loss, dpo_loss
from penstock.nodes.score import math_answer, score
from tests.nodes.rollouts import assert_gradients, random_rollouts
from tests.nodes.updating import (
    CONTEXT,
    FREE,
    LENGTHS,
    assert_same,
    batch,
    by_autograd,
    conversation,
    equal,
    gradients,
    in_parts,
    policy,
    unpacked,
)

# An update is AdamW steps on the loss's gradient, however its tokens are packed and its batch is cut.


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
    """Return made-up numbers near μ as π_old. It only matters that the loss reads them."""
    shift = torch.linspace(-0.3, 0.3, learner.logprobs_NT.numel()).reshape(learner.logprobs_NT.shape)
    return Logprobs(learner.logprobs_NT + shift)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("average", "micro_tokens"), [("token_mean", 20), ("sequence_mean", 1), ("constant", 1000)])
def test_an_update_steps_along_its_formula_however_it_is_packed(name: str, average: str, micro_tokens: int) -> None:
    learner, (rollouts, advantage) = policy(max_tokens=7), batch()
    proximal = proximal_of(rollouts)
    total = torch.tensor(0.0)
    for row, lp in enumerate(unpacked(learner, rollouts)):
        mu, old = (t[row, : len(lp)] for t in (rollouts.logprobs_NT, proximal.logprobs_NT))
        loss = OBJECTIVES[name][1](lp, mu, old, advantage.values_N[row])
        total = total + (loss.mean() if average == "sequence_mean" else loss.sum())
    mean = 0.5 * total / {"token_mean": 13, "sequence_mean": 5, "constant": 5 * 7}[average]
    needed = by_autograd(learner, mean)
    options = {"loss": OBJECTIVES[name][0], "average": average, "clip_norm": FREE, "micro_tokens": micro_tokens}
    options["weight"] = 0.5
    _, metrics = policy_update.fn(learner, rollouts, advantage, None, proximal, **options)
    assert_same(gradients(learner), needed)
    assert metrics["loss"] == pytest.approx(mean.item(), rel=1e-4)


@pytest.mark.parametrize("rows", [[[0], [1], [2], [3], [4]], [[0, 1, 2], [3, 4]], [[2, 3, 4, 0, 1]]])
@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "constant"])
def test_parts_of_a_batch_are_one_step_on_all_of_it(rows: list[list[int]], average: str) -> None:
    options: dict[str, Any] = {"loss": partial(aipo, rho=RHO), "average": average, "weight": 0.5, "clip_norm": 0.1}
    # Update twice: the sums of the first update must not be in the second.
    whole, ours, again = policy(max_tokens=7), policy(max_tokens=7), policy(max_tokens=7)
    for _ in range(2):
        _, needed = policy_update.fn(whole, *conversation(), **options)
        given = in_parts(ours, *conversation(), rows, **options)
        assert given == in_parts(again, *conversation(), rows, **options)
        assert given.keys() == needed.keys()
        assert given == pytest.approx(needed, rel=1e-4)
    assert ours.version == whole.version == 2
    assert equal(ours, again)
    for name, tensor in whole.masters.items():
        torch.testing.assert_close(ours.masters[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


def test_parts_begin_with_the_first_and_a_failed_one_leaves_nothing() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    options = {"loss": partial(aipo, rho=RHO)}
    with pytest.raises(ValueError, match="part 1 of 2 after 0"):
        policy_update.fn(learner, rollouts, advantage, part=BatchPart(1, 2), **options)
    for wrong in ({"epochs": 2}, {"minibatches": 2}, {"beside": (term.fn(rollouts, loss=imitate),)}):
        with pytest.raises(ValueError, match="a step has the whole batch"):
            policy_update.fn(learner, rollouts, advantage, part=BatchPart(0, 2), **options, **wrong)
    infinite = Advantages(advantage.values_N * torch.inf)
    before = {name: tensor.clone() for name, tensor in learner.state()[0].items()}
    policy_update.fn(learner, rollouts, infinite, part=BatchPart(0, 2), **options)
    with pytest.raises(FloatingPointError, match="The weights are as they were"):
        policy_update.fn(learner, rollouts, advantage, part=BatchPart(1, 2), **options)
    silent = replace(rollouts, versions_NT=torch.full_like(rollouts.versions_NT, -1))
    policy_update.fn(learner, silent, advantage, part=BatchPart(0, 2), **options)
    with pytest.raises(ValueError, match="2 parts of a batch without a sampled token"):
        policy_update.fn(learner, silent, advantage, part=BatchPart(1, 2), **options)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state()[0].items())
    other = policy()
    assert in_parts(learner, rollouts, advantage, [[0, 1, 2, 3, 4]], **options) == pytest.approx(
        policy_update.fn(other, rollouts, advantage, **options)[1]
    )
    assert equal(learner, other)


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


def test_equal_rollouts_make_equal_weights_to_the_bit() -> None:
    learners = [policy(), policy()]
    for learner in learners:
        for _ in range(2):
            policy_update.fn(learner, *batch(), loss=aipo, epochs=2, minibatches=5, micro_tokens=20)
    assert equal(*learners)
    assert not torch.equal(learners[0].weights()["model.norm.weight"], policy().weights()["model.norm.weight"])


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
    parts = optimizer_steps(cut.context, 0, rollouts.ordinals, 1, 2)
    assert sorted(rows for _, rows in parts) == [[0, 1], [2, 3, 4]]
    for _, rows in parts:
        policy_update.fn(step_by_step, rollouts.take(rows), advantage.take(rows), loss=aipo)
    policy_update.fn(cut, rollouts, advantage, loss=aipo, minibatches=2)
    assert equal(step_by_step, cut)
    assert cut.version == 1


def test_an_update_draws_nothing_from_the_global_generators() -> None:
    before, torch_before = random.getstate(), torch.get_rng_state()
    policy_update.fn(policy(), *batch(), loss=aipo, epochs=2, minibatches=5)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


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


def test_updates_without_a_gradient_are_told_of() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    nothing = Advantages(torch.zeros(5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for given in (nothing, nothing, advantage, nothing, nothing):
            aipo_update.fn(learner, rollouts, given)
    assert not told
    with pytest.warns(NodeWarning, match="policy: given 3 updates in a row with a gradient of 0"):
        aipo_update.fn(learner, rollouts, nothing)


def test_a_gradient_that_is_not_finite_stops_the_update_before_the_weights_change() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    before = {name: w.clone() for name, w in learner.weights().items()}
    advantage.values_N[2] = float("inf")
    with pytest.raises(
        FloatingPointError, match="policy: update of version 0: given a gradient of norm nan: elements of"
    ):
        aipo_update.fn(learner, rollouts, advantage)
    assert all(torch.equal(w, before[name]) for name, w in learner.weights().items())


def test_a_gradient_that_is_not_finite_is_named_by_its_tensor() -> None:
    learner = policy()
    *_, name, last = learner.masters

    def poison(gradient: Tensor) -> Tensor:
        return torch.where(torch.arange(gradient.numel()).view_as(gradient) < 3, torch.nan, gradient)

    for each in (name, last):
        learner.workers.parameters[each].register_hook(poison)  # type: ignore[no-untyped-call]
    said = f"elements of {name} that are NaN or infinite: 3, and of 1 more of {len(learner.masters)} tensors"
    with pytest.raises(FloatingPointError, match=re.escape(said)):
        aipo_update.fn(learner, *batch())


def test_a_norm_that_overflows_is_told_from_an_element_that_does() -> None:
    with pytest.raises(FloatingPointError, match="norm inf: every element is finite"):
        policy_update.fn(policy(), *batch(), loss=lambda logprobs_P, sampled: logprobs_P * 1e30)


def test_layers_that_are_computed_again_give_the_same_bits_and_keep_their_inputs_alone() -> None:
    for options in ({}, {"dtype": "bfloat16"}, {"threads": 2}):
        kept, again = policy(**options), policy(**options, recompute="layer")
        found = [policy_update.fn(each, *batch(), loss=aipo, epochs=2, micro_tokens=12)[1] for each in (kept, again)]
        assert found[0] == found[1]
        assert equal(kept, again)
    # Each of the two layers keeps only its input.
    packed = again.pack(batch()[0])[0]
    held = []
    for each in (kept, again):
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden_states(each.model, packed)
        held.append(sum(sizes))
    assert held[1] < held[0] / 4


@pytest.mark.parametrize("bucket", [0, 20_000, 1 << 30])
def test_moments_that_lie_on_the_host_make_the_same_bits(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket has one tensor, a few, or all."""
    monkeypatch.setattr(trainable, "BUCKET_BYTES", bucket)
    for options in ({}, {"dtype": "bfloat16"}):
        device, host = policy(**options), policy(**options, optimizer_state="host")
        for version in range(3):
            for each in (device, host):
                policy_update.fn(each, *batch(version), loss=aipo, lr=1e-2, weight_decay=0.1, epochs=2)
        assert equal(device, host)
        # Nothing of the optimizer is left for an offload to move.
        assert not [name for name in host.offloadable() if name.startswith(trainable.MOMENTS)]
        again = policy(**options, optimizer_state="host")
        again.restore(*host.state())
        for each in (device, again):
            policy_update.fn(each, *batch(3), loss=aipo, lr=1e-2)
        assert equal(device, again)


def test_adamw_has_the_bits_of_torchs() -> None:
    """Also for parameters that have a gradient only in some steps."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 7), (5,), (64, 129))]
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    optimizer = AdamW(ours)
    optimizer.lr, optimizer.betas, optimizer.weight_decay = 3e-3, (0.9, 0.95), 0.02
    oracle = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.02, fused=True)
    for step in range(6):
        for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            own.grad = None if number == 1 and step % 2 == 0 else torch.randn_like(own)
            other.grad = None if own.grad is None else own.grad.clone()
        optimizer.step()
        oracle.step()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
        assert {name: each.tolist() for name, each in optimizer.state[own].items()} == {
            name: each.tolist() for name, each in oracle.state[other].items()
        }


def test_a_run_starts_and_learns_without_torchs_compiler() -> None:
    """Its import takes a second, and sympy's half a second."""
    code = """
import sys, torch
from penstock.nodes.learn.optimizer import AdamW
from penstock.nodes.model import CausalLM
from penstock.nodes.model.config import ModelConfig
config = ModelConfig(16, 8, 8, 1, 1, 1, 8)
for device in ("meta", "cpu"):
    model = CausalLM(config, device=device)
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
AdamW([weight]).step()
print(*sorted({"sympy", "torch._dynamo"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


def test_moments_that_are_more_than_the_memory_of_their_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 8 * sum(p.numel() for p in policy().masters.values())
    for total in (needed, needed - 1):
        monkeypatch.setattr(machine, "cgroup_limits", lambda root, total=total: machine.MachineLimits(1, total))
        policy(host_ranks=2)
        with nullcontext() if total == needed else pytest.raises(ValueError, match=r"policy \[host-memory\]"):
            policy(optimizer_state="host", host_ranks=2)


def test_the_runs_micro_batches_are_those_of_every_pass_that_asks_for_none() -> None:
    widths = [
        max(each.tokens_RW.numel() for each in policy(micro_tokens=most).pack(batch()[0])) for most in (0, 12, 24)
    ]
    assert widths[1] <= 12 < widths[2] <= 24 < widths[0]


@pytest.mark.parametrize("one_prompt", [False, True])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"lora": 2}])
def test_sequences_that_lie_end_to_end_make_the_update_of_those_in_rows(
    options: dict[str, Any], one_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, advantage = batch()
    if one_prompt:
        rollouts.prompt_lengths_N[:] = 3
        rollouts.tokens_NS[:, :3] = rollouts.tokens_NS[0, :3]
    found = []
    for end_to_end in (True, False):
        monkeypatch.setattr(CausalLM, "takes_end_to_end", end_to_end)
        learner = policy(**options)
        (packed,) = learner.pack(rollouts)
        assert len(packed.tokens_RW) == (1 if end_to_end else 5)
        assert (packed.families_F is not None) == (end_to_end and one_prompt)
        _, figures = policy_update.fn(learner, rollouts, advantage, loss=aipo, clip_norm=FREE)
        found.append((gradients(learner), figures))
    near = 1e-2 if options.get("dtype") else 1e-5
    for name, gradient in found[0][0].items():
        torch.testing.assert_close(gradient, found[1][0][name], rtol=near, atol=near)
    assert found[0][1] == pytest.approx(found[1][1], rel=near, abs=near)


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


@pytest.mark.parametrize("ratio_log", [-800.0, 400.0])
def test_ratios_whose_squares_no_float_holds_stop_no_update_and_have_no_sample_size(ratio_log: float) -> None:
    """For example, if a policy has moved far away from its samples."""
    learner = policy()
    rollouts, advantage = batch()
    rollouts = replace(rollouts, logprobs_NT=torch.zeros_like(rollouts.logprobs_NT) - ratio_log)
    _, metrics = policy_update.fn(learner, rollouts, advantage, loss=reinforce)
    assert learner.version == 1
    assert math.isnan(metrics["ess"])


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


def test_a_loss_that_reads_no_mu_takes_rollouts_without_it() -> None:
    rollouts, advantage = batch()
    bare = replace(rollouts, logprobs_NT=None)
    one, other = policy(), policy()
    _, metrics = policy_update.fn(one, bare, advantage, loss=reinforce, minibatches=5)
    policy_update.fn(other, rollouts, advantage, loss=reinforce, minibatches=5)
    assert equal(one, other)
    assert not metrics.keys() & {"ratio_mean", "ratio_max", "ess", "kl"}


def my_loss(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    """A user's loss: learn only from responses that were better than their group."""
    return -sampled.advantages_P.clamp(min=0) * logprobs_P


def test_a_loss_of_ones_own_is_one_function() -> None:
    learner, (rollouts, advantage) = policy(), batch()
    logprobs = unpacked(learner, rollouts)
    better = [advantage.values_N[row] * lp.sum() for row, lp in enumerate(logprobs) if advantage.values_N[row] > 0]
    needed = by_autograd(learner, -torch.stack(better).sum() / 13)
    _, metrics = policy_update.fn(learner, rollouts, advantage, loss=my_loss, clip_norm=FREE)
    assert_same(gradients(learner), needed)
    assert metrics["ratio_clipped"] == 0


def told(logprobs_P: Tensor, sampled: Sampled, early: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's loss with metrics of its own; the name of one ends as those of maxima do, but it is a mean, too."""
    probs_P = logprobs_P.detach().exp()
    clipped_P = probs_P > 0.5
    return my_loss(logprobs_P, sampled), {
        "prob_max": probs_P,
        "ratio_clipped": clipped_P,
        "short": sampled.lengths_P <= early,
    }


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "minibatches": 2}, {"micro_tokens": 4}])
def test_figures_of_a_loss_are_metrics_as_means_over_tokens(options: dict[str, Any]) -> None:
    learner, (rollouts, advantage) = policy(), batch()
    probs = torch.cat([lp.detach() for lp in unpacked(learner, rollouts)]).exp()
    _, metrics = policy_update.fn(learner, rollouts, advantage, loss=told, lr=0.0, **options)
    assert metrics["prob_max"] == pytest.approx(float(probs.mean()), rel=1e-4)
    assert metrics["ratio_clipped"] == pytest.approx(float((probs > 0.5).float().mean()))
    lengths = [length for _, length in LENGTHS]
    assert metrics["short"] == pytest.approx(sum(n for n in lengths if n <= 2) / sum(lengths))
    _, plain = policy_update.fn(policy(), rollouts, advantage, loss=my_loss, lr=0.0, **options)
    assert {name: metrics[name] for name in plain.keys() - {"ratio_clipped"}} == {
        name: plain[name] for name in plain.keys() - {"ratio_clipped"}
    }


def test_figures_of_a_term_have_its_name() -> None:
    rollouts, advantage = batch()
    one = term.fn(rollouts, advantage, loss=told, name="one")
    other = term.fn(rollouts, advantage, loss=partial(told, early=9), name="other")
    _, metrics = policy_update.fn(policy(), rollouts, advantage, loss=aipo, beside=[one, other])
    assert (metrics["one_prob_max"], metrics["other_short"]) == (metrics["other_prob_max"], 1)
    assert not metrics.keys() & {"prob_max", "short"}


def test_metrics_of_updates_are_those_that_a_figure_of_a_loss_may_not_have_the_name_of() -> None:
    rollouts, advantage = batch(versions=3)
    found = set[str]()
    for replayed in (None, torch.arange(len(rollouts)) % 2 > 0):
        given = replace(rollouts, replayed_N=replayed)
        found |= policy_update.fn(policy(), given, advantage, loss=aipo)[1].keys()
    for name in found:
        loss = partial(named, name=name)
        if name == "ratio_clipped":
            policy_update.fn(policy(), rollouts, advantage, loss=loss)
            continue
        with pytest.raises(ValueError, match=f"{name}.*needed a name that no metric"):
            policy_update.fn(policy(), rollouts, advantage, loss=loss)


def by_length(logprobs_P: Tensor, sampled: Sampled) -> tuple[Tensor, dict[str, Tensor]]:
    return my_loss(logprobs_P, sampled), {f"of_{int(sampled.lengths_P[0])}": sampled.lengths_P}


def test_a_figure_that_a_loss_gives_in_some_steps_is_a_mean_over_their_tokens() -> None:
    rollouts, advantage = batch()
    _, metrics = policy_update.fn(policy(), rollouts, advantage, loss=by_length, minibatches=5)
    lengths = {length for _, length in LENGTHS}
    assert {name: value for name, value in metrics.items() if name.startswith("of_")} == {f"of_{n}": n for n in lengths}
    assert len(lengths) > 1


def named(logprobs_P: Tensor, sampled: Sampled, *, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    return my_loss(logprobs_P, sampled), {name: logprobs_P.detach()}


def sometimes(logprobs_P: Tensor, sampled: Sampled) -> tuple[Tensor, dict[str, Tensor]]:
    return named(logprobs_P, sampled, name=f"of_{int(sampled.sequence_P[0])}")


def figure_by_response(logprobs_P: Tensor, sampled: Sampled) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_P, {"mine": torch.zeros(2)}


def summed(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    return my_loss(logprobs_P, sampled).sum()


def said_thrice(logprobs_P: Tensor, sampled: Sampled) -> Any:
    return (logprobs_P,) * 3


def clipped_by_response(logprobs_P: Tensor, sampled: Sampled) -> tuple[Tensor, Tensor]:
    return -logprobs_P, torch.tensor([True, False])


def constant(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    return sampled.advantages_P * 2.0


ROLLOUTS, ADVANTAGE = batch()
NOBODYS = replace(ROLLOUTS, versions_NT=torch.full_like(ROLLOUTS.versions_NT, -1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": decoupled_ppo}, r"given no proximal_P .*there are: behaviour.*needed the trainer's own"),
        ({"loss": reinforce, "kl": 0.1}, r"given no reference_P .*needed a frozen policy's"),
        (
            {"rollouts": replace(ROLLOUTS, logprobs_NT=None)},
            r"given no behaviour_P .*none.*needed rollouts whose logpr",
        ),
        ({"rollouts": NOBODYS}, r"given 5 responses without a sampled token .* needed at least one"),
        (
            {"advantage": Advantages(ADVANTAGE.values_N[:3])},
            r"advantage: .* \[3\], needed \[5\], one for each response",
        ),
        (
            {"advantage": TokenAdvantages(ROLLOUTS.logprobs_NT[:, :3])},
            r"advantage: .* \[5, 3\], needed \[5, 4\], one for",
        ),
        (
            {"reference": Logprobs(ROLLOUTS.logprobs_NT[:, :2])},
            r"reference: .* \[5, 2\], needed \[5, 4\], one for each",
        ),
        ({"loss": summed}, r"loss summed: given a result of shape \[\], needed a loss for each token"),
        ({"loss": said_thrice}, r"loss said_thrice: given a result of shape .* and .* and .*, needed a loss for each"),
        ({"loss": clipped_by_response}, r"loss clipped_by_response: given a result of shape \[\d+\] and \[2\], needed"),
        ({"loss": figure_by_response}, r"loss figure_by_response: given a result of shape \[\d+\] and \[2\], needed"),
        ({"loss": partial(named, name="of lags")}, "loss named: given a figure 'of lags', needed a name of letters"),
        ({"loss": sometimes, "micro_tokens": 4}, "loss sometimes: given figures for some micro-batches alone: of_"),
        ({"loss": constant}, "loss constant: given a result without a gradient, needed one that follows from"),
        ({"minibatches": 6}, "minibatches=6 for a batch of 5 prompt groups"),
        ({"rate": LearningRate(-1e-3)}, r"update 0 of 10: given a learning rate of .*, needed a finite number of at"),
        ({"rate": LearningRate(float("nan"))}, r"update 0 of 10: given a learning rate of .*, needed a finite number"),
        ({"rate": LearningRate(float("inf"))}, r"update 0 of 10: given a learning rate of .*, needed a finite number"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_weights_change(changes: dict[str, Any], said: str) -> None:
    learner = policy()
    with pytest.raises(ValueError, match=said):
        policy_update.fn(learner, **{"rollouts": ROLLOUTS, "advantage": ADVANTAGE, "loss": aipo, **changes})
    assert equal(learner, policy())


def test_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="given a str, needed a LanguagePolicy"):
        aipo_update.fn("policy", *batch())


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


# Learning rates that change: by hand, by schedule, and by another node.


UPDATES = 10
"""Of the run that `policy` is made for."""


def rates(schedule: Schedule) -> list[float]:
    return [schedule(update, UPDATES) for update in range(UPDATES + 2)]


def test_a_line_up_then_a_line_down() -> None:
    falling = [2.0 * (1 - 0.1 * update) for update in range(UPDATES)] + [0.0, 0.0]
    assert rates(partial(linear, peak=2.0)) == pytest.approx(falling)
    rising = [0.25, 0.5, 0.75, *[1.0] * 9]
    assert rates(partial(linear, peak=1.0, warmup=3, final=1.0)) == pytest.approx(rising)
    assert rates(partial(linear, peak=1.0, warmup=6, final=0.5))[5:] == pytest.approx(
        [6 / 7, 1, 0.875, 0.75, 0.625, 0.5, 0.5]
    )
    assert rates(partial(linear, peak=1.0, warmup=12))[9:] == pytest.approx([10 / 13, 11 / 13, 12 / 13])


def test_half_a_cosine_from_the_peak_to_its_final_share() -> None:
    found = rates(partial(cosine, peak=4.0, final=0.5))
    assert (found[0], found[5], found[10], found[11]) == pytest.approx((4.0, 3.0, 2.0, 2.0))
    assert found == sorted(found, reverse=True)
    found = rates(partial(cosine, peak=4.0, warmup=2, final=0.5))
    assert [found[update] for update in (0, 2, 6, 10)] == pytest.approx([4 / 3, 4.0, 3.0, 2.0])


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_update_by_a_schedule_is_the_update_with_that_number_to_the_bit(epochs: int) -> None:
    schedule = partial(linear, peak=1e-2, warmup=2)
    one, other = policy(updates=UPDATES), policy(updates=UPDATES)
    for rate in rates(schedule)[:3]:
        _, figures = policy_update.fn(one, *batch(), loss=aipo, lr=schedule, epochs=epochs)
        policy_update.fn(other, *batch(), loss=aipo, lr=rate, epochs=epochs)
        assert figures["lr"] == rate
    assert equal(one, other)


@pytest.mark.parametrize(
    ("lr", "flags", "same"),
    [
        (3e-3, {"lr_warmup": 2}, partial(linear, peak=3e-3, warmup=2, final=1.0)),
        (3e-3, {"lr_decay": "cosine"}, partial(cosine, peak=3e-3)),
        (3e-3, {"lr_decay": "constant"}, 3e-3),
        (3e-3, {"lr_warmup": 2, "lr_decay": "linear"}, partial(linear, peak=3e-3, warmup=2)),
        (partial(cosine, peak=3e-3, final=0.5), {"lr_warmup": 2}, partial(cosine, peak=3e-3, final=0.5, warmup=2)),
        (partial(cosine, peak=3e-3, warmup=2), {"lr_warmup": 0}, partial(cosine, peak=3e-3)),
        (3e-3, {"lr_warmup": 0}, 3e-3),
        (partial(cosine, peak=3e-3, warmup=2, final=0.5), {"lr_decay": "linear"}, partial(linear, peak=3e-3, warmup=2)),
    ],
)
def test_the_flags_of_a_run_change_a_number_and_our_schedules(
    lr: float | Schedule, flags: dict[str, object], same: float | Schedule
) -> None:
    learner, needed = policy(updates=UPDATES, **flags), rates(same) if callable(same) else [same] * UPDATES
    for rate in needed[:3]:
        assert policy_update.fn(learner, *batch(), loss=aipo, lr=lr)[1]["lr"] == rate
    shown = Demonstrations(("1+1=",), ("2",))
    for warmup, rate in ((None, 0.5), (0, 1.0)):
        learner = policy(updates=UPDATES, lr_decay="constant", lr_warmup=warmup)
        assert sft_update.fn(learner, shown, lr=1.0, warmup=1)[1]["lr"] == rate


def test_a_rate_that_a_node_has_computed_takes_the_place_of_the_number() -> None:
    one, other = policy(), policy()
    _, figures = policy_update.fn(one, *batch(), rate=LearningRate(3e-3), loss=aipo)
    policy_update.fn(other, *batch(), loss=aipo, lr=3e-3)
    assert equal(one, other)
    assert figures["lr"] == 3e-3


def test_other_updates_take_schedules_too() -> None:
    (rollouts, advantage), learners = batch(), [policy(), policy()]
    rollouts.ordinals = (0,) * 5
    reference = policy_logprobs.fn(learners[0], rollouts)
    for learner, lr in zip(learners, (partial(cosine, peak=1e-3, warmup=3), 2.5e-4), strict=True):
        dpo_update.fn(learner, rollouts, advantage, reference, lr=lr)
    assert equal(*learners)


# Imitation learns demonstrations, end tokens included.


def test_sft_learns_the_demonstrations_and_ends_each_with_the_end_token() -> None:
    learner = policy(updates=30)
    demonstrations = Demonstrations(("1+1=", "10-3="), ("2", "7"))
    losses = [sft_update.fn(learner, demonstrations, lr=3e-3, warmup=2, final=0.1)[1] for _ in range(30)]
    assert losses[0]["tokens"] == 4
    assert losses[-1]["loss"] < 0.1 * losses[0]["loss"]
    assert losses[0]["lr"] < losses[2]["lr"] == pytest.approx(3e-3, rel=0.02)
    assert losses[-1]["lr"] == pytest.approx(3e-4, rel=0.1)


def test_demonstrations_as_rollouts_are_learnt_from_as_they_are() -> None:
    """Compare one step on their cross-entropy by `sft_update` and by `policy_update`."""
    shown = Demonstrations(("1+1=", "20+3="), ("2", "23"))
    one, other = policy(), policy()
    _, figures = sft_update.fn(one, shown, lr=1e-3, warmup=0, weight_decay=0.0)
    rollouts = demonstrated.fn(other, shown)
    _, found = policy_update.fn(other, rollouts, Advantages(torch.ones(2)), loss=imitate, lr=figures["lr"])
    assert equal(one, other)
    assert (found["tokens"], found["loss"]) == (figures["tokens"], pytest.approx(figures["loss"]))
    assert not {"lag_mean", "ratio_mean", "kl"} & found.keys()
    assert rollouts.finished_N.all()
    assert (rollouts.ordinals, rollouts.texts, rollouts.logprobs_NT) == ((0, 1), ("2", "23"), None)
    with pytest.raises(ValueError, match="given no behaviour_P"):
        policy_update.fn(other, rollouts, Advantages(torch.ones(2)), loss=aipo)


def test_texts_become_rollouts_in_groups_and_within_a_limit() -> None:
    with pytest.raises(ValueError, match=r"demonstration '1\+1=': given 45 tokens, needed at most 32"):
        demonstrated.fn(policy(), Demonstrations(("1+1=",), ("2" * 40,)))
    tokenizer = policy().tokenizer
    made = rollouts_of(tokenizer, ["1+1="] * 2, ["2", "3"], ordinals=[7, 7], answers=["2", "2"])
    assert (made.ordinals, made.answers) == ((7, 7), ("2", "2"))
    assert len(rollouts_of(tokenizer, [], [])) == 0
    with pytest.raises(ValueError, match="given 1 answers, needed 2, one for each text"):
        rollouts_of(tokenizer, ["1+1="] * 2, ["2", "3"], answers=["2"])


# A DPO update by hand: the gradient of equation 7 on each prompt's best and worst response.


BETA = 0.3
DPO_LENGTHS = [(2, 3), (2, 1), (2, 4), (1, 2), (1, 3), (1, 1), (3, 2), (3, 2)]
REWARDS = Rewards(torch.tensor([0.0, 2.0, 1.0, 0.5, -1.0, 0.0, 1.0, 1.0]))
PAIRS = [(1, 0), (3, 4)]
"""(best, worst) of the first two prompts; those of the third are equal."""


def dpo_batch() -> tuple[Rollouts, Logprobs]:
    """Return rollouts of three prompts, with an environment's token in the first response, and another reference."""
    rollouts = replace(random_rollouts(DPO_LENGTHS, unsampled=[(0, 1)]), ordinals=(4, 4, 4, 9, 9, 9, 7, 7))
    generator = torch.Generator().manual_seed(5)
    return rollouts, Logprobs(torch.randn(8, 4, generator=generator) * 0.3 - 2.7)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("micro_tokens", [1, 1000])
def test_an_update_steps_along_equation_7(micro_tokens: int, silent: bool) -> None:
    """`silent`: the policy sampled no token of the best response to the first prompt."""
    learner, twin, (rollouts, reference) = policy(), policy(), dpo_batch()
    if silent:
        rollouts.versions_NT[1] = -1
    options = {"beta": BETA, "clip_norm": FREE, "micro_tokens": micro_tokens}
    _, figures = dpo_update.fn(learner, rollouts, REWARDS, reference, **options)

    def against_reference(row: int) -> torch.Tensor:
        """Return log π / π_ref of the sampled tokens of a response."""
        prompt, length = DPO_LENGTHS[row]
        tokens = rollouts.tokens_NS[row, : prompt + length]
        logprobs = twin.model.logits(twin.model(tokens[None, :-1]))[0].log_softmax(-1)
        own = logprobs[range(prompt + length - 1), tokens[1:]][prompt - 1 :]
        gaps: torch.Tensor = own - reference.logprobs_NT[row, :length]
        return gaps[rollouts.versions_NT[row, :length] >= 0].sum()

    margins = torch.stack([against_reference(best) - against_reference(worst) for best, worst in PAIRS])
    loss = -torch.log(1 / (1 + torch.exp(-BETA * margins))).mean()
    assert_gradients(learner, loss, twin.masters)
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert figures["margin"] == pytest.approx(float(margins.detach().mean()), rel=1e-3)
    assert (figures["pairs"], figures["tokens"]) == (2.0, (not silent) + 2 + 2 + 3)
    assert figures["preferred"] == float((margins > 0).float().mean())


def test_without_a_preference_no_weight_moves_and_the_version_goes_on() -> None:
    learner, (rollouts, reference) = policy(), dpo_batch()
    before = {name: w.clone() for name, w in learner.weights().items()}
    _, figures = dpo_update.fn(learner, rollouts, Rewards(torch.ones(8)), reference)
    assert (figures["pairs"], figures["grad_norm"], learner.version) == (0.0, 0.0, 1)
    assert not figures.keys() & {"loss", "margin", "preferred"}  # figures of pairs
    assert all(torch.equal(w, before[name]) for name, w in learner.weights().items())


def test_responses_after_different_prefixes_make_no_pair() -> None:
    rollouts, reference = dpo_batch()
    rollouts.prefixes_N = torch.tensor([0, 0, 1, 0, 0, 1, 0, 1])
    for length, pairs in ((1, 2.0), (0, 3.0)):  # a prefix of no token is the prompt alone
        rollouts.prefix_lengths_N = torch.full((8,), length)
        rewards = Rewards(torch.tensor([0.0, 1.0, 5.0, 0.0, 1.0, 5.0, 0.0, 1.0]))
        assert dpo_update.fn(policy(), rollouts, rewards, reference)[1]["pairs"] == pairs


def test_responses_of_which_no_two_have_the_same_prompt_are_refused() -> None:
    """Else nothing would ever be learnt, and only the metric `pairs` would say so."""
    rollouts, reference = dpo_batch()
    first_N = torch.tensor([rollouts.groups.index(group) for group in dict.fromkeys(rollouts.groups)])
    alone = rollouts.take(first_N), REWARDS.take(first_N), reference.take(first_N)
    with pytest.raises(ValueError, match=f"given {len(first_N)} responses to as many prompts, needed 2 or more"):
        dpo_update.fn(policy(), *alone)


def test_the_chosen_becomes_likelier_against_the_rejected() -> None:
    learner, (rollouts, _) = policy(), dpo_batch()
    reference = policy_logprobs.fn(learner, rollouts)
    figures = [dpo_update.fn(learner, rollouts, REWARDS, reference, lr=1e-3)[1] for _ in range(10)]
    assert figures[0]["margin"] == 0.0
    assert figures[-1]["margin"] > 1.0
    assert figures[-1]["preferred"] == 1.0


# DPO and Bradley-Terry by hand; the best and the worst of a group, ties included.


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


CHOSEN, REJECTED = float64(-10.0, -12.0), float64(-11.0, -9.0)
REFERENCES = float64(-12.0, -12.0), float64(-10.0, -12.0)


@pytest.mark.parametrize(
    ("loss", "margins", "beta"),
    [
        # Margins (2 + 1) and (0 − 3), β = ½.
        (lambda w, x: dpo_loss(w, x, *REFERENCES, beta=0.5), (3.0, -3.0), 0.5),
        (lambda w, x: dpo_loss(w, x, CHOSEN, REJECTED, beta=0.1), (0.0, 0.0), 0.1),
        (bradley_terry_loss, (1.0, -3.0), 1.0),
    ],
)
def test_a_loss_of_pairs_and_its_gradient_by_hand(
    loss: Callable[[Tensor, Tensor], Tensor], margins: tuple[float, float], beta: float
) -> None:
    """−log σ(β · margin); the gradient is ∓ β · σ(−β · margin)."""
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    found = loss(chosen, rejected)
    torch.testing.assert_close(found, float64(*(-math.log(sigmoid(beta * margin)) for margin in margins)))
    slope = float64(*(beta * sigmoid(-beta * margin) for margin in margins))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (chosen, rejected)), (-slope, slope))


def test_a_hopeless_pair_has_a_finite_loss() -> None:
    far = torch.tensor([2000.0])
    assert dpo_loss(-far, far, torch.zeros(1), torch.zeros(1), beta=1.0).tolist() == [4000.0]


@pytest.mark.parametrize(
    ("rewards", "groups", "best", "worst", "weights"),
    [
        ([3.0, 0.5, 1.0, 0.1, 2.0, 0.9], [0, 1, 0, 1, 0, 1], [0, 5], [2, 3], [1, 1]),
        # The worst is the lowest, whatever the sign.
        *(
            ([x + shift for x in (3.0, -0.5, 1.0, -0.1, 2.0, -4.0)], [0, 1, 0, 1, 0, 1], [0, 3], [2, 5], [1, 1])
            for shift in (0.0, -2.0, -10.0)
        ),
        # Among equals the first row is taken, and a tie of all weighs nothing.
        ([1.0, 0.0, 1.0, 0.0, 0.7, 0.7, 0.7, 5.0], [0, 0, 0, 0, 1, 1, 1, 2], [0, 4, 7], [1, 4, 7], [1, 0, 0]),
    ],
)
def test_best_and_worst_of_each_group(
    rewards: list[float], groups: list[int], best: list[int], worst: list[int], weights: list[float]
) -> None:
    found = best_and_worst(torch.tensor(rewards), torch.tensor(groups))
    assert [each.tolist() for each in found] == [best, worst, weights]


def test_a_tied_pair_gives_no_gradient() -> None:
    logprobs = torch.tensor([-3.0, -4.0, -5.0, -6.0], requires_grad=True)
    best, worst, weight = best_and_worst(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    reference = logprobs.detach()
    loss = weight * dpo_loss(logprobs[best], logprobs[worst], reference[best], reference[worst], beta=1.0)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [0.0, 0.0, 0.5, -0.5]


def test_a_model_that_cannot_tell_is_right_half_the_time() -> None:
    found = bradley_terry_accuracy(torch.tensor([2.0, 0.5, -3.0]), torch.full((3,), 0.5))
    assert found.tolist() == [1.0, 0.5, 0.0]
