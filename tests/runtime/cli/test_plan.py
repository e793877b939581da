"""`penstock plan` in this process."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import load, trace
from penstock.runtime.cli import plan
from penstock.runtime.cli.main import main
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.plan.model_shape import SHAPES
from penstock.runtime.plan.planner import plan as planned
from penstock.runtime.plan.roles import AskedError
from penstock.runtime.plan.workload import Lognormal, Workload

pytestmark = pytest.mark.usefixtures("here")
Output = pytest.CaptureFixture[str]
SMALL = ("aipo", "--cluster", "1x8xH100", "--model", "qwen3-4b", "--batch", "16", "--lengths", "300,0.7")
FILE = """
[[hosts]]
name = "a"
cores = 8
devices = ["cuda:0", "cuda:1"]
gpu = "H100"
"""


def test_json_has_the_plan_its_pools_and_its_alternatives(capsys: Output) -> None:
    assert plan.main([*SMALL, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["optimal"] is True
    assert said["gap"] == 0
    assert said["period_s"] > 0
    trainer, generator, scorer = said["pools"]
    assert [pool["name"] for pool in said["pools"]] == ["trainer", "generator", "scorer"]
    assert trainer["nodes"] == ["aipo_update"]
    assert sum(trainer["memory"].values()) <= trainer["memory_available"]
    assert generator["precision"] in ("bf16", "fp8")
    assert scorer["devices"] == 0
    assert trainer["devices"] + generator["devices"] <= said["gpus"] == 8 or "shares" in generator
    assert [other["name"] for other in said["alternatives"]][1:] == [
        "half and half", "75:25 (generator : trainer)", "all shared, synchronous",
    ]  # fmt: skip
    assert all(other["period_s"] >= said["period_s"] and other["bound"] for other in said["alternatives"])


def test_text_says_what_is_best_and_what_bounds_it(capsys: Output) -> None:
    plan.main([*SMALL, "--lag", "0"])
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^period .*, optimal under the model$", shown)
    for word in ("bound ", "memory ", "runner-up", "half and half", "75:25", "all shared, synchronous"):
        assert word in shown
    assert re.search(r"all shared, synchronous +\S+ m?s, as planned, 8 shared H100: ", shown)
    assert re.search(r"half and half +\S+ m?s, \S+ % more, 4 \+ 4 H100: ", shown)


def test_alternatives_say_which_kinds_of_gpus_they_take(capsys: Output) -> None:
    words = ["--model", "qwen3-4b", "--batch", "16", "--lengths", "300,0.7"]
    plan.main(["aipo", "--cluster", "1x8xH100+1x8xA100", *words])
    assert re.search(r"half and half .*, 8 H100 \+ 8 A100:", capsys.readouterr().out)
    plan.main(["aipo", "--cluster", "1x8xA100", *words])
    assert re.search(r"half and half .*, 4 \+ 4 A100:", capsys.readouterr().out)


def test_optimal_is_not_printed_of_a_search_that_was_cut_off() -> None:
    graph = trace(load("aipo"))
    work = Workload(SHAPES["qwen3-4b"], 16, 8, Lognormal(300, 0.7, 4096))
    whole = planned(graph, read_cluster("1x8xH100"), work)
    assert "optimal" in plan.text(whole, "1x8xH100")
    for share, said in ((0.9, "no plan is more than 10.0 % faster"), (0.9999, "no plan is even 0.1 % faster")):
        cut = replace(whole.outcome, proved=False, floor=whole.best.period_s * share)
        shown = plan.text(replace(whole, outcome=cut), "1x8xH100")
        assert "optimal" not in shown
        assert said in " ".join(shown.split())  # lines are as wide as the terminal


def test_a_cluster_file_is_read(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    plan.main(["aipo", "--cluster", str(file), "--model", "qwen3-0.6b", "--json"])
    assert json.loads(capsys.readouterr().out)["gpus"] == 2


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "--cluster: given nothing"),
        (("--cluster", "1x8xH100"), "--model: given nothing"),
        (("--cluster", "0x8xH100", "--model", "llama-8b"), "needed at least 1 of each"),
        (("--cluster", "1x8xH10", "--model", "llama-8b"), "did you mean 'H100'"),
        (("--cluster", "1x8xH100", "--model", "lama-8b"), "did you mean 'llama-8b'"),
        (("--cluster", "1x8xH100", "--model", "llama-8b", "--lengths", "long"), "needed MEAN,SIGMA"),
        (("--cluster", "1x8xH100", "--model", "llama-8b", "--batch", "0"), "--batch: given 0, needed at least 1"),
        (("--cluster", "1x8xH100", "--model", "llama-8b", "--time-limit", "0"), "--time-limit: given 0"),
    ],
)
def test_what_cannot_be_understood_is_said_with_what_is_needed(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(CommandError, match=fault):
        plan.main(["aipo", *words])


@pytest.mark.parametrize("words", [("--mesh", "trainer=fsdp16"), ("--mesh", "scorer=tp2"), ("--mesh", "trainer=tp3")])
def test_a_bad_value_of_a_flag_is_a_usage_error(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", *SMALL, *words])
    assert leaving.value.code == 2


def test_a_host_with_a_kind_of_gpu_and_none_of_them_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.replace('"cuda:0", "cuda:1"', ""))
    with pytest.raises(AskedError, match="given 1 hosts without GPUs, needed one or more with devices"):
        plan.main(["aipo", "--cluster", str(file), "--model", "qwen3-0.6b"])


@pytest.mark.parametrize("name", ["ppo", "rlhf", "tool_use", "tis", "decoupled_ppo", "online_dpo"])
def test_programs_with_more_models_passes_or_turns_are_planned(name: str, capsys: Output) -> None:
    assert plan.main([name, *SMALL[1:5], "--batch", "8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["optimal"] is True
    assert {pool["name"] for pool in said["pools"]} >= {"trainer", "generator"}


def test_the_share_that_a_filter_keeps_is_named_and_can_be_given(capsys: Output) -> None:
    periods = []
    for words, share in ((), "70%"), (("--kept", "0.4"), "40%"):
        plan.main(["dapo", *SMALL[1:5], "--batch", "8", *words, "--json"])
        said = json.loads(capsys.readouterr().out)
        assert f"keep leaves {share} of the groups (--kept)" in said["assumptions"][0]
        periods.append(said["period_s"])
    assert periods[1] > periods[0]
    plan.main(["dapo", *SMALL[1:5], "--batch", "8"])
    assert re.search(r"(?m)^assumed +keep leaves 70% of the groups", capsys.readouterr().out)


def test_what_measures_on_a_slower_clock_is_not_of_the_plan(capsys: Output) -> None:
    plan.main(["curriculum", *SMALL[1:5], "--batch", "8"])
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^examiner +on machines of its own: measure$", shown)
    assert re.search(r"(?m)^curriculum +on CPUs: choose, remember$", shown)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("aipo", "--kept", "0.5"), "--kept: given 0.5, needed none, since aipo has no filter"),
        (("dapo", "--kept", "0"), "--kept: given 0, needed a share above 0, 1 at most"),
        (("dapo", "--kept", "1.5"), "--kept: given 1.5, needed a share above 0, 1 at most"),
    ],
)
def test_a_share_that_cannot_be_is_refused(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(CommandError, match=fault):
        plan.main([*words, *SMALL[1:]])


def test_a_typo_in_a_cluster_file_names_the_key_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.replace("devices", "device"))
    with pytest.raises(CommandError, match=r"unknown key 'hosts\.0\.device'; did you mean 'devices'"):
        plan.main(["aipo", "--cluster", str(file), "--model", "llama-8b"])
