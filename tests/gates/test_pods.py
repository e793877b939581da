"""`penstock run … --on kubernetes` from the command to the end of the run, in Pods of this machine (see `pods`)."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .network import Network, why_not
from .pods import HOSTS, Pods
from .running import (
    DEADLINE_S,
    HELD,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    holding,
    make_run,
    num_rows,
    replayed,
    rows,
    run_here,
    toy_flags,
    until,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
UPDATES, BATCH = 10, 4
# The groups that the generator is making when its own Pod, and when the trainer's, is taken away. No update is about to
# read its values then.
FIRST, SECOND = 2 * BATCH, 5 * BATCH


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(*HOSTS) as network, Pods(tmp_path, network) as found:
        yield found


def test_pods_that_are_taken_away_have_successors_and_the_run_has_the_bits_of_one_that_was_left_alone(
    pods: Pods, tmp_path: Path
) -> None:
    """First the generator's Pod is taken away: the run goes on without it until another one comes. Then the trainer's:
    the run stops, and all Pods are started again."""
    holds = holding(pods.claim / "holds", f"group {FIRST}", f"group {SECOND}")
    flags = ["--holds", "/runs/holds", "--lag", "0"]
    flags += ["--updates", str(UPDATES), "--batch", str(BATCH), "--slots", "16", "--device", "cpu"]
    flags += ["--versions", "pinned", "--lost-replica", "replace", "--checkpoint-every", "2"]
    job = ["--on", "kubernetes", "--image", "this/machine", "--claim", "runs", "--agents", "2", "--out", "/runs/r"]
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", HELD, *flags, *job]
    folder = pods.claim / "r"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=pods.environment, cwd=tmp_path
    ) as following:
        try:
            pods.await_jobset()
            until(lambda: pods.step() or num_rows(folder) >= 2, "two updates")
            pods.pod("agents-1").terminate()
            until(lambda: pods.step() or pods.successors, "its successor was started")
            (holds / f"group {FIRST}").unlink()
            until(lambda: pods.step() or num_rows(folder) >= 5, "five updates")
            assert (pods.starts, pods.successors) == (1, 1), pods.logs()
            assert ("agents", 75) in pods.statuses
            pods.pod("agents-0").terminate()
            until(lambda: pods.step() or pods.starts == 2, "the JobSet was started again")
            (holds / f"group {SECOND}").unlink()
            assert ("controller", 75) in pods.statuses, pods.logs()
            assert until(pods.step, "its end") == "Completed", pods.logs()
            said, told = following.communicate(timeout=DEADLINE_S)
        finally:
            following.kill()
    assert following.returncode == 0, told
    assert "/runs/r" in said
    assert_all_consumed(folder, UPDATES * BATCH)
    assert [row["update"] for row in rows(folder)] == list(range(UPDATES))
    assert len(replayed(folder)) >= 2
    alone = toy_flags(updates=UPDATES, batch=BATCH, versions="pinned")
    whole = run_here(make_run(tmp_path / "whole", "toy", {**delays(), "lag": 0}, alone))
    assert_equal_bits(final_state(folder, UPDATES), final_state(whole, UPDATES))
