"""Log-probabilities under another policy are those of its model, at each sampled token."""

import torch

from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.policy import FrozenPolicy, make_reference

from .updating import CONTEXT, batch, conversation, policy, unpacked


def test_reference_logprobs_are_those_of_the_frozen_model_and_zero_past_the_end() -> None:
    rollouts, _ = batch()
    reference = make_reference(CONTEXT)
    assert isinstance(reference, FrozenPolicy)
    for micro_tokens in (20, 1000):
        found = reference_logprobs.fn(reference, rollouts, micro_tokens=micro_tokens).logprobs_NT
        for row, logprobs in enumerate(unpacked(policy(), rollouts)):
            torch.testing.assert_close(found[row, : len(logprobs)], logprobs.detach(), rtol=1e-4, atol=1e-5)
            assert (found[row, len(logprobs) :] == 0).all()


def test_the_policys_own_are_those_it_has_now_and_need_no_behaviour() -> None:
    rollouts, _ = conversation()
    rollouts.logprobs_NT = None
    found = policy_logprobs.fn(policy(), rollouts).logprobs_NT
    needed = unpacked(policy(), rollouts)
    torch.testing.assert_close(found[0, :3], needed[0].detach(), rtol=1e-4, atol=1e-5)
    assert (found[1] == 0).all()
    assert (found[2] != 0).tolist() == [True, False, False, True]


def test_they_have_no_gradient() -> None:
    assert not policy_logprobs.fn(policy(), batch()[0]).logprobs_NT.requires_grad
