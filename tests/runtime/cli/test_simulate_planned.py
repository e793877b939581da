"""`penstock simulate` with a cluster or a plan, in this process."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from penstock.runtime.cli import plan, simulate
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import ClusterError
from penstock.runtime.plan.roles import PlanError
from penstock.runtime.record.errors import RecordError

pytestmark = pytest.mark.usefixtures("here")
Output = pytest.CaptureFixture[str]
WORK = ("--cluster", "1x8xH100", "--model", "qwen3-4b", "--batch", "8", "--lengths", "200,0.7", "--max-tokens", "1024")
SMALL = ("aipo", *WORK, "--updates", "24", "--width", "100")


def test_text_says_what_the_schedule_is_like(capsys: Output) -> None:
    assert simulate.main(SMALL) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("aipo with qwen3-4b on ")
    assert max(map(len, shown.splitlines())) <= 100
    for line in (
        r"period  \S+ m?s per update, .*; the planner", r"rate +.* tokens and .* groups per second",
        r"lag +\d", "the bound is 1", r"slots +.* in use; .* in tails", r"queues +generate +mean", r"pools +trainer",
        "generator/0", "end of an update",
    ):  # fmt: skip
        assert re.search(line, shown), line


def test_json_has_all_of_it_and_a_plan_file_gives_the_same(capsys: Output, tmp_path: Path) -> None:
    simulate.main([*SMALL, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["planned_s"] <= said["period_s"] * 1.5
    assert said["tokens_per_s_per_gpu"] * said["gpus"] == pytest.approx(said["tokens_per_s"])
    assert said["groups_per_s"] == pytest.approx(8 / said["period_s"])
    assert sum(said["lags"].values()) == 24 * 8
    assert max(map(int, said["lags"])) <= said["lag"] <= 1
    assert set(said["queues"]) == {"generate", "score", "group_advantage", "aipo_update"}
    assert 0 < said["slots"]["tail_occupancy"] <= said["slots"]["occupancy"] <= 1
    for pool in said["pools"].values():
        assert pool["busy"] + sum(pool["idle"].values()) == pytest.approx(1)
    assert [row["lag"] for row in said["effect_of_lag"]] in ([0, 1, 2, 3, 4], [])
    plan.main(["aipo", *WORK, "--json"])
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    simulate.main(["aipo", "--plan", str(file), "--updates", "24", "--json"])
    assert json.loads(capsys.readouterr().out) == said
    with pytest.raises(CommandError, match=r"plan\.json: given a plan for samples 8, needed 4, as the program has"):
        simulate.main(["aipo", "--plan", str(file), "--samples", "4"])


def test_the_schedule_is_written_as_pictures_page_and_trace(capsys: Output, tmp_path: Path) -> None:
    files = {flag: tmp_path / f"schedule.{flag}" for flag in ("svg", "html", "trace")}
    simulate.main([*SMALL, *(word for flag, file in files.items() for word in (f"--{flag}", str(file)))])
    assert files["svg"].read_text().startswith("<svg")
    assert "aipo with qwen3-4b" in files["html"].read_text()
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 64


def test_small_work_takes_the_seconds_that_are_given(capsys: Output) -> None:
    periods = []
    for words in ((), ("--duration", "score=3")):
        simulate.main([*SMALL, *words, "--json"])
        periods.append(json.loads(capsys.readouterr().out)["period_s"])
    assert periods[1] > periods[0] + 10


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--cluster", "0x8xH100", "--model", "llama-8b"), "needed at least 1 of each"),
        (("--cluster", "1x8xH10", "--model", "llama-8b"), "did you mean 'H100'"),
        (("--cluster", "1x8xH100"), "--model: given nothing"),
        (("--model", "llama-8b"), "--model: given without a plan; needed --cluster with it"),
        (("--plan", "plan.json", "--max-tokens", "99"), "--max-tokens: given beside --plan"),
        (("--plan", "plan.json", "--batch", "9"), "--batch: given beside --plan"),
        ((*WORK, "--generators", "2"), "--generators: given with a plan"),
        ((*WORK, "--duration", "generate=1"), "needed one of score, group_advantage before '='"),
        ((*WORK, "--updates", "0"), "--updates: given 0"),
    ],
)
def test_what_cannot_be_understood_is_said_with_what_is_needed(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises((CommandError, ClusterError), match=re.escape(fault)):
        simulate.main(["aipo", *words])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--cluster", "1x8xH100", "--model", "llama-405b"), "llama-405b does not fit on 8 GPUs"),
        (
            ("--cluster", "1x8xH100", "--model", "llama-8b", "--mesh", "trainer=fsdp16"),
            "given 16 ranks, needed at most",
        ),
        (("--plan", "none.json"), "--plan none.json: given"),
    ],
)
def test_what_has_no_plan_is_refused_with_the_numbers(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(PlanError, match=re.escape(fault)):
        simulate.main(["aipo", *words])


@pytest.mark.parametrize("verb", [plan, simulate])
def test_a_machine_without_gpus_has_no_plan_and_is_told_of_simulations_from_a_run(
    verb: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    (tmp_path / "machine.toml").write_text('[[hosts]]\nname = "local"\ncores = 2\n')
    with pytest.raises(CommandError, match=r"given hosts without GPUs, needed GPUs; .*simulate --from RUN") as error:
        verb.main(["aipo", "--cluster", "this", "--model", "llama-8b"])
    assert error.value.status == 2


def test_a_machine_that_was_not_measured_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    with pytest.raises(CommandError, match="needed first: penstock doctor --measure"):
        simulate.main(["aipo", "--cluster", "this", "--model", "llama-8b"])


def test_the_effect_of_lag_says_of_how_many_updates_it_is(capsys: Output) -> None:
    simulate.main(["aipo", *WORK, "--updates", "30", "--width", "100"])
    assert "the period of runs of 24 updates, while that above is of 30" in capsys.readouterr().out
    simulate.main(["aipo", *WORK, "--updates", "24", "--json"])
    said = json.loads(capsys.readouterr().out)
    same = next(row for row in said["effect_of_lag"] if row["lag"] == said["lag"])
    assert (same["period_s"], same["updates"]) == (said["period_s"], 24)


def test_a_file_that_cannot_be_written_names_its_own_flag(tmp_path: Path) -> None:
    for flag in ("--svg", "--html", "--trace"):
        with pytest.raises(RecordError, match=rf"needed .* \({flag} FILE\)$"):
            simulate.main([*SMALL, flag, str(tmp_path / "none" / "file")])
