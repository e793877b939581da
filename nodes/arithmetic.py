"""Arithmetic problems that cost nothing to make: sums and differences of two numbers, with a sloppy teacher.

A problem reads "347+586=", its answer "933". The teacher first writes a draft, each digit worked out by itself: "823".
The answer follows, with what is carried or borrowed: "823:0933". A sloppy teacher stops after the draft, so there
is something left for reinforcement learning to find: going on pays.

500 problems, the same for every seed, are held out: training never shows them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from penstock.graph.types import Context

HELD_OUT = 500
SLOPPY = 0.65
"""The share of demonstrations that stop after the draft."""


@dataclass(frozen=True, slots=True)
class Problem:
    """a + b, or a − b with a ≥ b; both have `digits` digits."""

    a: int
    b: int
    sign: str
    digits: int

    @staticmethod
    def draw(key: int, digits: int) -> "Problem":
        """The problem of a 63-bit key; every pair of operands and both signs are equally likely."""
        low = 10 ** (digits - 1)
        rest, a = divmod(key, 9 * low)
        rest, b = divmod(rest, 9 * low)
        a, b = a + low, b + low
        return Problem(a, b, "+", digits) if rest % 2 else Problem(max(a, b), min(a, b), "-", digits)

    @property
    def text(self) -> str:
        return f"{self.a}{self.sign}{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b if self.sign == "+" else self.a - self.b)

    @property
    def draft(self) -> str:
        """Each digit's own sum or difference, modulo 10."""
        pairs = zip(str(self.a), str(self.b), strict=True)
        step = 1 if self.sign == "+" else -1
        return "".join(str((int(x) + step * int(y)) % 10) for x, y in pairs)

    def demonstration(self, sloppy: bool) -> str:
        """What the teacher writes. Answers have one digit more than the operands, zeros in front."""
        return self.draft if sloppy else f"{self.draft}:{self.answer.zfill(self.digits + 1)}"


def draw_problem(context: Context, digits: int, *parts: int) -> Problem:
    """The training problem of this key: the first draw that is not held out."""
    draws = (Problem.draw(context.key(*parts, attempt), digits) for attempt in count())
    return next(p for p in draws if p not in _held_out_set(digits))


def is_sloppy(context: Context, *parts: int) -> bool:
    """Does the teacher stop this demonstration after the draft?"""
    return context.key("sloppy", *parts) % 10_000 < SLOPPY * 10_000


@lru_cache
def held_out(digits: int) -> tuple[Problem, ...]:
    """The problems of the evaluation, which depend on nothing but the number of digits."""
    chosen: dict[Problem, None] = {}
    for key in _fixed_keys():
        chosen[Problem.draw(key, digits)] = None
        if len(chosen) == HELD_OUT:
            break
    return tuple(chosen)


@lru_cache
def _held_out_set(digits: int) -> frozenset[Problem]:
    return frozenset(held_out(digits))


def _fixed_keys() -> Iterator[int]:
    for index in count():
        digest = hashlib.blake2b(f"held-out/{index}".encode(), digest_size=8).digest()
        yield int.from_bytes(digest, "big") >> 1
