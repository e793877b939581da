"""The instrument of the order tests detects what would hang with NCCL, and nothing else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unbuffered import Call, Cards, Deadlock, Mismatch, Operation, Unbuffered


def exchange(order: Callable[[int], tuple[str, str]]) -> Callable[[int], list[float]]:
    """Two ranks exchange a number, without a group, in the order given for each rank."""

    def work(rank: int) -> list[float]:
        own, other = torch.tensor([float(rank)]), torch.zeros(1)
        started: list[Any] = [
            dist.isend(own, 1 - rank) if step == "send" else dist.irecv(other, 1 - rank) for step in order(rank)
        ]
        for handle in started:
            handle.wait()
        return other.tolist()

    return work


def test_two_ranks_that_both_send_first_stand_still(monkeypatch: Any) -> None:
    world = Unbuffered(2)
    world.as_torch(monkeypatch)
    both = exchange(lambda rank: ("send", "receive"))
    with pytest.raises(Deadlock, match="rank 0: send 4 bytes to rank 1; rank 1: send 4 bytes to rank 0"):
        world.run(lambda: both(0), lambda: both(1))


def test_the_same_messages_in_turn_or_in_a_group_arrive(monkeypatch: Any) -> None:
    world = Unbuffered(2)
    world.as_torch(monkeypatch)
    turns = exchange(lambda rank: ("send", "receive") if rank else ("receive", "send"))
    assert world.run(lambda: turns(0), lambda: turns(1)) == [[1.0], [0.0]]
    assert world.trace == [(1, 0, 4), (0, 1, 4)]

    def grouped(rank: int) -> list[float]:
        own, other = torch.tensor([float(rank)]), torch.zeros(1)
        both = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        for handle in dist.batch_isend_irecv(both):
            handle.wait()
        return other.tolist()

    assert world.run(lambda: grouped(0), lambda: grouped(1)) == [[1.0], [0.0]]


@pytest.mark.parametrize("eager", [False, True])
def test_pairs_have_streams_of_their_own_unless_the_group_is_bound_to_a_device(eager: bool) -> None:
    """Rank 0 sends to 1 and then to 2; rank 2 must receive it before it tells rank 1 to receive."""
    world = Unbuffered(3, eager=eager)

    def first() -> None:
        for call in [world.rank(0).send(torch.ones(2), peer) for peer in (1, 2)]:
            call.wait()

    def second() -> None:
        world.rank(1).receive(torch.zeros(1), 2).wait()
        world.rank(1).receive(torch.zeros(2), 0).wait()

    def third() -> None:
        world.rank(2).receive(torch.zeros(2), 0).wait()
        world.rank(2).send(torch.ones(1), 1).wait()

    if eager:
        with pytest.raises(Deadlock):
            world.run(first, second, third)
    else:
        world.run(first, second, third)


def test_a_send_that_meets_another_size_or_nobody_is_told() -> None:
    world = Unbuffered(2)
    with pytest.raises(Mismatch, match="send 8 bytes to rank 1 met, on rank 1, receive 4 bytes"):
        world.run(
            lambda: world.rank(0).send(torch.ones(2), 1).wait(), lambda: world.rank(1).receive(torch.ones(1), 0).wait()
        )
    alone = Unbuffered(2)
    with pytest.raises(Deadlock):  # one rank has ended, and the other waits for it
        alone.run(lambda: alone.rank(0).send(torch.ones(2), 1).wait(), lambda: None)
    forgotten = Unbuffered(2)
    with pytest.raises(AssertionError, match="calls that nobody met"):
        forgotten.run(lambda: forgotten.rank(0).group([Operation("send", torch.ones(2), 1)]), lambda: None)


@pytest.mark.parametrize("room", [1, 2])
def test_calls_of_several_communicators_end_in_any_order_if_a_card_has_room_for_all(room: int) -> None:
    """Two ranks of a trainer send to two of a generator, and the ranks of each replica compute together. Half of the
    ranks begin with the sync, and half with the computation."""
    cards, places = Cards(room), ("trainer 0", "trainer 1", "generator 0", "generator 1")
    link = Unbuffered(4, patience=1.0, cards=cards, places=places)
    replicas = [Unbuffered(2, patience=1.0, cards=cards, places=own) for own in (places[:2], places[2:])]

    def work(rank: int) -> None:
        replica, own = divmod(rank, 2)
        both = [Operation("send", torch.ones(1), 1 - own), Operation("receive", torch.zeros(1), 1 - own)]
        kind: Any = "receive" if replica else "send"
        over = [Operation(kind, torch.ones(2), peer) for peer in ((0, 1) if replica else (2, 3))]
        begin: list[Callable[[], Call]] = [
            lambda: replicas[replica].rank(own).group(both),
            lambda: link.rank(rank).group(over),
        ]
        for call in [each() for each in (begin if rank in (0, 3) else begin[::-1])]:
            call.wait()

    with ThreadPoolExecutor(4) as threads:
        errors = [each.exception() for each in [threads.submit(work, rank) for rank in range(4)]]
    assert [type(error) for error in errors if error] == ([Deadlock] * 4 if room == 1 else [])
