"""Ranks find each other through the controller's key-value store."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest
import torch
from msgspec import structs
from torch._C._distributed_c10d import Store

from penstock.runtime.control import rendezvous as boards
from penstock.runtime.control.messages import MAX_BYTES, BoardValues, Count, Look, Post, Question, pack
from penstock.runtime.control.rank import RendezvousStore
from penstock.runtime.control.rendezvous import MAX_KEPT, Board, HeartbeatThread
from penstock.runtime.control.sockets import Server
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import Connection, TransportError

from .sockets import bench

# A posted value is found by all who ask, at once or when it is posted.


A, B = "trainer/0:0", "generator/0:0"


def test_whoever_looks_waits_until_all_keys_are_there_and_each_gets_its_own_answer() -> None:
    board = Board()
    assert board.hear(A, Look(1, ("x", "y"))) == []
    assert board.hear(B, Look(1, ("y",))) == []
    assert board.hear(A, Post("y", "02")) == [(B, BoardValues(1, {"y": "02"}))]
    assert board.hear(B, Post("x", "01")) == [(A, BoardValues(1, {"x": "01", "y": "02"}))]
    assert board.hear(B, Post("x", "03")) == []  # each question is answered once
    assert board.hear(A, Look(2, ("x",))) == [(A, BoardValues(2, {"x": "03"}))]


def test_what_a_peer_that_has_ended_had_asked_is_answered_to_none_that_comes_in_its_place() -> None:
    board = Board()
    assert board.hear("a:0", Look(1, ("key",))) == board.hear("b:0", Look(1, ("key",))) == []
    board.forget("a:0")
    assert board.hear("a:0", Look(1, ("other",))) == []
    assert board.hear("b:0", Post("key", "01")) == [("b:0", BoardValues(1, {"key": "01"}))]
    assert board.hear("b:0", Post("other", "02")) == [("a:0", BoardValues(1, {"other": "02"}))]
    for number in range(100):  # its questions no longer take room
        assert board.hear("a:0", Look(number, ("k" * (MAX_KEPT // 2),))) == []
        board.forget("a:0")


def test_a_look_at_once_is_answered_with_what_is_there() -> None:
    board = Board()
    board.hear(A, Post("x", "01"))
    assert board.hear(B, Look(7, ("x", "y"), at_once=True)) == [(B, BoardValues(7, {"x": "01"}))]


def test_counts_are_sums_in_decimal_digits_that_a_look_waits_for_too() -> None:
    board = Board()
    assert board.hear(B, Look(1, ("n",))) == []
    first = b"5".hex()
    assert board.hear(A, Count(3, "n", 5)) == [(A, BoardValues(3, {"n": first})), (B, BoardValues(1, {"n": first}))]
    assert board.hear(B, Count(2, "n", 6)) == [(B, BoardValues(2, {"n": b"11".hex()}))]


def test_a_number_over_what_somebody_else_put_up_counts_from_zero() -> None:
    board = Board()
    board.hear(A, Post("n", "no digits"))
    assert board.hear(A, Count(1, "n", 2)) == [(A, BoardValues(1, {"n": b"2".hex()}))]


def error(board: Board, peer: str, question: Question) -> str:
    """Return the error that a refused question is answered with."""
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
    assert board.hear(A, Look(1, ("more0",), at_once=True)) == [(A, BoardValues(1, {}))]
    assert board.hear(A, Post("k", value)) == []
    for _ in range(10):
        assert board.hear(B, Post("k0", value)) == []  # replaces the value of this key


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
    peers = (A, B, *(f"generator/1:{rank}" for rank in range(MAX_BYTES // MAX_KEPT)))
    for peer in peers:
        board.hear(peer, Post(f"first of {peer}", value))
        board.hear(peer, Post(f"second of {peer}", value))
    keys = [f"{which} of {peer}" for which in ("first", "second") for peer in peers]
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
    assert board.hear(B, Count(3, "n", 1)) == [(B, BoardValues(3, {"n": b"2".hex()}))]
    assert board.hear(B, Look(4, ("address",))) == [(B, BoardValues(4, {"address": "01"}))]


# Ranks connect through the controller's store, which torch's process groups use; no rank listens for it.


pytestmark = pytest.mark.timeout(300)
TCP = "tcp://127.0.0.1:0"


@contextmanager
def answering(server: Server, suspended_s: float = 0.0) -> Iterator[None]:
    """Answer questions to the board, as a controller does."""
    board, over = Board(), threading.Event()

    def serve() -> None:
        while not over.is_set():
            for peer, message in server.receive(0.02):
                for asker, found in board.hear(peer, message) if isinstance(message, get_args(Question)) else ():
                    server.send(asker, structs.replace(found, suspended_s=suspended_s))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def meetings(folder: Path, ranks: int, endpoint: str = "", suspended_s: float = 0.0) -> Iterator[list[RendezvousStore]]:
    """Return the stores of this many ranks, each with its own connection."""
    with bench(folder, endpoint) as b, answering(b.server, suspended_s):
        pulses = [HeartbeatThread(b.join(), "generator/0", rank).start() for rank in range(ranks)]
        try:
            yield [RendezvousStore(pulse) for pulse in pulses]
        finally:
            for pulse in pulses:
                pulse.stop()


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_what_one_rank_sets_others_get_wait_for_check_and_count(tmp_path: Path, endpoint: str) -> None:
    with meetings(tmp_path, 2, endpoint) as (first, second), ThreadPoolExecutor(1) as other:
        late = other.submit(second.of("group").get, "key")  # asked for before it is set
        assert not first.of("group").check(["key"])
        first.of("group").set("key", bytes(range(256)))  # type: ignore[arg-type] # as gloo does
        assert late.result(20) == bytes(range(256))
        second.of("group").wait(["key"], timedelta(seconds=20))
        assert second.of("group").check(["key"])
        assert not second.of("another").check(["key"])
        assert [store.of("group").add("count", 2) for store in (first, second)] == [2, 4]


def test_the_signal_by_which_torch_tells_all_ranks_of_a_failed_group_ends_no_ranks_store(tmp_path: Path) -> None:
    with meetings(tmp_path, 2) as stores:
        for rank, store in enumerate(stores):
            store.set("exception_dump", rank.to_bytes(4, "little"))  # as torch's thread does
        assert [store.of("group").add("count", 1) for store in stores] == [1, 2]


def test_keys_that_nobody_sets_are_an_error_with_the_deadline(tmp_path: Path) -> None:
    with meetings(tmp_path, 1) as (store,):
        with pytest.raises(RuntimeError, match=r"absent not there within 0\.05 s"):
            store.wait(["absent"], timedelta(seconds=0.05))
        store.set("there", "yes")
        assert store.get("there") == b"yes"  # the late answer to the failed wait is ignored


def test_seconds_for_which_the_controller_was_stopped_are_no_ranks(tmp_path: Path) -> None:
    with meetings(tmp_path, 2, suspended_s=30.0) as (store, other), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.wait, ["late"], timedelta(seconds=0.05))
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        other.set("late", "1")
        waiting.result(20)
        with pytest.raises(RuntimeError, match=r"absent not there within 0\.05 s"):
            store.wait(["absent"], timedelta(seconds=0.05))


def test_a_group_is_made_and_carries_and_an_absent_rank_is_named(tmp_path: Path) -> None:
    with meetings(tmp_path, 3) as stores, ThreadPoolExecutor(3) as threads:

        def opened(rank: int, group: str, timeout: float = 20.0) -> Connection:
            return Connection("policy", ("a", "b", "c"), stores[rank].of(group), rank, timeout=timeout)

        first, second, third = threads.map(lambda rank: opened(rank, "all"), (0, 1, 2))
        sent, received = first.send(torch.arange(4.0), 2, 0), third.receive(torch.zeros(4), 0, 0)
        sent.wait()
        assert received.wait().tolist() == [0.0, 1.0, 2.0, 3.0]
        del second
        for rank in (0, 2):  # both have arrived before one of them waits for the third
            stores[rank].of("two of three").set(f"here/{rank}", "1")
        stores[0].of("two of three").wait(["here/0", "here/2"], timedelta(seconds=20))
        for failed in [threads.submit(opened, rank, "two of three", 0.5) for rank in (0, 2)]:
            with pytest.raises(TransportError, match=r"not there: b$"):
                failed.result(20)


def test_a_bridge_without_its_receivers_says_who_is_not_there(tmp_path: Path) -> None:
    with meetings(tmp_path, 1) as (store,):
        bridge = ReplicaLink("policy", store.of("bridge"), destinations=2, timeout=0.2)
        with pytest.raises(TransportError, match="not there: destination rank 0, destination rank 1"):
            bridge.open("source")


def test_no_controller_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.control.rank.ANSWER_S", 0.05)
    with bench(tmp_path) as b:
        pulse = HeartbeatThread(b.join(), "generator/0", 0).start()
        store: Store = RendezvousStore(pulse)
        with pytest.raises(RuntimeError, match=r"the controller has not answered .*key.* within"):
            store.add("key", 1)
        with pytest.raises(RuntimeError, match=r"the controller has not answered .*key.* within"):
            store.check(["key"])
        pulse.stop()


@pytest.mark.parametrize(
    ("size", "said"), [(MAX_KEPT // 4, "generator/0:0 .*for each rank"), (MAX_BYTES // 2, "given Post")]
)
def test_a_rank_that_posts_too_much_is_told_so(tmp_path: Path, size: int, said: str) -> None:
    with meetings(tmp_path, 2) as (store, other):
        for number in range(2):
            store.set(str(number), "x" * size)
        with pytest.raises(RuntimeError, match=f"key-value store: {said}"):
            store.wait(["1"], timedelta(seconds=20))
        other.set("small", "1")
        assert other.get("small") == b"1"
