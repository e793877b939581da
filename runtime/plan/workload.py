"""What one update has to do: the model, the prompts and samples, and how long responses are. Pure but for files that
are read.

Lengths are a distribution, of which `take(n)` gives n lengths without chance: at the middles of n equally likely parts,
in an order that a hash of their places says. So two calls agree, and no length is averaged away.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, floor, log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock.runtime.plan.model_shape import Shape, Size
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows
from penstock.runtime.record.typed_json import Count

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
_NORMAL = NormalDist()
# The spread of lengths, as sigma of their logarithm, where nothing says another one.
SIGMA = 0.7
# The most responses of an update that are planned for: each has its length.
MOST_RESPONSES = 1_000_000
# The largest sigma: a hundredth of such lengths is 10⁵ times the median, and they are no lengths of responses.
WIDEST = 5.0


class LengthError(ValueError):
    """Lengths that cannot be: what was given, what is needed, and where."""


@dataclass(frozen=True)
class Lognormal:
    """A lognormal cut at `longest`: a response that would be longer ends there. `mean` is that of what is left, in
    tokens; `sigma` is the standard deviation of the logarithm before the cut."""

    mean: float
    sigma: float
    longest: int

    def __post_init__(self) -> None:
        if not (1 <= self.mean <= self.longest and 0 <= self.sigma <= WIDEST):
            given = f"a mean of {self.mean:g} tokens, sigma {self.sigma:g}, longest {self.longest}"
            raise LengthError(f"lengths: given {given}; needed 1 <= mean <= longest and a sigma from 0 to {WIDEST:g}")

    @cached_property
    def location(self) -> float:
        """The mean of the logarithm before the cut, found by halving: the mean after the cut grows with it."""
        # Beyond these limits the mean after the cut is surely too small, or too large.
        low, high = log(self.mean) - self.sigma**2, log(self.longest) + 9 * self.sigma + 1
        return halved(low, high, lambda location: cut_mean(location, self.sigma, self.longest) < self.mean)

    def take(self, count: int) -> IntArray:
        return _mixed(self.at((np.arange(count) + 0.5) / count))

    def at(self, shares: FloatArray) -> IntArray:
        """The quantiles of shares between 0 and 1."""
        normal = np.array([_NORMAL.inv_cdf(share) for share in shares.tolist()])
        lengths = np.exp(self.location + self.sigma * normal)
        return np.clip(np.rint(lengths), 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Listed:
    """Lengths that were seen, in tokens; `take` gives their quantiles."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            given = f"{len(self.lengths)} lengths" + (f", one of {min(self.lengths)}" if self.lengths else "")
            raise LengthError(f"lengths: given {given}; needed one or more, each of at least 1 token")

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def take(self, count: int) -> IntArray:
        return _mixed(self.at((np.arange(count) + 0.5) / count))

    def at(self, shares: FloatArray) -> IntArray:
        """The quantiles of shares between 0 and 1."""
        return self._sorted[(shares * len(self.lengths)).astype(np.int64)]

    @cached_property
    def _sorted(self) -> IntArray:
        return np.sort(np.array(self.lengths, np.int64))


Lengths = Lognormal | Listed


def cut_mean(location: float, sigma: float, longest: float) -> float:
    """The mean of min(X, longest) for lognormal X: e^(μ + σ²/2) Φ((ln L - μ - σ²) / σ) + L (1 - Φ((ln L - μ) / σ))."""
    if sigma == 0:
        return min(exp(location), longest)
    z = (log(longest) - location) / sigma
    return exp(location + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + longest * _NORMAL.cdf(-z)


def fitted(mean: float, finished: float, longest: int) -> Lognormal:
    """The lognormal of which `finished` (0 to 1) end before `longest`, and the mean after the cut is `mean`. With none
    or all of them finished the share says nothing of the spread: then it is the usual one."""
    if not 0 < finished < 1 or mean >= longest:
        return Lognormal(min(mean, longest), SIGMA, longest)
    quantile = _NORMAL.inv_cdf(finished)
    # More spread with the same share above the cut moves the rest down.
    spread = halved(1e-3, WIDEST, lambda s: cut_mean(log(longest) - s * quantile, s, longest) > mean)
    return Lognormal(mean, spread, longest)


def halved(low: float, high: float, below: Callable[[float], bool]) -> float:
    """Where `below` turns from true to false."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def read_lengths(path: Path, longest: int | None = None) -> Listed:
    """A file with one length in tokens per line; longer ones than `longest` are cut. Raises LengthError, with each
    line at fault (the first three)."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LengthError(f"{path}: cannot be read: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    wrong = [
        f"{path}:{n}: given {line!r:.40}"
        for n, line in numbered
        if not line.isdecimal() or len(line) > 9 or int(line) < 1
    ]
    if wrong or not numbered:
        given = wrong[:3] or [f"{path}: given no lengths"]
        raise LengthError("\n".join(f"{line}, needed a whole number of tokens, 1 or more, per line" for line in given))
    return Listed(tuple(min(int(line), longest or int(line)) for _, line in numbered))


def draws(first: int, count: int, seed: int = 0) -> FloatArray:
    """[count]: numbers between 0 and 1, each keyed by `seed` and its place from `first` on alone."""
    # Seeds are 2⁴⁰ places apart: more than any run draws.
    places = np.arange(first, first + count, dtype=np.uint64) + (np.uint64(seed) << np.uint64(40))
    return ((_hash(places) >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53


def _mixed(values: IntArray) -> IntArray:
    """In the order of a hash of their places: neighbours differ, without chance."""
    return values[np.argsort(_hash(np.arange(len(values), dtype=np.uint64)), kind="stable")]


def _hash(places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class Workload:
    """One update: `prompts` prompts of `prompt_tokens` each, `samples` responses to each of them to learn from.

    `kept` is the share of the prompts that filters keep, so that more are drawn. Beside its samples each prompt has
    `baselines` responses that nothing is learnt from. `replayed` past prompts are learnt from once more. `begun` is the
    share of each of a prompt's responses, `samples` before `baselines`, that is a prefix which it goes on from, in the
    cache of the response that has it; () where none does.

    `epochs` is how often each response is trained on, `minibatches` the optimizer's steps in each epoch, and
    `micro_tokens` the most tokens in a micro-batch of a data-parallel rank (a longer sequence is one by itself).
    `environment_s` are the seconds in which an environment answers a turn of a conversation; its lengths are of all its
    turns. `slot_tokens` are those of the longest prompt and response that a run may have: what a generator's slot has
    room for, and the smallest micro-batch; 0 where prompts are all alike. `parts`: in how many parts the update of the
    policy takes its batch.
    """

    shape: Shape
    prompts: Size
    samples: Size
    lengths: Lengths
    prompt_tokens: Annotated[int, Field(ge=0)] = 128
    epochs: Size = 1
    minibatches: Size = 1
    micro_tokens: Size = 8192
    environment_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    kept: Annotated[float, Field(gt=0, le=1)] = 1.0
    baselines: Annotated[int, Field(ge=0)] = 0
    replayed: Annotated[int, Field(ge=0)] = 0
    slot_tokens: Annotated[int, Field(ge=0)] = 0
    parts: Size = 1
    begun: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = ()

    def __post_init__(self) -> None:
        # The program says the one, its user the other. All other limits are those of flags, and of what is read.
        if self.minibatches > self.learnt:
            given = f"{self.minibatches} minibatches of {self.learnt} responses"
            raise ValueError(f"workload: given {given}, needed at least one response in each")
        if (most := max(self.responses, self.learnt)) > MOST_RESPONSES:
            given = f"{most} responses to {self.drawn} prompts of an update"
            raise ValueError(f"workload: given {given}, needed at most {MOST_RESPONSES} (--batch, --kept, samples)")

    @cached_property
    def drawn(self) -> int:
        """Prompts of which `prompts` are kept."""
        return ceil(self.prompts / self.kept - 1e-9)

    @property
    def rows(self) -> int:
        """Responses to each prompt."""
        return self.samples + self.baselines

    @cached_property
    def responses(self) -> int:
        """All that are generated."""
        return self.drawn * self.rows

    @property
    def learnt(self) -> int:
        """Responses that an update learns from."""
        return (self.prompts + self.replayed) * self.samples

    @cached_property
    def response_tokens(self) -> IntArray:
        """[responses]: tokens that are generated of each, those of a prompt beside each other."""
        return self.lengths.take(self.responses) - self.prefix_tokens

    @cached_property
    def prefix_tokens(self) -> IntArray:
        """[responses]: tokens of each that stand before it goes on."""
        return self.begins(self.lengths.take(self.responses))

    def begins(self, lengths: IntArray) -> IntArray:
        """Of whole responses to prompts, those of a prompt beside each other: the tokens that stand before."""
        if not self.begun:
            return np.zeros_like(lengths)
        shares = np.tile(np.array(self.begun), len(lengths) // self.rows)
        # A response goes on by a token at least.
        begins: IntArray = np.minimum((lengths * shares).astype(np.int64), lengths - 1)
        return begins

    @cached_property
    def seen_tokens(self) -> FloatArray:
        """[responses]: the tokens in the cache, summed over the steps of each."""
        lengths = self.response_tokens.astype(np.float64)
        return np.asarray(lengths * (self.prompt_tokens + self.prefix_tokens) + lengths * (lengths - 1) / 2)

    @cached_property
    def sequence_tokens(self) -> IntArray:
        """[learnt]: prompt and response, as the trainer sees them."""
        return self.lengths.take(self.learnt) + self.prompt_tokens

    @cached_property
    def replacements(self) -> dict[int, int]:
        """Prompts that filters drop, spread evenly over the batch without chance, and which one takes the place of
        each, later in the batch."""
        dropped = [p for p in range(self.drawn) if floor((p + 1) * self.kept + 1e-9) == floor(p * self.kept + 1e-9)]
        return dict(zip(dropped, range(self.prompts, self.drawn), strict=False))

    @cached_property
    def longest(self) -> int:
        """Tokens that follow each other at the least: of the longest response, and of those before it whose prompts
        were dropped."""
        ends = self.response_tokens.reshape(self.drawn, self.rows).max(axis=1)
        for dropped, replacement in self.replacements.items():
            ends[replacement] += ends[dropped]
        return int(ends.max())

    @cached_property
    def arrivals(self) -> tuple[float, ...]:
        """Of each of the update's parts, the share of a rollout at which the last of its groups is there, if all
        responses begin at once: about that of the longest one so far. None of an update that takes its batch whole."""
        if self.parts == 1:
            return ()
        ends = np.maximum.accumulate(self.response_tokens.reshape(self.drawn, self.rows).max(axis=1))
        last = [ceil(self.drawn * part / self.parts - 1e-9) - 1 for part in range(1, self.parts + 1)]
        return tuple((ends[last] / ends[-1]).tolist())

    @property
    def context(self) -> int:
        """The longest sequence there can be: prompts are longer than their mean."""
        return max(self.prompt_tokens + self.lengths.longest, self.slot_tokens)


def given_lengths(given: str, longest: int) -> Lengths:
    """`mean,sigma` of a lognormal, a file with a length per line, or the folder of a finished run; "" is a lognormal
    with a mean of a quarter of `longest` tokens, at most 1,000, and sigma 0.7.

    Raises LengthError, with what is needed.
    """
    if not given:
        return Lognormal(min(1000.0, max(1.0, longest / 4)), SIGMA, longest)
    path = Path(given)
    if path.is_dir():
        return of_run(path, longest)
    if path.is_file():
        return read_lengths(path, longest)
    try:
        mean, sigma = (float(part) for part in given.split(","))
    except ValueError:
        needed = "MEAN,SIGMA of a lognormal such as 1000,0.7, a file with a length per line, or a run's folder"
        raise LengthError(f"--lengths: given {given!r}, needed {needed}") from None
    try:
        return Lognormal(mean, sigma, longest)
    except LengthError as error:
        raise LengthError(f"--lengths {given}, --max-tokens {longest}: {error}") from None


def of_run(folder: Path, longest: int) -> Lognormal:
    """The lognormal that a run's `metrics.jsonl` speaks for, cut at `longest`: its mean `response_length`, and its
    share `finished` of responses that ended by themselves before the run's own `max_tokens`."""
    path = folder / "metrics.jsonl"
    try:
        if not path.exists():
            raise LengthError(f"{path}: no metrics of a run: no such file")
        rows = read_rows(path)
    except RecordError as error:
        raise LengthError(f"no metrics of a run: {error}") from error
    found = [
        (row["response_length"], 1.0 if row.get("finished") is None else row["finished"])
        for row in rows
        if row.get("response_length") is not None
    ]
    if not found:
        raise LengthError(f"{path}: given {len(rows)} rows, needed one or more with response_length")
    mean, finished = (sum(column) / len(found) for column in zip(*found, strict=True))
    config, own = folder / "config.json", longest
    try:
        if config.exists():
            own = RunFolder(folder).read_json(config.name, _Config)["flags"]["max_tokens"]
    except (RecordError, KeyError) as error:
        raise LengthError(f"{config}: given no flags of a run with max_tokens: {error!r}") from error
    if not 1 <= mean <= own:
        given = f"a mean response_length of {mean:g}"
        raise LengthError(f"{path}: given {given}, needed responses of 1 to {own} tokens, as the run had them")
    if not finished and longest > own:
        given = f"responses that were all cut at {own} tokens, which tell nothing of longer ones"
        raise LengthError(f"{path}: given {given}; needed --max-tokens {own} or less")
    seen = fitted(mean, finished, own)
    # The fit is of what the run saw; another cut moves its mean, not the distribution before it.
    if own == longest:
        return seen
    return Lognormal(max(1.0, cut_mean(seen.location, seen.sigma, longest)), seen.sigma, longest)


class _Flags(TypedDict):
    max_tokens: Count


class _Config(TypedDict):
    """What is read here of a run's `config.json`."""

    flags: _Flags
