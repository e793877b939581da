"""Replicas of several ranks: what they compute together is what one rank computes."""

from pathlib import Path

import pytest

from penstock.runtime.control.config import Flags

from .plain import toy_loop
from .running import assert_equal_bits, final_state, make_run, rows, run_to_end, summary

pytestmark = pytest.mark.timeout(240)
UPDATES, BATCH = 5, 4
DELAYS = {"generate_ms": 4.0, "score_ms": 1.0, "update_ms": 4.0, "sync_ms": 0.0, "jitter_ms": 20.0}


@pytest.mark.slow
@pytest.mark.parametrize("generators", [1, 2])
def test_toy_on_meshes_is_toy_to_the_bit(tmp_path: Path, generators: int) -> None:
    """Nodes that know nothing of ranks do the same on each, in step: streams too, whenever their orders arrive."""
    flags = Flags(updates=UPDATES, batch=BATCH, slots=16, deadline=60.0, versions="pinned")
    meshes = ("trainer=dp2", "generator=tp2")
    run = make_run(tmp_path / "r", "toy", {"lag": 2, **DELAYS}, flags, generators=generators, meshes=meshes)
    assert_equal_bits(final_state(run_to_end(run), UPDATES), toy_loop(UPDATES, BATCH, lag=2))
    assert summary(run)["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 0}
    assert [row["groups"] for row in rows(run)] == [BATCH] * UPDATES
