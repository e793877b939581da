"""Sums over the ranks of a replica, and who is to blame when there is none."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor.process_group import AllReduce, TransportError

from .replicas import sound, together

pytestmark = pytest.mark.timeout(300)


def test_every_rank_has_the_sum_mod_two_to_the_64(tmp_path: Path) -> None:
    adders = [AllReduce("trainer", FileStore(str(tmp_path / "sum")), rank, 3, timeout=30) for rank in range(3)]
    own = [torch.tensor([[2**62, rank], [rank, -rank]]) for rank in range(3)]
    for _ in range(3):
        for total in sound(together(*(partial(add, t) for add, t in zip(adders, own, strict=True)))):
            assert total.tolist() == [[3 * 2**62 - 2**64, 3], [3, -3]]
    for add in adders:
        add.close()


def test_every_rank_has_the_largest_of_the_magnitudes(tmp_path: Path) -> None:
    adders = [AllReduce("trainer", FileStore(str(tmp_path / "sum")), rank, 2, timeout=30) for rank in range(2)]
    own = [torch.tensor([[0.0, 1e-45], [3.5, torch.inf]]), torch.tensor([[1.5, 0.0], [3.25, 1.0]])]
    for largest in sound(together(*(partial(add.maximum, t) for add, t in zip(adders, own, strict=True)))):
        assert torch.equal(largest, torch.maximum(*own))
    for add in adders:
        add.close()


def test_a_rank_that_never_comes_is_an_error_with_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(
        TransportError, match=r"trainer: rank 0: the connection of 2 ranks is not complete after .* not there: rank 1"
    ):
        AllReduce("trainer", FileStore(str(tmp_path / "sum")), 0, 2, timeout=1)(torch.zeros(1, dtype=torch.int64))


def impatient(folder: Path, ranks: int) -> list[AllReduce]:
    """They have met, however long that took, and wait for two seconds from now on."""
    adders = [AllReduce("trainer", FileStore(str(folder / "sum")), rank, ranks, timeout=30) for rank in range(ranks)]
    sound(together(*(partial(add, torch.zeros(2, dtype=torch.int64)) for add in adders)))
    for add in adders:
        assert add._connection is not None
        add._connection.timeout = 2
    return adders


def test_a_rank_that_does_not_add_is_named(tmp_path: Path) -> None:
    adders, zero = impatient(tmp_path, 3), torch.zeros(2, dtype=torch.int64)
    results = together(partial(adders[0], zero), partial(adders[1], zero))
    assert all(isinstance(result, TransportError) for result in results)
    assert "sum 2: the numbers from rank 2 failed" in str(results[0])
    assert "sum 2: the numbers from rank 0 failed" in str(results[1])


def test_sums_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    adders, zero = impatient(tmp_path, 2), torch.zeros(2, dtype=torch.int64)
    adders[1]._calls += 1
    results = together(*(partial(add, zero) for add in adders))
    assert "rank 1 sent {'sum': 3}, needed {'sum': 2}" in str(results[0])
    assert isinstance(results[1], TransportError)
