"""Values are kept until they are freed, joined for an update, and exported only where another process reads them."""

from pathlib import Path

import pytest
import torch

from penstock.graph.ir import Firing, Ref
from penstock.graph.types import Rewards
from penstock.runtime.control.values import Values, join
from penstock.runtime.schedule.events import Fire
from penstock.runtime.tensor.handle import Handle

from .nodes_for_tests import make_setup

HANDLE = Handle("segment", 0, 8, "{}", "worker/0")


def rewards(*values: float) -> Rewards:
    return Rewards(torch.tensor(values))


def test_a_group_s_reader_gets_its_own_and_an_update_s_the_batch(tmp_path: Path) -> None:
    values = Values(make_setup(tmp_path), {})
    for group in range(3):
        assert values.keep(Firing("doubled", group), {"out": rewards(float(group))}) == {}
    ref = Ref("doubled", "out")
    update = Fire(Firing("learn", 0), "worker/0", (0, 2))
    assert values.read(ref, update, {}).values_N.tolist() == [0.0, 2.0]
    values.keep(Firing("basket", 1), {"out": rewards(7.0)})
    alone = Fire(Firing("doubled", 1), "worker/0", (1,))
    assert values.read(Ref("basket", "out"), alone, {}).values_N.tolist() == [7.0]


def test_what_another_process_reads_is_exported_and_released_with_the_value(tmp_path: Path) -> None:
    released: list[Handle] = []
    values = Values(make_setup(tmp_path, replicas=2), {}, export=lambda value: HANDLE, release=released.append)
    firing = Firing("basket", 0)
    assert values.keep(firing, {"out": rewards(1.0)}) == {"out": HANDLE}
    assert values.of([firing]).keys() == {(firing, "out")}
    values.free([firing])
    assert released == [HANDLE]
    assert values.of([firing]) == values.kept == values.handles == {}
    values.free([firing])
    assert released == [HANDLE]


def test_a_value_of_another_rank_is_fetched_as_the_class_that_the_graph_declares(tmp_path: Path) -> None:
    fetched: list[tuple[Handle, type]] = []

    def fetch(handle: Handle, cls: type) -> Rewards:
        fetched.append((handle, cls))
        return rewards(4.0)

    values = Values(make_setup(tmp_path), {}, fetch=fetch)
    fire = Fire(Firing("doubled", 0), "worker/0", (0,))
    found = values.read(Ref("basket", "out"), fire, {(Firing("basket", 0), "out"): HANDLE})
    assert (found.values_N.tolist(), fetched) == ([4.0], [(HANDLE, Rewards)])
    with pytest.raises(KeyError, match=r"worker/0: no value basket\[0\]\.out, and no handle of it"):
        values.read(Ref("basket", "out"), fire, {})


def test_values_of_a_class_without_concat_are_joined_as_a_tuple() -> None:
    assert join([1.0, 2.0]) == (1.0, 2.0)
    assert join([rewards(1.0), rewards(2.0)]).values_N.tolist() == [1.0, 2.0]
