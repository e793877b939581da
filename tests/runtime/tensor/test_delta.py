"""A delta gives back every bit, is refused where it does not belong, and is never larger than dense."""

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.tensor.delta import NONE, Delta, DeltaError, decode, encode, payload_bytes

KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def pair(elements: int, itemsize: int, density: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random bytes, and the same with about this share of the elements changed."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (elements * itemsize,), generator=generator).to(torch.uint8)
    after = before.clone()
    changed = torch.rand(elements, generator=generator) < density
    after.view(KINDS[itemsize])[changed] ^= 1 << 8 * itemsize - 2
    return before, after


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.integers(0, 300), st.sampled_from([65_535, 65_536, 65_537, 200_000])),
    st.sampled_from(sorted(KINDS)),
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.001, 0.015, 1.0])),
    st.integers(0, 1 << 30),
)
def test_every_bit_comes_back_and_no_delta_is_larger_than_dense(
    elements: int, itemsize: int, density: float, seed: int
) -> None:
    before, after = pair(elements, itemsize, density, seed)
    for previous in (before, None):
        delta, target = encode(previous, after, itemsize), before.clone()
        assert delta.payload.nbytes == payload_bytes(after.nbytes, itemsize, delta.changed) <= after.nbytes
        for _ in range(2):  # a second time changes nothing
            decode(Delta(delta.changed, delta.payload.clone()), target, itemsize)
            assert torch.equal(target, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_bits_that_equal_numbers_do_not_tell_apart_are_sent(dtype: torch.dtype) -> None:
    kind = KINDS[dtype.itemsize]
    before = torch.zeros(5000, dtype=dtype)
    after = before.clone()
    after.view(kind)[17] = torch.iinfo(kind).min  # -0.0
    if dtype.is_floating_point:
        before[99], after[99] = math.nan, math.nan
        after.view(kind)[99] ^= torch.iinfo(kind).min  # another NaN
        before[4999], after[4999] = math.nan, math.nan  # the same NaN
    delta = encode(before, after, dtype.itemsize)
    assert delta.changed == (2 if dtype.is_floating_point else 1)
    decode(delta, before, dtype.itemsize)
    assert torch.equal(before.view(kind), after.view(kind))


def test_few_changed_values_take_few_bytes() -> None:
    before, after = pair(1 << 21, 2, 0.015, 0)
    assert encode(before, after, 2).payload.nbytes < 0.032 * after.nbytes
    assert encode(after, after, 2).payload.nbytes < 0.0001 * after.nbytes


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.sampled_from([100, 65_540, 70_000]))
def test_bytes_that_are_no_delta_are_refused_or_write_inside(data: Any, itemsize: int, elements: int) -> None:
    before, after = pair(elements, itemsize, 0.01, 1)
    delta = encode(before, after, itemsize)
    changed, payload = data.draw(st.just(delta.changed) | st.integers(NONE - 1, elements + 1)), delta.payload.clone()
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: len(payload) - data.draw(st.sampled_from([0, 0, 0, 1, 2, 7]))]
    guarded = torch.full((len(before) + 128,), 77, dtype=torch.uint8)
    guarded[64:-64] = before
    written = False
    with suppress(DeltaError):
        decode(Delta(changed, payload), guarded[64:-64], itemsize)
        written = True
    assert written or torch.equal(guarded[64:-64], before)
    assert (guarded[:64] == 77).all()
    assert (guarded[-64:] == 77).all()


def test_more_than_dense_is_refused_before_its_payload_comes() -> None:
    for changed in (-2, 900, 1 << 60):
        with pytest.raises(DeltaError, match="which makes no delta"):
            payload_bytes(2000, 2, changed)
