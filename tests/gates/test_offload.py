"""A run whose trainer's state leaves its device between updates, and whose generators release their memory, has the
bits of one that keeps both where they are.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.tensor import offload
from penstock.runtime.tensor.checkpoint import CheckpointShard

from .running import Running, assert_equal_bits, make_run, run_here, run_to_end, status_here
from .test_resume import figures, interrupt_at

pytestmark = pytest.mark.timeout(480)
UPDATES = 4
AVERAGED = f"{Path(__file__).parent / 'program_that_offloads.py'}:averaged"
OFF = RunOptions(
    updates=UPDATES,
    batch=2,
    max_tokens=6,
    slots=16,
    seed=3,
    data="arithmetic",
    dtype="bfloat16",
    deadline=60.0,
    checkpoint_every=1,
    offload="off",
)
ON = replace(OFF, offload="on")


def saved(folder: Path) -> set[str]:
    """The checkpoints of a run: an update that ends while the one before is still being written has none of its own."""
    return {path.parent.name for path in (folder / "checkpoints").glob("*/cut.json")}


def kept(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """What these checkpoints have of both values."""
    found: dict[str, Tensor] = {}
    for name in names:
        path = folder / "checkpoints" / name
        part = CheckpointShard(path, "trainer/0", 0)
        for value in ("policy", "average"):
            found |= {f"{name}/{value}/{tensor}": t for tensor, t in part.carried(value)[0].items()}
    return found


def assert_equal_runs(first: Path, second: Path) -> None:
    both = saved(first) & saved(second)
    assert f"{UPDATES:08d}" in both
    assert_equal_bits(kept(first, both), kept(second, both))
    assert figures(first) == figures(second)


def offloaded(folder: Path) -> list[Any]:
    """What the trainer's log says of it."""
    lines = (folder / "logs" / "trainer-0-0.out").read_text().splitlines()
    return [json.loads(line).get("offloaded") for line in lines if line.startswith('{"kind": "values"')]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lag", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_in_one_process(tmp_path: Path, dtype: str, lag: int) -> None:
    """In float32 the masters are what computes, and moments alone leave."""
    changes: dict[str, Any] = {"dtype": dtype, "versions": "pinned" if lag else "free"}
    runs = [make_run(tmp_path / f.offload, AVERAGED, {"lag": lag}, replace(f, **changes)) for f in (OFF, ON)]
    assert_equal_runs(*map(run_here, runs))


def test_in_processes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f.offload, AVERAGED, {}, f) for f in (OFF, ON)]
    assert_equal_runs(run_here(runs[0]), run_to_end(runs[1]))
    (found,) = offloaded(runs[1])
    # Of each value: away at the start, and there and back around each update; the policy once more for its average.
    assert found["moves"] == 2 * (1 + 2 * UPDATES) + 2 * UPDATES
    assert json.loads((runs[1] / "config.json").read_text())["flags"]["offload"] == "on"


@pytest.mark.slow
def test_on_a_mesh(tmp_path: Path) -> None:
    """Each rank's moments leave; its masters are what computes."""
    runs = [make_run(tmp_path / f.offload, AVERAGED, {}, f, meshes=["trainer=fsdp2"]) for f in (OFF, ON)]
    assert_equal_runs(*map(run_to_end, runs))
    (found,) = offloaded(runs[1])
    assert found["moves"] > 0


@pytest.mark.slow
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path) -> None:
    whole, parted = (make_run(tmp_path / name, AVERAGED, {}, f) for name, f in (("whole", OFF), ("parted", ON)))
    assert status_here(parted, partial(interrupt_at, 1))[0] == "stopped"
    assert_equal_runs(run_here(whole), run_to_end(parted))


def test_a_move_that_fails_ends_the_run_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("the host has no room")

    monkeypatch.setattr(offload, "touched", refuse)
    status, lines = status_here(make_run(tmp_path / "r", AVERAGED, {}, ON))
    assert status == "failed"
    assert "of trainer/0 rank 0: " in lines[-1]["text"]
    assert "bytes, to the host: the host has no room" in lines[-1]["text"]


def test_values_that_cannot_leave_are_refused(tmp_path: Path) -> None:
    flags = RunOptions(updates=2, batch=2, slots=16, deadline=60.0, offload="on")
    with Running(make_run(tmp_path / "r", "toy", {"lag": 0}, flags)) as running:
        assert running.wait() == 1
    needed = "trainer/0 rank 0: given policy, a FakePolicy, needed a value that can leave its device"
    assert f"--offload on: {needed}" in running.errors
