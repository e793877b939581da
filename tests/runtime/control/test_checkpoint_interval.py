"""When a checkpoint is due: every n updates, or rarely enough that checkpoints cost at most a share of the time."""

import pytest

from penstock.runtime.control.checkpoint_interval import SHARE, SHORTEST_S, CheckpointInterval


def test_updates_are_counted_where_a_number_is_given() -> None:
    interval = CheckpointInterval(3, update=4)
    assert not interval.due(6, False, 1e9)
    assert interval.due(7, False, 0.0)
    interval.asked(7, 0.0)
    interval.began(8, 1.0)  # an update was in progress
    assert not interval.due(10, False, 1e9)
    assert interval.due(11, True, 1.0)


@pytest.mark.parametrize(("copy_s", "write_s"), [(0.0, 0.0), (0.1, 0.2), (4.0, 0.0), (1.0, 20.0), (0.0, 600.0)])
def test_checkpoints_by_time_cost_at_most_their_share(copy_s: float, write_s: float) -> None:
    interval, now, cost, update = CheckpointInterval(0, update=0), 0.0, 0.0, 0
    began = 0.0
    for _ in range(10):
        while not interval.due(update, False, now):
            now, update = now + 1.0, update + 1
        interval.asked(update, now)
        interval.began(update, now)
        now += copy_s
        interval.copied(now)
        for rank in (0.5, 1.0):
            interval.wrote(rank * write_s)
        cost, began = cost + copy_s + write_s, began or now
    # The first checkpoint is made before any cost is known.
    assert cost - copy_s - write_s <= SHARE * (now - began) + 1e-9
    assert now - began >= 9 * SHORTEST_S


def test_no_checkpoint_by_time_is_due_while_one_is_written_or_without_an_update() -> None:
    interval = CheckpointInterval(0, update=2)
    assert not interval.due(2, False, 0.0)
    assert not interval.due(2, False, 1e6)
    assert not interval.due(3, True, 1e6)
    assert interval.due(3, False, 1e6)
