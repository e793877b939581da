"""What an update computes on: rollouts with their advantages, cut into minibatches and packed into micro-batches.

A batch is cut into minibatches by whole prompt groups, in a keyed order. A minibatch is packed into micro-batches so
that little is computed on padding: sequences of about one length go together, the longest first, those of equal length
in the order of the batch; or whole prompt groups, for losses that compare the responses to a prompt. What is in which
micro-batch is a function of the lengths alone, so that equal rollouts make equal sums to the bit.

Only tokens that a policy sampled (version ≥ 0) are predicted and count in a loss; a token that an environment wrote
into a conversation is context alone. A sequence's last token predicts nothing and is left out.

The losses of tokens become the loss of an update as Σ weight · loss over all micro-batches, then one division.

Shapes: N responses (sequences), S their padded length, T that of responses, R rows (the sequences of a micro-batch), W
width of a row, P predicted tokens of a micro-batch.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from typing import Literal, Self

import torch
from torch import Tensor

from penstock.graph.protocols import Array
from penstock.graph.types import Advantages, Context, Logprobs, Rollouts, TokenAdvantages
from penstock.nodes.learn.losses import NEEDED, Sampled

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(lengths_P: Tensor, *, aggregation: Aggregation) -> Tensor:
    """The weight of each token's loss in the sum, float32 [P]; see `normaliser` for the division that follows."""
    if aggregation == "sequence_mean":
        return 1.0 / lengths_P
    return torch.ones_like(lengths_P, dtype=torch.float32)


def normaliser(lengths_N: Tensor, *, aggregation: Aggregation, max_tokens: int | None = None) -> float:
    """What the weighted sum of an update is divided by.

    "token_mean": all tokens count alike (DAPO, arXiv 2503.14476, equation 12). "sequence_mean": the mean over
    responses of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3). "constant": N · `max_tokens`, the
    longest response that can be, so that no token's weight depends on a length (Dr. GRPO, arXiv 2503.20783,
    section 3.2).
    """
    if aggregation == "token_mean":
        return float(lengths_N.sum())
    if aggregation == "sequence_mean":
        return float(len(lengths_N))
    if max_tokens is None:
        raise ValueError('normaliser: given aggregation="constant" without max_tokens, needed the longest length')
    return float(len(lengths_N) * max_tokens)


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


def per_token(given: str, values_NT: Tensor, rollouts: Rollouts) -> None:
    """Raises ValueError unless there is one value for each token of the rollouts; `given` begins the message."""
    _refuse_other(given, values_NT, list(rollouts.versions_NT.shape), "token")


def per_response(given: str, values_N: Tensor, rollouts: Rollouts) -> None:
    """The same with one value for each response."""
    _refuse_other(given, values_N, [len(rollouts)], "response")


def _refuse_other(given: str, values: Tensor, shape: list[int], each: str) -> None:
    if list(values.shape) != shape:
        raise ValueError(f"{given} of shape {list(values.shape)}, needed {shape}, one for each {each} of the rollouts")


@dataclass(frozen=True)
class Batch:
    """`others` are log-probabilities of the rollouts' tokens under other policies, by the names of `Sampled`.

    `behaviour` is among them unless `rollouts.logprobs_NT` is None, which says that it was not recorded.
    """

    rollouts: Rollouts
    advantage: Advantages
    others: Mapping[str, Logprobs]

    @classmethod
    def of(cls, rollouts: Rollouts, advantage: Advantages, device: torch.device, **others: Logprobs | None) -> Self:
        """On the learner's device. Raises ValueError for inputs that are not of the same tokens."""
        if rollouts.logprobs_NT is not None:
            others["behaviour"] = Logprobs(rollouts.logprobs_NT)
        given = {name: Logprobs(other.logprobs_NT.to(device)) for name, other in others.items() if other is not None}
        check_advantages = per_token if isinstance(advantage, TokenAdvantages) else per_response
        check_advantages("advantage: given values", advantage.values_N, rollouts)
        for name, other in given.items():
            per_token(f"{name}: given log-probabilities", other.logprobs_NT, rollouts)
        replayed_N = None if rollouts.replayed_N is None else rollouts.replayed_N.to(device)
        there = replace(rollouts, versions_NT=rollouts.versions_NT.to(device), replayed_N=replayed_N)
        return cls(there, replace(advantage, values_N=advantage.values_N.to(device)), given)

    def take(self, rows: Sequence[int]) -> "Batch":
        """These rows only."""
        others = {name: other.take(rows) for name, other in self.others.items()}
        return Batch(self.rollouts.take(rows), self.advantage.take(rows), others)

    def sampled(self, packed: Packed, lengths_N: Tensor, *, whole_groups: bool = False) -> Sampled:
        """What is known of a micro-batch's targets, which holds `whole_groups` or may cut them."""
        place, replayed_N = (packed.sequence_P, packed.step_P), self.rollouts.replayed_N
        return Sampled(
            advantages_P=self.advantage.at(*place),
            lengths_P=lengths_N[packed.sequence_P],
            versions_P=self.rollouts.versions_NT[place],
            sequence_P=packed.sequence_P,
            given={name: other.logprobs_NT[place] for name, other in self.others.items()},
            replayed_P=None if replayed_N is None else replayed_N[packed.sequence_P],
            whole_groups_N=group_rows(self.rollouts.ordinals).to(lengths_N.device) if whole_groups else None,
        )


@dataclass
class Term(Rollouts):
    """One term of an update's loss: rollouts, and what to make of them (see `update.term`).

    `values_N` are the advantages, [N] or [N, T]; `reference_NT` and `proximal_NT` log-probabilities as inputs of an
    update. `loss` is the loss function as JSON (`graph.paths.encode`), so that a term can cross processes.
    """

    values_N: Array = None
    reference_NT: Array = None
    proximal_NT: Array = None
    name: str = ""
    loss: str = ""
    weight: float = 1.0
    average: Aggregation = "token_mean"
    kl: float = 0.0

    def batch(self, device: torch.device) -> Batch:
        """As `Batch.of`."""
        rollouts = Rollouts(**{field.name: getattr(self, field.name) for field in fields(Rollouts)})
        kind = TokenAdvantages if self.values_N.ndim == 2 else Advantages
        others = {"reference": self.reference_NT, "proximal": self.proximal_NT}
        given = {name: None if values is None else Logprobs(values) for name, values in others.items()}
        return Batch.of(rollouts, kind(self.values_N), device, **given)


def minibatch_rows(ordinals: Sequence[int], minibatches: int, key: int, *, empty: bool = False) -> list[list[int]]:
    """The rows of each minibatch, in the order of the batch; which prompt group is in which is drawn by `key`.

    `ordinals` names the prompt group of each row; a group's rows are consecutive. What is cut is the batch as it is,
    with the past groups that a buffer has added. Where their number does not divide, some minibatches have one group
    more than others, which ones is a function of the numbers. Raises ValueError for fewer groups than minibatches,
    unless some may be `empty`.
    """
    rows = range(len(ordinals))
    groups = [list(group) for _, group in groupby(rows, key=lambda row: ordinals[row])]
    if minibatches < 1 or (len(groups) < minibatches and not empty):
        given = f"minibatches={minibatches} for a batch of {len(groups)} prompt groups"
        raise ValueError(f"minibatches: given {given}, needed at least 1, and a prompt group for each")
    # Groups are drawn and not rows: a loss may compare the responses to a prompt.
    order = list(range(len(groups)))
    random.Random(key).shuffle(order)
    bounds = [-(-len(groups) * number // minibatches) for number in range(minibatches + 1)]
    shares = (sorted(order[begin:end]) for begin, end in pairwise(bounds))
    return [[row for group in share for row in groups[group]] for share in shares]


def optimizer_steps(
    context: Context, version: int, ordinals: Sequence[int], epochs: int, minibatches: int, term: int = 0
) -> list[tuple[int, list[int]]]:
    """(epoch, rows) of each optimizer step of an update, in order, drawn by the run's seed, the version and the epoch.

    `term` is the number of the term of the loss: each cuts its own rows. Those behind the first, 0, may have fewer
    groups than there are minibatches. Raises ValueError for less than one epoch, and as `minibatch_rows` does.
    """
    if epochs < 1:
        raise ValueError(f"{context.node}: given epochs={epochs}, needed 1 or more")
    more = (term,) if term else ()
    return [
        (epoch, rows)
        for epoch in range(epochs)
        for rows in minibatch_rows(
            ordinals, minibatches, context.key("minibatches", version, epoch, *more), empty=bool(term)
        )
    ]


def behaviour_logprobs(rollouts: Rollouts, asker: str) -> Tensor:
    """log μ of each token, float [N, T]; zero where nobody sampled. Raises ValueError, which names the `asker`, for
    rollouts that lack them, such as data that no policy of this run has generated."""
    if rollouts.logprobs_NT is None:
        raise ValueError(f"{asker}: given rollouts without log μ (logprobs_NT is None), needed {NEEDED['behaviour']}")
    logprobs_NT: Tensor = rollouts.logprobs_NT
    return logprobs_NT
