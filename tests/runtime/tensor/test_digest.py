"""The proof: independent of the cut, and blind to nothing that goes wrong in a sync."""

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.digest import ProofError, compare, digest, finish, partial
from penstock.runtime.tensor.layout import ITEMSIZE, Box


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (math.prod(shape) * ITEMSIZE[dtype],), dtype=torch.uint8, generator=generator)
    return raw.view(DTYPES[dtype]).view(shape)


def cut(box: Box, data: Any, depth: int = 3) -> list[Box]:
    """Random disjoint boxes that cover `box`."""
    if not depth or not box.shape or not data.draw(st.booleans()):
        return [box]
    dim = data.draw(st.integers(0, len(box.shape) - 1))
    at = data.draw(st.integers(box.start[dim], box.stop[dim]))
    left = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
    right = Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
    return cut(left, data, depth - 1) + cut(right, data, depth - 1)


@settings(deadline=None)
@given(st.data())
def test_partial_sums_of_disjoint_boxes_add_up(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), max_size=3)))
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZE)))
    tensor = random_tensor(shape, dtype)
    whole = Box.whole(shape)
    pieces = cut(whole, data)
    total = sum(partial(tensor[box.slices(whole)].clone(), "t", shape, box) for box in pieces)
    assert finish(total, tensor, "t", shape) == digest({"t": tensor})["t"]


@pytest.mark.parametrize("shape", [(70_001,), (300, 301), (3, 70_000), (2, 129, 130)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_partial_sums_add_up_across_chunks(shape: tuple[int, ...], dtype: str) -> None:
    tensor = random_tensor(shape, dtype)
    whole = Box.whole(shape)
    middle = Box(tuple(n // 3 for n in shape), tuple(n - n // 4 for n in shape))
    total = sum(partial(tensor[b.slices(whole)], "t", shape, b) for b in (middle, *whole.minus(middle)))
    assert finish(total, tensor, "t", shape) == digest({"t": tensor})["t"]


def mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = x * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def by_hand(tensor: Tensor, name: str, dtype: str) -> int:
    """The formula of the module, one word after the other."""
    flat = tensor.reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) + bytes(8)
    total = 0
    for index in range(-(-tensor.nbytes // 8)):
        word = int.from_bytes(raw[8 * index : 8 * index + 8], "little", signed=True)
        place, tile = index % 1024, index // 1024
        a, b = mix((place - 2048) % 2**64) | 1, mix((place - 1024) % 2**64) | 1
        total += (mix(tile) | 1) * (a * word + b * (word >> 32))
    text = f"{name}\n{dtype}\n{','.join(map(str, tensor.shape))}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return (key + (key | 1) * total) % 2**64


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (37, 200)])
def test_the_value_follows_the_formula(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, dtype)
    assert digest({"layers.0.w": tensor}) == {"layers.0.w": by_hand(tensor, "layers.0.w", dtype)}


@pytest.mark.parametrize("tile", [(1 << 14) - 1, 1 << 14])
def test_tiles_past_the_kept_factors_follow_the_same_formula(tile: int) -> None:
    shape = (1 << 28,)
    box = Box((tile * 8192,), (tile * 8192 + 8,))
    ones = torch.ones(8, dtype=torch.uint8)
    word = int.from_bytes(bytes([1] * 8), "little")
    a, b = mix(2**64 - 2048) | 1, mix(2**64 - 1024) | 1
    key = finish(0, ones, "t", shape)
    assert partial(ones, "t", shape, box) == (key | 1) * (mix(tile) | 1) * (a * word + b * (word >> 32)) % 2**64


def test_strides_and_places_in_memory_do_not_matter() -> None:
    tensor = random_tensor((65, 33), "bfloat16")
    moved = torch.empty(65 * 33 + 1, dtype=torch.bfloat16)[1:].view(65, 33).copy_(tensor)
    assert digest({"t": tensor}) == digest({"t": moved}) == digest({"t": tensor.t().contiguous().t()})


@settings(deadline=None)
@given(st.data())
def test_one_flipped_bit_is_always_caught(data: Any) -> None:
    dtype = data.draw(st.sampled_from(sorted(set(ITEMSIZE) - {"bool"})))
    count = data.draw(st.integers(1, 3000))
    tensor = random_tensor((count,), dtype)
    wrong = tensor.clone()
    bits = wrong.view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest({"t": tensor}) != digest({"t": wrong})


@settings(deadline=None)
@given(st.data())
def test_two_swapped_elements_are_caught(data: Any) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "int8", "float32", "float64"]))
    tensor = random_tensor((3000,), dtype)
    i, j = data.draw(st.integers(0, 2999)), data.draw(st.integers(0, 2999))
    wrong = tensor.clone()
    wrong[[i, j]] = tensor[[j, i]]
    same = torch.equal(wrong.view(torch.uint8), tensor.view(torch.uint8))
    assert (digest({"t": tensor}) == digest({"t": wrong})) == same


def test_all_swaps_of_neighbouring_lanes_are_caught() -> None:
    """The upper elements of a word have the fewest key bits: 20,000 swaps of two of them."""
    base = random_tensor((20_000, 8), "bfloat16", seed=1)
    lanes = base.view(torch.int16)
    for low, high in ((3, 7), (2, 3), (2, 6)):
        wrong = lanes.clone()
        wrong[:, [low, high]] = lanes[:, [high, low]]
        for row in range(0, 20_000, 10):
            if not torch.equal(wrong[row], lanes[row]):
                a, b = ({"t": x[row].view(torch.bfloat16)} for x in (lanes, wrong))
                assert digest(a) != digest(b)


def test_name_dtype_and_shape_are_part_of_it() -> None:
    zeros = torch.zeros(4, 4)
    forms = [
        {"t": zeros},
        {"u": zeros},
        {"t": zeros.view(16)},
        {"t": zeros.view(2, 8)},
        {"t": zeros.view(torch.int32)},
    ]
    assert len({next(iter(digest(form).values())) for form in forms}) == len(forms)


def sent() -> dict[str, Tensor]:
    return {name: random_tensor((20, 30), "bfloat16", seed) for seed, name in enumerate("abc")}


def test_equal_tensors_pass() -> None:
    compare(3, digest(sent()), digest(sent()))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda t: {**t, "b": t["b"].clone().zero_()}, ["b"]),
        (lambda t: {**t, "a": t["b"], "b": t["a"]}, ["a", "b"]),
        (lambda t: {k: v for k, v in t.items() if k != "c"}, ["c"]),
        (lambda t: {**t, "d": t["a"]}, ["d"]),
        (lambda t: {k: v.roll(1) for k, v in t.items()}, ["a", "b", "c"]),
    ],
    ids=["skipped", "swapped", "missing", "surplus", "stale"],
)
def test_a_damaged_set_names_its_tensors_version_and_sides(damage: Any, named: list[str]) -> None:
    with pytest.raises(ProofError, match=r"version 3 \(here to there\)") as caught:
        compare(3, digest(sent()), digest(damage(sent())), "here to there")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == named
