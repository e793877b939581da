import json
import re
from copy import deepcopy
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import broadcast, load, node, program, trace
from penstock.graph.ir import Firing, Node
from penstock.graph.types import COLUMNS, Mean, Metrics, Policy, Prompts, Rewards, Rollouts
from penstock.nodes.generate import generate
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.metrics import (
    LOST,
    HalfRow,
    MetricsFile,
    Rows,
    columns,
    combine,
    counting,
    keep_rows,
    read_rows,
    read_undamaged,
    scalars,
)

from .rows import columns_of

# Nodes whose tokens make the rates of rows.
COUNTED = {"learn", "critic", "generate", "generate_2", "asks"}


def row(update: int, **figures: Any) -> dict[str, Any]:
    return {"update": update, "version": update + 1, "time_s": float(update), **figures}


def made(rows: Rows, update: int, now: float = 1.0, **metrics: float) -> dict[str, Any]:
    """Return the row of an update after "learn" has reported these metrics."""
    assert rows.update(update, "learn", metrics, seconds=1.0)
    return rows.row(update, now, {})


def nodes_of(*functions: str) -> list[Node]:
    """Return a node for each function, named as it."""
    return [Node(name, f"module:{name}", (), ()) for name in functions]


@pytest.fixture
def rows() -> Rows:
    return Rows({"learn": 1}, now=0.0, counted=COUNTED)


def test_groups_combine_by_mean_sum_and_extremes() -> None:
    parts = [
        {"reward_mean": 1.0, "tokens": 3.0, "lag_max": 0.0},
        {"reward_mean": 0.0, "tokens": 5.0, "lag_max": 2.0},
    ]
    combined = {"reward_mean": 0.5, "tokens": 8.0, "lag_max": 2.0, "turns_min": 4.0}
    assert combine([*parts, {"turns_min": 4.0}]) == combined
    assert combine([{"epoch": 0.5}, {"epoch": 0.75}, {"epoch": 0.25}]) == {"epoch": 0.75}
    assert combine([{"finished": Mean.of([1, 0, 0])}, {"finished": Mean(1.0, 1)}]) == {"finished": 0.5}
    # Values with and without counts, as after a resume from a checkpoint without counts.
    assert combine([{"finished": Mean(1.0, 3)}, {"finished": 0.0}]) == {"finished": 0.5}
    # Only counts that a message can carry are accepted.
    for count in (-1, 1e19, nan):
        with pytest.raises(ValueError, match=rf"given a count of {re.escape(str(count))}, needed a number from 0 to"):
            Mean(0.5, count)


def test_a_mean_has_a_count_in_copies_too_and_is_not_a_number_between_infinities() -> None:
    kept = deepcopy({"kept": Mean(0.5, 3)})["kept"]
    assert (kept, kept.count) == (0.5, 3.0)
    between = Mean.of([inf, -inf])
    assert isnan(between)
    assert between.count == 2.0


def test_shares_of_tokens_are_of_all_tokens_and_lengths_of_all_rows_whatever_group_or_turn_they_are_of(
    rows: Rows,
) -> None:
    def spoken(tokens: float, said: int, stale: float) -> dict[str, float]:
        return {"response_length": Mean(tokens / said, said), "stale_cache": Mean(stale, tokens)}

    rows.group(Firing("generate", 0), {**spoken(80.0, 8, 0.0), "mismatch": 2.0})
    rows.group(Firing("generate", 0, 1), {**spoken(1.0, 1, 1.0), "mismatch": 4.0})
    rows.group(Firing("generate", 1), spoken(19.0, 1, 1.0))
    rows.group(Firing("generate", 1, 1), {"generated_tokens": 0.0})  # no conversation went on
    rows.batch(0, (0, 1))
    row = made(rows, 0)
    assert (row["response_length"], row["stale_cache"], row["mismatch"]) == (10.0, pytest.approx(0.2), 3.0)


def test_a_row_has_its_own_groups_and_the_updates_figures() -> None:
    rows = Rows({"learn": 1}, now=100.0, elapsed=60.0, counted=COUNTED)
    for ordinal in range(4):
        rows.group(Firing("score", ordinal), {"reward_mean": float(ordinal)})
        rows.group(Firing("generate", ordinal), {"prompt_tokens": 10.0, "generated_tokens": 15.0})
    rows.batch(0, (0, 1))
    rows.batch(1, (2, 3))
    rows.synced(0.25)
    assert rows.update(0, "learn", {"loss": -0.5, "tokens": 20.0}, seconds=2.0)
    first = rows.row(0, 104.0, {"trainer": {"busy": 3.0, "data": 1.0}})
    figures = {"reward_mean": 0.5, "prompt_tokens": 20.0, "tokens": 20.0, "loss": -0.5, "generate_tokens_per_s": 15.0}
    seconds = {"time_s": 64.0, "seconds": 4.0, "update_s": 2.0, "sync_s": 0.25, "train_tokens_per_s": 10.0}
    pools = {"pools": {"trainer": {"busy": 3.0, "data": 1.0}}}
    assert first == {"update": 0, "version": 1, "groups": 2, **figures, **seconds, **pools}
    second = made(rows, 1, 105.0, tokens=7.0)
    assert (second["reward_mean"], second["tokens"], second["seconds"]) == (2.5, 7.0, 1.0)
    assert "sync_s" not in second  # no weights were swapped in since the first row


def test_a_rows_own_columns_are_those_that_nodes_may_not_report(rows: Rows) -> None:
    rows.group(Firing("generate", 0), {"generated_tokens": 5.0})
    rows.synced(0.5)
    rows.update(0, "learn", {"loss": nan, "tokens": 5.0}, seconds=1.0)
    assert rows.row(0, 1.0, {}, dict.fromkeys(LOST, 0)).keys() == COLUMNS | {"loss", "tokens"}


def test_where_no_node_says_anything_of_tokens_there_is_no_rate_of_them(rows: Rows) -> None:
    rates = {"generate_tokens_per_s", "train_tokens_per_s"}
    assert not rates & made(rows, 0, 1.0, loss=0.5).keys()
    rows.group(Firing("generate", 9), {"generated_tokens": 8.0})
    found = [made(rows, update, update + 1.0, loss=0.5, tokens=0.0) for update in (1, 2)]
    assert [(row["generate_tokens_per_s"], row["train_tokens_per_s"]) for row in found] == [(8.0, 0.0), (0.0, 0.0)]


def test_of_a_node_that_neither_decodes_nor_trains_tokens_change_no_rate() -> None:
    rows = Rows({"learn": 1, "watch": 1}, now=0.0, counted=COUNTED)
    rows.group(Firing("generate", 0), {"generated_tokens": 8.0})
    rows.group(Firing("judge", 0), {"generated_tokens": 100000.0})
    rows.batch(0, (0,))
    rows.update(0, "watch", {"tokens": 1e9, "generated_tokens": 5.0}, seconds=1.0)
    row = made(rows, 0, 2.0, tokens=6.0)
    assert (row["generate_tokens_per_s"], row["train_tokens_per_s"]) == (4.0, 3.0)
    # They are metrics as any.
    assert {100000.0, 5.0} == {row[name] for name in row if name.endswith("generated_tokens")}


@node(pool="scorer")
def noisy(rollouts: Rollouts) -> tuple[Rewards, Metrics]:
    return Rewards(rollouts.lengths().float()), {"generated_tokens": 1e5}


@node(pool="trainer", clock="update")
def watch(policy: Policy, rollouts: Rollouts) -> Metrics:
    return {"tokens": float(len(rollouts))}


@node(pool="trainer", clock="update")
def own_update(policy: Policy, rollouts: Rollouts, rewards: Rewards) -> tuple[Policy, Metrics]:
    return policy, {"tokens": 1.0}


@program
def watched(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=2)
    watch(policy, rollouts)
    return own_update(policy, rollouts, noisy(rollouts))


def test_rates_are_of_the_tokens_of_nodes_that_decode_or_train() -> None:
    assert counting([trace(watched, {})]) == {"generate", "own_update"}
    talking = trace(load("penstock.programs.tool_use:tool_use"), {})
    assert counting([talking]) == {"generate", "python_tool", "aipo_update"}


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_figure_that_is_no_number_is_null_with_a_note_of_what_it_was(rows: Rows, bad: float) -> None:
    rows.batch(0, (0,))
    rows.group(Firing("score", 0), {"reward_mean": bad, "length": 1.0})
    row = made(rows, 0, loss=0.5, tokens=bad)
    assert row["reward_mean"] is None
    assert (row["length"], row["loss"]) == (1.0, 0.5)
    assert row["not_finite"] == dict.fromkeys(("reward_mean", "tokens", "train_tokens_per_s"), str(bad))
    json.dumps(row, allow_nan=False)


def test_rows_with_a_figure_that_is_too_large_to_be_read_back_are_read(rows: Rows, tmp_path: Path) -> None:
    written = [made(rows, update, loss=loss) for update, loss in enumerate((1e300, -1.5e308, 0.5))]
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for row in written:
        file.append(row)
    file.close()
    read = read_rows(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in read] == [1e300, None, 0.5]
    assert read[1]["not_finite"] == {"loss": "-1.5e+308"}


def test_a_figure_has_a_column_for_each_node_with_a_name_and_none_twice() -> None:
    rows = [{"loss": x, "solver.loss": x, "proposer.loss": 2.0} for x in (1.0, 2.0)]
    assert columns(rows, "loss") == ["proposer.loss", "solver.loss"]
    assert columns([{"loss": 1.0, "policy_update_2.loss": 2.0}], "loss") == ["loss", "policy_update_2.loss"]
    assert columns([{"loss": None}], "loss") == ["loss"]
    assert columns([{"update": 0}], "loss") == []


def test_tokens_count_as_generated_when_they_are_whatever_becomes_of_their_group(rows: Rows) -> None:
    """Tokens of all turns and generators count, also of groups used later, dropped or never; replayed ones do not."""
    rows.group(Firing("generate", 0), {"generated_tokens": 7.0})
    rows.restart(now=0.0)  # earlier tokens are in no row
    for ordinal in range(4):
        rows.group(Firing("generate", ordinal), {"generated_tokens": 10.0})
        rows.group(Firing("generate", ordinal, 1), {"generated_tokens": 2.0, "response_length": 2.0})
        rows.group(Firing("generate_2", ordinal), {"generated_tokens": 1.0})
        rows.group(Firing("asks", ordinal), {"generated_tokens": 3.0})
    rows.batch(0, (1,))  # group 0 was dropped; groups 2 and 3 are used later
    row = made(rows, 0, 2.0, tokens=30.0, replayed_tokens=20.0)
    assert (row["generate_tokens_per_s"], row["train_tokens_per_s"]) == (4 * 16 / 2, 30.0)
    assert not [name for name in row if name.endswith("generated_tokens")]
    held = rows.to_json({"groups": [[2, ["generate"], 0], [3, ["generate"], 0]], "trailing": {}})
    resumed = Rows({"learn": 1}, now=5.0, counted=COUNTED)
    resumed.restore(held)
    for each in (rows, resumed):
        each.batch(1, (2,))
        row = made(each, 1, 6.0, tokens=12.0)
        assert (row["generate_tokens_per_s"], row["response_length"]) == (0.0, 2.0)


def test_a_column_is_of_the_first_node_that_reports_it_and_others_have_their_names_before_it() -> None:
    nodes, order = {"learn": 1, "critic": 1}, nodes_of("judge", "shape", "learn", "critic")
    rows = Rows(nodes, 0.0, order=order, counted=COUNTED)

    def row(rows: Rows, update: int, **rewards: float) -> dict[str, float]:
        for name in ("shape", "judge"):
            if name in rewards:
                loss = {"loss": 9.0} if name == "shape" else {}
                rows.group(Firing(name, update), {"reward_mean": rewards[name], **loss})
        rows.batch(update, (update,))
        rows.update(update, "critic", {"loss": 2.0, "tokens": 3.0}, seconds=1.0)
        assert rows.update(update, "learn", {"loss": 1.0, "tokens": 5.0}, seconds=1.0)
        made = rows.row(update, 1.0, {})
        assert made["train_tokens_per_s"] == 4.0
        return {name: made[name] for name in made if name.endswith(("reward_mean", "loss"))}

    # Columns of the updates stay theirs, although a group's node comes before them in the graph.
    losses = {"loss": 1.0, "critic.loss": 2.0, "shape.loss": 9.0}
    assert row(rows, 0, judge=0.5, shape=0.25) == {"reward_mean": 0.5, "shape.reward_mean": 0.25, **losses}
    resumed = Rows(nodes, 0.0, order=order, counted=COUNTED)
    resumed.restore(json.loads(json.dumps(rows.to_json({"groups": [], "trailing": {}}))))
    for each in (rows, resumed):
        assert row(each, 1, shape=0.75) == {"shape.reward_mean": 0.75, **losses}


def test_tokens_by_lag_are_of_one_node_though_another_one_has_had_a_lag_first() -> None:
    rows = Rows({"learn": 1, "critic": 1}, 0.0, order=nodes_of("learn", "critic"))
    for update in range(2):
        rows.update(update, "critic", {"tokens_lag_1": 9.0, "tokens_lag_2": 110.0}, seconds=1.0)
        rows.update(update, "learn", {"tokens_lag_1": 73.0} if update else {"tokens_lag_0": 78.0}, seconds=1.0)
        row = rows.row(update, 1.0, {})
        counted = {name: row[name] for name in row if "tokens_lag" in name}
        own = {"tokens_lag_1": 73.0} if update else {"tokens_lag_0": 78.0}
        assert counted == {**own, "critic.tokens_lag_1": 9.0, "critic.tokens_lag_2": 110.0}


@pytest.mark.parametrize("prompt", [True, False])
def test_whose_column_it_is_does_not_depend_on_when_a_node_off_the_critical_path_reports(prompt: bool) -> None:
    rows = Rows({"learn": 1}, 0.0, order=nodes_of("watch", "judge", "learn"))
    for update in range(2):
        rows.group(Firing("judge", update), {"kl": 1.0})
        rows.batch(update, (update,))
        if prompt or update:
            rows.trailing(update, "watch", {"kl": 2.0})
        rows.update(update, "learn", {}, seconds=1.0)
        made = rows.row(update, 1.0, {})
        assert made["kl"] == 1.0
    assert made["watch.kl"] == 2.0


def test_a_node_that_an_argument_shares_its_name_with_is_called_as_the_program_calls_it() -> None:
    rows = Rows({"learn": 1, "solver:critic": 1}, 0.0, order=nodes_of("learn", "solver:critic"))
    rows.batch(0, (0,))
    rows.update(0, "solver:critic", {"loss": 2.0}, seconds=1.0)
    assert rows.update(0, "learn", {"loss": 1.0}, seconds=1.0)
    made = rows.row(0, 1.0, {})
    assert {name: made[name] for name in made if "loss" in name} == {"loss": 1.0, "solver.loss": 2.0}


def test_two_nodes_of_a_function_report_apart_and_nodes_of_different_functions_under_plain_names() -> None:
    assert columns_of(trace(load("remax"))) == {
        "broadcast": {"broadcast"},
        "generate": {"generate"},
        "generate_2": {"generate_2.generate"},
        "score": {"score"},
        "score_2": {"score_2.score"},
        "greedy_advantage": {"greedy_advantage"},
        "policy_update": {"policy_update"},
    }


def test_further_nodes_of_a_function_never_have_the_plain_name() -> None:
    """This holds for metrics that the first node does not report, and however late it reports."""
    order = [Node("learn", "m:learn", (), ()), Node("score", "m:score", (), ()), Node("score_2", "m:score", (), ())]
    rows = Rows({"learn": 1}, 0.0, order=order)
    for update in range(2):
        rows.group(Firing("score_2", update), {"reward_mean": 2.0})
        if update:
            rows.group(Firing("score", update), {"reward_mean": 1.0})
        rows.batch(update, (update,))
        row = made(rows, update)
        assert row["score_2.reward_mean"] == 2.0
        assert row.get("reward_mean") == (1.0 if update else None)


def test_a_node_that_the_program_has_named_reports_under_its_label_too_and_its_update_once() -> None:
    rows = Rows({}, 0.0, order=[Node("held:measure", "m:measure", (), ()), Node("learn", "m:learn", (), ())])
    rows.trailing(0, "held:measure", {"accuracy": 0.5})
    assert rows.pending == [{"accuracy": 0.5, "held.accuracy": 0.5, "held_update": 0.0}]


def test_figures_of_a_group_that_an_update_passes_over_are_forgotten_and_count_nowhere(rows: Rows) -> None:
    for update in range(50):
        lost, taken = 2 * update, 2 * update + 1
        rows.group(Firing("score", lost), {"reward_mean": 9.0})
        rows.group(Firing("score", taken), {"reward_mean": 1.0})
        rows.group(Firing("generate", taken + 1), {"tokens": 3.0})  # for a later update
        rows.batch(update, (taken,))
        assert made(rows, update)["reward_mean"] == 1.0
        rows.group(Firing("generate", lost), {"tokens": 5.0})  # it was in progress when its group was lost
        assert set(rows.groups) == {lost, taken + 1}


def test_figures_of_a_group_that_is_overtaken_are_in_the_row_of_its_update(rows: Rows) -> None:
    for ordinal in range(3):
        rows.group(Firing("score", ordinal), {"reward_mean": float(ordinal)})
    rows.batch(0, (2,))
    assert rows.update(0, "learn", {}, seconds=1.0)
    assert rows.row(0, 1.0, {}, overtaken={1})["reward_mean"] == 2.0
    assert set(rows.groups) == {1}  # 0 was dropped
    rows.batch(1, (1,))
    assert made(rows, 1)["reward_mean"] == 1.0


def test_an_update_in_parts_has_one_row(rows: Rows) -> None:
    for ordinal in range(4):
        rows.group(Firing("score", ordinal), {"reward_mean": float(ordinal)})
    rows.batch(0, (3, 1))
    rows.part(0, "learn", 2.0)
    rows.batch(0, (0, 2))
    row = made(rows, 0, tokens=6.0)
    assert (row["groups"], row["update_s"], row["train_tokens_per_s"], row["reward_mean"]) == (4, 3.0, 2.0, 1.5)
    assert made(rows, 1)["update_s"] == 1.0


def test_an_update_without_groups_leaves_those_of_the_next_one(rows: Rows) -> None:
    rows.group(Firing("generate", 0), {"tokens": 3.0})
    rows.batch(0, ())
    made(rows, 0)
    assert set(rows.groups) == {0}


def test_a_row_waits_for_all_nodes_of_its_update() -> None:
    rows = Rows({"critic": 1, "learn": 1}, now=0.0, counted=COUNTED)
    assert not rows.update(0, "critic", {"value_loss": 1.0}, 1.0)
    assert made(rows, 0)["value_loss"] == 1.0


def test_a_firing_that_is_done_again_counts_once_and_each_turn_of_a_group_counts(rows: Rows) -> None:
    for turn, tokens in ((0, 7.0), (0, 3.0), (1, 5.0)):
        rows.group(Firing("speak", 0, turn), {"tokens": tokens})
    rows.batch(0, (0,))
    assert made(rows, 0)["tokens"] == 8.0


def test_a_resumed_run_has_the_figures_that_its_cut_knows_and_no_others() -> None:
    before, after = Rows({"learn": 1}, now=0.0, counted=COUNTED), Rows({"learn": 1}, now=0.0, counted=COUNTED)
    before.group(Firing("generate", 4), {"tokens": 3.0, "mismatch": inf})
    before.group(Firing("score", 4), {"reward_mean": Mean(0.1, 3), "worst": Mean(-inf, 2)})
    before.group(Firing("generate", 5), {"tokens": 9.0})  # came during the cut's write, and will come again
    before.trailing(1, "measure", {"accuracy": 0.5})
    before.trailing(3, "watch", {"width": 2.0})  # likewise
    cut = {
        "groups": [[4, {"generate": "g/0", "score": "s/0"}, {}], [5, {}, {}]],
        "trailing": {"measure": 3, "watch": 3},
    }
    after.restore(json.loads(json.dumps(before.to_json(cut), allow_nan=False)))
    assert after.groups == {4: before.groups[4]}
    scored = after.groups[4]["score", 0].values()
    assert [x.count for x in scored if isinstance(x, Mean)] == [3.0, 2.0]
    assert after.pending == [{"accuracy": 0.5, "measure_update": 1.0}]


def test_each_row_takes_the_oldest_figures_of_a_node_that_measures_and_none_are_lost(rows: Rows) -> None:
    for update, accuracy in ((1, 0.1), (3, 0.3), (5, 0.5)):
        rows.trailing(update, "measure", {"accuracy": accuracy})
    rows.trailing(5, "watch", {"width": 2.0})
    row = made(rows, 6)
    assert (row["accuracy"], row["measure_update"], row["width"], row["watch_update"]) == (0.1, 1.0, 2.0, 5.0)
    assert rows.pending == [{"accuracy": 0.3, "measure_update": 3.0}, {"accuracy": 0.5, "measure_update": 5.0}]


def test_a_resume_keeps_one_row_per_update(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keep_rows(path, 0) == []
    file = MetricsFile(path)
    for update in range(5):
        file.append(row(update, loss=0.0))
    file.close()
    with path.open("a") as torn:
        torn.write('{"update": 5, "ver')
    assert [r["update"] for r in keep_rows(path, 3)] == [0, 1, 2]
    file = MetricsFile(path)
    for update in range(3, 6):
        file.append(row(update, loss=1.0))
    assert [(r["update"], r["loss"]) for r in read_rows(path)] == [(u, float(u >= 3)) for u in range(6)]


def test_damage_behind_the_rows_that_a_resume_keeps_goes_and_other_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(row(update)) + "\n" for update in range(3)) + "oops\n" + json.dumps(row(4)) + "\n"
    path.write_text(text)
    with pytest.raises(RecordError, match=rf"{path}:4: .*or the file without this line"):
        keep_rows(path, 4)
    assert path.read_text() == text
    assert [r["update"] for r in keep_rows(path, 3)] == [0, 1, 2]
    assert [r["update"] for r in read_rows(path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "rows", "said"),
    [
        ('{"update": 0}\n{"upd', 1, r"m.jsonl:2: given half a line"),
        ('{"update": 0}\noops\n{"update": 2}\n', 1, r"m.jsonl:2: given something that is not JSON"),
        ('{"update": 0}\n[1]\n', 1, r"m.jsonl:2: Expected `object`"),
        ('{"update": 0}\n{}\n', 1, r"m.jsonl:2: .*`update`"),
    ],
)
def test_the_rows_before_damage_are_read_with_what_it_is(tmp_path: Path, text: str, rows: int, said: str) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    found, damage = read_undamaged(tmp_path / "m.jsonl")
    assert len(found) == rows
    assert re.search(said, str(damage))
    if isinstance(damage, HalfRow):  # as a kill leaves it
        assert read_rows(tmp_path / "m.jsonl") == found
    else:
        with pytest.raises(RecordError, match=said):
            read_rows(tmp_path / "m.jsonl")


def test_a_figure_that_json_cannot_say_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(row(0, loss=float("nan"), pools={"t": {"busy": float("inf")}}))
    assert read_rows(tmp_path / "m.jsonl") == [row(0, loss=None, pools={"t": {"busy": None}})]
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()


def test_scalars_are_numbers_by_path() -> None:
    assert list(scalars(row(3, pools={"trainer": {"busy": 0.5}}, note="x"))) == [
        ("version", 4.0),
        ("time_s", 3.0),
        ("pools/trainer/busy", 0.5),
    ]
