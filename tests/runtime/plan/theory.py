"""LlamaRL's argument for asynchrony as a problem that can be solved (Wu et al., 2025, arXiv 2505.24034, theory). Pure.

G GPUs, a batch of B samples, M bytes of memory on each GPU, W bytes of weights. A replica of m GPUs trains b samples
at once in A · b bytes beside its 4 W of weights, gradients and moments, and decodes b rows at once in K · b bytes
beside W. η(b) is its seconds per sample, which fall as b grows.

    synchronous     T_s = min (B m / G) (η_t(b_t) + η_g(b_g))                     with (5 W + A b_t + K b_g) / m <= M
    asynchronous    T_a = min max(B m_t η_t / (θ G), B m_g η_g / ((1 - θ) G))     with (4 W + A b_t) / m_t <= M
                                                                                  and  (W + K b_g) / m_g <= M

The maximum is least where its sides are equal, at θ* = m_t η_t / (m_t η_t + m_g η_g), and is then
T_a = (B / G) (m_t η_t + m_g η_g). At the synchronous optimum both separate constraints are slack, so that some b can
grow, and T_a < T_s while η falls. If it does not fall any more, T_a = T_s: overlap alone gains nothing. What is
left out is named in docs/staleness.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, sqrt


@dataclass(frozen=True)
class Rate:
    """η(b) = each + fixed / min(b, most): a pass over b samples takes `fixed` seconds whatever b is (reading the
    weights) and `each` for every sample; beyond `most` samples nothing is saved any more."""

    each: float
    fixed: float
    most: float = inf

    def seconds(self, at_once: float) -> float:
        return self.each + self.fixed / min(at_once, self.most)


@dataclass(frozen=True)
class Problem:
    """The quantities of the module's docstring. `sizes` are the numbers of GPUs that a replica may have."""

    gpus: float
    batch: float
    memory: float
    weights: float
    sample: float
    row: float
    train: Rate
    generate: Rate
    sizes: tuple[float, ...]


@dataclass(frozen=True)
class Optimum:
    """Seconds per update; `theta` is the trainer's share of the GPUs (all of them if synchronous: 1)."""

    seconds: float
    theta: float
    sizes: tuple[float, float]
    at_once: tuple[float, float]


def synchronous(problem: Problem) -> Optimum:
    """The best with one size and one memory for both. Raises ValueError if the weights fit in no size."""
    return min(_shared(problem), key=lambda found: found.seconds, default=None) or _refuse(problem, 5)


def asynchronous(problem: Problem) -> Optimum:
    """The best with GPUs, size and memory of each's own, at θ*. Raises ValueError if either fits in no size."""
    trains = _alone(problem, problem.train, 4 * problem.weights, problem.sample)
    decodes = _alone(problem, problem.generate, problem.weights, problem.row)
    if trains is None or decodes is None:
        return _refuse(problem, 4 if trains is None else 1)
    (cost_t, size_t, b_t), (cost_g, size_g, b_g) = trains, decodes
    scale = problem.batch / problem.gpus
    return Optimum(scale * (cost_t + cost_g), cost_t / (cost_t + cost_g), (size_t, size_g), (b_t, b_g))


def split(problem: Problem, found: Optimum, theta: float) -> float:
    """Seconds per update of an asynchronous optimum's sizes with another share θ for the trainer."""
    cost_t = found.sizes[0] * problem.train.seconds(found.at_once[0])
    cost_g = found.sizes[1] * problem.generate.seconds(found.at_once[1])
    return problem.batch / problem.gpus * max(cost_t / theta, cost_g / (1 - theta))


def _alone(problem: Problem, rate: Rate, held: float, each: float) -> tuple[float, float, float] | None:
    """(m η, m, b) of the best size for one side; b is as large as its memory allows."""
    rooms = [(size, problem.memory * size - held) for size in problem.sizes]
    return min(
        ((size * rate.seconds(room / each), size, room / each) for size, room in rooms if room > 0), default=None
    )


def _shared(problem: Problem) -> Iterator[Optimum]:
    """The best of each size. What is left of the memory is shared out where another byte gains as much on both sides,
    b_t : b_g = √(f_t / A) : √(f_g / K), but to neither beyond its `most`."""
    train, generate, a, k = problem.train, problem.generate, problem.sample, problem.row
    for size in problem.sizes:
        room = problem.memory * size - 5 * problem.weights
        if room <= 0:
            continue
        need_t, need_g = sqrt(train.fixed * a), sqrt(generate.fixed * k)
        share = need_t / (need_t + need_g) if need_t + need_g else 0.5
        b_t = min(room * share / a, train.most)
        b_g = min((room - a * b_t) / k, generate.most)
        b_t = min((room - k * b_g) / a, train.most)
        seconds = problem.batch * size / problem.gpus * (train.seconds(b_t) + generate.seconds(b_g))
        yield Optimum(seconds, 1.0, (size, size), (b_t, b_g))


def _refuse(problem: Problem, times: int) -> Optimum:
    given = f"{problem.weights:g} bytes of weights, {times} times over, on at most {max(problem.sizes):g} GPUs"
    raise ValueError(f"theory: given {given} of {problem.memory:g} bytes; needed a size that they fit in")
