"""Values go from worker to worker, on one host and between hosts, and nothing of them is left behind."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunOptions

from .plain import toy_loop
from .running import (
    ONE_HOST,
    Options,
    Running,
    assert_equal_bits,
    final_state,
    make_run,
    rows,
    run_to_end,
    segments_of,
    summary,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
TWO_NAMES = Cluster(hosts=(Host(name="a", cores=1), Host(name="b", cores=1)), pools={"generator": "b"})
"""Two agents on this machine: ranks of different names know nothing of each other's shared memory."""
NO_DELAYS: Options = {f"{name}_ms": 0.0 for name in ("generate", "score", "update", "sync")}
SLOW_SCORER: Options = {**NO_DELAYS, "lag": 4, "score_ms": 300.0}
"""The scorer always has groups to read that the generator made some time ago."""


def figures(folder: Path, rank: str) -> dict[str, Any]:
    """What a rank printed when it closed: its store's use, and what went to and came from other hosts."""
    lines = (folder / "logs" / f"{rank}.out").read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    assert found["kind"] == "values"
    return found


def test_values_of_another_host_are_asked_for_and_have_equal_bits(tmp_path: Path) -> None:
    flags = RunOptions(updates=5, batch=4, slots=16, deadline=60.0)
    folder = run_to_end(make_run(tmp_path / "r", "toy", {**NO_DELAYS, "lag": 0}, flags, cluster=TWO_NAMES))
    assert_equal_bits(final_state(folder, 5), toy_loop(5, 4))
    generator, scorer, trainer = (figures(folder, f"{pool}-0-0") for pool in ("generator", "scorer", "trainer"))
    assert (scorer["asked"], trainer["asked"]) == ({"asked": 20}, {"asked": 20})  # each of 20 groups in one part
    assert generator["answered"] == {"served": 40}
    assert "answered" not in scorer  # read on its own host only: it does not listen
    assert summary(folder)["dropped_frames"] == {}


def test_ranks_of_one_host_ask_nobody_and_do_not_listen_for_it(tmp_path: Path) -> None:
    """The scorer has no weights to receive, and so nothing to listen for at all."""
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", "toy", {**NO_DELAYS, "update_ms": 10.0}, flags)
    with Running(folder) as running:
        (scorer,) = running.until_ready()["pools"]["scorer"]
        running.until_update(2)
        assert psutil.Process(scorer).net_connections("inet") == []
        running.interrupt()
        assert running.wait() == 130
    for pool in ("generator", "scorer", "trainer"):
        found = figures(folder, f"{pool}-0-0")
        assert found["asked"] == {}
        assert "answered" not in found


def size_of(path: Path) -> int:
    """Bytes; 0 for a segment that has just gone."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def stopped_generator(running: Running) -> int:
    """The pid of the generator, which no longer answers the scorer."""
    (pid,) = running.until_ready()["pools"]["generator"]
    running.until_update(1)
    os.kill(pid, signal.SIGSTOP)
    return int(pid)


def test_an_owner_that_is_killed_while_a_reader_waits_ends_the_run_and_is_named(tmp_path: Path) -> None:
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=60.0)
    folder = make_run(tmp_path / "r", "toy", SLOW_SCORER, flags, cluster=TWO_NAMES)
    with Running(folder) as running:
        pid = stopped_generator(running)
        sleep(1.0)  # by now the scorer has asked
        os.kill(pid, signal.SIGKILL)
        assert running.wait() == 1
    assert f"generator/0 rank 0 on host b died: killed by SIGKILL (pid {pid})" in running.errors
    assert summary(folder)["status"] == "failed"


def test_an_owner_that_is_stopped_is_named_by_the_reader_within_its_deadline(tmp_path: Path) -> None:
    flags = RunOptions(updates=100_000, batch=4, slots=16, deadline=8.0)
    folder = make_run(tmp_path / "r", "toy", SLOW_SCORER, flags, cluster=TWO_NAMES)
    with Running(folder) as running:
        stopped_generator(running)
        assert running.wait() == 1
    assert "fake_score[" in running.errors
    assert "generator.0.0 on host b has not answered" in running.errors
    assert "for 4 s: dead, stopped, or out of reach of host a" in running.errors
    assert summary(folder)["fates"]["failed"] == 0  # no group was given up, and none had a reward made up
    assert summary(folder)["status"] == "failed"


@pytest.mark.parametrize("cluster", [ONE_HOST, TWO_NAMES], ids=["one host", "two hosts"])
def test_nothing_leaks_over_ten_thousand_groups(tmp_path: Path, cluster: Cluster) -> None:
    """Shared memory stops growing within the first tenth, every block is free at the end, and no segment is left."""
    flags = RunOptions(updates=100, batch=100, slots=64, deadline=60.0)
    folder = make_run(tmp_path / "r", "toy", {**NO_DELAYS, "lag": 1}, flags, cluster=cluster)
    samples: list[tuple[int, int]] = []  # updates over, bytes of all segments

    def look() -> bool:
        sizes = [size for path in segments_of(running.run, folder) if (size := size_of(path))]
        done = len(rows(folder))
        if len(sizes) == 3 or done:
            samples.append((done, sum(sizes)))
        return done >= flags.updates - 1

    with Running(folder) as running:
        running.until(look, "all updates but the last")
        assert running.wait() == 0, running.errors  # and nothing is left
    early = max(size for done, size in samples if done <= 10)
    assert len(samples) > 10
    assert max(size for done, size in samples if done > 10) <= early
    assert summary(folder)["groups"] == 10_000
    for pool, puts in (("generator", 10_000), ("scorer", 10_000), ("trainer", 0)):
        found = figures(folder, f"{pool}-0-0")
        assert (found["blocks"], found["block_bytes"], found["puts"]) == (0, 0, puts)
