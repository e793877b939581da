"""Several terms in one gradient, each with a weight and a normaliser; losses that see whole prompt groups."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph import requires
from penstock.graph.types import Advantages, Rollouts
from penstock.nodes.learn.batching import Term
from penstock.nodes.learn.losses import Sampled, aipo, imitate, reads, reinforce, segment_sum
from penstock.nodes.learn.update import policy_update, term
from penstock.runtime.tensor.codec import decode, encode

from .updating import FREE, LENGTHS, assert_same, batch, by_autograd, equal, gradients, policy, unpacked

ROWS = [0, 2, 3]
"""The rows of the batch that are demonstrations."""


def demonstrations() -> Rollouts:
    return replace(batch()[0].take(ROWS), logprobs_NT=None)


def beside(weight: float = 0.25, **options: Any) -> Term:
    made = term.fn(demonstrations(), loss=imitate, weight=weight, **options)
    assert isinstance(made, Term)
    return made


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_an_update_steps_along_the_weighted_sum_of_its_terms(average: Any, micro_tokens: int) -> None:
    """Each with a normaliser of its own: the second has 9 tokens of 3 responses."""
    learner, (rollouts, advantage) = policy(max_tokens=7), batch()
    logprobs = unpacked(learner, rollouts)
    shown = [logprobs[row].mean() if average == "sequence_mean" else logprobs[row].sum() for row in ROWS]
    imitated = -torch.stack(shown).sum() / {"token_mean": 9, "sequence_mean": 3, "constant": 3 * 7}[average]
    reinforced = -sum((a * lp.sum() for a, lp in zip(advantage.values_N, logprobs, strict=True)), torch.zeros(())) / 13
    needed = by_autograd(learner, 0.5 * reinforced + 0.25 * imitated)
    options = {"weight": 0.5, "clip_norm": FREE, "micro_tokens": micro_tokens}
    _, figures = policy_update.fn(
        learner, rollouts, advantage, beside=(beside(average=average),), loss=reinforce, **options
    )
    assert_same(gradients(learner), needed)
    assert figures["reinforce_loss"] == pytest.approx(reinforced.item(), rel=1e-4)
    assert figures["imitate_loss"] == pytest.approx(imitated.item(), rel=1e-4)
    assert figures["loss"] == pytest.approx(0.5 * reinforced.item() + 0.25 * imitated.item(), rel=1e-4)
    assert (figures["tokens"], figures["imitate_tokens"], figures["optimizer_steps"]) == (13, 9, 1)
    assert {"lag_mean", "ratio_mean"} < figures.keys()
    assert not {"imitate_lag_mean", "imitate_ratio_mean", "imitate_grad_norm"} & figures.keys()


def test_one_loss_in_two_halves_is_the_loss() -> None:
    one, other = policy(), policy()
    again = term.fn(*batch(), loss=aipo, weight=0.5, name="again")
    policy_update.fn(one, *batch(), loss=aipo, clip_norm=FREE)
    _, figures = policy_update.fn(other, *batch(), beside=(again,), loss=aipo, weight=0.5, clip_norm=FREE)
    assert_same(gradients(other), gradients(one))
    assert figures["again_kl"] == figures["kl"]
    assert figures["loss"] == pytest.approx(figures["aipo_loss"])


def test_a_term_of_nothing_changes_nothing() -> None:
    """None of the responses was good enough, or an environment wrote them."""
    silent = replace(demonstrations(), versions_NT=torch.full((3, 4), -1))
    for rollouts in (demonstrations().take([]), silent):
        one, other = policy(), policy()
        nothing = term.fn(rollouts, loss=imitate)
        policy_update.fn(one, *batch(), loss=aipo, epochs=2, minibatches=2)
        _, figures = policy_update.fn(other, *batch(), beside=(nothing,), loss=aipo, epochs=2, minibatches=2)
        assert equal(one, other)
        assert (figures["imitate_loss"], figures["imitate_tokens"]) == (0, 0)


def test_a_first_term_of_nothing_leaves_the_others() -> None:
    one, other, (rollouts, advantage) = policy(), policy(), batch()
    silent = replace(rollouts, versions_NT=torch.full((5, 4), -1))
    _, figures = policy_update.fn(one, silent, advantage, beside=(beside(1.0),), loss=aipo, clip_norm=FREE)
    policy_update.fn(other, demonstrations(), Advantages(torch.ones(3)), loss=imitate, clip_norm=FREE)
    assert_same(gradients(one), gradients(other))
    assert (figures["tokens"], figures["imitate_tokens"]) == (0, 9)
    nothing = term.fn(silent, loss=imitate)
    with pytest.raises(ValueError, match="2 terms, aipo and imitate, without a sampled token, needed at least one"):
        policy_update.fn(policy(), silent, advantage, beside=(nothing,), loss=aipo)


def test_every_term_is_in_every_step_with_minibatches_of_its_own() -> None:
    learner = policy()
    _, figures = policy_update.fn(learner, *batch(), beside=(beside(),), loss=aipo, epochs=2, minibatches=3)
    assert (figures["optimizer_steps"], learner.version) == (6, 1)
    assert (figures["tokens"], figures["imitate_tokens"]) == (13, 9)


def test_a_term_of_fewer_groups_than_minibatches_is_in_as_many_steps() -> None:
    """How many a term has may depend on rewards, so it ends no run."""
    for rows, tokens in (([0, 1, 2], 9), ([1], 4)):
        few = term.fn(demonstrations().take(rows), loss=imitate)
        _, figures = policy_update.fn(policy(), *batch(), beside=(few,), loss=aipo, epochs=2, minibatches=4)
        assert (figures["optimizer_steps"], figures["tokens"], figures["imitate_tokens"]) == (8, 13, tokens)
        assert figures["imitate_loss"] > 0
    with pytest.raises(ValueError, match="given minibatches=4 for a batch of 3 prompt groups"):
        policy_update.fn(policy(), demonstrations(), Advantages(torch.ones(3)), loss=imitate, minibatches=4)


def test_terms_of_one_name_are_refused() -> None:
    both = (beside(), beside(name="imitate"))
    with pytest.raises(ValueError, match="given terms aipo, imitate, imitate, needed names of their own"):
        policy_update.fn(policy(), *batch(), beside=both, loss=aipo)


def test_a_term_crosses_processes() -> None:
    one, other, (rollouts, advantage) = policy(), policy(), batch()
    made = term.fn(rollouts, advantage, loss=partial(aipo, rho=1.1), weight=0.5, name="again", average="sequence_mean")
    policy_update.fn(one, *batch(), beside=(made,), loss=reinforce)
    policy_update.fn(other, *batch(), beside=(decode(Term, *encode(made)),), loss=reinforce)
    assert equal(one, other)


# Whole groups -------------------------------------------------------------------------------------------------


@requires(reads("group"))
def listwise(logprobs_P: Tensor, sampled: Sampled, *, sign: float = 1.0) -> Tensor:
    """−A · log of the response's share among those to the same prompt; on each of its tokens, over their number."""
    group_N, row_P = sampled.group_N, sampled.sequence_P
    whole_N = segment_sum(logprobs_P, row_P, len(group_N))
    share_N = whole_N - segment_sum(whole_N.exp(), group_N).log()[group_N]
    return -sign * sampled.advantages_P * share_N[row_P] / sampled.lengths_P


GROUPED = (7, 8, 7, 8, 7)


@pytest.mark.parametrize("loss", [listwise, partial(listwise, sign=1.0)])
@pytest.mark.parametrize("micro_tokens", [1, 24, 1000])
def test_a_loss_that_reads_groups_sees_them_whole_whatever_the_packing(loss: Any, micro_tokens: int) -> None:
    learner, (rollouts, advantage) = policy(), batch()
    rollouts = replace(rollouts, ordinals=GROUPED)
    wholes = torch.stack([lp.sum() for lp in unpacked(learner, rollouts)])
    shares = [
        wholes[row] - wholes[[r for r in range(5) if GROUPED[r] == g]].logsumexp(0) for row, g in enumerate(GROUPED)
    ]
    total = -(advantage.values_N * torch.stack(shares)).sum() / 5
    needed = by_autograd(learner, total)
    options = {"average": "sequence_mean", "clip_norm": FREE, "micro_tokens": micro_tokens}
    _, figures = policy_update.fn(learner, rollouts, advantage, loss=mean_on_tokens(loss), **options)
    assert_same(gradients(learner), needed)
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-4)


def mean_on_tokens(loss: Any) -> Any:
    return partial(spread, base=loss)


def spread(logprobs_P: Tensor, sampled: Sampled, *, base: Any) -> Tensor:
    """The loss of a response on each of its tokens, so that their mean is the response's."""
    found: Tensor = base(logprobs_P, sampled) * sampled.lengths_P
    return found


def careless(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    return logprobs_P * sampled.group_P


def test_a_loss_that_does_not_say_that_it_reads_groups_is_told() -> None:
    with pytest.raises(ValueError, match=r'micro-batches that may cut groups, needed @requires\(reads\("group"\)\)'):
        policy_update.fn(policy(), *batch(), loss=careless)


def test_minibatches_are_groups_too() -> None:
    rollouts, advantage = batch()
    rollouts = replace(rollouts, ordinals=(3, 3, 5, 5, 5))
    learner = policy()
    _, figures = policy_update.fn(learner, rollouts, advantage, loss=listwise, minibatches=2, micro_tokens=1)
    assert (figures["optimizer_steps"], figures["tokens"]) == (2, sum(length for _, length in LENGTHS))
