"""Which tensors are hashed, by whom, and what each fault is called."""

import pytest
import torch

from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.digest import ChecksumError, Checksums, alone, digest, hashed_tensors
from penstock.runtime.tensor.layout import Layout, Mesh, sharded

NAMES = [f"model.layers.{k}.weight" for k in range(400)]


def test_full_hashes_everything_and_off_nothing() -> None:
    assert hashed_tensors("full", 3, NAMES) == tuple(NAMES)
    assert hashed_tensors("off", 3, NAMES) == ()


def test_a_sample_follows_from_the_version_alone() -> None:
    samples = [hashed_tensors("sampled", version, NAMES) for version in range(60)]
    assert samples == [hashed_tensors("sampled", version, list(NAMES)) for version in range(60)]
    assert len(set(samples)) == 60
    assert all(20 < len(sample) < 90 for sample in samples)
    assert {name for sample in samples for name in sample} == set(NAMES)


def test_a_sample_is_never_empty() -> None:
    assert all(len(hashed_tensors("sampled", version, NAMES[:2])) >= 1 for version in range(50))
    assert hashed_tensors("sampled", 0, []) == ()


@pytest.mark.parametrize("axes", [(("tp", 4),), (("dp", 2), ("tp", 2)), (("dp", 4),)])
def test_each_distinct_box_is_counted_once(axes: tuple[tuple[str, int], ...]) -> None:
    """Of the parts of all ranks the sums make the digests of the whole, wherever there are replicas."""
    shapes = {"a": (40, 30), "b": (7, 64), "c": (5,)}
    rules = {"a": (0, 0), "b": (1, 2), "c": None}
    mesh = Mesh(axes)
    layout = sharded([(n, s, "float32") for n, s in shapes.items()], mesh, rules)
    wholes = {name: torch.randn(shape) for name, shape in shapes.items()}
    parts = []
    for rank in range(mesh.size):
        held = allocate(layout, rank, "cpu")
        for name, part in held.items():
            part.tensor.copy_(wholes[name][tuple(map(slice, part.region.start, part.region.stop))])
        parts.append(held)
    total = torch.zeros(len(shapes), 1, dtype=torch.int64)
    for rank, held in enumerate(parts):
        Checksums(layout, rank, total.add_).digests(held, list(shapes))
    assert Checksums(layout, 0, total.add).digests({}, list(shapes)) == digest(wholes)


def sent() -> dict[str, torch.Tensor]:
    return {name: torch.randn(20, 30, generator=torch.Generator().manual_seed(k)) for k, name in enumerate("abc")}


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"b": "zero"}, ["b"]), ({"a": "b", "b": "a"}, ["a", "b"]), ({"a": "b", "b": "c", "c": "a"}, ["a", "b", "c"])],
    ids=["skipped", "swapped", "stale"],
)
def test_damage_is_named_with_version_and_sides(changed: dict[str, str], named: list[str]) -> None:
    tensors = {**sent(), "zero": torch.zeros(20, 30)}
    layout = Layout.whole([(name, (20, 30), "float32") for name in "abc"])
    parts = allocate(layout, 0, "cpu")
    for name, part in parts.items():
        part.tensor.copy_(tensors[name])
    prover = Checksums(layout, 0, alone)
    prover.check(parts, digest(sent()), 3, "here to there")
    for name, other in changed.items():
        parts[name].tensor.copy_(tensors[other])
    with pytest.raises(ChecksumError, match=r"version 3 \(here to there\)") as caught:
        prover.check(parts, digest(sent()), 3, "here to there")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == named


def test_digests_of_unknown_tensors_are_refused() -> None:
    layout = Layout.whole([("a", (2,), "float32")])
    with pytest.raises(ChecksumError, match="unknown tensors: d"):
        Checksums(layout, 0, alone).check({}, {"d": 1}, 3, "here to there")
