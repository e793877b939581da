"""LlamaRL's theorem holds under its assumptions, and not without them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.plan.theory import Problem, Rate, asynchronous, split, synchronous

POSITIVE = st.floats(0.01, 100)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any quantities with which the synchronous problem can be solved: all state fits at the largest size."""
    weights, memory = draw(POSITIVE), draw(POSITIVE)
    first = draw(st.floats(1.05, 4)) * 5 * weights / memory
    return Problem(
        gpus=draw(st.floats(1e3, 1e4)),
        batch=draw(POSITIVE),
        memory=memory,
        weights=weights,
        sample=draw(POSITIVE),
        row=draw(POSITIVE),
        train=Rate(draw(POSITIVE), draw(POSITIVE)),
        generate=Rate(draw(POSITIVE), draw(POSITIVE)),
        sizes=(first, 2 * first, 4 * first),
    )


@given(problems())
def test_asynchronous_is_faster_while_larger_batches_still_save_time(problem: Problem) -> None:
    assert asynchronous(problem).seconds < synchronous(problem).seconds


@given(problems(), st.floats(0.01, 0.99))
def test_no_split_is_better_than_theta(problem: Problem, theta: float) -> None:
    best = asynchronous(problem)
    assert split(problem, best, best.theta) == pytest.approx(best.seconds)
    assert split(problem, best, theta) >= best.seconds * (1 - 1e-9)


@given(problems(), st.floats(0.0, 1.0))
def test_no_sharing_of_memory_is_better_than_the_synchronous_optimum(problem: Problem, share: float) -> None:
    best = synchronous(problem)
    size = best.sizes[0]
    room = problem.memory * size - 5 * problem.weights
    b_t, b_g = max(room * share / problem.sample, 1e-12), max(room * (1 - share) / problem.row, 1e-12)
    other = problem.train.seconds(b_t) + problem.generate.seconds(b_g)
    assert problem.batch * size / problem.gpus * other >= best.seconds * (1 - 1e-9)


def test_with_slack_in_the_shared_memory_the_gain_is_zero() -> None:
    """Beyond `most` samples nothing is saved, and the shared memory holds that many of both: overlap alone is left."""
    rate = Rate(each=0.1, fixed=2.0, most=16)
    problem = Problem(64, 512, 80.0, 16.0, 1.0, 0.5, rate, rate, sizes=(4,))
    sync, other = synchronous(problem), asynchronous(problem)
    assert sync.at_once[0] >= 16
    assert sync.at_once[1] >= 16
    assert other.seconds == pytest.approx(sync.seconds, rel=1e-12)


def test_without_that_slack_there_is_a_gain_with_the_same_sizes() -> None:
    rate = Rate(each=0.1, fixed=2.0)
    problem = Problem(64, 512, 80.0, 16.0, 1.0, 0.5, rate, rate, sizes=(4,))
    assert asynchronous(problem).seconds < synchronous(problem).seconds


def test_theta_by_hand() -> None:
    """Equal sizes, and generation three times as dear as training: a quarter of the GPUs trains."""
    problem = Problem(8, 4, 100.0, 1.0, 1.0, 1.0, Rate(1.0, 0.0), Rate(3.0, 0.0), sizes=(1,))
    found = asynchronous(problem)
    assert found.theta == pytest.approx(0.25)
    assert found.seconds == pytest.approx(4 / 8 * (1 + 3))


def test_weights_that_fit_nowhere_are_refused_with_the_numbers() -> None:
    problem = Problem(8, 4, 1.0, 1.0, 1.0, 1.0, Rate(1, 1), Rate(1, 1), sizes=(2, 3))
    with pytest.raises(ValueError, match=r"given 1 bytes of weights, 5 times over, on at most 3 GPUs of 1 bytes"):
        synchronous(problem)
    with pytest.raises(ValueError, match="4 times over"):
        asynchronous(problem)
