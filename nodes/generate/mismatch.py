"""How far the generator's log-probabilities are from the trainer's, at equal weights."""

import torch

from penstock.graph.types import Rollouts
from penstock.nodes.learn.behaviour import behaviour_logprobs
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.packing import pack, sampled_mask
from penstock.nodes.model import Llama

MICRO_TOKENS = 8192


@torch.no_grad()
def mismatch(model: Llama, rollouts: Rollouts) -> float:
    """Mean |log μ recorded − log π of the trainer's packed forward, at the same temperature| over sampled tokens, nats.

    `model` must hold the weights that sampled every one: across versions the difference is drift, not mismatch. Raises
    ValueError for rollouts without log μ.
    """
    device = model.device
    tokens_NS, recorded_NT = rollouts.tokens_NS.to(device), behaviour_logprobs(rollouts, "mismatch").to(device)
    sampled_NT, total = sampled_mask(rollouts), 0.0
    lengths = rollouts.prompt_lengths_N, rollouts.response_lengths_N
    settings = {"sampled_NT": sampled_NT, "temperature_N": rollouts.temperature_N}
    for packed in pack(tokens_NS, *lengths, MICRO_TOKENS, **settings):
        logprobs_P, _ = packed_logprobs(model, packed)
        total += float((logprobs_P - recorded_NT[packed.sequence_P, packed.step_P]).abs().sum())
    return total / int(sampled_NT.sum())
