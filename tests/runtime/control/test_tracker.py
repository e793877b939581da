"""Silence is counted from the last sign of life."""

from math import inf

from penstock.runtime.control.tracker import Tracker


def test_a_peer_is_late_once_it_was_silent_for_longer_than_allowed() -> None:
    tracker = Tracker(silence=5.0)
    tracker.heard("b", 10.0)
    tracker.heard("a", 11.0)
    assert tracker.late(15.0) == []
    assert tracker.late(15.5) == ["b"]
    assert tracker.late(17.0) == ["a", "b"]
    tracker.heard("b", 17.0)
    assert tracker.late(17.0) == ["a"]
    assert (tracker.last("b"), tracker.last("c")) == (17.0, -inf)


def test_a_peer_is_tracked_from_its_first_sign_until_it_is_forgotten() -> None:
    tracker = Tracker(silence=5.0)
    assert tracker.late(100.0) == []
    tracker.heard("a", 0.0)
    tracker.forget("a")
    tracker.forget("never heard of")
    assert tracker.late(100.0) == []
