"""Slots are taken, sampled in and released with exactly the tokens of their holder."""

import numpy as np
import pytest

from penstock.nodes.generate.engine import Slots

STOP = 9


def make(num_slots: int = 3, max_tokens: int = 4) -> Slots[str]:
    stops = np.zeros(10, dtype=bool)
    stops[STOP] = True
    return Slots(num_slots, max_tokens, stops)


def step(slots: Slots[str], tokens: list[int], version: int = 0) -> dict[str, tuple[list[int], list[int], bool]]:
    """One step that samples these tokens, with their tenths as log-probabilities; what ended with it."""
    slots.record(np.array(tokens), (np.array(tokens) / 10).astype(np.float32), version)
    ended = {}
    for holder, response in slots.release():
        assert response.logprobs.tolist() == (response.tokens / 10).astype(np.float32).tolist()
        ended[holder] = (response.tokens.tolist(), response.versions.tolist(), response.finished)
    return ended


def test_a_response_ends_with_a_stop_token_or_at_the_bound() -> None:
    slots = make()
    assert [slots.take("a", 5), slots.take("b", 6)] == [0, 1]
    assert step(slots, [1, 2, STOP]) == {}
    assert step(slots, [STOP, 3, STOP], version=1) == {"a": ([1, STOP], [0, 1], True)}
    assert slots.live.tolist() == [False, True, False]
    assert step(slots, [STOP, 4, 0], version=1) == {}
    assert step(slots, [0, 5, 0], version=2) == {"b": ([2, 3, 4, 5], [0, 1, 1, 2], False)}


def test_a_slot_taken_again_holds_nothing_of_its_last_holder() -> None:
    slots = make(num_slots=1)
    slots.take("a", 0)
    step(slots, [1])
    assert "a" in step(slots, [STOP])
    for start in range(6):  # whatever column the response begins at
        slots.take(f"b{start}", 0)
        assert step(slots, [2], start) == {}
        assert step(slots, [3], start) == {}
        assert step(slots, [STOP], start) == {f"b{start}": ([2, 3, STOP], [start] * 3, True)}


def test_cleared_slots_are_free_and_end_nothing() -> None:
    slots = make()
    slots.take("a", 5)
    slots.take("b", 6)
    step(slots, [1, 2, 3])
    slots.clear()
    assert not slots.live.any()
    assert step(slots, [STOP, STOP, STOP]) == {}
    assert [slots.take(holder, 0) for holder in "cde"] == [0, 1, 2]
    assert not slots.any_free
    assert step(slots, [4, STOP, 5]) == {"d": ([STOP], [0], True)}


def test_reach_is_that_of_live_slots() -> None:
    slots = make()
    slots.take("a", 40)
    slots.take("b", 7)
    assert slots.reach == 41
    step(slots, [STOP, 1, 1])
    assert slots.reach == 8
    assert slots.any_free


def test_a_probability_that_is_no_number_is_an_error_in_a_held_slot_alone() -> None:
    slots = make(num_slots=2)
    slots.take("a", 0)
    nan = np.array([0.0, np.nan], dtype=np.float32)
    slots.record(np.array([1, 1]), nan, 3)
    with pytest.raises(FloatingPointError, match="weights of version 3"):
        slots.record(np.array([1, 1]), nan[::-1], 3)
