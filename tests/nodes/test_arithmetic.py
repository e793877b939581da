"""Problems are drawn evenly and held out for ever; the sloppy teacher is wrong where something is carried."""

from penstock.graph.types import Context
from penstock.nodes.data import HELD_OUT, SLOPPY, Problem, draw_problem, held_out, is_sloppy
from penstock.nodes.score import math_answer

CONTEXT = Context(node="demonstrations", seed=1)


def drawn(digits: int, count: int) -> list[Problem]:
    return [draw_problem(CONTEXT, digits, ordinal) for ordinal in range(count)]


def test_operands_have_the_given_digits_and_differences_are_not_negative() -> None:
    for digits in (2, 3, 5):
        for p in drawn(digits, 200):
            assert len(str(p.a)) == len(str(p.b)) == digits
            assert p.sign == "+" or p.a >= p.b


def test_both_operations_and_all_leading_digits_are_drawn_evenly() -> None:
    problems = drawn(2, 4000)
    assert 0.45 < sum(p.sign == "+" for p in problems) / 4000 < 0.55
    sums = [p for p in problems if p.sign == "+"]
    for first in "123456789":
        assert 0.08 < sum(str(p.a)[0] == first for p in sums) / len(sums) < 0.15


def test_held_out_problems_are_distinct_and_never_drawn() -> None:
    problems = held_out(2)
    assert len(set(problems)) == len(problems) == HELD_OUT
    assert not set(problems) & set(drawn(2, 5000))


def test_a_draft_drops_every_carry_and_borrow() -> None:
    assert Problem(47, 85, "+", 2).draft == "22"
    assert Problem(62, 35, "-", 2).draft == "37"
    assert Problem(24, 13, "+", 2).draft == "37"


def test_the_careful_teacher_corrects_the_draft_and_the_sloppy_one_does_not() -> None:
    assert Problem(47, 85, "+", 2).demonstration(sloppy=True) == "22"
    assert Problem(47, 85, "+", 2).demonstration(sloppy=False) == "22:132"
    assert Problem(62, 35, "-", 2).demonstration(sloppy=False) == "37:027"
    assert Problem(347, 586, "+", 3).demonstration(sloppy=False) == "823:0933"


def test_the_careful_teacher_gets_the_full_reward() -> None:
    for p in drawn(3, 100):
        assert math_answer(p.text, p.demonstration(sloppy=False), p.answer) == 1.0
        assert math_answer(p.text, p.demonstration(sloppy=True), p.answer) == float(int(p.draft) == int(p.answer))


def test_the_teacher_is_sloppy_as_often_as_said() -> None:
    share = sum(is_sloppy(CONTEXT, ordinal, 0) for ordinal in range(4000)) / 4000
    assert abs(share - SLOPPY) < 0.03
