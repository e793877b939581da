"""A delta gives back every bit, is refused where it does not belong, and is never much larger than dense."""

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.tensor.delta import (
    DELTA_HEADER,
    NONE,
    Delta,
    DeltaError,
    decode,
    encode,
    parse,
    payload_bytes,
)

KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def pair(elements: int, itemsize: int, density: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random bytes, and the same with about this share of the elements changed."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (elements * itemsize,), generator=generator).to(torch.uint8)
    after = before.clone()
    changed = torch.rand(elements, generator=generator) < density
    after.view(KINDS[itemsize])[changed] ^= 1 << 8 * itemsize - 2
    return before, after


def sent(delta: Delta) -> Delta:
    """What arrives at the other end."""
    return parse(delta.header(), delta.payload.clone())


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
    delta = encode(before, after, itemsize, 8, 7)
    assert DELTA_HEADER + delta.payload.nbytes <= after.nbytes + DELTA_HEADER
    assert delta.payload.nbytes == payload_bytes(delta.header())
    arrived, guarded = sent(delta), torch.cat([torch.full((64,), 77, dtype=torch.uint8), before, after[:0]])
    target = guarded[64:]
    for _ in range(2):  # a second time changes nothing
        decode(arrived, target, 7)
        assert torch.equal(target, after)
    assert (guarded[:64] == 77).all()


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
    delta = encode(before, after, dtype.itemsize, 1, 0)
    assert delta.changed == (2 if dtype.is_floating_point else 1)
    decode(sent(delta), before, 0)
    assert torch.equal(before.view(kind), after.view(kind))


def test_few_changed_values_take_few_bytes() -> None:
    before, after = pair(1 << 21, 2, 0.015, 0)
    assert encode(before, after, 2, 1, 0).payload.nbytes < 0.032 * after.nbytes
    assert encode(after, after, 2, 1, 0).payload.nbytes < 0.0001 * after.nbytes


def test_a_delta_of_another_version_is_refused_and_nothing_is_written() -> None:
    before, after = pair(1000, 2, 0.01, 0)
    target = before.clone()
    for density in (0.01, 1.0):
        delta = sent(encode(before, pair(1000, 2, density, 0)[1], 2, 8, 7))
        with pytest.raises(DeltaError, match="version 8: given a bucket of version 5, needed its predecessor 7"):
            decode(delta, target, 5)
    with pytest.raises(DeltaError, match="given a bucket of 1998 bytes, of 2000"):
        decode(sent(encode(before, after, 2, 8, 7)), target[:1998], 7)
    assert torch.equal(target, before)


def test_what_is_sent_in_full_needs_no_predecessor() -> None:
    before, after = pair(1000, 4, 0.01, 0)
    delta = encode(None, after, 4, 8)
    assert delta.dense
    assert delta.predecessor == NONE
    decode(sent(delta), before, -1)
    assert torch.equal(before, after)
    with pytest.raises(ValueError, match="given predecessor 3 and no bytes"):
        encode(None, after, 4, 8, 3)
    with pytest.raises(ValueError, match="given 3998 bytes of version 7, needed 4000"):
        encode(after[:3998], after, 2, 8, 7)
    with pytest.raises(ValueError, match="given 4000 bytes in elements of 3"):
        encode(before, after, 3, 8, 7)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.sampled_from([100, 65_540, 70_000]))
def test_bytes_that_are_no_delta_are_refused_or_write_inside(data: Any, itemsize: int, elements: int) -> None:
    before, after = pair(elements, itemsize, 0.01, 1)
    delta = encode(before, after, itemsize, 8, 7)
    header, payload = bytearray(delta.header()), delta.payload.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, DELTA_HEADER + len(payload) - 1))
        value = data.draw(st.integers(0, 255))
        if place < DELTA_HEADER:
            header[place] = value
        else:
            payload[place - DELTA_HEADER] = value
    payload = payload[: len(payload) - data.draw(st.sampled_from([0, 0, 0, 1, 2, 7]))]
    guarded = torch.full((len(before) + 128,), 77, dtype=torch.uint8)
    guarded[64:-64] = before
    written = False
    with suppress(DeltaError):
        decode(parse(bytes(header), payload), guarded[64:-64], 7)
        written = True
    if not written:
        assert torch.equal(guarded[64:-64], before)
    assert (guarded[:64] == 77).all()
    assert (guarded[-64:] == 77).all()


def test_a_header_of_another_bucket_or_of_more_than_dense_is_refused_before_its_payload_comes() -> None:
    before, after = pair(1000, 2, 0.01, 0)
    delta = encode(before, after, 2, 8, 7)
    assert payload_bytes(delta.header(), 2000) == delta.payload.nbytes
    with pytest.raises(DeltaError, match=r"version 8: given a bucket of 2000 bytes, \d+ of which travel, needed 4000"):
        payload_bytes(delta.header(), 4000)
    larger = Delta(8, 7, 2, 2000, 900, False, delta.payload).header()
    with pytest.raises(DeltaError, match="given a bucket of 2000 bytes, 3604 of which travel"):
        payload_bytes(larger, 2000)


@given(st.binary(max_size=2 * DELTA_HEADER))
def test_random_headers_are_refused(data: bytes) -> None:
    with pytest.raises(DeltaError, match="needed"):
        parse(data, torch.zeros(10, dtype=torch.uint8))
