"""How far the generator's log-probabilities are from the trainer's, at equal weights."""

import torch

from penstock.graph.types import Rollouts
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.packing import pack
from penstock.nodes.model import Llama

MICRO_TOKENS = 8192


@torch.no_grad()
def mismatch(model: Llama, rollouts: Rollouts, temperature: float) -> float:
    """Mean |log μ recorded − log π of the trainer's packed forward| over response tokens, nats.

    `model` must hold the weights that sampled every token: across versions the difference is drift, not mismatch.
    """
    device = model.head_weight().device
    tokens_NS, recorded_NT = rollouts.tokens_NS.to(device), rollouts.logprobs_NT.to(device)
    total = 0.0
    for packed in pack(tokens_NS, rollouts.prompt_lengths_N, rollouts.response_lengths_N, MICRO_TOKENS):
        logprobs_P, _ = packed_logprobs(model, packed, temperature=temperature)
        total += float((logprobs_P - recorded_NT[packed.sequence_P, packed.step_P]).abs().sum())
    return total / int(rollouts.response_lengths_N.sum())
