from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.record.timeline import (
    Bar,
    Utilisation,
    boundaries,
    lanes,
    microseconds,
    names,
    pool_means,
    pool_of,
    span,
)


def bar(lane: str, start: float, end: float, index: int = 0, name: str = "work") -> Bar:
    return Bar(lane, name, index, start, end)


times = st.floats(0, 1000)
all_bars = st.lists(
    st.builds(
        lambda lane, start, seconds, index: bar(lane, start, start + seconds, index),
        st.sampled_from(["a/0", "a/1", "b/0"]),
        times,
        st.floats(0, 10),
        st.integers(0, 9),
    )
)


@given(all_bars)
def test_bars_of_one_track_do_not_overlap_and_none_is_lost(bars: list[Bar]) -> None:
    found = lanes(bars)
    assert sum(len(track) for lane in found for track in lane.tracks) == len(bars)
    for lane in found:
        for track in lane.tracks:
            assert all(b.lane == lane.name for b in track)
            assert all(a.end <= b.start for a, b in pairwise(track))


def test_lanes_are_in_the_order_of_work_and_replicas_together() -> None:
    sync = [Bar("trainer/0", "publish", 0, 0, 1, "publish"), Bar("policy>generator/0", "send", 0, 0, 1, "send")]
    bars = [*sync, bar("scorer/0", 2, 3), bar("generator/10", 1, 2), bar("generator/2", 3, 4), bar("trainer/0", 5, 6)]
    order = ["generator/2", "generator/10", "scorer/0", "trainer/0", "policy>generator/0"]
    assert [lane.name for lane in lanes(bars)] == order


def test_a_lane_has_as_many_tracks_as_bars_at_once() -> None:
    (lane,) = lanes([bar("g/0", 0, 2, 0), bar("g/0", 1, 3, 1), bar("g/0", 2, 4, 2)])
    assert [[b.index for b in track] for track in lane.tracks] == [[0, 2], [1]]


def test_an_update_ends_with_its_last_node() -> None:
    bars = [
        Bar("t/0", "actor", 0, 0, 2, "update"),
        Bar("t/0", "critic", 0, 2, 3, "update"),
        Bar("t/0", "actor", 1, 4, 5, "update"),
        Bar("g/0", "generate", 7, 0, 9),
    ]
    assert boundaries(bars) == [(0, 3), (1, 5)]
    assert names(bars) == ["generate", "actor", "critic"]
    assert span(bars) == (0, 9)
    assert span([]) == (0.0, 0.0)


PLACES = ["g/0", "g/1", "g/2", "t/0"]
changes = st.lists(st.tuples(times, st.sampled_from(PLACES), st.sampled_from(["busy", "data", "weights", "joined"])))


@given(changes, st.lists(times, min_size=1))
def test_busy_and_idle_seconds_add_up_to_the_wall_time_exactly(
    given: list[tuple[float, str, str]], takes: list[float]
) -> None:
    account = Utilisation(PLACES, 0)
    moments = sorted([(t, r, s) for t, r, s in given] + [(t, "", "") for t in takes])
    last = 0
    for number, (time, replica, state) in enumerate(moments):
        account.let(microseconds(time), lambda _, number=number: f"cause {number % 3}")  # type: ignore[misc]
        if state == "joined":
            account.join(replica, pool_of(replica))
        elif replica:
            account.change(replica, state)
        else:
            now = microseconds(time)
            spent = account.take()
            assert {sum(states.values()) for states in spent.values()} == {now - last}
            assert all(time > 0 for states in spent.values() for time in states.values())
            for seconds in pool_means(spent).values():
                assert sum(map(microseconds, seconds.values())) == now - last
            last = now


def spent(states: list[tuple[int, str, str]], end: int) -> dict[str, dict[str, float]]:
    account = Utilisation(["g/0", "t/0"], 0)
    for time, replica, state in states:
        account.let(time)
        account.change(replica, state)
    account.let(end)
    return account.take()


def test_idle_seconds_go_to_their_cause() -> None:
    states = [(10, "g/0", "busy"), (10, "t/0", "data"), (30, "g/0", "weights"), (35, "t/0", "busy")]
    assert spent(states, 40) == {
        "g/0": {"start": 10, "busy": 20, "weights": 10},
        "t/0": {"start": 10, "data": 25, "busy": 5},
    }


def test_lanes_of_a_kind_are_in_its_state_while_they_are_with_it() -> None:
    account = Utilisation(["g/0", "g/1"], 0)
    account.join("g/0", "g")
    account.join("g/1", "g")
    account.let(3, lambda lane: "data")
    account.change("g/1", "busy")
    account.let(5, lambda lane: "weights")
    assert account.take() == {"g/0": {"data": 3, "weights": 2}, "g/1": {"data": 3, "busy": 2}}
    account.join("g/1", "g")
    account.let(6, lambda lane: "weights")
    assert account.take() == {"g/0": {"weights": 1}, "g/1": {"weights": 1}}


def test_a_pool_counts_the_mean_of_its_replicas() -> None:
    assert pool_means({"g/0": {"busy": 3_000_000}, "g/1": {"data": 3_000_000}}) == {"g": {"busy": 1.5, "data": 1.5}}
