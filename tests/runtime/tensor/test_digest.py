"""The checksum: it does not depend on the sharding, and detects whatever goes wrong in a sync."""

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.runtime.tensor import digest as module
from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.codec import DTYPES
from penstock.runtime.tensor.digest import (
    _C,
    _E,
    Checksums,
    _directions,
    alone,
    are_exact,
    digest,
    finish,
    halved_places,
    narrow_places,
    partial,
    wide_places,
)
from penstock.runtime.tensor.layout import ITEMSIZE, Mesh, Region, sharded


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (math.prod(shape) * ITEMSIZE[dtype],), dtype=torch.uint8, generator=generator)
    return raw.view(DTYPES[dtype]).view(shape)


def cut(region: Region, data: Any, depth: int = 3) -> list[Region]:
    """Return random disjoint regions that cover `region`."""
    if not depth or not region.shape or not data.draw(st.booleans()):
        return [region]
    dim = data.draw(st.integers(0, len(region.shape) - 1))
    at = data.draw(st.integers(region.start[dim], region.stop[dim]))
    left = Region(region.start, (*region.stop[:dim], at, *region.stop[dim + 1 :]))
    right = Region((*region.start[:dim], at, *region.start[dim + 1 :]), region.stop)
    return cut(left, data, depth - 1) + cut(right, data, depth - 1)


@settings(deadline=None)
@given(st.data())
def test_partial_sums_of_disjoint_boxes_add_up(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), max_size=3)))
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZE)))
    tensor = random_tensor(shape, dtype)
    whole = Region.whole(shape)
    pieces = cut(whole, data)
    total = sum(int(partial(tensor[region.slices(whole)].clone(), shape, region)) for region in pieces)
    assert finish(total, "t", tensor.dtype, shape) == digest({"t": tensor})["t"]


@pytest.mark.parametrize("shape", [(70_001,), (300, 301), (3, 70_000), (2, 129, 130)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_partial_sums_add_up_across_chunks(shape: tuple[int, ...], dtype: str) -> None:
    tensor = random_tensor(shape, dtype)
    whole = Region.whole(shape)
    middle = Region(tuple(n // 3 for n in shape), tuple(n - n // 4 for n in shape))
    total = sum(int(partial(tensor[b.slices(whole)], shape, b)) for b in (middle, *whole.minus(middle)))
    assert finish(total, "t", tensor.dtype, shape) == digest({"t": tensor})["t"]


def mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = x * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def row_length(shape: tuple[int, ...], itemsize: int) -> int:
    """The bytes of a row: the fewest last dimensions that make 1 KiB."""
    length = itemsize
    for count, size in enumerate(reversed(shape)):
        if count and length >= 1024:
            break
        length *= size
    return length


def by_hand(tensor: Tensor, name: str, dtype: str) -> int:
    """The module's formula, byte by byte."""
    raw = tensor.reshape(-1).view(torch.int8).tolist() if tensor.numel() else []
    length = row_length(tuple(tensor.shape), tensor.dtype.itemsize)
    tiles = -(-length // 8192)
    a, b = _directions().t().tolist()
    total = 0
    for index, value in enumerate(raw):
        row, column = divmod(index, length)
        tile, place = row * tiles + column // 8192, column % 8192
        total += (mix(tile) | 1) * (_C * a[place] + _E * b[place]) * value
    text = f"{name}\n{dtype}\n{','.join(map(str, tensor.shape))}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return (key + (key | 1) * total) % 2**64


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (37, 200), (3, 20_000), (5, 7, 11), (30_000,)])
def test_the_value_follows_the_formula(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, dtype)
    assert digest({"layers.0.w": tensor}) == {"layers.0.w": by_hand(tensor, "layers.0.w", dtype)}


def test_no_two_places_of_a_tile_have_factors_of_one_direction() -> None:
    pairs = _directions().tolist()
    assert len(pairs) == 8192
    assert len({(a / math.gcd(a, b), b / math.gcd(a, b)) for a, b in pairs}) == len(pairs)
    assert all(a > 0 and a % 2 for a, _ in pairs)
    assert (_C % 2, _E % 2) == (1, 0)


KEPT = {
    "layers.0.w": 0xAA2F9CE57BDCF871,
    "norm": 0x10AE43F5E93EAAF1,
    "flat": 0xA37A137FB108E971,
    "s": 0xB6E43603389E44CC,
    "wide": 0x5EE9552C0B9F8054,
}


def kept() -> dict[str, Tensor]:
    """The tensors of `KEPT`: rows, one long row, a scalar, and rows of several tiles."""
    return {
        "layers.0.w": (torch.arange(300 * 517) % 251).to(torch.uint8).view(torch.int8).view(300, 517),
        "norm": (torch.arange(20_000) % 97).float(),
        "flat": torch.arange(70_001).bfloat16(),
        "s": torch.tensor(7),
        "wide": (torch.arange(27_000) % 113).to(torch.int16).view(3, 9000),
    }


PLACES = {
    "apart": narrow_places(together=False),
    "together": narrow_places(together=True),
    "halved": halved_places(),
    "wide": wide_places(torch.device("cpu")),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("chunk", [1 << 10, 1 << 15, 4 << 20])
def test_digests_have_the_same_bits_for_ever_and_on_every_device(
    monkeypatch: pytest.MonkeyPatch, places: str, chunk: int
) -> None:
    if places != "wide" and not are_exact(PLACES[places]):
        pytest.skip("a CPU that computes digests otherwise")
    monkeypatch.setattr(module, "_places", lambda device: PLACES[places])
    monkeypatch.setattr(module, "_CHUNK", chunk)
    module._row_factors.cache_clear()
    assert digest(kept()) == KEPT
    module._row_factors.cache_clear()


def overflowing(most: int) -> Any:
    """int8 products as on a CPU that saturates sums of two products at `most` before it adds these sums."""

    def product(rows: Tensor, vectors: Tensor, out: Tensor | None = None) -> Tensor:
        total = torch.zeros(len(rows), vectors.shape[1], dtype=torch.int32) if out is None else out.zero_()
        for x, w in zip(torch.split(rows.int(), 2, 1), torch.split(vectors.int(), 2), strict=True):
            # With unsigned bytes (0 to 255) instead of signed ones.
            total += ((x + 128)[:, :, None] * w).sum(1).clamp(-most, most - 1).int() - 128 * w.sum(0).int()
        return total

    return product


@pytest.mark.parametrize("bits", [15, 13])
def test_digests_have_the_same_bits_where_sums_of_products_overflow(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    small = {name: tensor for name, tensor in kept().items() if name in ("layers.0.w", "s")}
    found = [module._places, module._row_factors]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_int_mm", overflowing(1 << bits))
        for each in found:
            each.cache_clear()
        assert digest(small) == {name: KEPT[name] for name in small}
    for each in found:
        each.cache_clear()


class OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's meta device as a GPU with unreadable memory: copies to the host are recorded, and give zeros. An
    operation on tensors of two devices fails, as does one that needs a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied: list[torch.Size] = []
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if op is torch.ops.aten._to_copy.default and device is not None and args[0].is_meta and device.type == "cpu":
            self.copied.append(args[0].shape)
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        found = op(*args, **(kwargs or {}))
        self.kinds |= {t.dtype for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_meta}
        return found


def test_on_a_gpu_a_publication_has_one_copy_to_the_host_and_computes_with_integers() -> None:
    shapes = {"embed": (1031, 96), "q": (640, 1024), "wide": (3, 70_000), "norm": (96,), "long": (70_001,), "step": ()}
    layout = sharded([(name, shape, "bfloat16") for name, shape in shapes.items()], Mesh((("fsdp", 2),)), {})
    parts = allocate(layout, 0, "meta")
    with OtherDevice() as seen:
        found = Checksums(layout, 0, alone).digests(parts, [*shapes])
    assert found.keys() == shapes.keys()
    assert [len(shape) for shape in seen.copied] == [1]
    assert {kind for kind in seen.kinds if kind.is_floating_point} <= {torch.bfloat16}


@settings(deadline=None)
@given(st.data())
def test_what_is_hashed_is_asked_for_first_and_once(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=2)))
    whole = Region.whole(shape)
    region = data.draw(st.sampled_from(cut(whole, data)))
    tensor = random_tensor(shape, "bfloat16")[region.slices(whole)].contiguous()
    filled = torch.zeros_like(tensor)
    rows: list[int] = []

    def fill(count: int, first: int, last: int) -> None:
        filled.view(count, -1)[first:last] = tensor.view(count, -1)[first:last]
        rows.extend(range(first, last))

    assert partial(filled, shape, region, fill) == partial(tensor, shape, region)
    assert torch.equal(filled.view(torch.int16), tensor.view(torch.int16))
    assert rows == list(range(len(rows)))


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
