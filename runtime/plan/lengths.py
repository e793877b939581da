"""How long responses are: a distribution, from which any number of lengths is taken without chance. Pure.

`take(n)` gives n lengths at the middles of n equally likely parts of the distribution, in an order that a hash of
their places says: two calls agree, and no length is averaged away.
"""

from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
_NORMAL = NormalDist()
WIDEST = 5.0
"""The largest sigma: a hundredth of such lengths is 10⁵ times the median, and they are no lengths of responses."""


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
        low, high = log(self.mean) - self.sigma**2, log(self.longest) + 9 * self.sigma + 1
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cut_mean(middle, self.sigma, self.longest) < self.mean else (low, middle)
        return (low + high) / 2

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


def fitted(mean: float, finished: float, longest: int, sigma: float = 0.7) -> Lognormal:
    """The lognormal of which `finished` (0 to 1) end before `longest`, and the mean after the cut is `mean`. With none
    or all of them finished the share says nothing of the spread: then it is `sigma`."""
    if not 0 < finished < 1 or mean >= longest:
        return Lognormal(min(mean, longest), sigma, longest)
    quantile = _NORMAL.inv_cdf(finished)
    low, high = 1e-3, WIDEST
    for _ in range(60):
        middle = (low + high) / 2
        # More spread with the same share above the cut moves the rest down.
        wide = cut_mean(log(longest) - middle * quantile, middle, longest) > mean
        low, high = (middle, high) if wide else (low, middle)
    return Lognormal(mean, (low + high) / 2, longest)


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
