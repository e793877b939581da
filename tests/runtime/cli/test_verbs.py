"""The verbs that start nothing, in this process."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import iter_modules
from xml.etree import ElementTree

import pytest

from penstock import programs
from penstock.graph import Graph
from penstock.runtime.cli import main, plan, simulate
from penstock.runtime.cli.tracing import CommandError, built_in

pytestmark = pytest.mark.usefixtures("here")
Output = pytest.CaptureFixture[str]
LANGUAGE = Path(__file__).parents[2] / "programs_for_language.py"


def test_show_reads_like_the_program(capsys: Output) -> None:
    assert main.show(["toy", "--lag", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("def toy(policy: FakePolicy, prompts: FakePrompts")
    assert "broadcast(policy, lag=3)" in shown


def test_show_gives_json_that_loads_back_equal(capsys: Output, tmp_path: Path) -> None:
    main.show(["toy", "--json"])
    graph = Graph.from_json(json.loads(capsys.readouterr().out))
    main.show(["toy", "--format", "json", "--out", str(tmp_path / "g.json")])
    assert Graph.from_json(json.loads((tmp_path / "g.json").read_text())) == graph
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).digest() == graph.digest()


def test_show_draws_svg_and_mermaid(capsys: Output, tmp_path: Path) -> None:
    main.show(["aipo", "--format", "svg", "--out", str(tmp_path / "g.svg")])
    assert ElementTree.parse(tmp_path / "g.svg").getroot().tag.endswith("svg")
    main.show(["aipo", "--format", "mermaid", "--evaluation"])
    shown = capsys.readouterr().out
    assert shown.startswith("flowchart")
    assert "accuracy" in shown


def test_show_says_that_a_program_has_no_evaluation() -> None:
    with pytest.raises(CommandError, match="toy has no evaluation"):
        main.show(["toy", "--evaluation"])


@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_names_the_flag_that_was_meant(verb: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as leaving:
        main.main([verb, "--helpp"])
    assert leaving.value.code == 2
    assert "given --helpp, needed a flag of" in (said := capsys.readouterr().err)
    assert "the nearest: --help" in said
    with pytest.raises(SystemExit):
        main.main(["--helpp"])
    assert "did you mean '--help'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [main.show, main.check, simulate.main, plan.main])
def test_a_verb_without_a_program_lists_the_built_in_ones(
    verb: Callable[[Sequence[str]], int],
) -> None:
    with pytest.raises(CommandError, match="needed a PROGRAM: aipo, cispo, ") as error:
        verb([])
    assert error.value.status == 2


def test_built_in_programs_have_a_summary() -> None:
    assert set(built_in()) == {module.name for module in iter_modules(programs.__path__)}
    assert {"aipo", "evaluate", "grpo", "sft", "toy"} < set(built_in())
    assert all(summary.endswith(".") for summary in built_in().values())


def test_help_without_a_program_explains_the_verb(capsys: Output) -> None:
    with pytest.raises(SystemExit) as leaving:
        simulate.main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert "package.module:function" in shown
    assert "--duration" in shown


@pytest.mark.parametrize("name", ["aipo", "grpo", "sft", "toy", "evaluate"])
def test_check_finds_nothing_in_the_built_in_programs(name: str, capsys: Output) -> None:
    assert main.check([name]) == 0
    assert f"{name}: no faults" in capsys.readouterr().out


def test_check_tells_all_faults(capsys: Output) -> None:
    assert main.check(["toy", "--batch", "0", "--lag", "-1"]) == 1
    shown = capsys.readouterr().out
    assert "given   0" in shown
    assert "given   -1" in shown
    assert shown.endswith("2 faults\n")
    assert main.check(["toy", "--batch", "0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["faults"])) == (False, 1)


def test_the_bound_is_told_as_a_share_of_the_period(capsys: Output) -> None:
    words = ["toy", "--updates", "2", "--lag", "3", "--batch", "2", "--generate-ms", "300"]
    assert simulate.main(words) == 0
    (less,) = re.findall(r"\(([0-9.]+) % less\)", capsys.readouterr().out)
    assert simulate.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["period_s"] > 2 * found["bound_s"]
    assert float(less) == pytest.approx(100 * (1 - found["bound_s"] / found["period_s"]), abs=0.05)


def test_a_simulation_at_lag_0_takes_as_long_as_the_loop(capsys: Output) -> None:
    words = "--lag 0 --batch 4 --updates 8 --generate-ms 50 --score-ms 5 --update-ms 50 --sync-ms 10 --json"
    assert simulate.main(["toy", *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    # All groups are generated at once, scored one after the other, learnt from, and the weights published.
    assert found["period_s"] == pytest.approx(0.050 + 4 * 0.005 + 0.050 + 0.010)
    assert found["period_s"] == pytest.approx(found["bound_s"])
    assert found["bound_s"] <= found["period_s"]
    assert found["lags"] == {"0": 32}
    for replica, busy in found["busy_s"].items():
        assert busy + sum(found["idle_s"][replica].values()) == pytest.approx(found["wall_s"])


def test_a_simulation_says_what_its_period_is_of(capsys: Output) -> None:
    words = ["toy", "--lag", "1", "--width", "90"]
    simulate.main([*words, "--updates", "40"])
    assert "per update once the pipeline is full" in capsys.readouterr().out
    simulate.main([*words, "--updates", "2"])
    shown = capsys.readouterr().out
    assert "per update: the mean of all 2, the filling of the pipeline included" in shown
    simulate.main([*words, "--updates", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["period_of"] == "all updates"


def test_a_simulation_is_drawn(capsys: Output, tmp_path: Path) -> None:
    svg, trace = tmp_path / "s.svg", tmp_path / "s.json"
    simulate.main(["toy", "--updates", "4", "--width", "90", "--svg", str(svg), "--trace", str(trace)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("toy: 4 updates of 8 groups")
    assert max(map(len, shown)) <= 90
    assert any(line.startswith("trainer/0") for line in shown)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"X", "M"}


def test_durations_are_given_by_node(capsys: Output) -> None:
    words = "generate=0.02~0.5 score=0.001 group_advantage=0 aipo_update=0.03 publish=0.002 wire=0.004 swap=0.001"
    assert simulate.main(["aipo", "--json", "--duration", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["period_s"] > 0.03


def test_a_simulation_drops_and_ends_turns_by_the_given_shares(capsys: Output) -> None:
    words = ["--updates", "40", "--batch", "4", "--width", "90"]
    talking = [f"{LANGUAGE}:talking", *words, "--duration", "grade=0.01", "learn=0.05", "speak=0.1", "reply=0.02"]
    found = []
    for again in ([], ["--again", "reply=0.2"]):
        simulate.main([*talking, *again, "--json"])
        found.append(json.loads(capsys.readouterr().out)["wall_s"])
    assert found[1] < found[0]
    filtered = [f"{LANGUAGE}:filtered", *words, "--drop", "keep=0.3"]
    simulate.main([*filtered, "--json"])
    dropped = json.loads(capsys.readouterr().out)["dropped"]
    assert 30 < dropped < 120
    simulate.main(filtered)
    assert f"groups  {dropped} dropped, 160 kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drop", "score=0.3"], "given 'score=0.3', needed one of keep before '='"),
        (["--drop", "keep=1.5"], "needed a share from 0 to 1, such as keep=0.3"),
        (["--drop", "keep=half"], "needed a share from 0 to 1"),
        (["--drop", "keep=1"], "simulation: given 256 groups dropped for update 0"),
        (["--again", "reply=0.3"], "needed none, since the program has no nodes that answer"),
        (["--versions", "pinned"], 'versions="pinned": given the filter keep'),
    ],
)
def test_shares_that_cannot_work_are_a_usage_error(words: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)) as error:
        simulate.main([f"{LANGUAGE}:filtered", *words])
    assert error.value.status == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            r"no duration of generate, score, .*; needed all, such as --duration generate=.*simulate --from RUN",
        ),
        (["--duration", "generat=1"], "needed one of generate, score"),
        (["--duration", "generate=fast"], "needed seconds and sigma"),
        (["--duration", "generate=-1"], "needed seconds and sigma"),
        (["--updates", "0"], "needed at least 1"),
    ],
)
def test_durations_that_cannot_work_are_a_usage_error(words: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said) as error:
        simulate.main(["aipo", *words])
    assert error.value.status == 2
