"""Weights along a chain of generators in a run: the bits of a run without one, and a death in the middle named."""

import json
import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunOptions

from .running import HERE, Running, assert_equal_bits, final_state, make_run, rows, run_to_end, summary

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
UPDATES, BATCH, GENERATORS = 4, 6, 3
TWO_NAMES = Cluster(hosts=(Host(name="a", cores=1), Host(name="b", cores=1)), pools={"generator": "b"})
"""Two agents on this machine, over TCP: the generators are not on the trainer's host."""
LARGE = f"{HERE / 'program_with_large_weights.py'}:large"


def passed_on(folder: Path) -> list[int]:
    """How many versions each generator passed on."""
    found = []
    for index in range(GENERATORS):
        lines = (folder / "logs" / f"generator-{index}-0.out").read_text().splitlines()
        (printed,) = [json.loads(line) for line in lines if '"values"' in line]
        found.append(printed["sent"].get("passed on", 0))
    return found


def learnt(path: Path, transport: Literal["auto", "messages"] = "auto", **cluster: Any) -> Path:
    flags = RunOptions(updates=UPDATES, batch=BATCH, max_tokens=8, slots=16, seed=3, deadline=60.0, transport=transport)
    return run_to_end(make_run(path, "aipo", {"lag": 0}, flags, generators=GENERATORS, **cluster))


def test_a_run_has_the_same_bits_with_a_chain_and_without(tmp_path: Path) -> None:
    direct, chained = learnt(tmp_path / "shm"), learnt(tmp_path / "messages", "messages")
    apart = learnt(tmp_path / "agents", cluster=TWO_NAMES)
    assert [sum(passed_on(run)) for run in (direct,)] == [0]
    for run in (chained, apart):
        first, second, third = passed_on(run)
        assert first > 0
        assert second > 0
        assert third == 0
        assert_equal_bits(final_state(run, UPDATES), final_state(direct, UPDATES))


def test_a_generator_killed_while_weights_go_through_it_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Half of version 2 is through the chain; the trainer goes on when the one in the middle is dead."""
    mark = tmp_path / "half"
    flags = RunOptions(updates=100_000, batch=BATCH, slots=16, deadline=60.0, versions="pinned", transport="messages")
    options = {"mark": str(mark), "at": 2, "lag": 0}  # all replicas have a version before there is the next one
    folder = make_run(tmp_path / "r", LARGE, options, flags, generators=GENERATORS)
    with Running(folder) as running:
        pid = running.until_ready()["pools"]["generator"][1]
        running.until(mark.exists, "half of version 2 was through")
        os.kill(pid, signal.SIGKILL)
        mark.with_suffix(".go").touch()
        assert running.wait() == 1
    error = summary(folder)["error"]
    assert summary(folder)["cause"] == "rank-died"
    assert f"generator/1 rank 0 died: killed by SIGKILL (pid {pid})" in error
    assert "version 2 of policy>generator from generator/0 to generator/1, which has 1" in error
    assert "version 2 of policy>generator from generator/1 to generator/2, which has 1" in error
    assert len(rows(folder)) >= 1
