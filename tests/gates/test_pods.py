"""`penstock run … --on kubernetes` from the command to the end of the run, in Pods of this machine (see `pods`)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .network import Network, why_not
from .pods import HOSTS, Pods
from .running import (
    DEADLINE_S,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    make_run,
    replayed,
    rows,
    run_here,
    toy_flags,
    until,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
UPDATES, BATCH = 50, 4
SLOW = {**delays(generate=20.0, score=2.0, update=40.0), "lag": 2}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(*HOSTS) as network, Pods(tmp_path, network) as found:
        yield found


def test_a_run_in_pods_of_which_one_is_taken_away_goes_on_and_has_the_bits_of_one_that_was_left_alone(
    pods: Pods, tmp_path: Path
) -> None:
    flags = [word for name, value in SLOW.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    run = ["--updates", str(UPDATES), "--batch", str(BATCH), "--slots", "16", "--versions", "pinned", "--device", "cpu"]
    job = ["--on", "kubernetes", "--image", "this/machine", "--claim", "runs", "--agents", "2", "--out", "/runs/r"]
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", *flags, *run, *job]
    folder = pods.claim / "r"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=pods.environment, cwd=tmp_path
    ) as following:
        try:
            pods.await_jobset(60)
            until(lambda: pods.step() or len(rows(folder)) >= 3, "three updates")
            assert pods.starts == 1, pods.logs()
            pods.pod("agents-1").terminate()
            until(lambda: pods.step() or pods.starts == 2, "the JobSet was started again")
            assert until(pods.step, "its end") == "Completed", pods.logs()
            said, told = following.communicate(timeout=DEADLINE_S)
        finally:
            following.kill()
    assert following.returncode == 0, told
    assert ("controller", 75) in pods.statuses
    assert pods.statuses.count(("controller", 0)) == 1
    assert json.loads((folder / "config.json").read_text())["flags"]["updates"] == UPDATES
    assert str(folder.name) in said
    assert_all_consumed(folder, UPDATES * BATCH)
    assert [row["update"] for row in rows(folder)] == list(range(UPDATES))
    assert len(replayed(folder)) >= 2
    whole = make_run(
        tmp_path / "whole",
        "toy",
        SLOW,
        toy_flags(updates=UPDATES, batch=BATCH, versions="pinned"),
    )
    assert_equal_bits(final_state(folder, UPDATES), final_state(run_here(whole), UPDATES))
