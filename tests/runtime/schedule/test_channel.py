"""What may be published, sent and swapped when."""

from penstock.runtime.plan.plan import Rank, Replica
from penstock.runtime.schedule.channel import NONE, Way

REPLICAS = tuple(Replica(f"generator/{i}", (Rank(),)) for i in range(2))


def test_nothing_is_published_over_a_snapshot_that_is_still_to_be_sent() -> None:
    way = Way(REPLICAS, {})
    assert way.may_publish(0)
    way.published = 0
    assert way.to_send() == ["generator/0", "generator/1"]
    assert not way.may_publish(1)
    for receiver in way.receivers.values():
        receiver.shadow = receiver.live = 0
    assert way.to_send() == []
    assert way.may_publish(1)
    assert not way.may_publish(0)


def test_a_replica_takes_a_new_version_when_its_shadow_is_free() -> None:
    way = Way(REPLICAS, {"generator/0": 0, "generator/1": 0})
    way.published = 1
    way.receivers["generator/0"].swapping = True
    assert way.to_send() == ["generator/1"]


def test_what_all_replicas_hold_is_not_published_again() -> None:
    way = Way(REPLICAS, {"generator/0": 3, "generator/1": 3})
    assert not way.may_publish(3)
    assert way.may_publish(4)
    way.receivers["generator/1"].live = NONE
    assert way.may_publish(3)


def test_a_replica_can_have_what_is_in_its_shadow_or_published() -> None:
    way = Way(REPLICAS, {})
    way.receivers["generator/0"].shadow = 2
    assert way.holds(2, "generator/0")
    assert not way.holds(2, "generator/1")
    way.published = 2
    assert way.holds(2, "generator/1")
