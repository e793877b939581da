"""Ranks meet through the controller: the store is what torch's process groups need, and nothing listens for it."""

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

from penstock.runtime.control.messages import Question
from penstock.runtime.control.rank import Meeting
from penstock.runtime.control.rendezvous import MAX_KEPT, Board, Pulse
from penstock.runtime.control.sockets import Server
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.process_group import AbsentError, TransportError, open_group

from .sockets import bench

pytestmark = pytest.mark.timeout(300)
TCP = "tcp://127.0.0.1:0"


@contextmanager
def controller(server: Server, held_up: float = 0.0) -> Iterator[None]:
    """Answers what is asked of the board, as a controller does."""
    board, over = Board(), threading.Event()

    def serve() -> None:
        while not over.is_set():
            for peer, message in server.receive(0.02):
                for asker, found in board.hear(peer, message) if isinstance(message, get_args(Question)) else ():
                    server.answer(asker, structs.replace(found, held_up=held_up))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def meetings(folder: Path, ranks: int, endpoint: str = "", held_up: float = 0.0) -> Iterator[list[Meeting]]:
    """The stores of so many ranks, each over a connection of its own."""
    with bench(folder, endpoint) as b, controller(b.server, held_up):
        pulses = [Pulse(b.join(), "generator/0", rank).start() for rank in range(ranks)]
        try:
            yield [Meeting(pulse) for pulse in pulses]
        finally:
            for pulse in pulses:
                pulse.stop()


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_what_one_rank_sets_others_get_wait_for_check_and_count(tmp_path: Path, endpoint: str) -> None:
    with meetings(tmp_path, 2, endpoint) as (first, second), ThreadPoolExecutor(1) as other:
        late = other.submit(second.of("group").get, "key")  # asked for before it is there
        assert not first.of("group").check(["key"])
        first.of("group").set("key", bytes(range(256)))  # type: ignore[arg-type] # as gloo does
        assert late.result(20) == bytes(range(256))
        second.of("group").wait(["key"], timedelta(seconds=20))
        assert second.of("group").check(["key"])
        assert not second.of("another").check(["key"])
        assert [store.of("group").add("count", 2) for store in (first, second)] == [2, 4]


def test_keys_that_nobody_sets_are_an_error_with_the_deadline(tmp_path: Path) -> None:
    with meetings(tmp_path, 1) as (store,):
        with pytest.raises(RuntimeError, match=r"absent not there within 0\.05 s"):
            store.wait(["absent"], timedelta(seconds=0.05))
        store.set("there", "yes")
        assert store.get("there") == b"yes"  # the answer that came of nothing is nobody's


def test_seconds_for_which_the_controller_was_stopped_are_no_ranks(tmp_path: Path) -> None:
    with meetings(tmp_path, 2, held_up=30.0) as (store, other), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.wait, ["late"], timedelta(seconds=0.05))
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        other.set("late", "1")
        waiting.result(20)
        with pytest.raises(RuntimeError, match=r"absent not there within 0\.05 s"):
            store.wait(["absent"], timedelta(seconds=0.05))


def test_a_group_is_made_and_carries_and_an_absent_rank_is_named(tmp_path: Path) -> None:
    with meetings(tmp_path, 3) as stores, ThreadPoolExecutor(3) as threads:

        def opened(rank: int, group: str, timeout: float = 20.0) -> object:
            return open_group(stores[rank].of(group), rank, 3, timeout=timeout)

        first, second, third = threads.map(
            lambda rank: open_group(stores[rank].of("all"), rank, 3, timeout=20), (0, 1, 2)
        )
        got = torch.zeros(4)
        sent, received = first.send(torch.arange(4.0), 2, 0), third.receive(got, 0, 0)
        first.wait(sent)
        third.wait(received)
        assert got.tolist() == [0.0, 1.0, 2.0, 3.0]
        del second
        for rank in (0, 2):  # both have come before one of them waits for the third
            stores[rank].of("two of three").set(f"here/{rank}", "1")
        stores[0].of("two of three").wait(["here/0", "here/2"], timedelta(seconds=20))
        for failed in [threads.submit(opened, rank, "two of three", 0.5) for rank in (0, 2)]:
            with pytest.raises(AbsentError, match="rank 1 has not come"):
                failed.result(20)


def test_a_bridge_without_its_receivers_says_who_is_not_there(tmp_path: Path) -> None:
    with meetings(tmp_path, 1) as (store,):
        bridge = ReplicaLink("policy", store.of("bridge"), destinations=2, timeout=0.2)
        with pytest.raises(TransportError, match="not there: destination rank 0, destination rank 1"):
            bridge.open("source")


def test_no_controller_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.control.rank.ANSWER_S", 0.05)
    with bench(tmp_path) as b:
        pulse = Pulse(b.join(), "generator/0", 0).start()
        store: Store = Meeting(pulse)
        with pytest.raises(RuntimeError, match="the controller has not counted key within"):
            store.add("key", 1)
        with pytest.raises(RuntimeError, match="the controller has not looked for key within"):
            store.check(["key"])
        pulse.stop()


@pytest.mark.parametrize(("size", "said"), [(MAX_KEPT // 4, "generator/0:0 .*for each rank"), (MAX_KEPT, "frame: ")])
def test_a_rank_that_posts_too_much_is_told_so(tmp_path: Path, size: int, said: str) -> None:
    with meetings(tmp_path, 2) as (store, other):
        for number in range(2):
            store.set(str(number), "x" * size)
        with pytest.raises(RuntimeError, match=f"key-value store: {said}"):
            store.wait(["1"], timedelta(seconds=20))
        other.set("small", "1")
        assert other.get("small") == b"1"
