"""Silence is counted from the last sign of life, while somebody listens."""

from math import inf

from penstock.runtime.control.sockets import PAUSE_S, Tracker


def look(tracker: Tracker, since: int, until: int) -> list[str]:
    """Who is late at last, when somebody looks twice a second."""
    return [tracker.late(time / 2) for time in range(2 * since, 2 * until + 1)][-1]


def test_a_peer_is_late_once_it_was_silent_for_longer_than_allowed() -> None:
    tracker = Tracker(silence=5.0)
    tracker.heard("b", 10.0)
    tracker.heard("a", 11.0)
    assert look(tracker, 11, 15) == []
    assert tracker.late(15.5) == ["b"]
    assert look(tracker, 16, 17) == ["a", "b"]
    tracker.heard("b", 17.0)
    assert tracker.late(17.0) == ["a"]
    assert (tracker.last("b"), tracker.last("c")) == (17.0, -inf)


def test_nobody_is_late_because_the_one_who_listens_was_stopped() -> None:
    """What they said meanwhile may be read one after the other; whoever is silent from then on, or was before, is."""
    tracker = Tracker(silence=5.0)
    tracker.heard("a", 0.0)
    tracker.heard("b", 1.0)
    assert look(tracker, 1, 4) == []
    tracker.heard("b", 64.0)
    assert look(tracker, 64, 64) == []
    assert look(tracker, 64, 65) == ["a"]
    assert look(tracker, 65, 69) == ["a"]
    assert look(tracker, 69, 70) == ["a", "b"]


def test_what_a_stop_took_is_known_at_the_moment_that_is_asked_about() -> None:
    """The stop may come between a look at who is late and one at another deadline."""
    tracker = Tracker(3.0)
    tracker.heard("a", 0.0)
    assert tracker.late(0.5) == []
    assert tracker.held_up(20.5) == 20.0 - PAUSE_S
    assert tracker.late(20.6) == []
    assert tracker.held_up(20.7) == 20.0 - PAUSE_S


def test_a_peer_is_late_for_one_who_never_looks_often() -> None:
    tracker = Tracker(silence=5.0)
    tracker.heard("a", 0.0)
    assert [tracker.late(3.0 * look) for look in range(7)][-2:] == [[], ["a"]]


def test_a_peer_is_tracked_from_its_first_sign_until_it_is_forgotten() -> None:
    tracker = Tracker(silence=5.0)
    assert tracker.late(100.0) == []
    tracker.heard("a", 100.0)
    tracker.forget("a")
    tracker.forget("never heard of")
    assert look(tracker, 100, 200) == []
