"""Who is given work next."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.cluster.placement import Rank, Replica
from penstock.runtime.schedule.channel import LeastLoadedQueue


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_the_one_with_most_room_that_fits_is_first_and_equals_go_by_the_plans_order(
    sizes: list[int], data: st.DataObject
) -> None:
    replicas = [Replica(f"generator/{i}", (Rank(),), size) for i, size in enumerate(sizes)]
    line, room = LeastLoadedQueue(replicas), {r.name: r.capacity for r in replicas}
    kinds = dict.fromkeys(room, 0)
    for _ in range(30):
        name = data.draw(st.sampled_from(replicas)).name
        if data.draw(st.booleans()):
            kinds[name] = data.draw(st.integers(0, 2))
            line.move(name, kinds[name])
        else:
            more = data.draw(st.sampled_from([1, -1]))
            line.load(name, more)
            room[name] -= more
        fitting = data.draw(st.sets(st.integers(0, 2)))
        wanted = min((n for n in room if room[n] > 0 and kinds[n] in fitting), key=lambda n: -room[n], default=None)
        assert line.first(lambda n, fitting=fitting: kinds[n] in fitting) == wanted  # type: ignore[misc]
