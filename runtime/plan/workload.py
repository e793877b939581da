"""The work of one update: the model, the prompts and samples, and the lengths of responses. Pure except for files that
are read.

Lengths are a distribution. `take(n)` returns n lengths without randomness: the quantiles at the middles of n equally
likely parts, in an order given by a hash. So two calls agree, and long responses are not averaged away.
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
# The default spread of lengths: sigma of their logarithm.
SIGMA = 0.7
# The most responses of an update that a plan can have: each has its length.
MOST_RESPONSES = 1_000_000
# The largest sigma: with it 1 % of the lengths are above 10⁵ times the median, which no responses are.
WIDEST = 5.0


class LengthError(ValueError):
    """Impossible lengths. The message says what was given, what is needed, and where."""


@dataclass(frozen=True)
class Lognormal:
    """A lognormal cut at `longest`: a response that would be longer ends there. `mean` is the mean after the cut, in
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
        """The mean of the logarithm before the cut, found by bisection: the mean after the cut grows with it."""
        # At these limits the mean after the cut is certainly too small, or too large.
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
    """Observed lengths, in tokens; `take` returns their quantiles."""

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
    """The lognormal with this `mean` after the cut, and with the share `finished` (0 to 1) of responses that end before
    `longest`. If none or all are finished, the spread is not determined, and is the default."""
    if not 0 < finished < 1 or mean >= longest:
        return Lognormal(min(mean, longest), SIGMA, longest)
    quantile = _NORMAL.inv_cdf(finished)
    # With the same share above the cut, a larger spread moves the rest down.
    spread = halved(1e-3, WIDEST, lambda s: cut_mean(log(longest) - s * quantile, s, longest) > mean)
    return Lognormal(mean, spread, longest)


def halved(low: float, high: float, below: Callable[[float], bool]) -> float:
    """The value at which `below` turns from true to false, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def read_lengths(path: Path, longest: int | None = None) -> Listed:
    """Read a file with one length in tokens per line; lengths above `longest` are cut. Raises LengthError with the
    first three wrong lines."""
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
    """[count]: numbers between 0 and 1, each keyed by `seed` and its place, from `first` on."""
    # Seeds are 2⁴⁰ places apart, more than any run draws.
    places = np.arange(first, first + count, dtype=np.uint64) + (np.uint64(seed) << np.uint64(40))
    return ((_hash(places) >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53


def _mixed(values: IntArray) -> IntArray:
    """The values in the order of a hash of their places: neighbours differ, without randomness."""
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
    """One update: `prompts` prompts of `prompt_tokens` each, with `samples` responses each that are trained on.

    `kept` is the share of the prompts that filters keep, so that more are drawn. In addition each prompt has
    `baselines` responses that are not trained on. `replayed` past prompts are trained on once more. `begun` is, for
    each of a prompt's responses (`samples` before `baselines`), the share that is a prefix of another response, which
    is in the cache; () if none has a prefix.

    `epochs` is how often each response is trained on, `minibatches` the optimizer's steps in each epoch, and
    `micro_tokens` the most tokens in a micro-batch of a data-parallel rank (a longer sequence has its own micro-batch).
    `environment_s` are the seconds in which an environment answers a turn of a conversation, whose lengths are those of
    all turns together. `slot_tokens` is the length of the longest prompt and response that a run may have: the size of
    a generator's slot, and the smallest micro-batch; 0 if all prompts are equally long. `parts`: in how many parts the
    policy's update takes its batch.
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
        # `minibatches` comes from the program, the batch from its user. Flags and readers check all other limits.
        if self.minibatches > self.learnt:
            given = f"{self.minibatches} minibatches of {self.learnt} responses"
            raise ValueError(f"workload: given {given}, needed at least one response in each")
        if (most := max(self.responses, self.learnt)) > MOST_RESPONSES:
            given = f"{most} responses to {self.drawn} prompts of an update"
            raise ValueError(f"workload: given {given}, needed at most {MOST_RESPONSES} (--batch, --kept, samples)")

    @cached_property
    def drawn(self) -> int:
        """How many prompts are drawn, so that `prompts` are kept."""
        return ceil(self.prompts / self.kept - 1e-9)

    @property
    def rows(self) -> int:
        """How many responses each prompt has."""
        return self.samples + self.baselines

    @cached_property
    def responses(self) -> int:
        """How many responses are generated."""
        return self.drawn * self.rows

    @property
    def learnt(self) -> int:
        """How many responses an update trains on."""
        return (self.prompts + self.replayed) * self.samples

    @cached_property
    def response_tokens(self) -> IntArray:
        """[responses]: the tokens that are generated of each; responses of a prompt are consecutive."""
        return self.lengths.take(self.responses) - self.prefix_tokens

    @cached_property
    def prefix_tokens(self) -> IntArray:
        """[responses]: the tokens of each response's prefix."""
        return self.begins(self.lengths.take(self.responses))

    def begins(self, lengths: IntArray) -> IntArray:
        """The tokens of the prefixes of whole responses with these lengths; responses of a prompt are consecutive."""
        if not self.begun:
            return np.zeros_like(lengths)
        shares = np.tile(np.array(self.begun), len(lengths) // self.rows)
        # A response generates at least one token.
        begins: IntArray = np.minimum((lengths * shares).astype(np.int64), lengths - 1)
        return begins

    @cached_property
    def seen_tokens(self) -> FloatArray:
        """[responses]: the tokens in the cache, summed over the steps of each response."""
        lengths = self.response_tokens.astype(np.float64)
        return np.asarray(lengths * (self.prompt_tokens + self.prefix_tokens) + lengths * (lengths - 1) / 2)

    @cached_property
    def sequence_tokens(self) -> IntArray:
        """[learnt]: the tokens of prompt and response that the trainer processes."""
        return self.lengths.take(self.learnt) + self.prompt_tokens

    @cached_property
    def replacements(self) -> dict[int, int]:
        """The prompts that filters drop, spread evenly over the batch, each with the later prompt that replaces it."""
        dropped = [p for p in range(self.drawn) if floor((p + 1) * self.kept + 1e-9) == floor(p * self.kept + 1e-9)]
        return dict(zip(dropped, range(self.prompts, self.drawn), strict=False))

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest chain: a response, and those before it whose dropped prompts it replaces."""
        ends = self.response_tokens.reshape(self.drawn, self.rows).max(axis=1)
        for dropped, replacement in self.replacements.items():
            ends[replacement] += ends[dropped]
        return int(ends.max())

    @cached_property
    def arrivals(self) -> tuple[float, ...]:
        """For each part of the update, the share of a rollout at which its last group arrives, if all responses begin
        at once: roughly the longest response so far over the longest of all. Empty if an update takes its batch
        whole."""
        if self.parts == 1:
            return ()
        ends = np.maximum.accumulate(self.response_tokens.reshape(self.drawn, self.rows).max(axis=1))
        last = [ceil(self.drawn * part / self.parts - 1e-9) - 1 for part in range(1, self.parts + 1)]
        return tuple((ends[last] / ends[-1]).tolist())

    @property
    def context(self) -> int:
        """The longest possible sequence; prompts may be longer than their mean."""
        return max(self.prompt_tokens + self.lengths.longest, self.slot_tokens)


def given_lengths(given: str, longest: int) -> Lengths:
    """Parse lengths: `mean,sigma` of a lognormal, a file with a length per line, or the folder of a finished run. "" is
    a lognormal with a mean of a quarter of `longest` tokens, at most 1,000, and sigma 0.7. Raises LengthError."""
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
    """The lognormal that fits a run's `metrics.jsonl`, cut at `longest`: its mean `response_length`, and its share
    `finished` of responses that ended by themselves before the run's own `max_tokens`."""
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
    # The fit is with the run's cut; another cut changes the mean, not the distribution before the cut.
    if own == longest:
        return seen
    return Lognormal(max(1.0, cut_mean(seen.location, seen.sigma, longest)), seen.sigma, longest)


class _Flags(TypedDict):
    max_tokens: Count


class _Config(TypedDict):
    """The part of a run's `config.json` that is read here."""

    flags: _Flags
