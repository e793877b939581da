"""Values are kept until they are freed, joined for an update, and exported only where another process reads them."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.graph.ir import Firing
from penstock.graph.types import Rewards
from penstock.nodes.curriculum import Varied
from penstock.runtime.control.rank_setup import InputRead
from penstock.runtime.control.rank_state import HeldValues, History, join, private
from penstock.runtime.schedule.events import Fire
from penstock.runtime.tensor.codec import CodecError, decode, encode
from penstock.runtime.tensor.shm import ObjectRef

from .nodes_for_tests import make_setup

OWN = InputRead("rewards", "basket", "out", joined=False, at_turn=False, back=False)
HANDLE = ObjectRef("segment", 0, 8, "{}", "worker/0")


def rewards(*values: float) -> Rewards:
    return Rewards(torch.tensor(values))


def test_a_group_s_reader_gets_its_own_and_an_update_s_the_batch(tmp_path: Path) -> None:
    values = HeldValues(make_setup(tmp_path), {})
    for group in range(3):
        assert values.keep(Firing("doubled", group), {"out": rewards(float(group))}) == {}
    batch = InputRead("rewards", "doubled", "out", joined=True, at_turn=False, back=False)
    update = Fire(Firing("learn", 0), "worker/0", (0, 2))
    assert values.read(batch, update, {}).values_N.tolist() == [0.0, 2.0]
    values.keep(Firing("basket", 1), {"out": rewards(7.0)})
    alone = Fire(Firing("doubled", 1), "worker/0", (1,))
    assert values.read(OWN, alone, {}).values_N.tolist() == [7.0]


@dataclass
class Everything:
    """One field of each sort that a value may have."""

    tensor: torch.Tensor
    array: Any
    words: list[str]
    nested: tuple[list[dict[str, list[int]]], ...]
    plain: tuple[int, ...]


def test_a_value_is_private_to_each_reader_and_apart_from_its_maker(tmp_path: Path) -> None:
    values, firing = HeldValues(make_setup(tmp_path), {}), Firing("basket", 0)
    whole = torch.arange(6.0).view(2, 3)
    made = Everything(whole.T, np.arange(3), ["a"], ([{"x": [1]}],), (1, 2))
    values.keep(firing, {"out": made})

    def change(value: Everything) -> None:
        value.tensor.zero_()
        value.array[:] = 9
        value.words.append("b")
        value.nested[0][0]["x"].append(2)
        value.plain = (3,)

    change(made)
    alone = Fire(Firing("doubled", 0), "worker/0", (0,))
    for _ in range(2):
        found = values.read(OWN, alone, {})
        assert found.tensor.equal(torch.arange(6.0).view(2, 3).T)
        assert found.tensor.is_contiguous()  # as one that came from another process: the bits of sums depend on it
        assert found.array.tolist() == [0, 1, 2]
        assert (found.words, found.nested, found.plain) == (["a"], ([{"x": [1]}],), (1, 2))
        change(found)


def test_a_reader_of_the_same_process_finds_what_one_of_another_does(tmp_path: Path) -> None:
    made = Everything(torch.ones(2, requires_grad=True), np.array([1.5], np.float32), ["a"], (), (1,))
    encoded, meta = encode(made)
    away, here = decode(Everything, encoded, meta), private(made)
    for name in ("tensor", "array"):
        one, other = getattr(away, name), getattr(here, name)
        assert (type(one), one.dtype, one.requires_grad) == (type(other), other.dtype, other.requires_grad)
        assert one.equal(other)
    assert (away.words, away.nested, away.plain) == (here.words, here.nested, here.plain)


def test_what_cannot_be_copied_for_its_readers_is_refused(tmp_path: Path) -> None:
    values = HeldValues(make_setup(tmp_path), {})
    with pytest.raises(CodecError, match="given a lock that cannot be copied"):
        values.keep(Firing("basket", 0), {"out": threading.Lock()})


def test_a_delayed_value_is_private_to_each_reader() -> None:
    history = History({"varied": 1})
    history.note("varied", 0, Varied())
    cast(Varied, history.of("varied", 0)).variances["+"] = 1.0
    assert cast(Varied, history.of("varied", 0)).variances == {}


def test_what_another_process_reads_is_exported_and_released_with_the_value(tmp_path: Path) -> None:
    released: list[ObjectRef] = []
    values = HeldValues(make_setup(tmp_path, replicas=2), {}, export=lambda value: HANDLE, release=released.append)
    firing = Firing("basket", 0)
    assert values.keep(firing, {"out": rewards(1.0)}) == {"out": HANDLE}
    assert values.of([firing]).keys() == {(firing, "out")}
    values.free([firing])
    assert released == [HANDLE]
    assert values.of([firing]) == values.kept == values.handles == {}
    values.free([firing])
    assert released == [HANDLE]


def test_a_value_of_another_rank_is_fetched_as_the_class_that_the_graph_declares(tmp_path: Path) -> None:
    fetched: list[tuple[ObjectRef, type]] = []

    def fetch(handle: ObjectRef, cls: type) -> Rewards:
        fetched.append((handle, cls))
        return rewards(4.0)

    values = HeldValues(make_setup(tmp_path), {}, fetch=fetch)
    fire = Fire(Firing("doubled", 0), "worker/0", (0,))
    found = values.read(OWN, fire, {(Firing("basket", 0), "out"): HANDLE})
    assert (found.values_N.tolist(), fetched) == ([4.0], [(HANDLE, Rewards)])
    with pytest.raises(KeyError, match=r"worker/0: no value basket\[0\]\.out, and no handle of it"):
        values.read(OWN, fire, {})


def test_values_of_a_class_without_concat_are_joined_as_a_tuple() -> None:
    assert join([1.0, 2.0]) == (1.0, 2.0)
    assert join([rewards(1.0), rewards(2.0)]).values_N.tolist() == [1.0, 2.0]
