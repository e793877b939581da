"""Small charts with a text of what they show; schedules as columns; the page size of a long run; samples as texts."""

import base64
import json
import re
import zlib
from math import nan
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import load, trace
from penstock.runtime.record.metrics import read_rows
from penstock.runtime.report.charts import Figure, accuracies, chart_groups, curves, histogram, number, percent, thinned
from penstock.runtime.report.follow import Work
from penstock.runtime.report.page import render
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.schedule_data import Chart, Row, Strip, encode, thin
from penstock.runtime.report.summary import make_report
from penstock.runtime.report.write import write_report
from penstock.runtime.schedule.simulator import Durations

from .runs import ACCURACY, simulated_run

CALLED = """
from penstock.graph import broadcast, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update

@program
def called(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate.named("policy")(prompts, broadcast(policy, lag=1))
    return fake_update(policy, rollouts, fake_score.named("prompts")(rollouts))
"""


def drawn(figure: Figure) -> str:
    return render("_chart.svg.j2", figure=figure)


def test_a_curve_has_a_label_a_table_and_points_to_read_off() -> None:
    figure = curves("Loss", ["loss"], [(0.0, 1.0), (1.0, 0.5), (2.0, nan), (3.0, 0.25)])
    assert figure.said == "loss from 1 to 0.25, between 0.25 and 1"
    assert all(part in drawn(figure) for part in ('role="img"', "Loss: loss from 1 to 0.25"))
    assert figure.rows[2] == ("2", "–")
    assert "NaN" not in figure.points
    assert "null" in figure.points


def test_a_long_chart_keeps_its_ends_and_the_extremes_of_each_of_its_curves() -> None:
    points = [(float(i), 1.0, float(i == 4321), float(-(i == 77))) for i in range(10_000)]
    kept = thinned(points, 200)
    assert len(kept) <= 202
    assert {points[0], points[4321], points[77], points[-1]} <= set(kept)


def test_a_count_stays_until_it_changes() -> None:
    """Queue depths are steps: there are no values between 16 and 0."""
    points = [(0.0, 16.0), (1.0, 0.0)]
    sloped, stepped = (drawn(curves("Depth", ["groups"], points, steps=way)) for way in (False, True))
    line = re.compile(r'points="(.*?)"')
    (first, last), (begin, corner, end) = (line.search(svg)[1].split() for svg in (sloped, stepped))  # type: ignore[index]
    assert (first, last) == (begin, end)
    assert corner == f"{end.split(',')[0]},{begin.split(',')[1]}"


def test_a_curve_of_one_point_and_of_equal_values_is_drawn() -> None:
    assert "<circle" in drawn(curves("One", ["y"], [(0.0, 3.0)]))
    same = drawn(curves("<b>", ["<b>"], [(0.0, 0.0), (1.0, 0.0)]))
    assert "nan" not in same
    assert "<b>" not in same


def test_a_few_updates_have_whole_numbers_below_them() -> None:
    below = [re.findall(r'y="159.0"[^>]*>([\d.]+)</text>', drawn(curves("Loss", ["loss"], points))) for points in (
        [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)], [(0.0, 0.0), (1.5, 0.0), (3.0, 0.0)])]  # fmt: skip
    assert below == [["0", "1", "2", "3"], ["0", "0.5", "1", "1.5", "2", "2.5", "3"]]


def test_the_axis_of_a_value_that_never_changes_begins_at_zero() -> None:
    above = curves("Share", ["y"], [(0.0, 1.0), (1.0, 1.0)]).ys
    assert above.low == 0 < 1 < above.high
    below = curves("Loss", ["y"], [(0.0, -2.0), (1.0, -2.0)]).ys
    assert below.low < -2 < below.high == 0


@pytest.mark.parametrize("values", [(1.0, 1.000003, 1.000001), (-2.5, -2.5000001), (1e6 + 1, 1e6 + 2), (3e-9, 4e-9)])
def test_no_two_numbers_beside_an_axis_are_the_same(values: tuple[float, ...]) -> None:
    drawing = drawn(curves("Ratio", ["y"], [(float(at), y) for at, y in enumerate(values)]))
    beside = re.findall(r'text-anchor="end">([^<]+)</text>', drawing)[:-1]
    assert len(set(beside)) == len(beside) >= 2


def test_the_numbers_below_many_bars_are_round() -> None:
    drawing = drawn(histogram("Tokens", dict.fromkeys(range(3, 103), 1.0), "version", "tokens"))
    below = [int(number) for number in re.findall(r'y="159.0"[^>]*>(\d+)</text>', drawing)]
    assert below == list(range(10, 103, 10))


def test_a_histogram_marks_its_bound_and_names_each_bar() -> None:
    figure = histogram("Lag", {0: 25.0, 1: 75.0}, "lag", "groups", (2, "bound: lag 2"))
    assert "bound: lag 2" in drawn(figure)
    assert figure.said == "lag 0: 25 %, lag 1: 75 %"
    assert "<title>lag 1: 75 groups</title>" in drawn(figure)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (3.0, 0.123456, nan, 1e9, 2.5e-7)] == ["3", "0.1235", "–", "1e+9", "2.5e-7"]
    assert [percent(v) for v in (0.0, 0.0123, 0.5)] == ["0 %", "1.2 %", "50 %"]


def work(index: int, start: int, end: int, node: str = "n", version: int = 0) -> Work:
    return Work("p/0", node, index, start * 1000, end * 1000, "group", version, cause=("m[#] was done", index + 5))


def decoded(chart: Chart, most: int = 10_000) -> Any:
    text, _ = encode(chart, most)
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_differences_add_up_to_the_bars() -> None:
    items = [work(4, 10, 30), work(2, 20, 25), work(9, 40, 41)]
    data = decoded(Chart([Row("p/0", "p", Strip(items))], [(0, 41_000)], end=41_000))
    columns = data["rows"][0]["real"]["main"]
    starts = [sum(columns["s"][: i + 1]) for i in range(3)]
    indices = [sum(columns["i"][: i + 1]) for i in range(3)]
    assert (starts, indices, columns["d"]) == ([10, 20, 40], [4, 2, 9], [20, 5, 1])
    assert columns["x"] == [5, 5, 5]
    assert columns["k"] == [0, 1, 0]
    assert (data["names"], data["causes"], data["ends"], data["end"]) == (
        [["n", "group"]], ["m[#] was done"], [[0, 41]], 41)  # fmt: skip


def test_a_long_run_is_merged_in_its_middle_by_node_and_version() -> None:
    items = [work(i, 10 * i, 10 * i + 8, version=i // 50) for i in range(3000)]
    strip = Strip(list(items))
    assert thin([strip], 3000) == 0
    gone = thin([strip], 300)
    assert len(strip.work) + gone == sum(getattr(w, "count", 1) for w in strip.work) == 3000
    assert len(strip.work) < 300
    assert (strip.work[0].index, max(w.end for w in strip.work)) == (0, items[-1].end)


def test_a_lanes_room_and_tracks_do_not_depend_on_the_evaluation_or_the_side() -> None:
    program = [work(i, i, i + 10) for i in range(4)]
    evaluation = [work(i, 100, 200, node="evaluate.n") for i in range(50)]
    predicted = Strip([work(0, 0, 10), work(1, 5, 15), work(2, 6, 16)])
    rows = [
        Row("p/0", "p", Strip(program), room=6),
        Row("p/0", "p", Strip(program + evaluation), room=6),
        Row("p/0", "p", Strip([work(0, 0, 10)]), predicted),
    ]
    found = [(row["room"], row["tracks"]) for row in decoded(Chart(rows, []))["rows"]]
    assert found == [(6, [4, 0]), (6, [4, 50]), (3, [3, 0])]


def test_accuracy_is_of_versions_that_were_measured_and_of_no_samples_to_learn_from(tmp_path: Path) -> None:
    """An update's node may report as `accuracy` that of training samples (rlhf) or of pairs (a reward model)."""
    folder = simulated_run(tmp_path / "r", updates=4).folder
    rows = [{**row, "accuracy": 0.01} for row in read_rows(folder.metrics)]
    rows[3] |= {"measure.accuracy": 0.7, "measure.accuracy_version": 2.0, "measure_update": 1.0}
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert accuracies(read_facts(folder)) == [(0.0, ACCURACY), (2.0, 0.7), (4.0, 0.93)]


def test_metrics_of_the_programs_own_nodes_are_drawn_where_they_changed(tmp_path: Path) -> None:
    folder = simulated_run(tmp_path / "run", updates=3).folder
    own = [
        {
            "right_in_4": 0.25 * u,
            "fake_score.kept": u % 2,
            "acc.math": u,
            "len.math": 2 * u,
            "math": 3 * u,
            "x.": u,
            "dataset_version": u,
            "since_update": u,
            "accuracy": u / 2,
            "accuracy_version": u,
            "fake_update_update": u,
            "same": 1.0,
            "tokens_lag_1": u,
        }
        for u in range(3)
    ]
    rows = [row | more for row, more in zip(read_rows(folder.metrics), own, strict=True)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (further,) = [
        group for group in chart_groups(make_report(read_facts(folder), lambda: False)) if group.anchor == "further"
    ]
    # A node's label is no part of a metric's name, which may have dots itself.
    titles = ["right_in_4", "kept", "acc.math", "len.math", "math", "x.", "dataset_version", "since_update"]
    assert [figure.title for figure in further.figures] == titles
    write_report(folder, tmp_path / "report.html", limit_s=1.0)
    (section,) = re.findall(r'<section id="further".*?</section>', (tmp_path / "report.html").read_text(), re.S)
    assert "right_in_4 from 0 to 0.5" in section
    assert "fake_score.kept from 0 to 0, between 0 and 1" in section
    assert section.count("math from ") == 3
    assert not any(name in section for name in ("same", "tokens_lag_1", "ratio_mean", "reward_mean", "accuracy"))


@pytest.mark.slow
def test_a_thousand_updates_are_a_page_of_less_than_two_megabytes(tmp_path: Path) -> None:
    # Four times as many groups in each update add less than half to the page, and triple the time of this test.
    made = simulated_run(tmp_path / "run", updates=1000, batch=8, generators=2)
    report = write_report(made.folder, tmp_path / "report.html", limit_s=1.0)
    assert len(report.facts.training[0].followed.ends) == 1000
    assert (tmp_path / "report.html").stat().st_size < 1_400_000


def test_samples_are_shown_as_texts_with_the_rewards_of_nodes_that_read_them(tmp_path: Path) -> None:
    folder = simulated_run(tmp_path / "r", updates=2).folder
    response = {"text": "<b>2</b>", "tokens": 3, "finished": False, "versions": [0, 1]}
    said = {"node": "fake_generate", "prompt": "1+1=", "answer": "2", "responses": [response]}
    line = {"update": 1, "group": 8, "texts": [said], "rewards": {}}
    line["rewards"] = {"fake_score": [0.125], "fake_score.style": [0.375], "another": [0.75]}
    folder.samples.write_text(json.dumps(line) + "\n")
    write_report(folder, tmp_path / "report.html", limit_s=0.5)
    page = (tmp_path / "report.html").read_text()
    (shown,) = re.findall(r'<section id="samples".*?</section>', page, re.DOTALL)
    texts = re.sub(r"<[^>]*>", " ", shown).split()
    assert {"Update", "1,", "8,", "1+1=", "&lt;b&gt;2&lt;/b&gt;", "fake_score", "0.125", "(cut)"} <= set(texts)
    assert {"fake_score.style", "0.375"} <= set(texts)
    assert "0.75" not in texts  # of a node that does not read these responses
    folder.samples.write_text("{}\n")
    report = write_report(folder, tmp_path / "report.html", limit_s=0.5)
    assert [note for note in report.facts.notes if "samples.jsonl" in note]
    assert 'id="samples"' not in (tmp_path / "report.html").read_text()


def test_no_secret_of_a_command_or_an_error_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers store the page as an artifact."""
    monkeypatch.setenv("JUDGE_TOKEN", "0123456789")
    folder = simulated_run(tmp_path / "r", updates=2).folder
    url = "http://bob:pw@judge/reward?x=1&api_key=verysecret"
    config = json.loads((folder.path / "config.json").read_text())
    config["asked"]["command"] = ["toy", "--url", url]
    folder.write_json("config.json", config)
    summary = json.loads((folder.path / "summary.json").read_text())
    folder.write_json("summary.json", {**summary, "status": "failed", "error": f"no answer from {url} (0123456789)"})
    write_report(folder, tmp_path / "report.html", limit_s=0.5)
    page = (tmp_path / "report.html").read_text()
    assert page.count("http://***@judge/reward?x=1&amp;api_key=***") >= 2
    assert [secret for secret in ("pw@", "verysecret", "0123456789") if secret in page] == []


def test_rewards_of_a_node_that_is_called_as_an_argument_stand_beside_its_responses(tmp_path: Path) -> None:
    (tmp_path / "called.py").write_text(CALLED)
    nodes = dict.fromkeys(("policy:fake_generate", "prompts:fake_score", "fake_update"), 0.01)
    program, durations = f"{tmp_path}/called.py:called", Durations(nodes)
    folder = simulated_run(tmp_path / "r", updates=1, program=program, durations=durations, options={}).folder
    response = {"text": "r0", "tokens": 1, "finished": True}
    texts = [{"node": "policy", "prompt": "a", "answer": "", "responses": [response]}]
    rewards = {"prompts": [0.25], "prompts.style": [0.5]}
    folder.samples.write_text(json.dumps({"update": 0, "group": 0, "texts": texts, "rewards": rewards}) + "\n")
    write_report(folder, tmp_path / "report.html", limit_s=0.5)
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<pre>r0</pre></td>\s*<td>([^<]*)</td>\s*<td>([^<]*)</td>", page) == [("0.25", "0.5")]


def test_rewards_stand_beside_the_responses_that_they_are_of(tmp_path: Path) -> None:
    """Rewards of several prompts of a node are in the prompts' order. Rewards of continuations do not belong to the
    responses that they continue."""
    vineppo = "penstock.programs.vineppo:vineppo"
    nodes = dict.fromkeys((node.name for node in trace(load(vineppo), {}).nodes if node.name != "broadcast"), 0.01)
    folder = simulated_run(tmp_path / "r", updates=1, program=vineppo, durations=Durations(nodes), options={}).folder

    def said(node: str, prompt: str, *texts: str) -> dict[str, Any]:
        responses = [{"text": text, "tokens": 1, "finished": True} for text in texts]
        return {"node": node, "prompt": prompt, "answer": "", "responses": responses}

    texts = [said("generate", "a", "r0", "r1"), said("generate", "b", "r2", "r3"), said("vines", "a", "s0", "s1")]
    rewards = {"score": [0.25, 0.5, 0.75, 1.0], "outcomes": [-0.25, -0.5], "vine_advantage": [5.0]}
    folder.samples.write_text(json.dumps({"update": 0, "group": 0, "texts": texts, "rewards": rewards}) + "\n")
    write_report(folder, tmp_path / "report.html", limit_s=0.5)
    page = (tmp_path / "report.html").read_text()
    rows = re.findall(r"<pre>([rs]\d)</pre></td>\s*<td>([^<]*)</td>", page)
    assert rows == [("r0", "0.25"), ("r1", "0.5"), ("r2", "0.75"), ("r3", "1"), ("s0", "-0.25"), ("s1", "-0.5")]
