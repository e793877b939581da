"""Sequences of different lengths in rows of one width, so that little is computed on padding.

Sequences keep their order: (ordinal, sample) in, (row, place in the row) out, so that equal rollouts make equal
sums to the bit. A sequence's last token predicts nothing and is left out.

Shapes: N sequences, S their padded length, R rows, W width of a row, P predicted tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """One micro-batch. Row r of `tokens_RW` holds one or more sequences, padded with zeros on the right.

    `segments_RW` numbers the sequences of the micro-batch, −1 on padding; None if each row holds a single one, where
    causal attention alone keeps tokens from seeing others. `at_P` is the flat index in R × W of the token that
    predicts `targets_P`; `sequence_P` and `step_P` say which sequence of the batch, and which token of its response,
    that target is.
    """

    tokens_RW: Tensor
    positions_RW: Tensor
    segments_RW: Tensor | None
    at_P: Tensor
    targets_P: Tensor
    sequence_P: Tensor
    step_P: Tensor


def pack(tokens_NS: Tensor, prompt_lengths_N: Tensor, response_lengths_N: Tensor, max_tokens: int) -> Iterator[Packed]:
    """Micro-batches of at most `max_tokens` tokens with padding (but at least one row), in order.

    The rows are as wide as the longest sequence of the batch. Every prompt needs a token: the first one of a
    response has to be predicted by something.
    """
    if int(prompt_lengths_N.min()) < 1:
        raise ValueError(f"pack: given an empty prompt in row {int(prompt_lengths_N.argmin())}, needed one token")
    lengths = (prompt_lengths_N + response_lengths_N - 1).tolist()
    width = max(lengths)
    rows, starts = _next_fit(lengths, width)
    per_micro = max(1, max_tokens // width)
    rows_N, starts_N = torch.tensor(rows), torch.tensor(starts)
    for first in range(0, rows[-1] + 1, per_micro):
        chosen_M = ((rows_N >= first) & (rows_N < first + per_micro)).nonzero().squeeze(1)
        flat_M = (rows_N[chosen_M] - first) * width + starts_N[chosen_M]
        num_rows = int(rows_N[chosen_M[-1]]) - first + 1
        yield _build(tokens_NS, prompt_lengths_N, response_lengths_N, chosen_M, flat_M, (num_rows, width))


def _next_fit(lengths: list[int], width: int) -> tuple[list[int], list[int]]:
    """Each sequence's row and place: the current row if it still fits, else the next."""
    rows, starts, row, used = [], [], 0, 0
    for length in lengths:
        if used + length > width:
            row, used = row + 1, 0
        rows.append(row)
        starts.append(used)
        used += length
    return rows, starts


def _build(
    tokens_NS: Tensor,
    prompt_lengths_N: Tensor,
    response_lengths_N: Tensor,
    chosen_M: Tensor,
    flat_M: Tensor,
    shape: tuple[int, int],
) -> Packed:
    """The micro-batch of the sequences `chosen_M`, the m-th of which begins at flat index `flat_M[m]`."""
    device = tokens_NS.device
    prompts_M, responses_M = prompt_lengths_N[chosen_M].cpu(), response_lengths_N[chosen_M].cpu()
    which_I, offset_I = _ragged(prompts_M + responses_M - 1)
    at_I = (flat_M[which_I] + offset_I).to(device)
    tokens, positions = tokens_NS.new_zeros(shape), tokens_NS.new_zeros(shape)
    tokens.view(-1)[at_I] = tokens_NS[chosen_M[which_I], offset_I]
    positions.view(-1)[at_I] = offset_I.to(positions)
    segments = None
    if len(chosen_M) > shape[0]:
        segments = torch.full(shape, -1, dtype=torch.long, device=device)
        segments.view(-1)[at_I] = which_I.to(device)
    which_P, step_P = _ragged(responses_M)
    place_P = prompts_M[which_P] + step_P
    sequence_P = chosen_M[which_P]
    return Packed(
        tokens,
        positions,
        segments,
        at_P=(flat_M[which_P] + place_P - 1).to(device),
        targets_P=tokens_NS[sequence_P, place_P].long(),
        sequence_P=sequence_P.to(device),
        step_P=step_P.to(device),
    )


def _ragged(lengths_M: Tensor) -> tuple[Tensor, Tensor]:
    """For each item of M lists laid end to end, its list and its place in it."""
    which_I = torch.repeat_interleave(torch.arange(len(lengths_M)), lengths_M)
    begins_M = lengths_M.cumsum(0) - lengths_M
    return which_I, torch.arange(len(which_I)) - begins_M[which_I]
