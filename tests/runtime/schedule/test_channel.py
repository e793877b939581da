"""What may be published, sent and swapped when."""

from penstock.runtime.cluster.placement import Rank, Replica
from penstock.runtime.schedule.channel import ChannelState

NAMES = ["generator/0", "generator/1"]
REPLICAS = tuple(Replica(name, (Rank(),)) for name in NAMES)


def deliver(way: ChannelState, replica: str, version: int) -> None:
    """Send, arrive, swap."""
    way.send(replica)
    way.arrive(replica, version)
    way.swap(replica)
    way.swapped(replica, version)


def test_nothing_is_published_over_a_snapshot_that_is_still_to_be_sent() -> None:
    way = ChannelState(REPLICAS, {})
    assert way.may_publish(0)
    way.publish(0)
    assert way.to_send() == NAMES
    assert not way.may_publish(1)
    for replica in NAMES:
        deliver(way, replica, 0)
    assert way.to_send() == way.to_swap() == []
    assert way.may_publish(1)
    assert not way.may_publish(0)


def test_a_replica_takes_a_new_version_when_its_shadow_is_free() -> None:
    way = ChannelState(REPLICAS, {"generator/0": 0, "generator/1": 0})
    way.publish(1)
    for replica in NAMES:
        way.send(replica)
        way.arrive(replica, 1)
    assert way.to_swap() == NAMES
    way.swap("generator/0")
    assert way.to_swap() == ["generator/1"]
    way.publish(2)
    assert way.to_send() == []
    way.swapped("generator/0", 1)
    assert way.to_send() == ["generator/0"]


def test_the_newest_live_version_is_known() -> None:
    way = ChannelState(REPLICAS, {"generator/1": 3})
    assert way.newest == 3
    way.publish(4)
    deliver(way, "generator/0", 4)
    assert way.newest == 4


def test_what_all_replicas_hold_is_not_published_again() -> None:
    way = ChannelState(REPLICAS, {"generator/0": 3, "generator/1": 3})
    assert not way.may_publish(3)
    assert way.may_publish(4)
    assert ChannelState(REPLICAS, {"generator/0": 3}).may_publish(3)


def test_a_replica_can_have_what_is_in_its_shadow_or_published() -> None:
    way = ChannelState(REPLICAS, {"generator/0": 2})
    assert way.holds(2, "generator/0")
    assert not way.holds(2, "generator/1")
    way.publish(2)
    assert way.holds(2, "generator/1")
