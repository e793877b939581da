"""LlamaRL's theorem (Wu et al., 2025, arXiv 2505.24034, theory) holds under its assumptions, and not without them.

G GPUs, a batch of B samples, M bytes of memory on each GPU, W bytes of weights. A replica of m GPUs trains b samples
at once in A · b bytes beside its 4 W of weights, gradients and moments, and decodes b rows at once in K · b bytes
beside W. η(b) = each + fixed / min(b, most) is its seconds per sample: beyond `most` samples nothing is saved.

    synchronous     T_s = min (B m / G) (η_t(b_t) + η_g(b_g))                     with (5 W + A b_t + K b_g) / m <= M
    asynchronous    T_a = min max(B m_t η_t / (θ G), B m_g η_g / ((1 - θ) G))     with (4 W + A b_t) / m_t <= M
                                                                                  and  (W + K b_g) / m_g <= M

The maximum is least where its sides are equal, at θ* = m_t η_t / (m_t η_t + m_g η_g), and is then
T_a = (B / G) (m_t η_t + m_g η_g). At the synchronous optimum both separate constraints are slack, so that some b can
grow, and T_a < T_s while η falls. If it does not fall any more, T_a = T_s: overlap alone gains nothing
(docs/staleness.md).
"""

from dataclasses import dataclass, replace
from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

POSITIVE = st.floats(0.01, 100)


@dataclass(frozen=True)
class Rate:
    each: float
    fixed: float
    most: float = inf

    def seconds(self, at_once: float) -> float:
        return self.each + self.fixed / min(at_once, self.most)


@dataclass(frozen=True)
class Problem:
    """`sample` and `row` are A and K. `sizes` are the numbers of GPUs that a replica may have. B / G is 1."""

    memory: float
    weights: float
    sample: float
    row: float
    train: Rate
    generate: Rate
    sizes: tuple[float, ...]

    def rooms(self, held: float) -> list[tuple[float, float]]:
        """Each size that holds so many times the weights, and the memory that is left."""
        found = [(size, self.memory * size - held * self.weights) for size in self.sizes]
        return [(size, room) for size, room in found if room > 0]

    def synchronous(self) -> float:
        return min(self.shared(size, room) for size, room in self.rooms(5))

    def shared(self, size: float, room: float, share: float | None = None) -> float:
        """The trainer's `share` of the room; None: where another byte gains as much on both sides, b_t : b_g =
        √(f_t / A) : √(f_g / K), but to neither beyond its `most`."""
        train, generate, a, k = self.train, self.generate, self.sample, self.row
        if share is None:
            need_t, need_g = sqrt(train.fixed * a), sqrt(generate.fixed * k)
            b_t = min(room * need_t / (need_t + need_g) / a, train.most)
            b_g = min((room - a * b_t) / k, generate.most)
            b_t = min((room - k * b_g) / a, train.most)
        else:
            b_t, b_g = max(room * share / a, 1e-12), max(room * (1 - share) / k, 1e-12)
        return size * (train.seconds(b_t) + generate.seconds(b_g))

    def alone(self) -> tuple[float, float]:
        """m η of the best size of each side by itself, with all of its memory."""
        trains = (size * self.train.seconds(room / self.sample) for size, room in self.rooms(4))
        decodes = (size * self.generate.seconds(room / self.row) for size, room in self.rooms(1))
        return min(trains), min(decodes)

    def asynchronous(self, theta: float | None = None) -> float:
        trains, decodes = self.alone()
        return trains + decodes if theta is None else max(trains / theta, decodes / (1 - theta))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any quantities with which the synchronous problem can be solved: all state fits at the largest size."""
    weights, memory = draw(POSITIVE), draw(POSITIVE)
    first = draw(st.floats(1.05, 4)) * 5 * weights / memory
    train, generate = (Rate(draw(POSITIVE), draw(POSITIVE)) for _ in range(2))
    return Problem(memory, weights, draw(POSITIVE), draw(POSITIVE), train, generate, (first, 2 * first, 4 * first))


@given(problems(), st.floats(0.01, 0.99), st.floats(0.0, 1.0))
def test_asynchronous_is_faster_while_larger_batches_still_save_time(p: Problem, theta: float, share: float) -> None:
    assert p.asynchronous() < p.synchronous()
    trains, decodes = p.alone()
    assert p.asynchronous(trains / (trains + decodes)) == pytest.approx(p.asynchronous())
    assert p.asynchronous(theta) >= p.asynchronous() * (1 - 1e-9)
    size, room = p.rooms(5)[0]
    assert p.shared(size, room, share) >= p.synchronous() * (1 - 1e-9)


def test_with_slack_in_the_shared_memory_the_gain_is_zero() -> None:
    """The shared memory holds `most` samples of both: overlap alone is left."""
    rate = Rate(each=0.1, fixed=2.0, most=16)
    slack = Problem(80.0, 16.0, 1.0, 0.5, rate, rate, sizes=(4,))
    assert slack.asynchronous() == pytest.approx(slack.synchronous(), rel=1e-12)
    more = Rate(each=0.1, fixed=2.0)
    assert (
        replace(slack, train=more, generate=more).asynchronous()
        < replace(slack, train=more, generate=more).synchronous()
    )
