"""A sync in a wire format: quantised on the ranks as the gathered tensor would be, proved, and back in floats."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.protocols import Axes
from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.digest import ChecksumError
from penstock.runtime.tensor.layout import Layout, Region
from penstock.runtime.tensor.quantise import ConversionError, Converter, dequantise
from penstock.runtime.tensor.shm import sweep
from penstock.runtime.tensor.weight_sync import WeightPublisher
from penstock.runtime.tensor.wire_format import FORMATS, SCALE, converted

from .replicas import CHANNEL, RUN, SHAPES, Both, ShardedPolicy, sound, wholes

pytestmark = pytest.mark.timeout(300)

MESHES: list[tuple[Axes, Axes]] = [
    ((("fsdp", 2),), (("tp", 2),)),
    ((("fsdp", 2), ("tp", 2)), (("tp", 2),)),
    ((("fsdp", 3),), (("dp", 2), ("tp", 2))),
]
QUANTISED = ("q.weight", "k.weight", "o.weight")


@pytest.fixture(autouse=True)
def _no_segments_left() -> Any:
    yield
    sweep(RUN)


def gathered(wire: str, version: int) -> dict[str, Tensor]:
    """What one rank that has everything makes of it."""
    layout = Layout.whole((name, shape, str(t.dtype).removeprefix("torch.")) for name, shape, t in _entries(version))
    out = allocate(converted(layout, wire), 0, "cpu")
    Converter(layout, converted(layout, wire), 0).convert(wholes(version), out)
    return {name: part.tensor for name, part in out.items()}


def _entries(version: int) -> list[tuple[str, tuple[int, ...], Tensor]]:
    made = wholes(version)
    return [(name, SHAPES[name], made[name]) for name in SHAPES]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("wire", list(FORMATS))
@pytest.mark.parametrize(("source", "target"), MESHES)
def test_what_arrives_is_the_quantised_gathered_tensor_to_the_bit(
    tmp_path: Path, source: Axes, target: Axes, wire: str, shared: bool
) -> None:
    both = Both(tmp_path, source, target, shared, wire=wire, restore=False)
    for version in (0, 3):
        sound(both.move(version, both.publish(version)))
        whole = gathered(wire, version)
        assert {name.removesuffix(SCALE) for name in whole if name.endswith(SCALE)} == set(QUANTISED)
        for destination in both.destinations:
            arena = destination.receiver._arena
            assert arena is not None
            assert destination.receiver.weights.tensors.keys() == whole.keys()
            for name, part in arena.live.items():
                expected = whole[name][part.region.slices(Region.whole(whole[name].shape))]
                assert part.tensor.dtype == expected.dtype
                assert torch.equal(bits(destination.receiver.weights.tensors[name]), bits(expected)), name


@pytest.mark.parametrize("wire", list(FORMATS))
def test_readers_get_floats_within_the_bound_of_the_format(tmp_path: Path, wire: str) -> None:
    both = Both(tmp_path, *MESHES[0], True, wire=wire)
    for version in (0, 1, 2):
        sound(both.move(version, both.publish(version)))
        made, sent = wholes(version), gathered(wire, version)
        floats = dict(made)
        for name in QUANTISED:
            floats[name] = torch.empty(made[name].shape, dtype=torch.bfloat16)
            dequantise(sent[name], Region.whole(made[name].shape), sent[name + SCALE], FORMATS[wire], floats[name])
            # Half a step of int8, or of three bits of a significand, and rounding to bfloat16 beside it.
            step = 0.5 / 127 if wire == "int8" else 2.0**-4
            largest = made[name].float().abs().max()
            assert (floats[name].float() - made[name].float()).abs().max() <= largest * (step + 2.0**-8)
        for destination, expected in zip(both.destinations, both.parts(floats), strict=True):
            tensors = destination.receiver.weights.tensors
            assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
                n: (floats[n].dtype, tuple(t.shape)) for n, t in expected.items()
            }
            assert [n for n, t in expected.items() if not torch.equal(tensors[n], t)] == []


def test_live_floats_stay_while_the_next_version_is_restored(tmp_path: Path) -> None:
    both = Both(tmp_path, *MESHES[0], False, wire="int8")
    sound(both.move(0, both.publish(0)))
    receiver = both.destinations[0].receiver
    before = {n: t.clone() for n, t in receiver.weights.tensors.items()}
    swaps = [destination.receiver.swap for destination in both.destinations]
    for destination in both.destinations:
        destination.receiver.swap = lambda version: None  # type: ignore[method-assign]
    sound(both.move(1, both.publish(1)))
    assert all(torch.equal(receiver.weights.tensors[n], t) for n, t in before.items())
    for swap in swaps:
        swap(1)
    assert not torch.equal(receiver.weights.tensors["q.weight"], before["q.weight"])


@pytest.mark.parametrize("wire", list(FORMATS))
def test_a_flipped_scale_is_caught_on_all_ranks_and_never_live(tmp_path: Path, wire: str) -> None:
    def flip(parts: Any) -> None:
        parts["o.weight.scale"].tensor.view(torch.int32).view(-1)[-1] ^= 1

    both = Both(tmp_path, *MESHES[0], False, wire=wire)
    sound(both.move(0, both.publish(0)))
    both.destinations[1].damage = flip
    results = both.move(1, both.publish(1))[2:]
    assert [type(result) for result in results] == [ChecksumError, ChecksumError]
    assert all("o.weight.scale: sent" in str(result) for result in results)
    assert {destination.receiver.weights.version for destination in both.destinations} == {0}


def test_weights_that_the_format_cannot_hold_are_refused_by_name() -> None:
    policy = ShardedPolicy((("fsdp", 1),), 0)
    publisher = WeightPublisher(CHANNEL, policy, wire="int8")
    policy.tensors["q.weight"][5, 6] = torch.inf
    with pytest.raises(ConversionError, match=r"q\.weight: row 5 has inf or NaN"):
        publisher.publish(0)


def test_the_bytes_of_int8_are_an_element_each_and_the_scales() -> None:
    policy = ShardedPolicy((("fsdp", 1),), 0)
    layouts = [WeightPublisher(CHANNEL, policy, wire=wire).layout for wire in ("", "int8")]
    nbytes = [sum(part.tensor.nbytes for part in allocate(layout, 0, "cpu").values()) for layout in layouts]
    matrices = sum(SHAPES[n][0] * SHAPES[n][1] for n in QUANTISED)
    assert nbytes[0] - nbytes[1] == matrices - 4 * sum(SHAPES[n][0] for n in QUANTISED)
