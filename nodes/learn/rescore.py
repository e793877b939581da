"""Log-probabilities of sampled tokens under another policy than the one that sampled them.

Shapes: N responses, T tokens of a response.
"""

import torch

from penstock.graph import node
from penstock.graph.types import Logprobs, Policy, Reference, Rollouts
from penstock.nodes.policy import language_model


@node(pool="reference")
def reference_logprobs(reference: Reference, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Logprobs:
    """log π_ref of each sampled token, float32 [N, T]; zero elsewhere.

    π_ref is at the temperature that was sampled at, as π is: a policy that has not moved from it has no divergence.
    """
    return _logprobs(reference, rollouts, micro_tokens)


@node(pool="trainer", clock="update")
def policy_logprobs(policy: Policy, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Logprobs:
    """log π of each sampled token by the policy as it is before the update, at the temperature that was sampled at,
    float32 [N, T]; zero elsewhere."""
    return _logprobs(policy, rollouts, micro_tokens)


def _logprobs(policy: Policy, rollouts: Rollouts, micro_tokens: int | None) -> Logprobs:
    model = language_model(policy)
    micro_batches = model.pack(rollouts, micro_tokens)
    logprobs_NT = torch.zeros(rollouts.versions_NT.shape, device=model.device)
    for packed, logprobs_P in zip(micro_batches, model.logprobs(micro_batches), strict=True):
        logprobs_NT[packed.sequence_P, packed.step_P] = logprobs_P
    return Logprobs(logprobs_NT.to(rollouts.versions_NT.device))
