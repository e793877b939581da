"""What flows on edges: plain dataclasses over an array protocol, so that a graph needs no torch.

Shape suffixes: N rows (the samples of one group, or of a batch of groups), S tokens of prompt and response
together, T tokens of a response.

A type of a program's argument names its `maker`, the import path of the function that makes the value in the
worker that holds it, and the `pool` label it belongs to by default.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any, ClassVar, Self, TypeVar

from penstock.graph.protocols import Array, Source, Vector

# Metrics that a node returns besides its outputs; `metrics.jsonl` has their averages over an update's groups.
Metrics = dict[str, float]
# The prefix of the counts of tokens by lag. They are one metric, so that all of them in a row come from one node.
BY_LAG = "tokens_lag_"
# The metric that says how often a source has read all its rows (`graph.protocols.Cyclic`).
EPOCH = "epoch"
# The lag of the last of these counts, which has all tokens of longer lags, too.
LONGEST_LAG = 15


# Most items of a `Mean`: what messages between processes take.
MOST_ITEMS = 1e18


class Mean(float):
    """A metric that is a mean over `count` rows, tokens or other items. The average over several groups is the mean
    over all their items, with any number in each group. `metrics.jsonl` leaves out a mean over no items.

        {"tool_errors": Mean.of(failed), "words": Mean(words / turns, turns)}
    """

    count: float

    def __new__(cls, value: float, count: float) -> Self:
        """Raises ValueError for a count that is negative or above `MOST_ITEMS`."""
        made = super().__new__(cls, value)
        made.count = float(count)
        if not 0 <= made.count <= MOST_ITEMS:
            raise ValueError(f"Mean: given a count of {count!r}, needed a number from 0 to {MOST_ITEMS:g}")
        return made

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]  # for copies
        return float(self), self.count

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the mean of the numbers, NaN if there are none, or both infinities. Raises OverflowError if their sum
        is not a float."""
        try:
            return cls(fmean(values), len(values))
        except ValueError:  # no numbers (StatisticsError), or ∞ - ∞
            return cls(math.nan, len(values))


# Columns that each row of `metrics.jsonl` has anyway: no metric of a node may have such a name.
COLUMNS = frozenset(
    {
        "update",
        "version",
        "time_s",
        "seconds",
        "groups",
        "dropped",
        "failed",
        "retried",
        "update_s",
        "sync_s",
        "generate_tokens_per_s",
        "train_tokens_per_s",
        "pools",
        "not_finite",
    }
)

# The most characters of a metric's name, and the most metrics of one firing.
NAME_LENGTH, MOST_FIGURES = 100, 1000


class NodeWarning(UserWarning):
    """A warning of a node to the user of a run: `warnings.warn("…", NodeWarning)`.

    The run shows each text once, in the terminal, in `summary.json` and in the report.
    """


class Model:
    """A carried value with weights. `broadcast` sends them; `delay` refuses it.

    Attributes:
        version: the number of updates applied to it. A call of an update adds one. A run sets it before each firing
            that reads the value, since an update of a graph may be several calls, or may not change the value.
    """

    version: int = 0


class Policy(Model):
    """A language model with its optimizer: a carried value (`nodes.policy`)."""

    # A path, since this package must not import the nodes, which import torch.
    maker: ClassVar[str] = "penstock.nodes.policy:make_policy"
    pool: ClassVar[str] = "trainer"


class LoraPolicy(Policy):
    """A policy that learns low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) of weights that never change.
    Only the adapters are sent, saved and exported. The program's options NAME_rank, NAME_alpha and NAME_targets
    configure them, where NAME is the argument's name; else the flags `--lora`, `--lora-alpha` and `--lora-targets`,
    which give any policy adapters; else their rank is `rank`."""

    maker: ClassVar[str] = "penstock.nodes.policy:make_lora_policy"
    rank: ClassVar[int] = 16


class Reference(Policy):
    """The model that a run starts from, frozen: a policy to stay close to."""

    maker: ClassVar[str] = "penstock.nodes.policy:make_reference"
    pool: ClassVar[str] = "reference"


class Average(Reference):
    """A copy that follows the policy: its moving average, or what it was some updates ago (`nodes.ema`)."""

    maker: ClassVar[str] = "penstock.nodes.ema:make_average"
    pool: ClassVar[str] = "trainer"


class Teacher(Reference):
    """A frozen model to learn from, read from the directory that the program's option `teacher_model` names."""

    maker: ClassVar[str] = "penstock.nodes.distill:open_teacher"
    pool: ClassVar[str] = "teacher"


class FrozenModel(Model):
    """A language model that never changes, with its own tokenizer: a judge, or a partner to talk with (`nodes.policy`).

    It is read from the directory that the program's option `NAME_model` names, where NAME is the argument's name.
    Without that option, or if it is None, it is the model that the run starts from.
    """

    maker: ClassVar[str] = "penstock.nodes.policy:open_frozen"
    pool: ClassVar[str] = "frozen"


class Critic(Model):
    """A model that predicts the reward still to come, with its optimizer: a carried value (`nodes.critic`)."""

    maker: ClassVar[str] = "penstock.nodes.critic:make_critic"
    pool: ClassVar[str] = "critic"


class RewardModel(Model):
    """A frozen model of what people prefer, read from the directory that the program's option `reward_model` names."""

    maker: ClassVar[str] = "penstock.nodes.reward_model:open_reward_model"
    pool: ClassVar[str] = "reward"


class PreferenceModel(Model):
    """A reward model that learns from pairs, with its optimizer: a carried value (`nodes.reward_model`)."""

    maker: ClassVar[str] = "penstock.nodes.reward_model:make_preference_model"
    pool: ClassVar[str] = "trainer"


AnyPolicy = TypeVar("AnyPolicy", bound=Policy)
AnyAverage = TypeVar("AnyAverage", bound=Average)
AnyCritic = TypeVar("AnyCritic", bound=Critic)
# An update returns the type that it is given: a program's `Solver(Policy)` stays a `Solver`.
AnyPreferenceModel = TypeVar("AnyPreferenceModel", bound=PreferenceModel)


@dataclass
class LearningRate:
    """The learning rate of one update, computed by a node.

    Attributes:
        value: the rate.
    """

    value: float


@dataclass
class Weights:
    """Live weights, as `broadcast` delivers them. They change only between two steps of the node that reads them.

    Attributes:
        version: the version of the carried value.
        tensors: the logical tensors by name; on a rank of a mesh, this rank's shard of each. If `broadcast` sends a
            tensor with a `precision`, its elements are NAME, and the scales of its rows NAME.scale.
        about: what the carried value says of its weights (`graph.protocols.Described`), the same for all versions.
    """

    version: int
    tensors: Mapping[str, Array]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Batchable:
    """A dataclass of arrays (first axis N) and of tuples with one entry per row; `concat` joins groups.

    An optional array may be None, for all parts that are joined or for none. Properties named in `derived` are one
    number for each row. They are sent beside the fields, for readers that do not load large columns (`graph.deferred`).
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        """Its number of rows."""
        columns = (getattr(self, field.name) for field in fields(self))
        return next((len(column) for column in columns if column is not None), 0)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """One value with the rows of all parts in order; arrays are padded to a common width with zeros."""
        rows = {f.name: joined([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        return cls(**rows)

    def take(self, rows: "Sequence[int] | Array") -> Self:
        """The value with these rows only, in this order; a row may be taken twice, or none at all.

        `rows` are row numbers from 0, or for each row whether it is taken (bool [N]), as a list, a tensor or an array:
        `rollouts.take(rewards.values_N > 0)`. Raises ValueError for a row that does not exist.
        """
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        index = row_numbers(rows, len(self), type(self).__name__)
        return type(self)(**{name: taken(column, index) for name, column in columns.items()})


@dataclass
class Prompts(Batchable):
    """Prompts, usually one per group.

    Attributes:
        ordinals: the prompt group of each row, N; a run sets it (`read_group`).
        texts: the prompts, N.
        answers: the reference answers, N.
    """

    ordinals: tuple[int, ...]
    texts: tuple[str, ...]
    answers: tuple[str, ...]

    maker: ClassVar[str] = "penstock.nodes.data:open_prompts"
    pool: ClassVar[str] = "generator"


def read_group(source: Source, ordinal: int) -> Any:
    """The value of group `ordinal`. Rows of prompts and of rollouts get this ordinal, whatever the source calls them.

    Draws are keyed by it, and rows are compared within it. The row numbers of data that begin again would have every
    epoch draw the same responses, and join the groups of two visits.
    """
    value = source.read(ordinal)
    if isinstance(value, Prompts | Rollouts):
        value = copy(value)  # the source may keep its own
        value.ordinals = (ordinal,) * len(value)
    return value


@dataclass
class Rollouts(Batchable):
    """Sampled responses, with the log-probability and the version of the weights of each token.

    A response may be a conversation with an environment: everything after the first prompt. A node that scores the
    tokens applies the temperature, so that equal weights give equal log-probabilities.

    Attributes:
        ordinals: the prompt group of each row, N.
        prompts: the first prompt of each row, N.
        answers: the reference answer of each row, N.
        texts: what the model said last in each row, N.
        tokens_NS: prompt and response, int64 [N, S], padded on the right.
        prompt_lengths_N: where the response of each row starts in `tokens_NS`, int64 [N].
        response_lengths_N: tokens of each response, the end token included, int64 [N].
        logprobs_NT: log-probabilities (nats) of the tokens under the policy that sampled them, float [N, T]; 0 past the
            end and for tokens of an environment. None if no row has them; NaN in rows without, joined with others.
        versions_NT: version of the weights that sampled each token, int64 [N, T]; -1 for tokens of an environment.
        finished_N: False where the token bound cut the response, bool [N].
        transcripts: for each row the texts of its turns, the model's and the environment's in turn.
        replayed_N: rows that an earlier update has learnt from, bool [N]; None without a buffer.
        temperature_N: temperature of each row, float [N]; 0 is greedy, 1 by default.
        cut_N: rows that were sampled from a part of the vocabulary (top-k, top-p), bool [N].
        turn_rewards: for each row what the environment gave after each turn but the newest (see `rewarded`); None
            stands for a turn without a reward.
        experts_NSLK: the experts of each token in each layer when it was sampled, counted from 1, int16
            [N, S, layers, experts of a token]; 0 where none are recorded. None without `--replay-routing`.
        prefixes_N: the number of the prefix that each row continues (`Prefixes.numbers_N`), int64 [N]; -1 for rows
            without. None if no row has one.
        prefix_lengths_N: tokens at the beginning of each response that belong to its prefix, int64 [N]. They keep log μ
            and versions, and are context: `sampled_N` and losses leave them out. 0 for rows without a prefix, and if
            prefixes are learnt from, too. None if no row has a prefix.
    """

    ordinals: tuple[int, ...]
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    texts: tuple[str, ...]
    tokens_NS: Array
    prompt_lengths_N: Array
    response_lengths_N: Array
    logprobs_NT: Array
    versions_NT: Array
    finished_N: Array
    transcripts: tuple[list[str], ...] = ()
    replayed_N: Array = None
    temperature_N: Array = None
    cut_N: Array = None
    turn_rewards: "tuple[list[float | None], ...]" = ()
    experts_NSLK: Array = None
    prefixes_N: Array = None
    prefix_lengths_N: Array = None

    derived: ClassVar[tuple[str, ...]] = ("sampled_N",)

    def __post_init__(self) -> None:
        """Without transcripts each response is a conversation of one turn."""
        self.transcripts = self.transcripts or tuple([text] for text in self.texts)
        self.turn_rewards = self.turn_rewards or tuple([] for _ in self.texts)
        # Made by arithmetic on another array, since a graph imports no array library.
        if self.temperature_N is None and self.response_lengths_N is not None:
            self.temperature_N = self.response_lengths_N * 0.0 + 1.0
        if self.cut_N is None and self.response_lengths_N is not None:
            self.cut_N = self.response_lengths_N < 0

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """One value with the rows of all parts. Rows without log-probabilities get NaN if other rows have them."""
        for name, without in _WITHOUT.items():
            columns = [getattr(part, name) for part in parts]
            like = next((column for column in columns if column is not None), None)
            if like is not None:
                given = zip(parts, columns, strict=True)
                parts = [p if c is not None else replace(p, **{name: without(p, like)}) for p, c in given]
        return super().concat(parts)

    @property
    def groups(self) -> tuple[tuple[int, str], ...]:
        """The prompt group of each row: its ordinal and its prompt, since rows of two sources may share an ordinal."""
        return tuple(zip(self.ordinals, self.prompts, strict=True))

    @property
    def sampled_N(self) -> Array:
        """Tokens of each response that a policy sampled, int64 [N], without those of an environment or a prefix."""
        return None if self.versions_NT is None else self.sampled_NT.sum(1)

    @property
    def sampled_NT(self) -> Array:
        """True for tokens of responses that a policy sampled, bool [N, T], as counted by `sampled_N`."""
        # Positions are a cumulative sum of ones, since a graph imports no array library.
        place_NT = (self.versions_NT * 0 + 1).cumsum(1)
        sampled_NT = (place_NT <= self.response_lengths_N[:, None]) & (self.versions_NT >= 0)
        if self.prefix_lengths_N is not None:
            sampled_NT = sampled_NT & (place_NT > self.prefix_lengths_N[:, None])
        return sampled_NT

    def place(self, row: int) -> str:
        """The name of a row in errors: its group, its prefix if it continues one, and its number in the group."""
        before = [other for other in range(row) if self.ordinals[other] == self.ordinals[row]]
        number = -1 if self.prefixes_N is None else int(self.prefixes_N[row])
        prefix = f", prefix {number}" if number >= 0 else ""
        return f"group {self.ordinals[row]}{prefix}, row {len(before)}"

    def turns(self) -> list[int]:
        """The number of the model's turns in each row."""
        return [(len(transcript) + 1) // 2 for transcript in self.transcripts]

    def in_newest_turn(self) -> list[bool]:
        """True for each row with a newest turn, which awaits a reply. The others have ended at an earlier one: done, or
        without room."""
        return [len(past) < turns for past, turns in zip(self.turn_rewards, self.turns(), strict=True)]

    def rewarded(self, replies: "Replies") -> "tuple[list[float | None], ...]":
        """The rewards of all turns of each row: the earlier ones, and those of the `replies` to the newest turns.

        A row that ended at an earlier turn has all of its rewards already; its reply does not count.
        """
        given = [None] * len(self) if replies.rewards_N is None else replies.rewards_N.tolist()
        rows = zip(self.turn_rewards, self.in_newest_turn(), given, strict=True)
        return tuple([*past, reward] if awaits else past for past, awaits, reward in rows)

    def settled(self, replies: "Replies") -> "Replies":
        """The `replies`, one per row, in which rows that ended at an earlier turn are done and keep their last reward,
        whatever is given for them."""
        done_N, rewards_N = replies.done_N * True, None if replies.rewards_N is None else replies.rewards_N * 1.0
        for row, (past, awaits) in enumerate(zip(self.turn_rewards, self.in_newest_turn(), strict=True)):
            if not awaits:
                done_N[row] = True
                if rewards_N is not None and past and past[-1] is not None:
                    rewards_N[row] = past[-1]
        return replace(replies, done_N=done_N, rewards_N=rewards_N)

    def lengths(self) -> Vector:
        """Response lengths in tokens, float [N]."""
        lengths_N: Vector = self.response_lengths_N * 1.0
        return lengths_N


# Default columns of rows without a column that are joined with rows that have it: made of the rows without it, and of
# the column of some others.
_WITHOUT: Mapping[str, Callable[[Rollouts, Array], Array]] = {
    "logprobs_NT": lambda part, like: part.versions_NT * math.nan,
    "replayed_N": lambda part, like: part.response_lengths_N < 0,
    "prefixes_N": lambda part, like: part.response_lengths_N * 0 - 1,
    "prefix_lengths_N": lambda part, like: part.response_lengths_N * 0,
    "experts_NSLK": lambda part, like: like.new_zeros((len(part), 1, *like.shape[2:])),
}


@dataclass
class Prefixes(Batchable):
    """Beginnings of responses: the sub-prompts of a group, which `generate(…, after=prefixes)` continues.

    Attributes:
        ordinals: the prompt group of each, N.
        numbers_N: the number of each in its group, int64 [N]: a part of the random keys of what follows it.
        rows_N: the row of the group's rollouts that each is the beginning of, int64 [N].
        tokens_NS: the prompt and the beginning of the response, as sampled, int64 [N, S], padded on the right.
        prompt_lengths_N: where the response starts in `tokens_NS`, int64 [N].
        lengths_N: tokens of the response that the prefix has, int64 [N]; 0 is the prompt alone.
        logprobs_NT: log μ of these tokens, nats, float [N, T].
        versions_NT: version of the weights that sampled each, int64 [N, T]; -1 for tokens that no policy sampled.
        temperature_N: temperature that they were sampled at, float [N].
        cut_N: True if they were sampled from a part of the vocabulary, bool [N].
        experts_NSLK: as in `Rollouts`.
    """

    ordinals: tuple[int, ...]
    numbers_N: Array
    rows_N: Array
    tokens_NS: Array
    prompt_lengths_N: Array
    lengths_N: Array
    logprobs_NT: Array
    versions_NT: Array
    temperature_N: Array
    cut_N: Array
    experts_NSLK: Array = None


@dataclass
class Replies(Batchable):
    """An environment's answers to the newest turn of each row of `Rollouts`.

    Attributes:
        texts: the reply to each row, N; not read for a row that is done.
        roles: "user" or "tool" for each row, for models whose chat template knows the difference.
        done_N: conversations that have ended, bool [N]. What has ended stays so.
        rewards_N: the reward of each conversation so far, float [N]; None if the environment gives none. One that has
            ended keeps its last.
    """

    texts: tuple[str, ...]
    roles: tuple[str, ...]
    done_N: Array
    rewards_N: Array | None = None

    @property
    def done(self) -> bool:
        """True if all rows are done."""
        return bool(self.done_N.all())

    def lack(self) -> str:
        """A message if `done_N` is not one bool per row, or `rewards_N` not one finite number, or if a role is neither
        "user" nor "tool"; else ""."""
        needed = "an array [N], one {} per row".format
        if lack := _lack(self.done_N, (1,), "done_N", needed("bool"), finite=False):
            return lack
        if kinds := {type(value).__name__ for value in self.done_N.tolist()} - {"bool"}:
            return f"done_N of {kinds.pop()}, needed {needed('bool')}"
        if others := [role for role in self.roles if role not in ("user", "tool")]:
            return f'the role {others[0]!r}, needed "user" or "tool"'
        return "" if self.rewards_N is None else _lack(self.rewards_N, (1,), "rewards", needed("number"), finite=True)


@dataclass
class Rewards(Batchable):
    """One number per response. Arithmetic works on it as on an array: `rewards - 0.01 * rollouts.lengths()`.

    Attributes:
        values_N: float [N].
    """

    values_N: Array

    def __add__(self, other: Any) -> "Rewards":
        return Rewards(self.values_N + _values(other))

    def __sub__(self, other: Any) -> "Rewards":
        return Rewards(self.values_N - _values(other))

    def __rsub__(self, other: Any) -> "Rewards":
        return Rewards(_values(other) - self.values_N)

    def __mul__(self, other: Any) -> "Rewards":
        return Rewards(self.values_N * _values(other))

    def __truediv__(self, other: Any) -> "Rewards":
        return Rewards(self.values_N / _values(other))

    def __neg__(self) -> "Rewards":
        return Rewards(-self.values_N)

    __radd__ = __add__
    __rmul__ = __mul__

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values_N)

    def lack(self) -> str:
        """A message if `values_N` is not one finite number per response; else ""."""
        return _lack(self.values_N, (1,), "Rewards", "an array [N], one number per response", finite=True)


@dataclass
class TurnRewards(Batchable):
    """A reward for each turn of the model.

    Attributes:
        values_NK: float [N, K], 0 past a row's last turn.
        turns_N: turns of each row, int64 [N].
    """

    values_NK: Array
    turns_N: Array

    @property
    def values_N(self) -> Array:
        """The sum of the rewards of each row's turns, float [N]."""
        return self.values_NK.sum(1)

    def lack(self) -> str:
        """A message if `values_NK` is not one finite number per turn of a response; else ""."""
        needed = "an array [N, K], one number per turn of a response"
        return _lack(self.values_NK, (2,), "TurnRewards", needed, finite=True)


# The rewards that an environment or a scorer makes.
AnyRewards = Rewards | TurnRewards


def _lack(values: Array, dims: Sequence[int], kind: str, needed: str, *, finite: bool) -> str:
    shape = getattr(values, "shape", None)
    if shape is None or len(shape) not in dims:
        given = f"a {type(values).__name__}" if shape is None else f"an array of shape {list(shape)}"
        return f"{kind} of {given}, needed {needed}"
    # On plain numbers, since `isfinite` differs between array libraries.
    rows = values.tolist() if finite else []
    for row, found in enumerate(rows):
        for value in found if isinstance(found, list) else (found,):
            if isinstance(value, float) and not math.isfinite(value):
                return f"a reward of {value} for row {row} of {len(rows)}, needed a finite number"
    return ""


@dataclass
class Advantages(Batchable):
    """How much better each response is than expected.

    Attributes:
        values_N: float [N].
    """

    values_N: Array

    def lack(self) -> str:
        """A message if `values_N` has neither one number per response nor one per token; else "". The numbers need not
        be finite: those of tokens that no policy sampled may be anything."""
        needed = "an array, one number per response [N] or token [N, T]"
        return _lack(self.values_N, (1, 2), type(self).__name__, needed, finite=False)


@dataclass
class TokenAdvantages(Advantages):
    """How much better each token is than expected.

    Attributes:
        values_N: float [N, T], 0 past a response's end.
    """


@dataclass
class Logprobs(Batchable):
    """Log-probabilities of the sampled tokens under some policy.

    Attributes:
        logprobs_NT: nats, float [N, T]; 0 past the end.
    """

    logprobs_NT: Array


@dataclass
class Values(Batchable):
    """A critic's prediction before each token of a response.

    Attributes:
        values_NT: float [N, T]; 0 past the end.
    """

    values_NT: Array


@dataclass
class Returns(Batchable):
    """The return after each token of a response; a critic learns to predict it.

    Attributes:
        returns_NT: float [N, T]; 0 past the end.
    """

    returns_NT: Array


def _values(other: Any) -> Any:
    return other.values_N if isinstance(other, Rewards) else other


def row_numbers(rows: "Sequence[int] | Array", count: int, name: str) -> list[int]:
    """The row numbers that `rows`, an argument of `Batchable.take`, means in a batch of `count` rows."""
    # Elements of tensors and arrays of any library become plain numbers.
    index = [row.item() if hasattr(row, "item") else row for row in rows]
    if index and all(isinstance(row, bool) for row in index):
        if len(index) != count:
            raise ValueError(f"{name}.take: given {len(index)} marks, needed {count}, one for each row")
        index = [row for row, taken in enumerate(index) if taken]
    if wrong := [row for row in index if not (isinstance(row, int) and 0 <= row < count)]:
        needed = f"0 to {count - 1}, or True or False for each row"
        raise ValueError(f"{name}.take: given row {wrong[0]!r}, needed {needed}")
    return index


def uneven(value: Batchable) -> str:
    """A message if the columns of a value have different numbers of rows; else "". An empty tuple does not count: it is
    an optional column that is not there."""
    rows: dict[int, str] = {}
    for each in fields(value):
        column = getattr(value, each.name)
        if isinstance(column, tuple) and column:
            rows.setdefault(len(column), each.name)
        elif shape := getattr(column, "shape", ()):
            rows.setdefault(shape[0], each.name)
    given = " and ".join(f"{count} rows of {name}" for count, name in rows.items())
    return f"{type(value).__name__} with {given}, needed as many of each" if len(rows) > 1 else ""


def taken(column: Any, rows: Sequence[int]) -> Any:
    """These rows of a column, in this order. The column is an array, a tuple or None."""
    if column is None:
        return None
    return tuple(column[row] for row in rows) if isinstance(column, tuple) else column[list(rows)]


def joined(values: Sequence[Any], widths: Sequence[int] = ()) -> Any:
    """Arrays (first axis N) joined along the rows, padded with zeros to a common width of at least `widths`; or tuples
    joined; or None if all are None."""
    if all(value is None for value in values):
        return None
    if isinstance(values[0], tuple):
        return tuple(item for value in values for item in value)
    if wrong := [value for value in values if not getattr(value, "shape", ())]:
        raise TypeError(f"given a {type(wrong[0]).__name__}, needed an array or a tuple with one entry for each row")
    # Each axis except the rows is as wide as the widest part.
    shapes = [tuple(value.shape[1:]) for value in values]
    widest = [max(sizes) for sizes in zip(*shapes, *([tuple(widths)] if widths else []), strict=True)]
    out = values[0].new_zeros((sum(value.shape[0] for value in values), *widest))
    row = 0
    for value in values:
        region = (slice(row, row + value.shape[0]), *(slice(0, size) for size in value.shape[1:]))
        out[region] = value
        row += value.shape[0]
    return out
