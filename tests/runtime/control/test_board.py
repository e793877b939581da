"""What is put up on the board is found by whoever asks, at once or when it is there."""

import pytest

from penstock.runtime.control import rendezvous as boards
from penstock.runtime.control.messages import Count, Found, Look, Post, Question, pack
from penstock.runtime.control.rendezvous import MAX_KEPT, Board

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


def error(board: Board, peer: str, question: Question) -> str:
    """What a peer is told of a question that is refused."""
    ((asker, found),) = board.hear(peer, question)
    assert (asker, found.values) == (peer, {})
    return found.error


def test_what_one_peer_keeps_on_the_board_is_bounded_and_others_are_not_hindered() -> None:
    board, value = Board(), "0" * (MAX_KEPT // 4)
    for number in range(3):
        assert board.hear(B, Post(f"k{number}", value)) == []
    for number in range(1000):
        assert B in error(board, B, Post(f"more{number}", value))
        assert B in error(board, B, Count(number, "n" * (MAX_KEPT // 4), 1))
        assert B in error(board, B, Look(number, ("n" * (MAX_KEPT // 4),)))
    assert board.hear(A, Look(1, ("more0",), at_once=True)) == [(A, Found(1, {}))]
    assert board.hear(A, Post("k", value)) == []
    for _ in range(10):
        assert board.hear(B, Post("k0", value)) == []  # in place of what is there


def test_questions_that_wait_are_bounded_and_give_back_their_room() -> None:
    board = Board()
    waiting = [Look(number, (str(number), "x" * 1000)) for number in range(100_000)]
    kept = [one for one in waiting if not board.hear(B, one)]
    assert 0 < len(kept) < len(waiting)
    assert len(board.hear(A, Post("x" * 1000, "01"))) == 0
    for one in kept:
        assert [(peer, found.number) for peer, found in board.hear(A, Post(str(one.number), "01"))] == [(B, one.number)]
    assert board.hear(B, Look(1, ("absent",))) == []


def test_an_answer_fits_in_a_frame_and_all_of_them_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    board, value = Board(), "0" * (MAX_KEPT // 2 - 200)
    for peer in (A, B):
        board.hear(peer, Post(f"first of {peer}", value))
        board.hear(peer, Post(f"second of {peer}", value))
    keys = [f"{which} of {peer}" for which in ("first", "second") for peer in (A, B)]
    assert "at once" in error(board, A, Look(1, (*keys,)))
    ((_, found),) = board.hear(A, Look(2, (keys[0],)))
    assert pack(found)
    monkeypatch.setattr(boards, "MAX_ANSWERED", len(value))
    assert A in error(board, A, Look(3, (keys[0],)))
    assert board.hear(B, Look(3, (keys[0],))) != []


def test_a_peer_does_not_change_what_another_has_posted() -> None:
    board = Board()
    board.hear(A, Post("address", "01"))
    board.hear(A, Count(1, "n", 1))
    assert A in error(board, B, Post("address", "02"))
    assert A in error(board, B, Count(2, "address", 1))
    assert A in error(board, B, Post("n", "02"))
    assert board.hear(B, Count(3, "n", 1)) == [(B, Found(3, {"n": b"2".hex()}))]
    assert board.hear(B, Look(4, ("address",))) == [(B, Found(4, {"address": "01"}))]
