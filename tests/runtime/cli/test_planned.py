"""`penstock plan`, and `penstock simulate` with a cluster or a plan."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import load, trace
from penstock.runtime.cli import plan
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.plan.model_shape import SHAPES
from penstock.runtime.plan.planner import plan as planned
from penstock.runtime.plan.workload import Lognormal, Workload

from .conftest import Facts, Refuse, Say

H100 = ("--cluster", "1x8xH100", "--model", "qwen3-4b")
SMALL = (*H100, "--batch", 16, "--lengths", "300,0.7")
WORK = (*H100, "--batch", 8, "--lengths", "200,0.7", "--max-tokens", 1024)
SHOWN = (*WORK, "--updates", 24, "--width", 100)
FILE = '[[hosts]]\nname = "a"\ncores = 8\ndevices = ["cuda:0", "cuda:1"]\ngpu = "H100"\n'


def test_json_has_the_plan_its_pools_and_its_alternatives(facts: Facts, tmp_path: Path) -> None:
    said = facts("plan", "aipo", *SMALL)
    assert (said["optimal"], said["gap"]) == (True, 0)
    assert said["period_s"] > 0
    trainer, generator, scorer = said["pools"]
    assert [pool["name"] for pool in said["pools"]] == ["trainer", "generator", "scorer"]
    assert trainer["nodes"] == ["aipo_update"]
    assert sum(trainer["memory"].values()) <= trainer["memory_available"]
    assert generator["precision"] == "bf16"
    narrow = facts("plan", "aipo", *SMALL, "--generator-precision", "fp8")
    assert narrow["pools"][1]["precision"] == "fp8"
    assert scorer["devices"] == 0
    assert trainer["devices"] + generator["devices"] <= said["gpus"] == 8 or "shares" in generator
    names = ["4 + 4 (trainer + generator)", "2 + 6 (trainer + generator)", "all shared, synchronous"]
    assert [other["name"] for other in said["alternatives"]][1:] == names
    assert all(other["period_s"] >= said["period_s"] and other["bound"] for other in said["alternatives"])
    (tmp_path / "cluster.toml").write_text(FILE)
    assert facts("plan", "aipo", "--cluster", tmp_path / "cluster.toml", "--model", "qwen3-0.6b")["gpus"] == 2


def test_a_period_has_a_range_and_two_digits_and_says_that_it_is_not_calibrated(facts: Facts, say: Say) -> None:
    for verb in (("plan",), ("simulate", "--updates", 8)):
        found = facts(verb[0], "aipo", *WORK, *verb[1:])
        low, high = found["period_range_s"]
        assert low <= found["period_s"] <= high
        assert found["calibrated"] is None
        assert float(f"{found['period_s']:.2g}") == found["period_s"]
        (line,) = re.findall(r"(?m)^period .*\n?.*", say(verb[0], "aipo", *WORK, *verb[1:]))
        assert "likely (not calibrated" in " ".join(line.split())
        assert not re.search(r"\d{3}\.\d|\d\.\d{3}", line)


def test_what_is_simulated_may_have_more_ranks_than_this_machine_has_room_for(facts: Facts) -> None:
    many = facts("simulate", "toy", "--generators", 200, "--updates", 2)
    assert len([lane for lane in many["busy_s"] if lane.startswith("generator/")]) == 200
    large = facts("simulate", "aipo", "--cluster", "16x8xH100", "--model", "llama-8b", "--batch", 64, "--updates", 2)
    assert len([lane for lane in large["busy_s"] if lane.startswith("generator/")]) > 16


def test_text_says_what_is_best_what_bounds_it_and_which_gpus_alternatives_take(say: Say) -> None:
    shown = say("plan", "aipo", *SMALL, "--lag", 0)
    for line in (
        r"(?m)^period .*\n? *.*optimal\s+under\s+the\s+model$", "bound ", "memory ", "runner-up",
        r"all shared, synchronous +\S+ m?s, .*8 shared H100: ", r"2 \+ 6 \(",
        r"4 \+ 4 \(trainer \+ generator\) +\S+ m?s, \S+ % more, 4 \+ 4 H100: ",
    ):  # fmt: skip
        assert re.search(line, shown), line
    mixed = say("plan", "aipo", "--cluster", "1x8xH100+1x8xA100", *SMALL[2:])
    assert re.search(r"8 \+ 8 \(.*, 8 H100 \+ 8 A100:", mixed)


def test_optimal_is_not_printed_of_a_search_that_was_cut_off() -> None:
    work = Workload(SHAPES["qwen3-4b"], 16, 8, Lognormal(300, 0.7, 4096))
    whole = planned(trace(load("aipo")), read_cluster("1x8xH100"), work)
    for share, said in ((0.9, "no plan is more than 10.0 % faster"), (0.9999, "no plan is even 0.1 % faster")):
        cut = replace(whole.outcome, proved=False, floor=whole.best.period_s * share)
        shown = plan.text(replace(whole, outcome=cut), "1x8xH100")
        assert "optimal" not in shown
        assert said in " ".join(shown.split())  # lines are wrapped at the terminal's width


@pytest.mark.parametrize("name", ["ppo", "rlhf", "tool_use", "tis", "decoupled_ppo", "online_dpo"])
def test_programs_with_more_models_passes_or_turns_are_planned(name: str, facts: Facts) -> None:
    said = facts("plan", name, *H100, "--batch", 8)
    assert said["optimal"] is True
    assert {pool["name"] for pool in said["pools"]} >= {"trainer", "generator"}


def test_the_share_that_a_filter_keeps_is_named_and_can_be_given(facts: Facts, say: Say) -> None:
    periods = []
    for words, share in ((), "70%"), (("--kept", 0.4), "40%"):
        said = facts("plan", "dapo", *H100, "--batch", 8, *words)
        assert f"keep leaves {share} of the groups (--kept)" in said["assumptions"][0]
        periods.append(said["period_s"])
    assert periods[1] > periods[0]
    assert re.search(r"(?m)^assumed +keep leaves 70% of the groups", say("plan", "dapo", *H100, "--batch", 8))


def test_a_plan_says_that_it_does_not_follow_where_the_cluster_file_has_pools(facts: Facts, tmp_path: Path) -> None:
    host = '[[hosts]]\nname = "{}"\ncores = 8\ndevices = ["cuda:0", "cuda:1"]\ngpu = "H100"\n'
    (tmp_path / "c.toml").write_text(host.format("a") + host.format("b") + '[pools]\ngenerator = "a"\nscorer = "b"\n')
    words = ("--cluster", tmp_path / "c.toml", "--model", "qwen3-0.6b", "--batch", 8)
    (said,) = facts("plan", "aipo", *words)["assumptions"]
    assert said.startswith("generator ")


def test_what_measures_on_a_slower_clock_is_not_of_the_plan(say: Say) -> None:
    shown = say("plan", "curriculum", *H100, "--batch", 8)
    assert re.search(r"(?m)^examiner +on machines of its own: measure$", shown)
    assert re.search(r"(?m)^curriculum +on CPUs: choose, remember$", shown)


def test_a_planned_schedule_is_told_and_written_as_pictures_page_and_trace(say: Say, tmp_path: Path) -> None:
    files = {flag: tmp_path / f"schedule.{flag}" for flag in ("svg", "html", "trace")}
    shown = say("simulate", "aipo", *SHOWN, *(word for flag, file in files.items() for word in (f"--{flag}", file)))
    assert shown.startswith("aipo with qwen3-4b on ")
    assert max(map(len, shown.splitlines())) <= 100
    for line in (
        r"period  \S+ m?s per update by the model, ", r"the\s+planner\s+says",
        r"rate +.* tokens and .* groups per second",
        r"lag +\d", "the bound is 1", r"slots +.* in use; .* in tails", r"queues +generate +mean", r"pools +trainer",
        "generator/0", "end of an update",
    ):  # fmt: skip
        assert re.search(line, shown), line
    assert files["svg"].read_text().startswith("<svg")
    assert "aipo with qwen3-4b" in files["html"].read_text()
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 64


def test_json_has_all_of_a_schedule_and_a_plan_file_gives_the_same(
    facts: Facts, say: Say, refuse: Refuse, tmp_path: Path
) -> None:
    said = facts("simulate", "aipo", *SHOWN)
    assert said["planned_s"] <= said["period_s"] * 1.5
    assert said["tokens_per_s_per_gpu"] * said["gpus"] == pytest.approx(said["tokens_per_s"])
    assert said["groups_per_s"] == pytest.approx(8 / said["period_s"], rel=0.05)
    assert sum(said["lags"].values()) == 24 * 8
    assert max(map(int, said["lags"])) <= said["lag"] <= 1
    assert set(said["queues"]) == {"generate", "score", "group_advantage", "aipo_update"}
    assert 0 < said["slots"]["tail_occupancy"] <= said["slots"]["occupancy"] <= 1
    for pool in said["pools"].values():
        assert pool["busy"] + sum(pool["idle"].values()) == pytest.approx(1)
    assert [row["lag"] for row in said["effect_of_lag"]] in ([0, 1, 2, 3, 4], [])
    file = tmp_path / "plan.json"
    file.write_text(say("plan", "aipo", *WORK, "--json"))
    assert facts("simulate", "aipo", "--plan", file, "--updates", 24) == said
    status, why = refuse("simulate", "aipo", "--plan", file, "--samples", 4)
    assert (status, "given a plan for samples 8, needed 4, as the program has" in why) == (2, True)
    slow = facts("simulate", "aipo", *SHOWN, "--duration", "score=3")  # small CPU nodes take their given seconds
    assert slow["period_s"] > said["period_s"] + 10


def test_the_effect_of_lag_says_of_how_many_updates_it_is(facts: Facts, say: Say) -> None:
    shown = say("simulate", "aipo", *WORK, "--updates", 30, "--width", 100)
    assert "the period of runs of 24 updates, while that above is of 30" in shown
    said = facts("simulate", "aipo", *WORK, "--updates", 24)
    same = next(row for row in said["effect_of_lag"] if row["lag"] == said["lag"])
    assert (same["period_s"], same["updates"]) == (said["period_s"], 24)
