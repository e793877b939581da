"""Environments in whole runs: a slow one stalls nothing within the lag; if one hangs, its group fails."""

import warnings
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from penstock.graph import NodeWarning
from penstock.graph.ir import Firing
from penstock.runtime.cli import report
from penstock.runtime.control.messages import read_record
from penstock.runtime.record.event_log import read_log
from penstock.runtime.schedule.events import Done
from tests.nodes.reward_server import Asked, Server, serving

from .running import (
    HERE,
    Options,
    assert_all_consumed,
    assert_equal_bits,
    final_state,
    make_run,
    replayed,
    rows,
    run_here,
    run_to_end,
    run_to_failure,
    status_here,
    summary,
    toy_flags,
)

pytestmark = pytest.mark.timeout(400)
FILE = f"{HERE / 'programs_for_environments.py'}:"
UPDATES, BATCH = 6, 2
DEADLINE_S = 3.0
PATIENCE_S = 60.0
PROCESSES = pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])


def prepared(tmp_path: Path, name: str, program: str, options: Options, **flags: Any) -> Path:
    used = toy_flags(updates=UPDATES, batch=BATCH, slots=64, **flags)
    return make_run(tmp_path / name, FILE + program, options, used)


def marks(tmp_path: Path, name: str = "marks") -> str:
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


def run(folder: Path, processes: bool) -> Path:
    return run_to_end(folder) if processes else run_here(folder)


def done(folder: Path) -> list[Firing]:
    """Return the firings of the run in the order in which they ended."""
    stages = [stage for segment in read_log(folder / "events.log") for stage in segment.stages]
    events = [read_record(step.event) for stage in stages if stage.facts["stage"] == "train" for step in stage.steps]
    return [event.firing for event in events if isinstance(event, Done)]


@PROCESSES
def test_a_slow_environment_stalls_nothing_within_the_lag(tmp_path: Path, processes: bool) -> None:
    """The first reply to group 4 comes only when all other groups that a lag of 3 admits have ended their turns."""
    lag, slow = 3, 4
    others = (slow // BATCH + lag + 1) * BATCH - 1
    options = {"folder": marks(tmp_path), "slow": slow, "others": others, "lag": lag}
    folder = run(prepared(tmp_path, "r", "shopping", options), processes)
    firings = done(folder)
    before = firings[: firings.index(Firing("shop", slow, 0))]
    assert {f.index for f in before if f.node == "seen"} == set(range(others + 1)) - {slow}
    assert sum(f.node == "shop" for f in before) == 2 * others
    assert [f.index for f in before if f.node == "fake_update"] == [0, 1]
    assert_all_consumed(folder, UPDATES * BATCH)
    assert max(row["lag_max"] for row in rows(folder)) <= lag
    assert replayed(folder)[0].outcomes["consumed"] == UPDATES * BATCH


@pytest.mark.parametrize(
    ("how", "processes"),
    [("sleep", False), *(pytest.param(how, True, marks=pytest.mark.slow) for how in ("loop", "read"))],
)
def test_a_group_whose_environment_hangs_fails_and_the_run_goes_on(tmp_path: Path, how: str, processes: bool) -> None:
    options = {"folder": marks(tmp_path), "hangs": 5, "how": how, "deadline": DEADLINE_S, "lag": 2}
    folder = run(prepared(tmp_path, "r", "shopping", options, on_failure="replace"), processes)
    assert_all_consumed(folder, UPDATES * BATCH, failed=1)
    assert [row["groups"] for row in rows(folder)] == [BATCH] * UPDATES
    assert Firing("shop", 5, 0) in done(folder)
    assert Firing("seen", 5) not in done(folder)  # it has no reward, not even zero
    assert how == "loop" or rows(folder)[-1]["abandoned"] > 0
    assert replayed(folder)[0].outcomes["failed"] == 1


@PROCESSES
def test_an_environment_that_hangs_stops_the_run_by_name(tmp_path: Path, processes: bool) -> None:
    # Group 3 belongs to the second update; at lag 0 it begins after the first one.
    options = {"folder": marks(tmp_path), "hangs": 3, "deadline": DEADLINE_S, "lag": 0}
    folder = prepared(tmp_path, "r", "shopping", options)
    if processes:
        run_to_failure(folder)
    else:
        assert status_here(folder)[0] == "failed"
    error = summary(folder)["error"]
    assert "shop[3.1] on environment/0 rank 0" in error
    assert "OverdueError: shop[3.1]: given no reply within 3 s, needed one (deadline=3)" in error
    assert "in hang" in error  # the error has the line at which it hangs
    assert len(rows(folder)) == 1


@PROCESSES
def test_a_reply_that_is_asked_for_again_changes_no_bit(tmp_path: Path, processes: bool) -> None:
    whole = prepared(tmp_path, "w", "shopping", {"folder": marks(tmp_path, "a"), "lag": 0})
    options = {"folder": marks(tmp_path, "b"), "hangs": 3, "how": "once", "deadline": DEADLINE_S, "lag": 0}
    again = prepared(tmp_path, "r", "shopping", options, retries=1)
    assert_equal_bits(final_state(run_here(whole), UPDATES), final_state(run(again, processes), UPDATES))
    assert_all_consumed(again, UPDATES * BATCH)


@PROCESSES
def test_replies_that_come_in_any_order_make_the_same_bits(tmp_path: Path, processes: bool) -> None:
    quick = prepared(tmp_path, "q", "uneven", {"lag": 2}, versions="pinned")
    slow = prepared(tmp_path, "s", "uneven", {"lag": 2, "ms": 30.0}, versions="pinned")
    assert_equal_bits(final_state(run_here(quick), UPDATES), final_state(run(slow, processes), UPDATES))


@PROCESSES
def test_a_warning_of_a_node_is_told_once_in_the_terminal_the_summary_and_the_report(
    tmp_path: Path, processes: bool, recwarn: pytest.WarningsRecorder
) -> None:
    folder = prepared(tmp_path, "r", "warned", {})
    if processes:
        run_to_end(folder)
    else:
        warnings.simplefilter("default", NodeWarning)
        _, lines = status_here(folder)
        told = [line["text"] for line in lines if line["kind"] == "note"]
        assert told == ["these rewards are <made up>"]
    assert summary(folder)["warnings"] == ["these rewards are <made up>"]
    assert report.main([str(folder)]) == 0
    assert "<li>these rewards are &lt;made up&gt;</li>" in (folder / "report.html").read_text()


@PROCESSES
def test_a_server_that_is_asked_for_rewards_holds_up_no_other_group(tmp_path: Path, processes: bool) -> None:
    """The server's first answer waits until it was asked about all other groups that the lag admits."""
    lag, samples = 1, 4
    others = (lag + 1) * BATCH - 1
    late = Event()

    def answer(asked: Asked, server: Server) -> tuple[int, bytes]:
        groups = {each["prompt"] for each in server.asked}
        if len(groups) > others:
            late.set()
        assert late.wait(PATIENCE_S), f"only {len(groups)} groups were asked about"
        return 200, b'{"reward": 0.5}'

    with serving(answer) as server:
        folder = run(prepared(tmp_path, "r", "asked", {"url": server.url, "lag": lag}), processes)
    assert len(server.asked) == UPDATES * BATCH * samples
    assert [row["reward_mean"] for row in rows(folder)] == [0.5] * UPDATES


@PROCESSES
def test_rewards_that_a_server_does_not_give_fail_their_group_and_are_no_zeros(tmp_path: Path, processes: bool) -> None:
    def answer(asked: Asked, server: Server) -> tuple[int, bytes]:
        first = server.asked[0]["prompt"]
        return (500, b"") if asked["prompt"] == first else (200, b'{"reward": 0.5}')

    with serving(answer) as server:
        flags = {"on_failure": "replace", "retries": 1}
        folder = run(prepared(tmp_path, "r", "asked", {"url": server.url}, **flags), processes)
        assert [row["reward_mean"] for row in rows(folder)] == [0.5] * UPDATES
    assert sum(row["failed"] for row in rows(folder)) == 1
