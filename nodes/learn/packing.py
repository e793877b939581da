"""Sequences of different lengths in micro-batches, so that little is computed on padding.

Sequences of about one length go together: the longest first, those of equal length in the order of the batch; or whole
prompt groups, for losses that compare the responses to a prompt. What is in which micro-batch is a function of the
lengths alone, so that equal rollouts make equal sums to the bit. A sequence's last token predicts nothing and is left
out.

What a policy sampled is predicted; a token that an environment wrote into a conversation is context alone.

Shapes: N sequences, S their padded length, T that of responses, R rows (the sequences of a micro-batch), W width of a
row, P predicted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.graph.types import Rollouts


@dataclass(frozen=True)
class Packed:
    """One micro-batch. Each row of `tokens_RW` is a sequence, padded with zeros on the right.

    `at_P` is the flat index in R × W of the token that predicts `targets_P`; `sequence_P` and `step_P` say which
    sequence of the batch, and which token of its response, that target is. `temperature_P` (float32) is the
    temperature that each target was sampled at; None where all are 1.
    """

    tokens_RW: Tensor
    at_P: Tensor
    targets_P: Tensor
    sequence_P: Tensor
    step_P: Tensor
    temperature_P: Tensor | None = None


def sampled_mask(rollouts: Rollouts) -> Tensor:
    """Which tokens of each response the policy sampled, bool [N, T]: no padding, and none of an environment's."""
    versions_NT: Tensor = rollouts.versions_NT
    steps_T = torch.arange(versions_NT.shape[1], device=versions_NT.device)
    within_NT: Tensor = steps_T < rollouts.response_lengths_N.to(versions_NT.device)[:, None]
    return within_NT & (versions_NT >= 0)


def turn_of_tokens(rollouts: Rollouts) -> Tensor:
    """Which of the model's turns each token of a response is of, int64 [N, T]: 0, 1, …; −1 for what it did not sample.

    Turns are told by the environment's tokens between them.
    """
    sampled_NT = sampled_mask(rollouts)
    before_NT = torch.cat([torch.zeros_like(sampled_NT[:, :1]), sampled_NT[:, :-1]], 1)
    return ((sampled_NT & ~before_NT).cumsum(1) - 1).masked_fill(~sampled_NT, -1)


def group_rows(ordinals: Sequence[int]) -> Tensor:
    """Which prompt group each row is of, int64 [N]: 0, 1, … in the order in which the groups come."""
    numbers = {ordinal: number for number, ordinal in enumerate(dict.fromkeys(ordinals))}
    return torch.tensor([numbers[ordinal] for ordinal in ordinals], dtype=torch.long)


def sampled_lengths(rollouts: Rollouts) -> Tensor:
    """Sampled tokens of each response, int64 [N]. Raises ValueError if there is none at all: nothing to learn from."""
    lengths_N = sampled_mask(rollouts).sum(1)
    if not int(lengths_N.sum()):
        given = f"{len(rollouts)} responses without a sampled token (all versions are -1)"
        raise ValueError(f"rollouts: given {given}, needed at least one")
    return lengths_N


def pack(
    tokens_NS: Tensor,
    prompt_lengths_N: Tensor,
    response_lengths_N: Tensor,
    max_tokens: int,
    multiple: int = 1,
    sampled_NT: Tensor | None = None,
    temperature_N: Tensor | None = None,
    group_N: Tensor | None = None,
) -> list[Packed]:
    """Micro-batches of at most `max_tokens` tokens with padding (but at least one row), about equally large.

    Their number is a multiple of `multiple` where there are sequences enough. `sampled_NT` (bool, see `sampled_mask`)
    says which tokens of the responses are predicted; None: all of them. `temperature_N` is the temperature that each
    response was sampled at; None: 1. A micro-batch in which nothing is predicted is left out: there is nothing to
    compute, and kernels refuse matrices without a row. `group_N` (int64) says which rows stay together: a micro-batch
    holds whole groups, at least one, whatever its tokens. Every prompt needs a token: the first one of a response has
    to be predicted by something. Raises ValueError for an empty prompt.
    """
    if int(prompt_lengths_N.min()) < 1:
        raise ValueError(f"pack: given an empty prompt in row {int(prompt_lengths_N.argmin())}, needed one token")
    lengths_N = (prompt_lengths_N + response_lengths_N - 1).cpu()
    order_N = torch.argsort(lengths_N, descending=True, stable=True)
    # The units that are never cut: rows, or groups by their longest row. Each has its length and its number of rows.
    units = {row: [row] for row in order_N.tolist()}
    if group_N is not None:
        units = {}
        for row, group in zip(order_N.tolist(), group_N.cpu()[order_N].tolist(), strict=True):
            units.setdefault(group, []).append(row)
        order_N = torch.tensor([row for unit in units.values() for row in unit])
    lengths = lengths_N[[unit[0] for unit in units.values()]].tolist()
    rows = _balanced(lengths, [len(unit) for unit in units.values()], max_tokens, multiple)
    parts = prompt_lengths_N.cpu(), response_lengths_N.cpu()
    predicted_NT = None if sampled_NT is None else sampled_NT.cpu()
    if temperature_N is not None:
        temperature_N = temperature_N.float().cpu() if bool((temperature_N != 1).any()) else None
    given = (*parts, predicted_NT, temperature_N)
    packed = [_build(tokens_NS, *given, chosen_R) for chosen_R in torch.split(order_N, rows)]
    return [each for each in packed if len(each.targets_P)]


def _balanced(lengths: list[int], counts: list[int], max_tokens: int, multiple: int) -> list[int]:
    """Rows of each micro-batch: the smallest bound on its tokens that needs no more of them than `max_tokens` does,
    rounded up to `multiple`."""
    most = len(_rows(lengths, counts, max_tokens))
    most += -most % multiple
    low, high = 1, max(max_tokens, lengths[0])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_rows(lengths, counts, middle)) <= most else (middle + 1, high)
    return _rows(lengths, counts, low)


def _rows(lengths: list[int], counts: list[int], max_tokens: int) -> list[int]:
    """Rows of each micro-batch of at most `max_tokens`, each as wide as its first (longest) unit."""
    rows: list[int] = []
    width = 0
    for length, count in zip(lengths, counts, strict=True):
        if rows and (rows[-1] + count) * width <= max_tokens:
            rows[-1] += count
        else:
            rows.append(count)
            width = length
    return rows


def _build(
    tokens_NS: Tensor,
    prompts_N: Tensor,
    responses_N: Tensor,
    sampled_NT: Tensor | None,
    temperature_N: Tensor | None,
    chosen_R: Tensor,
) -> Packed:
    """The micro-batch of the sequences `chosen_R`."""
    device = tokens_NS.device
    prompts_R, responses_R = prompts_N[chosen_R], responses_N[chosen_R]
    lengths_R = prompts_R + responses_R - 1
    width = int(lengths_R.max())
    within_RW = torch.arange(width) < lengths_R[:, None]
    row_P = torch.repeat_interleave(torch.arange(len(chosen_R)), responses_R)
    step_P = torch.arange(len(row_P)) - (responses_R.cumsum(0) - responses_R)[row_P]
    if sampled_NT is not None:
        sampled_P = sampled_NT[chosen_R[row_P], step_P]
        row_P, step_P = row_P[sampled_P], step_P[sampled_P]
    place_P = prompts_R[row_P] + step_P
    sequence_P = chosen_R[row_P].to(device)
    temperature_P = None if temperature_N is None else temperature_N[chosen_R[row_P]].to(device)
    return Packed(
        tokens_RW=tokens_NS[chosen_R.to(device), :width].masked_fill(~within_RW.to(device), 0),
        at_P=(row_P * width + place_P - 1).to(device),
        targets_P=tokens_NS[sequence_P, place_P.to(device)].long(),
        sequence_P=sequence_P,
        step_P=step_P.to(device),
        temperature_P=temperature_P,
    )
