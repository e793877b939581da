"""The verbs that start no run: show, check, and simulate with given durations."""

import json
import re
import sys
from pathlib import Path
from pkgutil import iter_modules
from xml.etree import ElementTree

import pytest

from penstock import programs
from penstock.graph.ir import Graph
from penstock.runtime.cli.children import answered, traced
from penstock.runtime.cli.main import VERBS, main
from penstock.runtime.cli.tracing import built_in

from .conftest import Facts, Output, Say

LANGUAGE = Path(__file__).parents[2] / "programs_for_language.py"


def test_show_reads_like_the_program_and_gives_json_svg_and_mermaid(say: Say, tmp_path: Path) -> None:
    shown = say("show", "toy", "--lag", 3)
    assert shown.startswith("def toy(policy: FakePolicy, prompts: FakePrompts")
    assert "broadcast(policy, lag=3)" in shown
    graph = Graph.from_json(json.loads(say("show", "toy", "--json")))
    say("show", "toy", "--format", "json", "--out", tmp_path / "g.json")
    assert Graph.from_json(json.loads((tmp_path / "g.json").read_text())) == graph
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).digest() == graph.digest()
    say("show", "aipo", "--format", "svg", "--out", tmp_path / "g.svg")
    assert ElementTree.parse(tmp_path / "g.svg").getroot().tag.endswith("svg")
    shown = say("show", "aipo", "--format", "mermaid", "--evaluation")
    assert shown.startswith("flowchart")
    assert "accuracy" in shown


def test_built_in_programs_have_a_summary() -> None:
    assert set(built_in()) == {module.name for module in iter_modules(programs.__path__)}
    assert all(summary.endswith(".") for summary in built_in().values())


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example(verb: str, say: Say) -> None:
    shown = say(verb, "--help")
    assert f"penstock {verb}" in shown.partition("Example")[2]
    if VERBS[verb].argument == "PROGRAM":
        assert "package.module:function" in shown
        assert "--config" in shown


@pytest.mark.parametrize("words", [["run", "--help"], ["resume", "--help"], ["plan", "aipo", "--help"]])
def test_help_is_wrapped_between_words_and_an_example_never(
    words: list[str], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for columns in ("60", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        shown.append(say(*words).partition("\n\n")[2].rpartition("Examples:")[::2])
    (narrow, examples), (wide, same) = shown
    assert all(len(line) <= 60 for line in narrow.splitlines())
    assert narrow.split() == wide.split()
    assert examples.partition("\n\n")[0] == same.partition("\n\n")[0]


@pytest.mark.usefixtures("here")
def test_an_error_is_wrapped_for_a_terminal_and_for_a_program_it_is_not(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = []
    for terminal in (True, False):
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        for words in (["check", "toy", "--lag", "-1"], ["check", "toy", "--mesh", "trainer=2"]):
            with pytest.raises(SystemExit):
                main(words)
        captured = capsys.readouterr()
        shown.append(captured.out + captured.err)
    wrapped, whole = shown
    assert wrapped.split() == whole.split()
    assert max(map(len, wrapped.splitlines())) <= 60 < max(map(len, whole.splitlines()))


@pytest.mark.parametrize("name", ["tool_use", "rlhf", "vineppo", "online_dpo"])
def test_a_program_is_shown_in_the_width_of_a_terminal_and_whole(
    name: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = say("show", name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fitting = say("show", name)
    assert max(map(len, fitting.splitlines())) <= 100
    # Comments may stand above their lines.
    assert sorted(fitting.split()) == sorted(whole.split())


def test_no_verb_shows_them_all(say: Say, capsys: Output) -> None:
    shown = say("--help")
    assert all(f"  {verb}" in shown for verb in VERBS)
    assert say("--version").startswith("penstock 0.")
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", ["aipo", "grpo", "sft", "toy", "evaluate"])
def test_check_finds_nothing_in_the_built_in_programs(name: str, say: Say) -> None:
    assert f"{name}: no faults" in say("check", name)


@pytest.mark.usefixtures("here")
def test_check_tells_all_faults(capsys: Output) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["check", "toy", "--batch", "0", "--lag", "-1"])
    shown = capsys.readouterr().out
    assert "given   0" in shown
    assert "given   -1" in shown
    assert shown.endswith("2 faults\n")
    with pytest.raises(SystemExit, match="1"):
        main(["check", "toy", "--batch", "0", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["faults"])) == (False, 1)


@pytest.mark.usefixtures("here")
def test_a_warning_of_data_is_a_line_of_check_and_in_a_run_it_is_said_by_the_ranks(
    here: None, capsys: Output, tmp_path: Path
) -> None:
    data = tmp_path / "two.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": f"{n + 1}"}) + "\n" for n in range(2)))
    with pytest.raises(SystemExit):
        main(["check", "aipo", "--model", "new", "--data", str(data)])
    told = capsys.readouterr().err
    assert told.startswith("note: accuracy is measured on the 2 rows that training learns from")
    assert len(told.splitlines()) == 1
    answered(traced, "run", "aipo", ["--model", "new", "--data", str(data)])
    assert "accuracy is measured" not in "".join(capsys.readouterr())


def test_check_gives_what_is_refused_as_data_too(capsys: Output) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", "--device", "tpu", "--json"])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert leaving.value.code
    assert (found["program"], found["ok"], found["faults"]) == ("aipo", False, [])
    assert found["error"] in captured.err


def test_the_bound_is_told_as_a_share_of_the_period(say: Say, facts: Facts) -> None:
    words = ("simulate", "toy", "--updates", 2, "--lag", 3, "--batch", 2, "--generate-ms", 300)
    (less,) = re.findall(r"\(([0-9.]+) % less\)", say(*words))
    found = facts(*words)
    assert found["period_s"] > 2 * found["bound_s"]
    assert float(less) == pytest.approx(100 * (1 - found["bound_s"] / found["period_s"]), abs=0.05)


def test_a_simulation_at_lag_0_takes_as_long_as_the_loop(facts: Facts) -> None:
    words = "--lag 0 --batch 4 --updates 8 --generate-ms 50 --score-ms 5 --update-ms 50 --sync-ms 10"
    found = facts("simulate", "toy", *words.split())
    # All groups are generated at once and scored one by one; then come the update and the publication.
    assert found["period_s"] == pytest.approx(0.050 + 4 * 0.005 + 0.050 + 0.010)
    assert found["bound_s"] <= found["period_s"]
    assert found["bound_s"] == pytest.approx(found["period_s"])
    assert found["lags"] == {"0": 32}
    for replica, busy in found["busy_s"].items():
        assert busy + sum(found["idle_s"][replica].values()) == pytest.approx(found["wall_s"])


def test_a_simulated_generator_works_on_as_many_groups_as_fill_its_slots(facts: Facts) -> None:
    given = "aipo --lag 0 --batch 8 --samples 8 --duration generate=1 score=0 group_advantage=0 aipo_update=1"
    for slots, seconds in ((8, 9), (16, 5), (24, 4), (64, 2)):
        assert facts("simulate", *given.split(), "--slots", slots)["period_s"] == pytest.approx(seconds)


def test_a_simulation_says_what_its_period_is_of_and_is_drawn(say: Say, facts: Facts, tmp_path: Path) -> None:
    words = ("simulate", "toy", "--lag", 1, "--width", 90)
    svg, trace = tmp_path / "s.svg", tmp_path / "s.json"
    shown = say(*words, "--updates", 40, "--svg", svg, "--trace", trace)
    assert "per update once the pipeline is full" in shown
    assert shown.startswith("toy: 40 updates of 8 groups")
    assert max(map(len, shown.splitlines())) <= 90
    assert any(line.startswith("trainer/0") for line in shown.splitlines())
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"X", "M"}
    filling = "per update: the mean of all 2, the filling of the pipeline included"
    assert filling in say(*words, "--updates", 2)
    assert facts(*words, "--updates", 2)["period_of"] == "all updates"


def test_times_of_a_second_and_more_are_in_seconds(say: Say) -> None:
    words = "simulate toy --lag 0 --batch 1 --updates 1 --score-ms 0 --generate-ms 0 --sync-ms 0 --update-ms"
    for update_ms, shown in (("999", "999 ms"), ("999.99", "1 s"), ("1505", "1.505 s"), ("2000", "2 s")):
        assert f" {shown} in all" in say(*words.split(), update_ms)


def test_durations_are_given_by_node(facts: Facts) -> None:
    words = "generate=0.02~0.5 score=0.001 group_advantage=0 aipo_update=0.03 publish=0.002 wire=0.004 swap=0.001"
    assert facts("simulate", "aipo", "--duration", *words.split())["period_s"] > 0.03


def test_a_simulation_draws_lengths_and_shares_by_its_seed(facts: Facts) -> None:
    seconds = ("--duration", "generate=0.02~0.5", "score=0.001", "group_advantage=0", "aipo_update=0.03")
    shares = (f"{LANGUAGE}:filtered", "--updates", 40, "--batch", 4, "--drop", "keep=0.3")
    for words, drawn in ((("aipo", *seconds), "wall_s"), (shares, "dropped")):
        found = [facts("simulate", *words, "--seed", seed)[drawn] for seed in (1, 2, 1)]
        assert found[0] == found[2] != found[1]


def test_a_simulation_drops_and_ends_turns_by_the_given_shares(say: Say, facts: Facts) -> None:
    words = ("--updates", 40, "--batch", 4, "--width", 90)
    given = ("grade=0.01", "learn=0.05", "speak=0.1", "reply=0.02")
    talking = ("simulate", f"{LANGUAGE}:talking", *words, "--duration", *given)
    assert facts(*talking, "--again", "reply=0.2")["wall_s"] < facts(*talking)["wall_s"]
    filtered = ("simulate", f"{LANGUAGE}:filtered", *words, "--drop", "keep=0.3")
    dropped = facts(*filtered)["dropped"]
    assert 30 < dropped < 120
    assert f"groups  {dropped} dropped, 160 kept" in say(*filtered)
