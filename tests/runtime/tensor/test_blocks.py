"""The free list against a model that marks every byte."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.tensor.object_store import FreeList

SIZE = 64


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 24)), max_size=60))
def test_blocks_never_overlap_and_a_fitting_gap_is_always_found(steps: list[tuple[bool, int]]) -> None:
    blocks, used, taken = FreeList(SIZE), [False] * SIZE, []
    for take, number in steps:
        if take:
            gaps = [i for i in range(SIZE - number + 1) if not any(used[i : i + number])]
            offset = blocks.take(number)
            assert offset == (gaps[0] if gaps else None)
            if offset is not None:
                used[offset : offset + number] = [True] * number
                taken.append((offset, number))
        elif taken:
            offset, length = taken.pop(number % len(taken))
            used[offset : offset + length] = [False] * length
            blocks.give(offset, length)
        assert blocks.free_bytes() == used.count(False)


def test_neighbours_become_one_in_any_order() -> None:
    blocks = FreeList(30)
    offsets = [blocks.take(10) for _ in range(3)]
    assert offsets == [0, 10, 20]
    for offset in (0, 20, 10):
        blocks.give(offset, 10)
    assert blocks.take(30) == 0
