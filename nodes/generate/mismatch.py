"""How far the generator's log-probabilities are from the trainer's, at equal weights."""

import torch

from penstock.graph.types import Rollouts
from penstock.nodes.learn.logprobs import token_logprobs
from penstock.nodes.learn.packing import pack
from penstock.nodes.model import Llama

MICRO_TOKENS = 8192


@torch.no_grad()
def mismatch(model: Llama, rollouts: Rollouts, temperature: float) -> float:
    """Mean |log μ recorded − log π of the trainer's packed forward| over response tokens, nats.

    `model` must hold the weights that sampled every token: across versions the difference is drift, not mismatch.
    """
    head_weight_VD = model.head_weight()
    tokens_NS = rollouts.tokens_NS.to(head_weight_VD.device)
    recorded_NT = rollouts.logprobs_NT.to(head_weight_VD.device)
    total = 0.0
    for packed in pack(tokens_NS, rollouts.prompt_lengths_N, rollouts.response_lengths_N, MICRO_TOKENS):
        hidden_RWD = model.hidden(packed.tokens_RW, packed.positions_RW, packed.segments_RW)
        hidden_PD = hidden_RWD.flatten(0, 1)[packed.at_P] / temperature
        logprobs_P, _ = token_logprobs(hidden_PD, head_weight_VD, packed.targets_P)
        total += float((logprobs_P - recorded_NT[packed.sequence_P, packed.step_P]).abs().sum())
    return total / int(rollouts.response_lengths_N.sum())
