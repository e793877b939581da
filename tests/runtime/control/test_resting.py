"""What leaves a rank is away between updates and there for whoever works with it; a checkpoint reads it where it is."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from penstock.graph.ir import Firing
from penstock.runtime.control.executor import Executor
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.weight_channels import LocalWays
from penstock.runtime.schedule.events import Abort, Command, Done, Failed, Fire, Save, Saved
from penstock.runtime.tensor import offload
from penstock.runtime.tensor.checkpoint import CheckpointShard

from .nodes_for_tests import make_setup as make_other_setup
from .nodes_that_leave import Cupboard, Heavy, make_setup

STEPS = ("peek", "grow", "look_back")


def make(folder: Path, restore: Path | None = None, *, on: bool = True) -> Executor:
    setup = make_setup(folder, restore, offload="on" if on else "off", patience=30.0)
    return Executor(setup, LocalWays({}, "worker/0", 0, "cpu", {}), {})


def order(executor: Executor, *commands: Command) -> list[Result]:
    return [result for results in executor.carry_out(Order(commands, (), "00000001")) for result in results]


def update(executor: Executor, number: int, steps: Iterable[str] = STEPS) -> list[Result]:
    """An update on one group."""
    for node in ("prompts", "basket"):
        order(executor, Fire(Firing(node, number), "worker/0", (number,)))
    executor.step()
    return order(executor, *(Fire(Firing(step, number), "worker/0", (number,)) for step in steps))


def value(executor: Executor) -> Heavy:
    found = executor.held.carried["policy"]
    assert isinstance(found, Heavy)
    return found


def where(executor: Executor) -> str:
    executor.resting.settle()
    return executor.resting._offloads["policy"].where


def written(folder: Path) -> Tensor:
    return CheckpointShard(folder, "worker/0", 0).carried("policy")[0]["momentum"]


def test_it_is_away_but_for_those_who_work_with_it(tmp_path: Path) -> None:
    executor = make(tmp_path)
    assert where(executor) == "host"
    host = value(executor).place
    for number in range(3):
        results = update(executor, number)
        assert [type(result.event) for result in results] == [Done] * 3
        assert where(executor) == "host"
        assert value(executor).place == host
    assert len(value(executor).seen) == 9
    assert host not in value(executor).seen
    # Once at the start; there and back for each update, and again for who reads it afterwards.
    assert executor.resting.counts()["moves"] == 1 + 3 * 4


def test_it_stays_for_its_update_once_somebody_has_read_it(tmp_path: Path) -> None:
    executor = make(tmp_path)
    update(executor, 0, ["peek"])
    assert where(executor) == "device"
    order(executor, Fire(Firing("grow", 0), "worker/0", (0,)))
    assert where(executor) == "host"


def test_a_checkpoint_that_is_written_while_it_is_away_is_that_of_one_that_stayed(tmp_path: Path) -> None:
    folders = []
    for name, on in (("away", True), ("stayed", False)):
        (tmp_path / name).mkdir()
        executor = make(tmp_path / name, on=on)
        update(executor, 0)
        (saved,) = order(executor, Save(1, "worker/0", ()))
        assert isinstance(saved.event, Saved)
        folders.append(tmp_path / name / "checkpoints" / "00000001")
        assert not on or where(executor) == "host"
    assert written(folders[0]).tolist() == written(folders[1]).tolist()
    ends = []
    for folder, on in zip(folders, (True, False), strict=True):
        executor = make(tmp_path / "again", folder, on=on)
        assert not on or where(executor) == "host"
        update(executor, 1)
        ends.append(value(executor).momentum_W.tolist())
    assert ends[0] == ends[1] != written(folders[0]).tolist()


def test_a_stream_gives_up_its_memory_when_it_has_nothing_left(tmp_path: Path) -> None:
    for on in (True, False):
        executor = make(tmp_path, on=on)
        for group in range(3):
            order(executor, *(Fire(Firing(node, group), "worker/0", (group,)) for node in ("prompts", "basket")))
        executor.step()
        executor.step()
        (held,) = executor.held.streams
        assert isinstance(held.state, Cupboard)
        assert held.state.released == int(on)


def test_a_move_that_fails_is_told_once_and_fails_whoever_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(offload, "touched", refuse)
    executor = make(tmp_path)
    executor.resting._offloads["policy"]._over.wait(30)  # type: ignore[union-attr]
    (told,) = executor.step()
    why = r"^policy of worker/0 rank 0: 1 tensors, \d+ bytes, to the host: no room"
    assert isinstance(told.event, Abort)
    assert executor.step() == []
    (saved,) = order(executor, Save(0, "worker/0", ()))
    assert isinstance(saved.event, Abort)
    for abort in (told.event, saved.event):
        with pytest.raises(ValueError, match=why):
            raise ValueError(abort.error)
    executor = make(tmp_path)
    (failed,) = update(executor, 0, ["peek"])
    assert isinstance(failed.event, Failed)
    assert "no room" in failed.event.error


def test_a_rank_that_must_offload_and_has_nothing_that_can_leave_is_refused(tmp_path: Path) -> None:
    ways = LocalWays({}, "worker/0", 0, "cpu", {})
    setup = replace(make_other_setup(tmp_path), offload="on")
    with pytest.raises(ValueError, match="--offload on: worker/0 rank 0: given policy, a FakePolicy, needed a value"):
        Executor(setup, ways, {})
    assert Executor(replace(setup, offload="auto"), ways, {}).resting.counts() == {}
