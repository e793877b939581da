"""How a run is displayed: number formats, totals, the dashboard, and plain lines."""

from collections.abc import Iterator
from io import StringIO
from itertools import count

import pytest
from rich.console import Console

from penstock.runtime.cli.display import (
    Line,
    PlainDisplay,
    Progress,
    clock,
    dashboard,
    figure,
    many,
    open_display,
    percent,
    sparkline,
)

from .conftest import Output


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.81234, "0.812"), (-0.0023, "-0.0023"), (12345.6, "12346"), (1.5e-7, "1.50e-07")],
)
def test_a_figure_has_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_units_and_sparklines() -> None:
    assert (percent(0.9341), percent(None)) == ("93.4 %", "-")
    assert (many(12), many(12_345), many(3_456_789), many(None)) == ("12", "12.3 k", "3.46 M", "-")
    assert (clock(45.24), clock(123), clock(3723)) == ("45.2 s", "2:03 min", "1:02:03 h")
    assert (sparkline(range(8), 8), sparkline([1.0] * 5, 8), sparkline([], 30)) == ("▁▂▃▄▅▆▇█", "▁" * 5, "")
    assert len(sparkline(range(1000), 30)) == 30


def row(update: int) -> Line:
    pools = {"generator": {"busy": 0.9, "weights": 0.1}, "scorer": {"data": 1.0}, "trainer": {"busy": 0.5, "data": 0.5}}
    figures = {"reward_mean": update / 10, "loss": -0.0023, "lag_mean": 0.6}
    # Sums over two policies, of which the second has trained on 200 tokens.
    figures |= {"tokens": 300.0, "update_s": 0.25, "train_tokens_per_s": 2000.0}
    return {"kind": "row", "row": {"update": update, "version": update + 1, "seconds": 1.0, **figures, "pools": pools}}


def status(update: int, **more: object) -> Line:
    pools = {
        "generator": {"doing": [f"generate[{32 * update}]"], "version": update},
        "scorer": {"doing": ["data"], "version": None},
        "trainer": {"doing": [f"aipo_update[{update}]"], "version": None},
    }
    accuracy = {"before": 0.382}
    return {"kind": "status", "time": 3.5, "stage": "train", "updates": 10, "pools": pools, "accuracy": accuracy} | more


def lines() -> Iterator[Line]:
    yield {"kind": "stage", "stage": "before"}
    yield {"kind": "accuracy", "stage": "before", "accuracy": 0.382}
    yield {"kind": "stage", "stage": "train"}
    for update in range(10):
        yield row(update)
        yield status(update)
    yield {"kind": "something new", "text": "from a later version"}


def progress(*heard: Line) -> Progress:
    seen = Progress("aipo", 10)
    for line in heard:
        seen.hear(line)
    return seen


def text(seen: Progress, width: int = 100) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(dashboard(seen, "runs/aipo-1", width, 12.3))
    return capture.get().splitlines()


def test_progress_adds_up_what_it_hears() -> None:
    seen = progress(*lines())
    assert (seen.stage, seen.update, seen.updates, seen.accuracy) == ("train", 10, 10, {"before": 0.382})
    assert [seen.rewards[-1], seen.pools["trainer"].busy] == pytest.approx([0.9, 0.5])
    assert seen.pools["generator"].version == 9
    assert [seen.updates_per_s, seen.tokens_per_s] == pytest.approx([1.0, 500.0])
    error = {"kind": "error", "text": "trainer/0 rank 0 died"}
    assert progress(error, {"kind": "summary", "status": "failed", "error": error["text"]}).errors == [error["text"]]


def test_the_base_model_counts_its_own_updates() -> None:
    base = {"kind": "stage", "stage": "base"}, {"kind": "base", "update": 500, "updates": 1000, "loss": 1.5}
    seen = progress(*base)
    assert (seen.update, seen.updates) == (500, 1000)
    seen.hear({"kind": "stage", "stage": "before"})
    assert (seen.update, seen.updates) == (0, 10)


RAISED = "score[7] on scorer/0 rank 0, written at a.py:3:\nTraceback …\n  File …\nZeroDivisionError: division by zero\n"


def failing(failed: int) -> Line:
    return status(0, lost={"dropped": 1, "failed": failed, "retried": 2, "raised": RAISED})


def test_what_a_program_does_not_have_is_not_shown() -> None:
    trained = row(0)
    for name in ("reward_mean", "tokens", "train_tokens_per_s"):
        del trained["row"][name]
    heard = [trained, {"kind": "accuracy", "stage": "before", "accuracy": 0.5}]
    written: list[str] = []
    display = PlainDisplay(Progress("sft", 10), written.append, now=lambda: 0.0)
    for line in heard:
        display.tell(line)
    drawn = "\n".join([*written, *text(progress(*heard))])
    assert "updates/s" in drawn
    assert "reward" not in drawn
    assert "tokens/s" not in drawn


def test_a_program_that_measures_shows_its_accuracy() -> None:
    measured = row(0)
    measured["row"]["accuracy"] = 0.375
    written: list[str] = []
    PlainDisplay(Progress("evaluate", 1), written.append, now=lambda: 0.0).tell(measured)
    assert all("accuracy 37.5 %" in drawn for drawn in (written[-1], "\n".join(text(progress(measured)))))


def test_one_failure_is_no_plural() -> None:
    lost = {"failed": 1, "retried": 1, "raised": ""}
    assert progress(status(0, lost=lost)).failures == "1 group failed, 1 firing tried again"


def test_idle_time_has_the_words_of_the_report() -> None:
    waiting = row(0)
    waiting["row"]["pools"] = {"trainer": {"busy": 0.5, "admission": 0.2, "done": 0.3}}
    assert "admission bound 20.0 %, nothing left 30.0 %" in "\n".join(text(progress(waiting)))


def test_failures_are_shown_with_what_the_last_one_raised() -> None:
    assert progress(*lines()).failures == ""
    seen = progress(*lines(), failing(5), status(1))  # the last line has no news of failures
    line = "5 groups failed, 2 firings tried again; the last: score[7] on scorer/0 rank 0: ZeroDivisionError: division"
    assert seen.failures.startswith(line)
    shown = "\n".join(text(seen, 120))
    assert "5 groups failed" in shown
    assert "  File …" in shown


def test_plain_lines_tell_of_failures_once_with_the_traceback_and_then_now_and_then() -> None:
    written: list[str] = []
    times = count()
    plain = PlainDisplay(Progress("aipo", 10), written.append, now=lambda: float(next(times)))
    for failed in range(1, 26):
        plain.tell(failing(failed))
    said = [line for line in written if line.startswith("failures: ")]
    assert [line.split()[1] for line in said] == ["1", "11", "21"]
    assert ["Traceback" in line for line in said] == [True, False, False]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_dashboard_fills_its_width_and_no_more(width: int) -> None:
    assert {len(line) for line in text(progress(*lines()), width)} == {width}


def test_the_dashboard_shows_what_matters() -> None:
    shown = "\n".join(text(progress(*lines())))
    for needed in (
        "training", "10/10  12.3 s", "reward 0.9", "accuracy before 38.2 %", "lag 0.6", "updates/s 1", "tokens/s 500",
        "generate[288]", "waits for data", "weights v9", "90 %", "runs/aipo-1",
    ):  # fmt: skip
        assert needed in shown
    assert "starting processes" in "\n".join(text(Progress("aipo", 10), 80))  # before anything is known
    odd = row(0)
    odd["row"] |= {"reward_mean": None, "loss": None, "not_finite": {"reward_mean": "nan", "loss": "inf"}}
    shown = "\n".join(text(progress(odd, {"kind": "accuracy", "stage": "before", "accuracy": 0.5})))
    assert "reward nan" in shown
    assert "loss inf" in shown


def test_plain_lines_come_once_a_second_and_at_the_end(capsys: Output) -> None:
    written: list[str] = []
    ticks = count()
    display = PlainDisplay(Progress("aipo", 10), written.append, now=lambda: next(ticks) * 0.3)
    for line in lines():
        display.tell(line)
    assert written[:3] == ["measuring accuracy before …", "accuracy before training: 38.2 %", "training …"]
    updates = [line.split()[1] for line in written if line.startswith("update ")]
    assert updates == ["1/10", "5/10", "9/10", "10/10"]
    assert "reward 0.9  loss -0.0023  lag 0.6  1 updates/s  500 tokens/s" in written[-1]
    with open_display("aipo", 10, "runs/aipo-1", plain=False) as opened:  # the output is not a terminal
        opened.tell({"kind": "stage", "stage": "train"})
    assert capsys.readouterr().out == "training …\n"
