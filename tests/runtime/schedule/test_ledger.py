"""Fates of groups, the order of consumption, and what stands before a group."""

import json
from random import Random

from penstock.runtime.schedule.state import Ledger


def opened(count: int, finished: bool = True) -> Ledger:
    ledger = Ledger()
    for _ in range(count):
        group = ledger.open()
        if finished:
            ledger.finish(group)
    return ledger


def test_a_batch_is_the_next_kept_groups_in_order() -> None:
    ledger = opened(6)
    ledger.lose(1, "dropped")
    ledger.lose(2, "failed")
    assert ledger.take(3) == (0, 3, 4)
    assert ledger.take(3) is None


def test_an_unfinished_group_holds_up_those_after_it() -> None:
    ledger = opened(4)
    ledger.groups[1].finished = False
    assert ledger.take(2) is None
    ledger.groups[1].finished = True
    assert ledger.take(2) == (0, 1)


def test_a_lost_group_no_longer_stands_before_others() -> None:
    ledger = opened(5)
    assert ledger.before(4) == 4
    ledger.lose(2, "dropped")
    assert (ledger.before(2), ledger.before(3), ledger.before(4)) == (2, 2, 3)


def test_a_lost_group_leaves_only_when_nobody_works_on_it() -> None:
    ledger = opened(2)
    ledger.groups[0].working = 1
    lost = ledger.lose(0, "failed")
    assert ledger.find(0) is lost
    assert 0 not in ledger.groups


def test_lost_groups_below_the_last_consumed_one_are_only_counted() -> None:
    rng = Random(1)
    ledger, lost = Ledger(), []
    for ordinal in range(400):
        ledger.finish(ledger.open())
        if rng.random() < 0.4:
            ledger.lose(ordinal, "dropped")
            lost.append(ordinal)
        if batch := ledger.take(5):
            ledger.consume(batch)
        assert ledger.before(ordinal + 1) == ordinal + 1 - len(lost)
    assert len(ledger.lost) < 20 < len(lost)


def test_groups_of_earlier_updates_stand_before_all() -> None:
    ledger = Ledger(earlier=12)
    ledger.open()
    assert ledger.before(0) == 12


def test_a_ledger_survives_json() -> None:
    ledger = opened(7)
    ledger.lose(1, "dropped")
    batch = ledger.take(2)
    assert batch == (0, 2)
    ledger.consume(batch)
    ledger.lose(4, "failed")
    ledger.groups[3].made, ledger.groups[3].readers = {"generate": "generator/0"}, {"generate": 2}
    told = json.loads(json.dumps(ledger.to_json()))
    restored = Ledger()
    restored.restore(told)
    assert restored.to_json() == ledger.to_json()
    assert restored.before(6) == ledger.before(6) == 4
    assert restored.first == 3
