"""The batches of an update: rollouts with their advantages, cut into minibatches and packed into micro-batches.

A batch is cut into minibatches by whole prompt groups, in a keyed order. A minibatch is packed into micro-batches with
little padding: sequences of similar length go together, the longest first, those of equal length in the order of the
batch; or whole prompt groups, for losses that compare the responses to a prompt. On a CPU sequences are laid end to
end, and the responses to a prompt share it. The packing is a function of the lengths, and of which prompts are equal if
they are shared, so that equal rollouts make equal sums to the bit.

Only tokens that a policy sampled (version ≥ 0) are predicted and count in a loss; an environment's tokens in a
conversation are only context. A sequence's last token predicts nothing and is left out.

The loss of an update is Σ weight · loss over the tokens of all micro-batches, then one division.

Shapes: N responses (sequences), S their padded length, T that of responses, R rows (the sequences of a micro-batch), W
width of a row, P predicted tokens of a micro-batch.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import pairwise
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.deferred import shape_of
from penstock.graph.requires import Call
from penstock.graph.types import Rollouts
from penstock.nodes.learn.losses import NEEDED

# Rows and columns of micro-batches are multiples of these, so that shapes repeat: for each new shape oneDNN compiles
# all products of a model again (20 ms on a CPU with AMX, of 100 ms that a micro-batch takes).
ROWS, WIDTHS = 8, 4
# The same for tokens of sequences laid end to end, and for rows of the head's products on a CPU.
STEP = 64

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(lengths_P: Tensor, *, aggregation: Aggregation) -> Tensor:
    """The weight of each token's loss in the sum, float32 [P]; see `normaliser` for the division that follows."""
    if aggregation == "sequence_mean":
        return 1.0 / lengths_P
    return torch.ones_like(lengths_P, dtype=torch.float32)


def normaliser(lengths_N: Tensor, *, aggregation: Aggregation, max_tokens: int | None = None) -> float:
    """The divisor of the weighted sum of an update.

    "token_mean": all tokens have equal weight (DAPO, arXiv 2503.14476, equation 12). "sequence_mean": the mean over
    responses of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3). "constant": N · `max_tokens`, the
    longest possible response, so that no token's weight depends on a length (Dr. GRPO, arXiv 2503.20783, section 3.2).
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
    """One micro-batch. Each row of `tokens_RW` is a sequence, padded with zeros on the right; or all sequences are laid
    end to end in one row, with a shared prompt once before its responses. Then `positions_W` are the tokens' positions,
    and `starts_C` and `families_F` describe the layout, as in `causal.attend`; the padding of the row is the last
    family, and `families_F` is None if no prompt is shared.

    `at_P` is the flat index in R × W of the token that predicts `targets_P`; `sequence_P` is the target's sequence in
    the batch, `step_P` its token in the response. `temperature_P` (float32) is the temperature that each target was
    sampled at; None if all are 1. `rollouts` are the micro-batch's sequences, on any device, and `row_P` is the row
    among them of each target.
    """

    tokens_RW: Tensor
    at_P: Tensor
    targets_P: Tensor
    sequence_P: Tensor
    step_P: Tensor
    temperature_P: Tensor | None = None
    row_P: Tensor | None = None
    rollouts: Rollouts | None = None
    positions_W: Tensor | None = None
    starts_C: Tensor | None = None
    families_F: Tensor | None = None

    def to(self, device: torch.device) -> "Packed":
        there: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **there)


class MicroBatches(Sequence[Packed]):
    """Micro-batches that are made at the first access, and kept: a rank makes only those that it computes, and reads
    only their rows. `sizes` are their tokens, with padding."""

    def __init__(self, make: Callable[[int], Packed], sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._make = make
        self._made: dict[int, Packed] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Packed: ...
    @overload
    def __getitem__(self, index: slice) -> list[Packed]: ...
    def __getitem__(self, index: int | slice) -> Packed | list[Packed]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


def token_counts(items: Sequence[Packed]) -> Sequence[int]:
    """The tokens of each micro-batch, with padding."""
    return items.sizes if isinstance(items, MicroBatches) else [item.tokens_RW.numel() for item in items]


def sampled_mask(rollouts: Rollouts) -> Tensor:
    """True for tokens that the policy sampled, bool [N, T]: no padding, no tokens of an environment or of the prefix
    that a row continues."""
    versions_NT: Tensor = rollouts.versions_NT
    steps_T = torch.arange(versions_NT.shape[1], device=versions_NT.device)
    within_NT: Tensor = steps_T < rollouts.response_lengths_N.to(versions_NT.device)[:, None]
    if rollouts.prefix_lengths_N is not None:
        within_NT = within_NT & (steps_T >= rollouts.prefix_lengths_N.to(versions_NT.device)[:, None])
    # An environment's tokens have version -1.
    return within_NT & (versions_NT >= 0)


def turn_of_tokens(rollouts: Rollouts) -> Tensor:
    """The number of the model's turn of each token of a response, int64 [N, T]: 0, 1, …; −1 for tokens that the model
    did not sample.

    Turns are separated by the environment's tokens.
    """
    sampled_NT = sampled_mask(rollouts)
    before_NT = torch.cat([torch.zeros_like(sampled_NT[:, :1]), sampled_NT[:, :-1]], 1)
    return ((sampled_NT & ~before_NT).cumsum(1) - 1).masked_fill(~sampled_NT, -1)


def group_rows(names: Sequence[Hashable]) -> Tensor:
    """The number of each row's group, int64 [N]: 0, 1, … in the order of the first rows with each name."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.long)


def sampled_lengths(rollouts: Rollouts) -> Tensor:
    """The number of sampled tokens of each response, int64 [N]. Raises ValueError if there are none at all."""
    lengths_N: Tensor = rollouts.sampled_N
    if not int(lengths_N.sum()):
        given = f"{len(rollouts)} responses without a sampled token (all versions are -1)"
        raise ValueError(f"rollouts: given {given}, needed at least one")
    return lengths_N


def behaviour_logprobs(rollouts: Rollouts, asker: str) -> Tensor:
    """log μ of each token, float [N, T]; zero for tokens that no policy sampled. Raises ValueError, with the name
    `asker`, for rollouts without them, such as data that no policy of this run has generated."""
    if rollouts.logprobs_NT is None:
        raise ValueError(f"{asker}: given rollouts without log μ (logprobs_NT is None), needed {NEEDED['behaviour']}")
    logprobs_NT: Tensor = rollouts.logprobs_NT
    return logprobs_NT


def of_its_rows(call: Call) -> None:
    """Requirement of a node that reads rollouts beside inputs with a number for each row or token: these come from the
    same responses."""
    own = call.origins("rollouts")
    for name in ("rewards", "values", "returns", "advantage", "reference", "proximal"):
        # Only if they have nothing in common: a node of the user's may join others to them.
        if own and (of := call.origins(name)) and own.isdisjoint(of):
            given, needed = (" and ".join(sorted(names)) for names in (of, own))
            raise call.lack(f"numbers for responses of {given}", f"numbers for those of {needed}", input=name)


def check_shape(given: str, shape: Sequence[int], rollouts: Rollouts, *, each: Literal["token", "response"]) -> None:
    """Raises ValueError unless an array of this shape has one value for `each` token or response; `given` begins the
    message."""
    needed = (shape_of(rollouts, "versions_NT") or [])[: 2 if each == "token" else 1]
    if list(shape) != needed:
        raise ValueError(f"{given} of shape {list(shape)}, needed {needed}, one for each {each} of the rollouts")


def pack(
    rollouts: Rollouts,
    max_tokens: int,
    *,
    multiple: int = 1,
    widest: int | None = None,
    device: torch.device | None = None,
    whole_groups: bool = False,
    end_to_end: bool = False,
    inspect: Callable[[Packed], None] | None = None,
) -> MicroBatches:
    """Micro-batches of at most `max_tokens` tokens with padding (but at least one row), about equally large, and in
    steps of ROWS and WIDTHS if they are larger; none is padded to more than `widest` columns. With `end_to_end` the
    only padding is to a whole STEP, and responses to one prompt in one micro-batch share its tokens.

    Their number is a multiple of `multiple` if there are enough sequences. They are on `device`, by default that of the
    tokens. Only tokens that a policy sampled are predicted, each at the temperature of its response. A micro-batch in
    which nothing is predicted is left out: there is nothing to compute, and kernels refuse matrices without a row. With
    `whole_groups` a micro-batch holds whole prompt groups, at least one, with any number of tokens. Every prompt needs
    a token, which predicts the first one of the response. Raises ValueError for an empty prompt. `inspect` is called
    with each micro-batch before it is copied to the device.

    The packing follows from lengths, and with `end_to_end` also from equal prompts; otherwise tokens are read only when
    a micro-batch is made.
    """
    # Positions of tokens are computed on the CPU; each micro-batch is copied once.
    sampled_N = rollouts.sampled_N.cpu()
    prompts_N, temperature_N = rollouts.prompt_lengths_N.cpu(), rollouts.temperature_N.float().cpu()
    if bool((prompts_N < 1).any()):
        raise ValueError(f"pack: given an empty prompt in row {int(prompts_N.argmin())}, needed one token")
    # A prompt is whole even if its response has no token.
    lengths_N: Tensor = prompts_N + (rollouts.response_lengths_N.cpu() - 1).clamp(min=0)
    names = rollouts.groups if whole_groups else range(len(rollouts))
    units: dict[Hashable, list[int]] = {}
    for row in torch.argsort(lengths_N, descending=True, stable=True).tolist():
        units.setdefault(names[row], []).append(row)
    rows: _PaddedRows | _EndToEnd
    if end_to_end:
        rows = _EndToEnd(lengths_N, prompts_N, _prompt_numbers(rollouts, prompts_N), max_tokens, multiple)
    else:
        padded = (shape_of(rollouts, "tokens_NS") or [])[1]  # does not load the tokens
        rows = _PaddedRows(lengths_N, padded if widest is None else min(padded, widest), max_tokens, multiple)
    # A group from which no prefix was cut has no rows.
    found = rows.shares(list(units.values()), whole_groups) if units else []
    shares = [share for share in found if int(sampled_N[share].sum())]
    # Most batches are at temperature 1: then no logits are divided.
    same = bool((temperature_N == 1).all())

    def make(number: int) -> Packed:
        share, own = shares[number], rollouts.take(shares[number])
        # Row by row, and within a row step by step: the order in which losses get the tokens of a response.
        row_P, step_P = sampled_mask(own).cpu().nonzero(as_tuple=True)
        sequence_P = torch.tensor(share)[row_P]
        tokens_RS, place_P = own.tokens_NS.cpu(), prompts_N[sequence_P] + step_P
        made = Packed(
            **rows.laid(share, tokens_RS, row_P, place_P),
            targets_P=tokens_RS[row_P, place_P].long(),
            sequence_P=sequence_P,
            step_P=step_P,
            temperature_P=None if same else temperature_N[sequence_P],
            row_P=row_P,
            rollouts=own,
        )
        if inspect is not None:
            inspect(made)
        return made.to(device or own.tokens_NS.device)

    return MicroBatches(make, [rows.size(share) for share in shares])


def _smallest(numbers: range, enough: Callable[[int], bool]) -> int:
    """The first of the numbers that is enough, if all after it are; the end of the range if none is."""
    return numbers.start + bisect_left(numbers, True, key=enough)


class _PaddedRows:
    """The packing with each sequence in a row of its own, and sequences of similar length together.

    `_PaddedRows` and `_EndToEnd` both say which rows of a batch are in one micro-batch (`shares`), its tokens with
    padding (`size`), and where its tokens are (`laid`, fields of `Packed`). A unit is never cut: it is a row, or a
    group, whose first row is its longest. The longest unit comes first.
    """

    def __init__(self, lengths_N: Tensor, widest: int, max_tokens: int, multiple: int) -> None:
        self.lengths_N, self.max_tokens, self.multiple = lengths_N, max_tokens, multiple
        lengths: list[int] = lengths_N.tolist()
        self.widths = [max(length, min(-(-length // WIDTHS) * WIDTHS, widest)) for length in lengths]

    def shares(self, units: list[list[int]], whole_groups: bool) -> list[list[int]]:
        found = self._equal(units, 1 if whole_groups else ROWS)
        return self._equal(units, 1) if len(found) % self.multiple else found

    def _equal(self, units: list[list[int]], step: int) -> list[list[int]]:
        """The rows of each micro-batch, about equally large."""
        most = len(self._split(units, self.max_tokens, step))
        most += -most % self.multiple

        def few(bound: int) -> bool:
            """True if micro-batches of so many tokens are no more than those of the most tokens."""
            return len(self._split(units, bound, step)) <= most

        return self._split(units, _smallest(range(1, max(self.max_tokens, *self.widths)), few), step)

    def _split(self, units: list[list[int]], bound: int, step: int) -> list[list[int]]:
        """The rows of each micro-batch of at most `bound` tokens. A micro-batch is as wide as its first (longest) unit,
        and has a multiple of `step` rows if there is room for as many."""
        shares: list[list[int]] = []
        for unit in units:
            if shares and (len(shares[-1]) + len(unit)) * self.widths[shares[-1][0]] <= bound:
                shares[-1] += unit
                continue
            left: list[int] = []
            if shares and len(shares[-1]) > step:
                kept = len(shares[-1]) // step * step
                left, shares[-1] = shares[-1][kept:], shares[-1][:kept]
            shares.append([*left, *unit])
        return shares

    def size(self, rows: Sequence[int]) -> int:
        return len(rows) * self.widths[rows[0]]

    def laid(self, rows: Sequence[int], tokens_RS: Tensor, row_P: Tensor, place_P: Tensor) -> dict[str, Any]:
        wide = max(self.widths[row] for row in rows)
        beyond_RW = torch.arange(wide) >= self.lengths_N[rows][:, None]
        return {"tokens_RW": tokens_RS[:, :wide].masked_fill(beyond_RW, 0), "at_P": row_P * wide + place_P - 1}


class _EndToEnd:
    """The packing with all sequences in one row, end to end. Rows with the same prompt are a family: the prompt stands
    once, before their responses. Three rows, of which the first two have the same prompt, and the padding:

        | prompt of 0 and 1 | response of 0 | response of 1 | prompt of 2 | response of 2 | 0 0 0 |

    `prompt_of` is the number of each row's prompt, `before` and `behind` are the tokens of its prompt and its response.
    """

    def __init__(
        self, lengths_N: Tensor, prompts_N: Tensor, prompt_of: list[int], max_tokens: int, multiple: int
    ) -> None:
        self.lengths_N, self.prompts_N, self.prompt_of = lengths_N, prompts_N, prompt_of
        self.max_tokens, self.multiple = max_tokens, multiple
        self.before: list[int] = prompts_N.tolist()
        self.behind: list[int] = (lengths_N - prompts_N).tolist()

    def shares(self, units: list[list[int]], whole_groups: bool) -> list[list[int]]:
        """A prompt that stands once is less work, but large families make unequal shares. So families are cut into 1,
        2, 4, … parts, each with the prompt, and the cut is taken that is the least work for the busiest worker."""
        if whole_groups:
            found = self._level(units)
        else:
            families = self._families(row for (row,) in units)
            doublings = (max(map(len, families)) - 1).bit_length()
            parts = ([part for family in families for part in self._parts(family, 2**n)] for n in range(doublings + 1))
            found = min(map(self._level, parts), key=self._busiest)
        return [[row for family in self._families(rows) for row in family] for rows in found]

    def _busiest(self, shares: list[list[int]]) -> int:
        """The tokens of the worker with the most, if workers get the shares in turn."""
        return max(sum(map(self._total, shares[worker :: self.multiple])) for worker in range(self.multiple))

    def _total(self, rows: Sequence[int]) -> int:
        """The tokens of rows laid end to end."""
        prompts = {self.prompt_of[row]: self.before[row] for row in rows}
        return sum(self.behind[row] for row in rows) + sum(prompts.values())

    def _families(self, rows: Iterable[int]) -> list[list[int]]:
        """The rows of each prompt."""
        families: dict[int, list[int]] = {}
        for row in rows:
            families.setdefault(self.prompt_of[row], []).append(row)
        return list(families.values())

    def _parts(self, family: list[int], count: int) -> list[list[int]]:
        """The rows of one prompt, the longest first, in about equal parts: `count`, or more if those are too large."""

        def fits(count: int) -> bool:
            return self._total(family[::count]) <= self.max_tokens  # the first part, which has the longest rows

        count = max(count, _smallest(range(1, len(family)), fits))
        return [family[part::count] for part in range(min(count, len(family)))]

    def _level(self, units: list[list[int]]) -> list[list[int]]:
        """The rows of each micro-batch, as few as hold all tokens: each unit goes to the smallest so far. A unit that
        is too large for a micro-batch is one by itself."""
        sizes = sorted(((self._total(unit), unit) for unit in units), key=lambda each: -each[0])
        large = [unit for size, unit in sizes if size > self.max_tokens]
        others = [(size, unit) for size, unit in sizes if size <= self.max_tokens]

        def dealt(count: int) -> tuple[int, list[list[int]]]:
            """(tokens of the largest micro-batch, the rows of each) for `count` of them, rounded up for the workers."""
            count = min(count + -(len(large) + count) % self.multiple, len(others))
            smallest = [(0, number) for number in range(count)]
            rows: list[list[int]] = [[] for _ in smallest]
            for size, unit in others:
                used, number = smallest[0]
                rows[number] += unit
                heapreplace(smallest, (used + size, number))
            return max(smallest)[0], rows

        if not others:
            return large
        # Twice the number that the tokens fill is enough: units of over half a micro-batch are fewer than that and get
        # one each, and any other unit goes to one that is at most half full.
        filled = -(-sum(size for size, _ in others) // self.max_tokens)
        counts = range(filled, min(2 * filled, len(others)))
        return [*large, *dealt(_smallest(counts, lambda count: dealt(count)[0] <= self.max_tokens))[1]]

    def size(self, rows: Sequence[int]) -> int:
        tokens = self._total(rows)
        return max(tokens, min(-(-tokens // STEP) * STEP, self.max_tokens))

    def laid(self, rows: Sequence[int], tokens_RS: Tensor, row_P: Tensor, place_P: Tensor) -> dict[str, Any]:
        lengths_R, prompts_R, width = self.lengths_N[rows], self.prompts_N[rows], self.size(rows)
        # For each row the first one of its family, with which the prompt stands.
        first = dict[int, int]()
        first_R = torch.tensor([first.setdefault(self.prompt_of[row], at) for at, row in enumerate(rows)])
        # The tokens that stand for a row itself: all of the first of a family, the responses of the others.
        from_R = torch.where(first_R < torch.arange(len(rows)), prompts_R, 0)
        at_S = torch.arange(tokens_RS.shape[1])
        own_RS = (at_S >= from_R[:, None]) & (at_S < lengths_R[:, None])
        ends_R = (lengths_R - from_R).cumsum(0)
        begins_R = ends_R - lengths_R  # where a row's token 0 would stand if its prompt were there, too
        # A token is predicted at the one before it; that before a response is its prompt's last.
        source_P = torch.where(place_P > from_R[row_P], row_P, first_R[row_P])
        # The padding is a sequence by itself, all at position 0, which every model has.
        fill = (0, width - int(ends_R[-1]))
        return {
            "tokens_RW": F.pad(tokens_RS[own_RS], fill)[None],
            "at_P": begins_R[source_P] + place_P - 1,
            "positions_W": F.pad(own_RS.nonzero()[:, 1], fill),
            **_segments(first_R.tolist(), prompts_R.tolist(), (begins_R + from_R).tolist(), width, fill[1]),
        }


def _prompt_numbers(rollouts: Rollouts, prompts_N: Tensor) -> list[int]:
    """A number for each row; rows with equal prompts have the same."""
    tokens_NS = rollouts.tokens_NS.cpu().numpy()
    prompts = [tokens_S[:length].tobytes() for tokens_S, length in zip(tokens_NS, prompts_N.tolist(), strict=True)]
    return group_rows(prompts).tolist()


def _segments(
    first: Sequence[int], prompts: Sequence[int], begins: Sequence[int], end: int, filled: int
) -> dict[str, Tensor | None]:
    """`starts_C` and `families_F` of rows laid end to end. `first` is the first row with the same prompt as each row,
    `begins` where each row's own tokens begin; the last `filled` tokens up to `end` are padding."""
    starts: list[int] = []
    families: list[int] = []
    for row, begin in enumerate(begins):
        if first[row] == row:
            families.append(len(starts))
            if row in first[row + 1 : row + 2]:
                starts.append(begin)
                begin += prompts[row]
        starts.append(begin)
    if filled:
        families.append(len(starts))
        starts.append(end - filled)
    families.append(len(starts))
    starts.append(end)
    shares = len(families) < len(starts)
    return {"starts_C": torch.tensor(starts), "families_F": torch.tensor(families) if shares else None}


def optimizer_steps(
    context: Context, version: int, names: Sequence[Hashable], epochs: int, minibatches: int, term: int = 0
) -> list[tuple[int, list[int]]]:
    """(epoch, rows) of each optimizer step of an update, in order. The rows of a minibatch are in the order of the
    batch; prompt groups are assigned to minibatches by the run's seed, the version and the epoch.

    `names` says the prompt group of each row (`Rollouts.groups`); rows may be in any order. The whole batch is cut,
    with the past groups that a buffer has added. If the number of groups does not divide, some minibatches have one
    group more than others; which ones is a function of the numbers. `term` is the number of the term of the loss: each
    cuts its own rows. Terms after the first, 0, may have fewer groups than there are minibatches. Raises ValueError for
    a first term without groups or with fewer groups than minibatches, and for less than one epoch.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        groups.setdefault(name, []).append(row)
    if not (groups or term):
        needed = (
            "one to learn from: a node that takes rows of its groups (`rollouts.take`, `cut`) has taken none of any; "
        )
        needed += "`keep` behind it drops such groups, and others take their places"
        raise ValueError(f"{context.node}: given a batch without a response, needed {needed}")
    if min(epochs, minibatches) < 1 or (len(groups) < minibatches and not term):
        given = f"epochs={epochs} and minibatches={minibatches} for a batch of {len(groups)} prompt groups"
        raise ValueError(f"{context.node}: given {given}, needed at least 1, and a prompt group for each minibatch")
    # The first term has the key of an update without other terms, so that adding a term does not change its cut.
    more = (term,) if term else ()
    bounds = [-(-len(groups) * number // minibatches) for number in range(minibatches + 1)]
    steps = []
    for epoch in range(epochs):
        # Shuffle groups and not rows: a loss may compare the responses to a prompt.
        order = list(groups)
        random.Random(context.key("minibatches", version, epoch, *more)).shuffle(order)
        for begin, end in pairwise(bounds):
            steps.append((epoch, sorted(row for group in order[begin:end] for row in groups[group])))
    return steps
