"""What is put up on the board is found by whoever asks, at once or when it is there."""

from penstock.runtime.control.board import Board
from penstock.runtime.control.messages import Count, Found, Look, Post

A, B = "trainer/0:0", "generator/0:0"


def test_whoever_looks_waits_until_all_keys_are_there_and_each_gets_its_own_answer() -> None:
    board = Board()
    assert board.hear(A, Look(1, ("x", "y"))) == []
    assert board.hear(B, Look(1, ("y",))) == []
    assert board.hear(A, Post("y", "02")) == [(B, Found(1, {"y": "02"}))]
    assert board.hear(B, Post("x", "01")) == [(A, Found(1, {"x": "01", "y": "02"}))]
    assert board.hear(B, Post("x", "03")) == []  # everybody has been answered, once
    assert board.hear(A, Look(2, ("x",))) == [(A, Found(2, {"x": "03"}))]


def test_a_look_at_once_is_answered_with_what_is_there() -> None:
    board = Board()
    board.hear(A, Post("x", "01"))
    assert board.hear(B, Look(7, ("x", "y"), at_once=True)) == [(B, Found(7, {"x": "01"}))]


def test_counts_are_sums_in_decimal_digits_that_a_look_waits_for_too() -> None:
    board = Board()
    assert board.hear(B, Look(1, ("n",))) == []
    first = b"5".hex()
    assert board.hear(A, Count(3, "n", 5)) == [(A, Found(3, {"n": first})), (B, Found(1, {"n": first}))]
    assert board.hear(B, Count(2, "n", 6)) == [(B, Found(2, {"n": b"11".hex()}))]


def test_a_number_over_what_somebody_else_put_up_counts_from_zero() -> None:
    board = Board()
    board.hear(A, Post("n", "no digits"))
    assert board.hear(A, Count(1, "n", 2)) == [(A, Found(1, {"n": b"2".hex()}))]
