"""Weights that travel in another format than they are computed in: training goes on, a little beside its own policy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunOptions

from .running import FAULTS, assert_equal_bits, final_state, make_run, rows, run_here, run_to_end, summary

pytestmark = pytest.mark.timeout(480)
TWO_NAMES = Cluster(hosts=(Host(name="a", cores=1), Host(name="b", cores=1)), pools={"generator": "b"})
"""An agent for each, over TCP."""
UPDATES, BATCH = 4, 4
FLAGS = RunOptions(updates=UPDATES, batch=BATCH, max_tokens=8, slots=16, seed=3, data="arithmetic", deadline=60.0)


@pytest.mark.slow
def test_aipo_in_int8_keeps_its_ratios_near_one_and_is_the_same_in_one_process(tmp_path: Path) -> None:
    """At lag 0 the ratio of a token is that of its floats to its quantised weights, and nothing else."""
    flags = replace(FLAGS, wire="int8")
    runs = [make_run(tmp_path / name, "aipo", {"lag": 0}, flags) for name in ("processes", "here")]
    run_to_end(runs[0])
    run_here(runs[1])
    assert_equal_bits(*(final_state(run, UPDATES) for run in runs))
    assert summary(runs[0])["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 0}
    ratios = [row["ratio_mean"] for row in rows(runs[0])]
    assert len(ratios) == UPDATES
    assert all(abs(ratio - 1) < 0.02 and row["ess"] > 0.98 for ratio, row in zip(ratios, rows(runs[0]), strict=True))
    assert any(row["ratio_max"] > 1 for row in rows(runs[0]))


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["bfloat16", "fp8_block"])
def test_formats_cross_meshes(tmp_path: Path, wire: Literal["bfloat16", "fp8_block"]) -> None:
    flags, meshes = replace(FLAGS, wire=wire, updates=2), ("trainer=fsdp2", "generator=tp2")
    run = run_to_end(make_run(tmp_path / "r", "aipo", {"lag": 1}, flags, meshes=meshes))
    assert [abs(row["ratio_mean"] - 1) < 0.1 for row in rows(run)] == [True, True]


@pytest.mark.slow
def test_deltas_over_tcp_between_two_agents_are_sent_proved_and_learnt_with(tmp_path: Path) -> None:
    """In bfloat16 an update changes few of the values; of any four syncs in a row one is full."""
    updates = 20
    flags = replace(FLAGS, updates=updates, batch=32, slots=128, wire="bfloat16", delta=4)
    options = {"lag": 1, "samples": 8, "lr": 1e-4}
    run = run_to_end(make_run(tmp_path / "r", f"{FAULTS}digits", options, flags, cluster=TWO_NAMES))
    (printed,) = [line for line in (run / "logs" / "trainer-0-0.out").read_text().splitlines() if '"values"' in line]
    sent = json.loads(printed)["sent"]
    assert sent["full"] >= 1
    assert sent["delta"] > 2 * sent["full"]
    assert sent["bytes"] < 0.7 * sent["whole"]
    rewards = [row["reward_mean"] for row in rows(run)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3
    assert summary(run)["fates"]["consumed"] == updates * 32
