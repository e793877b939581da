"""Each construct of the language: its printed form, the faults of its misuse, its simulated schedule, its real run."""

import json
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Graph, GraphError, Program, check, load, trace
from penstock.graph.analysis import period_bound
from penstock.graph.program import trace_evaluation
from penstock.runtime.cli.children import answer
from penstock.runtime.cli.display import Progress
from penstock.runtime.cli.launching import finish
from penstock.runtime.cli.simulate import timing
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import Plan, place
from penstock.runtime.control.run_config import EVALUATION, RunOptions
from penstock.runtime.control.signals import FAILED
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import columns
from penstock.runtime.report.page import page
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.summary import make_report
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Durations, Simulation, simulate
from penstock.runtime.tensor.checkpoint import CheckpointShard

from .faults import assert_told, marked
from .gates.running import (
    assert_equal_bits,
    final_state,
    make_run,
    replayed,
    rows,
    run_here,
    run_to_end,
    status_here,
    summary,
    with_updates,
)
from .runtime.record.rows import columns_of

pytestmark = pytest.mark.timeout(180)
PROGRAMS = Path(__file__).parent / "programs_for_language.py"
FILE = f"{PROGRAMS}:"
MARKED = marked(PROGRAMS)
UPDATES, BATCH = 6, 3
TOY = RunOptions(updates=UPDATES, batch=BATCH, slots=16, deadline=60.0)


def graph(name: str, **options: Any) -> Graph:
    found = load(FILE + name)
    assert isinstance(found, Program)
    return trace(found, options)


def faults(name: str, **options: Any) -> str:
    return "\n".join(str(fault) for fault in check(graph(name, **options), batch=BATCH))


def simulated(name: str, seconds: Mapping[str, float], updates: int = 40, **options: Any) -> tuple[Graph, Simulation]:
    """Simulate a program with one firing at a time in each pool, so that the bound can be reached."""
    made = graph(name, **options)
    plan = place([made], Cluster(hosts=(Host(name="local", cores=4),)), slots=4)
    durations = {n.name: seconds.get(n.name, 0.0) for n in made.nodes if n.fires}
    return made, simulate(Tables(made, plan), Rules(batch=BATCH, end=updates), Durations(durations))


def prepared(tmp_path: Path, name: str, flags: RunOptions = TOY, **options: Any) -> Path:
    return make_run(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}", FILE + name, options, flags)


def run(tmp_path: Path, name: str, *, processes: bool = False, flags: RunOptions = TOY, **options: Any) -> Path:
    made = prepared(tmp_path, name, flags, **options)
    return run_to_end(made) if processes else run_here(made)


def failed(tmp_path: Path, name: str, flags: RunOptions = TOY, **options: Any) -> dict[str, Any]:
    """Run a program that fails, and return the summary."""
    made = prepared(tmp_path, name, flags, **options)
    assert status_here(made)[0] == "failed"
    return summary(made)


def stop_after(folder: Path, update: int) -> None:
    """Run until there is a row of that update, then stop the run as Ctrl-C does."""
    interrupted = threading.Event()

    def hear(line: dict[str, Any]) -> None:
        if line["kind"] == "row" and line["row"]["update"] == update and not interrupted.is_set():
            interrupted.set()
            signal.raise_signal(signal.SIGINT)

    assert status_here(folder, hear)[0] == "stopped"


PROCESSES = pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])


# All constructs ---------------------------------------------------------------------------------------------


ALL = ["filtered", "clocks", "seldom", "moved", "curriculum", "talking", "composed", "accumulating"]


@pytest.mark.parametrize("name", ALL)
def test_a_construct_is_checked_and_survives_json(name: str) -> None:
    made = graph(name)
    assert check(made, batch=BATCH) == []
    assert Graph.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert Graph.from_json(made.to_json()).digest() == made.digest()


@pytest.mark.parametrize("name", MARKED)
def test_misuse_of_a_construct_is_told_at_its_line(name: str) -> None:
    assert_told(PROGRAMS, name, MARKED[name])


@pytest.mark.parametrize(
    ("name", "options", "printed"),
    [
        (
            "filtered",
            {},
            ["kept_rewards = keep(rollouts, rewards, when=odd_sum)  # generator, per group, drops"],
        ),
        ("clocks", {"every": 4, "look": 5}, ["# trainer, every 4 updates", "# watcher, every 5 updates"]),
        ("seldom", {}, ["broadcast(policy, lag=3, every=2)"]),
        ("accumulating", {}, ["# trainer, per update, in parts of 1 group"]),
        ("moved", {}, ["rewards = fake_score(rollouts)                 # trainer, per update"]),
        ("curriculum", {}, ["past_seen = delay(seen, lag=1)", "choose(prompts, past_seen)"]),
        (
            "talking",
            {"turns": 4},
            [
                "conversation, replies = alternate(speak, reply, prompts, behaviour, stubborn=2,",
                "turns=4)",
                "# generator and environment, per group, at most 4 turns",
            ],
        ),
    ],
)
def test_a_construct_is_printed_as_it_is_written(name: str, options: dict[str, Any], printed: list[str]) -> None:
    text = str(graph(name, **options))
    assert all(words in text for words in printed), text


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", ALL)
def test_a_construct_runs_at_any_lag_and_replays(tmp_path: Path, name: str, lag: int) -> None:
    options: dict[str, Any] = {"every": 1} if name == "seldom" and lag == 0 else {}
    folder = run(tmp_path, name, lag=lag, **options)
    assert summary(folder)["status"] == "done"
    assert summary(folder)["fates"]["consumed"] == UPDATES * BATCH
    assert all(row["lag_max"] <= lag for row in rows(folder) if "lag_max" in row)
    assert [one.finish.status for one in replayed(folder) if one.finish] == ["done", "stopped"]  # and saved at the end


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_construct_is_the_same_bits_in_processes(tmp_path: Path, name: str) -> None:
    """At lag 0, or with pinned versions. The construct's rule holds in processes, too."""
    asked: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
        "clocks": ({"lag": 1, "look": 2}, assert_watched),
        "curriculum": ({"lag": 1, "delayed": 1}, partial(assert_known, delayed=1)),
        "talking": ({"lag": 1, "turns": 8}, assert_turns),
        "seldom": ({"lag": 0, "every": 1}, assert_done),
    }
    options, assert_rule = asked.get(name, ({"lag": 0}, assert_done))
    flags = replace(TOY, versions="pinned") if options["lag"] else TOY
    here, there = (run(tmp_path, name, processes=apart, flags=flags, **options) for apart in (False, True))
    assert_equal_bits(final_state(here, UPDATES), final_state(there, UPDATES))
    assert_rule(there)


def assert_done(folder: Path) -> None:
    assert summary(folder)["fates"]["consumed"] == UPDATES * BATCH


# Filters ------------------------------------------------------------------------------------------------------


@PROCESSES
def test_a_filter_drops_groups_and_the_next_ones_take_their_place(tmp_path: Path, processes: bool) -> None:
    folder = run(tmp_path, "filtered", processes=processes, lag=1)
    fates = summary(folder)["fates"]
    assert fates["consumed"] == UPDATES * BATCH
    assert fates["dropped"] > 3
    assert [row["groups"] for row in rows(folder)] == [BATCH] * UPDATES
    assert all(row["lag_max"] <= 1 for row in rows(folder))
    for line in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        assert [said["node"] for said in line["texts"]] == ["fake_generate"]
        assert line["rewards"].keys() == {"fake_score"}


def test_a_filter_that_keeps_everything_changes_nothing(tmp_path: Path) -> None:
    kept = run(tmp_path, "keeps_everything", lag=0)
    assert_equal_bits(final_state(kept, UPDATES), final_state(run(tmp_path, "without_filter", lag=0), UPDATES))


def test_a_filter_that_drops_everything_ends_the_run_with_the_counts(tmp_path: Path) -> None:
    flags = RunOptions(updates=2, batch=2, slots=16, drops=3, deadline=60.0)
    error = failed(tmp_path, "drops_everything", flags)["error"]
    where = graph("drops_everything")["keep"].where
    assert f"given 12 groups dropped for update 0, the last by keep[11] (written at {where}), and 0 kept; n" in error
    assert "--drops" in error


# Clocks ---------------------------------------------------------------------------------------------------------


def test_weights_that_travel_too_seldom_for_their_lag_are_refused() -> None:
    said = faults("seldom", lag=1, every=3)
    assert "[weights-too-seldom]" in said
    assert "given   every=3, lag=1" in said
    assert "needed  every=2 at most, or lag=2" in said
    assert f"{FILE.rstrip(':')}:" in said
    assert faults("seldom", lag=2, every=3) == ""
    with pytest.raises(GraphError) as raised:
        simulated("seldom", {}, lag=1, every=3)
    assert str(raised.value) == said


def test_a_slower_node_fires_at_its_updates_and_its_value_stays_in_between(tmp_path: Path) -> None:
    found = rows(run(tmp_path, "clocks", lag=1, every=2, look=3))
    assert [row.get("followed") for row in found] == [None, 2.0, None, 4.0, None, 6.0]
    assert [row.get("policy_version") for row in found] == [None, 2.0, None, 4.0, None, 6.0]


def test_a_node_that_only_measures_fires_at_its_updates_with_their_weights(tmp_path: Path) -> None:
    assert_watched(run(tmp_path, "clocks", lag=1, look=2, flags=replace(TOY, updates=7)))


def assert_watched(folder: Path) -> None:
    """Assert that `watch` fired at every second update of six or seven."""
    seen = [row for row in [*rows(folder), *summary(folder)["measured"]] if "watch_update" in row]
    assert [(row["watch_update"], row["watched_version"]) for row in seen] == [(1.0, 1.0), (3.0, 3.0), (5.0, 5.0)]


def test_what_was_measured_after_the_last_row_is_in_the_summary(tmp_path: Path) -> None:
    folder = run(tmp_path, "clocks", lag=1, look=UPDATES)
    seen = [row["watch_update"] for row in [*rows(folder), *summary(folder)["measured"]] if "watch_update" in row]
    assert seen == [UPDATES - 1]


def test_nobody_waits_for_a_node_that_only_measures() -> None:
    """The node takes as long as three updates, and fires at every fifth: the period is the same as without it."""
    seconds = {"fake_update": 1.0, "watch": 3.0}
    made, found = simulated("clocks", seconds, look=5, lag=1)
    assert found.period_s == pytest.approx(1.0)
    assert period_bound(made, {n.name: seconds.get(n.name, 0.0) for n in made.nodes}, BATCH).seconds == 1.0
    watched = [bar.index for bar in found.bars if bar.name == "watch"]
    assert watched == list(range(4, 40, 5))


# Parts of a batch -----------------------------------------------------------------------------------------------


def test_parts_are_in_the_graphs_digest_and_a_whole_batch_is_not() -> None:
    digests = [graph("accumulating", accumulate=n).replace(options=()).digest() for n in (0, 1, 3)]
    assert len(set(digests)) == 3
    assert all("accumulate" not in data for data in graph("accumulating", accumulate=0).to_json()["nodes"])


def test_an_update_in_parts_works_while_the_rest_is_generated() -> None:
    """A group takes 1 s, and an update of three groups 2 s. As a whole both take 3 + 2 s; in parts, only the last part
    comes after the last group. With a slow trainer all parts follow the first group."""
    cases = [(0, 0, 2.0, 5.0), (0, 3, 2.0, 5.0), (0, 1, 2.0, 3 + 2 / 3), (0, 1, 6.0, 7.0), (2, 1, 6.0, 6.0)]
    for lag, accumulate, update_s, period_s in cases:
        made = graph("accumulating", lag=lag, accumulate=accumulate)
        pools = place([made], Cluster(hosts=(Host(name="local", cores=4),))).pools
        plan = Plan(tuple(replace(p, replicas=tuple(replace(r, capacity=1) for r in p.replicas)) for p in pools))
        seconds = {n.name: {"fake_generate": 1.0, "add_up": update_s}.get(n.name, 0.0) for n in made.nodes if n.fires}
        found = simulate(Tables(made, plan), Rules(batch=BATCH, end=40), Durations(seconds))
        assert found.period_s == pytest.approx(period_s)
        assert period_bound(made, seconds, BATCH).seconds == pytest.approx(period_s)


def test_parts_of_a_batch_make_one_value_and_one_row(tmp_path: Path) -> None:
    whole = run(tmp_path, "accumulating", lag=0, accumulate=0)
    parts = run(tmp_path, "accumulating", lag=0, accumulate=1)
    assert_equal_bits(final_state(parts, UPDATES), final_state(whole, UPDATES))
    for one, other, count in zip(rows(whole), rows(parts), (3.0,) * UPDATES, strict=True):
        assert (one["total"], one["parts"], one["groups"]) == (other["total"], 1.0, BATCH)
        assert (other["parts"], other["groups"]) == (count, BATCH)
    fired = [work for stage in read_facts(RunFolder(parts)).training for work in stage.followed.work]
    segments = [work.segment for work in sorted(fired, key=lambda w: w.start) if work.name == "add_up"]
    assert segments == [0, 1, 2] * UPDATES


def test_a_checkpoint_that_is_due_does_not_come_between_parts(tmp_path: Path) -> None:
    flags = replace(TOY, checkpoint_every=1, keep=0)
    path = run(tmp_path, "accumulating", flags=flags, lag=2, accumulate=1)
    saved = sorted(folder.name for folder in RunFolder(path).checkpoints.iterdir())
    assert saved == [f"{update:08}" for update in range(1, UPDATES + 1)]


def test_a_part_that_fails_ends_the_run_and_is_named(tmp_path: Path) -> None:
    error = failed(tmp_path, "accumulating", accumulate=1, breaks_at=1)["error"]
    assert "add_up[0.0.1] on trainer/0 rank 0" in error
    assert "part 1 of 3" in error


def test_a_run_that_is_stopped_between_parts_takes_them_again(tmp_path: Path) -> None:
    whole = run(tmp_path, "accumulating", lag=0)
    folder = prepared(tmp_path, "accumulating", lag=0, ms=20.0)
    stop_after(folder, 2)
    assert status_here(folder)[0] == "done"
    assert_equal_bits(final_state(folder, UPDATES), final_state(whole, UPDATES))
    assert [row["parts"] for row in rows(folder)] == [3.0] * UPDATES


# Steps ----------------------------------------------------------------------------------------------------------


def test_minibatches_that_do_not_divide_the_batch_are_refused_before_anything_starts() -> None:
    found = load("ppo")
    assert isinstance(found, Program)
    said = "\n".join(map(str, check(trace(found, {"minibatches": 4}), batch=6)))
    assert "given   minibatches=4 for a batch of 6 prompt groups" in said
    assert "[indivisible-batch]" in said
    assert check(trace(found, {"minibatches": 3}), batch=6) == []


@pytest.mark.parametrize(("lag", "processes"), [(0, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_updates_in_a_row_make_one_version(tmp_path: Path, lag: int, processes: bool) -> None:
    pinned = replace(TOY, versions="pinned")
    found = rows(run(tmp_path, "in_a_row", processes=processes, lag=lag, flags=pinned))
    assert [row["lag_max"] for row in found] == [min(update, lag) for update in range(UPDATES)]
    assert [row["policy_version"] for row in found] == list(range(1, UPDATES + 1))


@pytest.mark.parametrize("name", ["read_between", "read_between_of_two"])
@pytest.mark.parametrize(("lag", "processes"), [(0, False), (2, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_each_node_reads_the_value_that_it_is_given_of_updates_in_a_row(
    tmp_path: Path, lag: int, processes: bool, name: str
) -> None:
    found = rows(run(tmp_path, name, processes=processes, lag=lag))
    first, between, last = ([row[f"{place}.sum"] for row in found] for place in ("at_first", "between", "at_last"))
    assert (first[0], first[1:]) == (pytest.approx(64.0), last[:-1])
    assert all(len({*values}) == 3 for values in zip(first, between, last, strict=True))


# Places and clocks by the call --------------------------------------------------------------------------------


def test_a_node_fires_where_and_when_the_call_says(tmp_path: Path) -> None:
    assert_equal_bits(
        final_state(run(tmp_path, "moved", lag=0), UPDATES),
        final_state(run(tmp_path, "without_filter", lag=0), UPDATES),
    )


# Delays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lag", "delayed"), [(0, 0), (1, 1), (2, 3), (2, 0)])
def test_the_groups_of_an_update_see_exactly_the_updates_before_it_less_the_lag(
    tmp_path: Path, lag: int, delayed: int
) -> None:
    assert_known(run(tmp_path, "curriculum", lag=lag, delayed=delayed), delayed)


def assert_known(folder: Path, delayed: int) -> None:
    needed = [max(0, update - delayed) for update in range(UPDATES)]
    assert [(row["known_min"], row["known_max"]) for row in rows(folder)] == [(n, n) for n in needed]


def test_a_delay_is_part_of_the_cycle_that_bounds_the_period() -> None:
    seconds = {"choose": 0.0, "fake_generate": 1.0, "fake_score": 0.0, "fake_update": 0.0}
    made, found = simulated("curriculum", seconds, lag=4, delayed=0)
    bound = period_bound(made, {n.name: seconds.get(n.name, 0.0) for n in made.nodes}, BATCH, {"generator": 4})
    assert bound.seconds == pytest.approx(1.0)
    assert found.period_s == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "options", "update"), [("curriculum", {"delayed": 2}, 2), ("composed", {}, 1)])
def test_a_delayed_value_and_a_state_go_on_exactly_after_a_resume(
    tmp_path: Path, name: str, options: dict[str, Any], update: int
) -> None:
    whole, half = run(tmp_path, name, lag=0, **options), prepared(tmp_path, name, lag=0, **options)
    stop_after(half, update)
    assert update < len(rows(half)) < UPDATES
    run_here(half)
    assert_equal_bits(final_state(whole, UPDATES), final_state(half, UPDATES))


# Values -------------------------------------------------------------------------------------------------------


@PROCESSES
def test_what_readers_and_makers_write_into_a_value_is_seen_by_nobody_else(tmp_path: Path, processes: bool) -> None:
    flags = RunOptions(updates=2, batch=BATCH, slots=16, deadline=60.0)
    clean = run(tmp_path, "shared", flags=flags, write=False)
    written = run(tmp_path, "shared", flags=flags, processes=processes, write=True)
    assert_equal_bits(final_state(clean, 2), final_state(written, 2))


def test_a_run_that_only_measures_may_have_no_accuracy(tmp_path: Path) -> None:
    found = summary(run(tmp_path, "only_measured", nothing=True))
    assert (found["status"], found["accuracy"]) == ("done", None)


def test_the_accuracy_of_a_run_that_only_measures_is_that_of_all_its_problems(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "only_measured", replace(TOY, checkpoint_every=1))
    stop_after(folder, 2)
    found = [row["accuracy"] for row in rows(run_here(folder))]
    assert len({*found}) > 1
    assert summary(folder)["accuracy"] == pytest.approx(sum(found) / len(found))


@PROCESSES
def test_what_a_source_gives_again_is_another_group(tmp_path: Path, processes: bool) -> None:
    """Its rows are of the group that was asked for; by the source's own numbers a batch would have two groups."""
    for update, row in enumerate(rows(run(tmp_path, "again", processes=processes))):
        assert (row["distinct"], row["lowest"]) == (BATCH, update * BATCH)
        assert row["apart"] < 1e-6


# Figures, also NaN and infinite ones, and failures --------------------------------------------------------------


@PROCESSES
def test_means_over_rows_are_of_all_rows_of_an_update_however_many_each_group_has(
    tmp_path: Path, processes: bool
) -> None:
    made = run(tmp_path, "uneven", processes=processes)
    stopped = prepared(tmp_path, "uneven", replace(TOY, checkpoint_every=1))
    stop_after(stopped, 2)
    for folder in (made, run_here(stopped)):
        assert len(rows(folder)) == UPDATES
        for row in rows(folder):
            assert row["reward_mean"] == pytest.approx(row["batch_reward"])
            assert row["sums"] == pytest.approx(row["batch_sums"])
            assert row["groups_seen"] == 1.0
            assert "none" not in row


@PROCESSES
def test_all_metrics_of_an_evaluation_are_kept_those_of_its_groups_averaged_over_rows(
    tmp_path: Path, processes: bool
) -> None:
    flags = replace(TOY, eval_groups=5, checkpoint_every=1)
    whole, stopped = (
        make_run(tmp_path / name, FILE + "trained_and_examined", {"lag": 0}, flags, evaluate=True)
        for name in ("a", "b")
    )
    found = summary(run_to_end(whole) if processes else run_here(whole))["evaluated"]
    assert found.keys() == {"before", "after"}
    for figures in found.values():
        # Each group with two or three rows; those with none or one are dropped, and count nowhere.
        assert figures["sums"] == pytest.approx(figures["batch_sums"])
        assert figures["reward_mean"] == pytest.approx(figures["batch_reward"])
        assert figures["groups_seen"] == 1.0
        # Of two nodes that report an accuracy, the one per update is first.
        assert (figures["accuracy"], figures["first_rows.accuracy"]) == (figures["batch_reward"], -1.0)
    assert found["before"] != found["after"]
    stop_after(stopped, 2)
    assert summary(stopped)["evaluated"] == {"before": found["before"]}
    assert summary(run_here(stopped))["evaluated"] == found


def test_a_report_has_the_lag_of_each_group_also_of_those_that_a_checkpoint_had(tmp_path: Path) -> None:
    stopped = prepared(tmp_path, "uneven", replace(TOY, checkpoint_every=1), lag=3)
    stop_after(stopped, 2)
    for _ in range(2):
        report = make_report(read_facts(RunFolder.open(stopped)), lambda: False)
        assert sum(report.lags.values()) == report.facts.updates * BATCH
        assert max(report.lags) <= 3
        run_here(stopped)
    assert report.facts.updates == UPDATES


def test_a_figure_that_is_no_number_is_noted_and_nothing_follows(tmp_path: Path) -> None:
    flags = RunOptions(updates=2, batch=2, slots=16, eval_groups=2, checkpoint_every=1, deadline=60.0)
    made = make_run(tmp_path / "r", FILE + "no_numbers", {}, flags, evaluate=True)
    status, lines = status_here(made)
    assert status == "done"
    assert json.loads(json.dumps(lines, allow_nan=False)) == lines  # every display can read it
    notes = "\n".join(line["text"] for line in lines if line["kind"] == "note")
    assert all(
        figure in notes for figure in ("accuracy before", "accuracy after", "reward_mean is nan", "worst_max is")
    )
    for row in rows(made):
        assert (row["reward_mean"], row["worst_max"]) == (None, None)
        assert row["not_finite"] == {"reward_mean": "nan", "worst_max": "inf"}
    found = summary(made)
    assert (found["accuracy_before"], found["accuracy_after"], found["reward_mean"]) == (None, None, None)
    assert found["not_finite"]["reward_mean"] == {"value": "nan", "first": 0, "last": 1, "updates": 2}
    assert found["not_finite"].keys() == {"accuracy_before", "accuracy_after", "reward_mean", "worst_max"}
    read = read_facts(RunFolder.open(made))
    assert sum("no number" in note for note in read.notes) == 4
    page(make_report(read, lambda: False))
    run_here(with_updates(made, 3))
    assert summary(made)["not_finite"]["reward_mean"]["updates"] == 3


@pytest.mark.parametrize("by_token", [False, True])
def test_an_advantage_that_makes_a_gradient_nan_is_told_with_its_node_group_and_row(
    tmp_path: Path, by_token: bool
) -> None:
    error = failed(tmp_path, "divides_by_zero", by_token=by_token)["error"]
    assert "given a gradient of norm nan" in error
    assert "over_zero made an advantage of nan for group 1, row 2; 1 of 12 rows have such ones" in error


def test_an_advantage_of_a_term_that_is_nan_is_told_with_its_group_and_row(tmp_path: Path) -> None:
    error = failed(tmp_path, "divides_by_zero_beside")["error"]
    assert "term_2 was given an advantage of nan for group 1, row 2; 1 of 12 rows have such ones" in error


def test_advantages_that_cannot_be_looked_through_do_not_hide_the_error(tmp_path: Path) -> None:
    error = failed(tmp_path, "divides_by_zero", by_token=True, wide=True)["error"]
    assert error.rstrip().endswith("given a gradient of norm nan")


def test_a_node_that_reports_a_rows_own_column_is_refused_by_name(tmp_path: Path) -> None:
    error = failed(tmp_path, "takes_a_column")["error"]
    assert "taken returned 'version' among its metrics" in error


@pytest.mark.parametrize("retries", [0, 1])
def test_a_run_that_only_fails_ends_with_its_counts_and_the_last_traceback(tmp_path: Path, retries: int) -> None:
    flags = RunOptions(updates=2, batch=2, slots=16, deadline=60.0, on_failure="replace", retries=retries)
    made = prepared(tmp_path, "breaking", flags)
    status, _ = status_here(made)
    found = summary(made)
    assert status == found["status"] == "failed"
    assert found["fates"]["failed"] + found["retried"] in (15, 16)  # the last one ends the run
    for text in (found["error"], found["last_failure"]):
        assert "breaks[" in text
        assert "RuntimeError: no reward today" in text
    assert rows(made) == []


def test_failures_and_retries_are_counted_in_rows_status_summary_and_report(tmp_path: Path) -> None:
    flags = replace(TOY, on_failure="replace", retries=1)
    made = prepared(tmp_path, "breaking", flags, every=3)
    status, lines = status_here(made)
    assert status == "done"
    found = summary(made)
    assert found["retried"] > 0
    assert sum(row["retried"] for row in rows(made)) <= found["retried"]
    assert sum(row["failed"] for row in rows(made)) <= found["fates"]["failed"]
    assert "no reward today" in found["last_failure"]
    said, last = read_facts(RunFolder.open(made)).failures
    assert f"{found['retried']} firings were tried again" in said
    assert last == found["last_failure"]
    seen = Progress("breaking", UPDATES)
    for line in lines:
        seen.hear(line)
    assert "tried again" in seen.failures
    assert "RuntimeError: no reward today" in seen.failures


def test_a_run_that_is_stopped_or_fails_knows_its_dropped_and_failed_groups(tmp_path: Path) -> None:
    flags = RunOptions(updates=2, batch=2, slots=16, drops=3, deadline=60.0)
    assert failed(tmp_path, "drops_everything", flags)["fates"] == {"consumed": 0, "dropped": 12, "failed": 0}
    half = prepared(tmp_path, "filtered")
    stop_after(half, 2)
    fates = summary(half)["fates"]
    assert fates == replayed(half)[0].outcomes
    assert fates["dropped"] >= sum(row["dropped"] for row in rows(half)) > 0


@pytest.mark.parametrize("name", ["drops_everything", "breaking"])
def test_a_run_whose_controller_wrote_no_summary_knows_its_groups_from_the_log(tmp_path: Path, name: str) -> None:
    flags = RunOptions(updates=2, batch=2, slots=16, drops=3, on_failure="replace", retries=1, deadline=60.0)
    found = failed(tmp_path, name, flags)
    folder = RunFolder.open(found["folder"])
    (folder.path / "summary.json").unlink()
    made = finish(folder, FAILED, [], 1.0)
    for key in ("fates", "retried", "last_failure", "groups", "updates"):
        assert made[key] == found[key]


# Composition ----------------------------------------------------------------------------------------------------


def test_a_node_that_is_an_option_takes_the_place_of_another() -> None:
    other = graph("composed", by={"path": f"{FILE}half_score"})
    assert "half_score(rollouts)" in str(other)
    assert "fake_score" not in [node.name for node in other.nodes]
    assert check(other, batch=BATCH) == []
    assert "rewards = add_noise(" in str(other).replace("add_noise_out", "rewards")
    assert other["add_noise"].pool == "noise"


def test_a_nodes_key_comes_from_the_runs_seed(tmp_path: Path) -> None:
    first, same = run(tmp_path, "composed", lag=0), run(tmp_path, "composed", lag=0)
    other = run(tmp_path, "composed", lag=0, flags=replace(TOY, seed=1))
    figures = [[row["noise_max"] for row in rows(folder)] for folder in (first, same, other)]
    assert figures[0] == figures[1] != figures[2]


# Turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, -1, 1.5])
def test_a_bound_of_turns_that_is_none_is_told_as_it_was_given(turns: Any) -> None:
    said = faults("talking", turns=turns)
    assert f"given   {turns}\n" in said
    assert "[unbounded-turns]" in said


def test_each_group_takes_the_turns_that_its_environment_wants(tmp_path: Path) -> None:
    assert_turns(run(tmp_path, "talking", lag=1, turns=8))


def assert_turns(folder: Path) -> None:
    turns = [ordinal % 3 + 1 for ordinal in range(UPDATES * BATCH)]
    batches = [turns[update * BATCH : (update + 1) * BATCH] for update in range(UPDATES)]
    assert [row["turns_mean"] for row in rows(folder)] == [sum(b) / BATCH for b in batches]


def test_turns_end_at_their_bound(tmp_path: Path) -> None:
    found = rows(run(tmp_path, "talking", lag=0, turns=2, stubborn=9))
    turns = [min(2, ordinal % 10 + 1) for ordinal in range(UPDATES * BATCH)]
    assert [row["loss"] for row in found] == [sum(turns[u * BATCH : (u + 1) * BATCH]) for u in range(UPDATES)]


def test_an_environment_that_breaks_gives_its_group_its_fate(tmp_path: Path) -> None:
    flags = replace(TOY, on_failure="replace")
    folder = run(tmp_path, "talking", flags=flags, lag=1, turns=8, raise_at=4)
    assert summary(folder)["fates"] == {"consumed": UPDATES * BATCH, "dropped": 0, "failed": 1}
    error = failed(tmp_path, "talking", lag=1, turns=8, raise_at=4)["error"]
    assert "reply[4.1]" in error
    assert "the environment broke" in error


def test_a_slow_environment_stalls_nothing_within_the_lag() -> None:
    """With two turns of 1 s each in the environment and a lag of 3, groups of four updates are in flight."""
    seconds = {"speak": 0.0, "reply": 1.0, "grade": 0.0, "learn": 0.1}
    made = graph("talking", lag=3, turns=2)
    plan = place([made], Cluster(hosts=(Host(name="local", cores=4),)), slots=16)
    wide = type(plan)(tuple(p if p.name != "environment" else _wide(p) for p in plan.pools))
    found = simulate(Tables(made, wide), Rules(batch=BATCH, end=40), Durations(seconds))
    assert found.period_s == pytest.approx(2.1 / 4)


def _wide(pool: Any) -> Any:
    from dataclasses import replace

    return replace(pool, replicas=tuple(replace(replica, capacity=16) for replica in pool.replicas))


# An evaluation measures what the program carries ---------------------------------------------------------------


def evaluated(name: str) -> tuple[Graph, Graph]:
    found = load(FILE + name)
    made = trace(found)
    return made, trace_evaluation(found, made, EVALUATION)


@pytest.mark.parametrize(
    ("name", "given", "offered"),
    [
        ("measures_another", "'policy'", '"proposer", "solver"'),
        ("measures_nothing", "'solvr'", '"proposer", "solver"'),
        ("measures_a_source", "'prompts_of_mine', which is a source", '"proposer", "solver"'),
        ("measures_another_type", "'seen', a Seen", '"policy"'),
    ],
)
def test_an_evaluation_of_what_the_program_does_not_carry_is_refused(name: str, given: str, offered: str) -> None:
    found = answer("check", FILE + name, [])
    (fault,) = found["faults"]
    assert fault["what"].endswith("evaluation held: argument 'policy'")
    assert given in fault["given"]
    assert fault["needed"].endswith(f"held.of(policy=NAME)), NAME one of {offered}")
    assert fault["where"].startswith(FILE.rstrip(":"))
    assert answer("run", FILE + name, [])["faults"] == found["faults"]
    assert answer("run", FILE + name, ["--eval-groups", "0"])["faults"] == []


def test_a_pointed_evaluation_reads_the_programs_own_value() -> None:
    made, evaluation = evaluated("measures_solver")
    assert evaluation.argument("solver") == made.argument("solver")
    assert [a.name for a in evaluation.arguments] == ["solver", "evaluate.prompts"]
    assert evaluation["evaluate.broadcast"].inputs[0].ref.node == "solver"
    assert [(name, ref.node) for name, ref in evaluation.results] == [("solver", "solver")]
    assert str(evaluation).startswith("def held(solver: FakeAverage, prompts: FakePrompts")
    assert not check(evaluation)


def test_options_of_the_evaluation_that_the_program_has_too_are_the_programs() -> None:
    guessing = load("guessing")
    made = trace(guessing, {"turns": 5, "samples": 3})
    evaluation = trace_evaluation(guessing, made, EVALUATION)
    assert evaluation.options == (("turns", 5),)
    spoken = evaluation["evaluate.generate"]
    assert (spoken.turns, dict(spoken.options)["samples"]) == (5, 1)


def test_an_option_of_the_evaluation_with_a_default_of_its_own_stays() -> None:
    made = trace(load(FILE + "measured_greedily"), {"temperature": 0.5, "samples": 2})
    evaluation = trace_evaluation(load(FILE + "measured_greedily"), made, EVALUATION)
    assert dict(evaluation.options) == {"temperature": 0.0, "samples": 2}


def test_what_cannot_be_pointed_is_refused() -> None:
    held = load(FILE + "held")
    with pytest.raises(GraphError, match=r"given   'polcy'\n.*the nearest: policy"):
        held.of(polcy="solver")
    with pytest.raises(GraphError, match=r"\[bad-name\]"):
        held.of(policy="a solver")
    with pytest.raises(GraphError, match="as the argument 'prompts' is called"):
        held.of(policy="prompts")
    with pytest.raises(
        GraphError, match=r"given   'prompts', which is a source\n    needed  a carried argument: policy"
    ):
        trace(held.of(prompts="problems"))
    assert held.names == {}


@PROCESSES
def test_a_pointed_evaluation_measures_the_value_and_makes_no_other(tmp_path: Path, processes: bool) -> None:
    made = make_run(tmp_path / "run", FILE + "measures_solver", {}, replace(TOY, eval_groups=4), evaluate=True)
    run_to_end(made) if processes else run_here(made)
    part = CheckpointShard(made / "checkpoints" / f"{UPDATES:08d}", "trainer/0", 0)
    sums = {name: float(part.carried(name)[0]["values"].sum()) for name in ("proposer", "solver")}
    with pytest.raises(KeyError):
        part.carried("policy")
    said = summary(made)
    assert said["accuracy_after"] == pytest.approx(sums["solver"], abs=1e-5)
    assert said["accuracy_before"] == pytest.approx(64.0, abs=1e-5)
    assert len({round(number, 4) for number in (64.0, *sums.values())}) == 3


# Calls with names of their own -----------------------------------------------------------------------------------


def test_a_call_has_the_name_that_it_is_given() -> None:
    made = graph("named")
    fired = {node.name: node.label for node in made.nodes if node.construct == "call"}
    assert list(fired.values()) == ["asks", "answers", "fake_score", "fake_update", "worth", "solver"]
    assert [name for name, label in fired.items() if name != label] == ["solver:fake_update"]  # an argument's name
    assert dict(made.results)["solver"].node == "solver:fake_update"
    assert made["asks"].op == made["answers"].op
    assert Graph.from_json(made.to_json()) == made
    assert not check(made)
    shown = [line.partition("# ")[2].partition(",")[0] for line in str(made).splitlines() if "#" in line]
    assert {"asks", "answers", "solver"} < set(shown)
    assert columns_of(made) == {
        "broadcast": {"broadcast"},
        "asks": {"fake_generate", "asks.fake_generate"},
        "broadcast_2": {"broadcast_2.broadcast"},
        "answers": {"answers.fake_generate"},
        "fake_score": {"fake_score"},
        "fake_update": {"fake_update"},
        "worth": {"worth.fake_score"},
        "solver:fake_update": {"solver.fake_update"},
    }


def test_a_name_that_another_call_has_or_that_is_none_is_refused() -> None:
    with pytest.raises(GraphError, match=r"given   'solver', the name of the call at .*:\d+") as error:
        graph("named_twice")
    assert error.value.faults[0].where.startswith(FILE.rstrip(":"))
    call = load(FILE + "follow")
    for name in ("", "a b", "a.b", "a:b", "ä", "1a", "x" * 65, None):
        with pytest.raises(GraphError, match=r"\[bad-name\]"):
            call.named(name)
    assert call.label == ""


def test_flags_of_a_simulation_take_names_of_calls() -> None:
    made = graph("named")
    _, means = timing(made, ["solver=0.5", "asks=0.25", "fake_update=0.125"])
    assert (means["solver:fake_update"], means["asks"], means["fake_update"]) == (0.5, 0.25, 0.125)
    with pytest.raises(CommandError, match="needed one of asks, answers, fake_score, fake_update, worth, solver, pub"):
        timing(made, ["slover=1"])


@PROCESSES
def test_figures_of_a_named_call_stand_under_its_name(tmp_path: Path, processes: bool) -> None:
    folder = run(tmp_path, "named", processes=processes)
    for row in rows(folder):
        assert (row["tokens"], row["solver.tokens"]) == (4 * 4 * BATCH, 2 * 4 * BATCH)
        assert row["loss"] != row["solver.loss"]
        assert row["reward_mean"] != row["worth.reward_mean"]
        assert "fake_update_2.loss" not in row
        assert columns([row], "loss") == ["loss", "solver.loss"]


# Plain values that are carried ------------------------------------------------------------------------------------


@PROCESSES
def test_plain_values_are_carried_kept_sent_and_gone_on_with(tmp_path: Path, processes: bool) -> None:
    """The next update reads what an update returns, and other pools receive it; a resume changes nothing."""
    launch = run_to_end if processes else run_here
    whole = launch(prepared(tmp_path, "plainly"))
    parted = launch(prepared(tmp_path, "plainly", replace(TOY, updates=2)))
    launch(with_updates(parted, UPDATES))
    (kept, gone_on) = (
        CheckpointShard(folder / "checkpoints" / f"{UPDATES:08d}", "trainer/0", 0).carried("baseline")[1]
        for folder in (whole, parted)
    )
    found = rows(whole)
    assert kept == gone_on
    assert (kept["rows"], kept["mean"]) == (UPDATES * BATCH * 4, found[-1]["mean"])
    value = load(FILE + "Baseline")()
    value.restore({}, kept)
    assert value.course == tuple(row["mean"] for row in found)
    assert value.words == {"last": ["x"]}
    assert [row["sent_mean"] for row in found[1:]] == pytest.approx([row["mean"] for row in found[:-1]])
    assert [row["sent_rows"] for row in found] == [row["rows"] - BATCH * 4 for row in found]
    assert [row["mean"] for row in rows(parted)] == [row["mean"] for row in found]


def test_what_is_not_plain_is_refused_where_it_is_set(tmp_path: Path) -> None:
    said = failed(tmp_path, "plainly", tensor=True)["error"]
    assert "Baseline.mean: given a torch.Tensor, needed a number" in said
    assert "follow_rewards[0]" in said
