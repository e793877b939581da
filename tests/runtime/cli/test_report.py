"""`penstock report DIR`: whole folders, and what is left of broken ones."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cli import report
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.write import end_with_report
from tests.runtime.report.runs import Made, simulated_run

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return simulated_run(tmp_path_factory.mktemp("runs") / "whole", updates=6, batch=4)


@pytest.fixture
def folder(whole: Made, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(whole.folder.path, tmp_path / "run"))


def figures(folder: Path, capsys: Output) -> Any:
    assert report.main([str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_writes_the_page_into_the_folder_and_says_where(folder: Path, capsys: Output) -> None:
    assert report.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "bounds this run" in said
    assert str(folder / "report.html") in said
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_links_that_somebody_planted_in_a_folder_are_not_written_through(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "authorized_keys"
    mine.write_text("mine\n")
    for name in ("report.html", f".report.html.{os.getpid()}"):
        (folder / name).symlink_to(mine)
    assert report.main([str(folder)]) == 0
    assert mine.read_text() == "mine\n"
    assert not (folder / "report.html").is_symlink()


def test_out_names_another_file(folder: Path, tmp_path: Path) -> None:
    assert report.main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (folder / "report.html").exists()


def test_its_figures_add_up(folder: Path, capsys: Output) -> None:
    found = figures(folder, capsys)
    assert (found["updates"], found["status"], found["notes"]) == (6, "done", [])
    for rank in found["ranks"]:
        assert sum(rank["whole_ns"].values()) == rank["wall_ns"] == found["wall_ns"]
        assert sum(rank["training_ns"].values()) == found["training_ns"]
    assert found["model_error"] == pytest.approx(0, abs=1e-6)
    assert sum(found["lags"].values()) == 24
    assert max(map(int, found["lags"])) <= found["lag_bound"] == 1
    assert sum(found["tokens_by_version"].values()) == 6 * 512
    assert found["bound_s"] <= found["period_s"] * (1 + 1e-6)


@pytest.mark.parametrize(
    ("gone", "told"),
    [("summary.json", "no summary.json"), ("metrics.jsonl", "no rows"), ("events.log", "no events.log")],
)
def test_what_is_missing_is_said_and_the_rest_is_drawn(folder: Path, capsys: Output, gone: str, told: str) -> None:
    (folder / gone).unlink()
    found = figures(folder, capsys)
    assert [told in note for note in found["notes"]] == [True]
    assert told in (folder / "report.html").read_text()
    assert (found["updates"] == 0) == (gone == "events.log")


def test_a_log_that_a_crash_cut_off_is_drawn_as_far_as_it_goes(folder: Path, capsys: Output) -> None:
    log = (folder / "events.log").read_bytes()
    (folder / "events.log").write_bytes(log[: len(log) * 3 // 4])
    found = figures(folder, capsys)
    assert 0 < found["updates"] < 6
    assert found["notes"][0] == "The event log has no end: its process was killed."
    assert all(sum(rank["whole_ns"].values()) == found["wall_ns"] for rank in found["ranks"])


def test_a_run_that_goes_on_is_said_to_and_nothing_of_it_is_missed(folder: Path, capsys: Output) -> None:
    log = (folder / "events.log").read_bytes()
    (folder / "events.log").write_bytes(log[: len(log) * 3 // 4])
    (folder / "summary.json").unlink()
    run = RunFolder.open(folder)
    run.lock()
    try:
        found = figures(folder, capsys)
    finally:
        run.unlock()
    assert found["notes"] == ["The run goes on: what it has written so far is shown."]
    assert found["status"] == "running"
    assert 0 < found["updates"] < 6


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (lambda text: text[:-20], r"damaged; .* is shown\. .*metrics.jsonl:6: given half a line"),
        (lambda text: text.replace('"update": 3', '"upd', 1), r"metrics.jsonl:4: given something that is not JSON"),
        (lambda text: "".join(text.splitlines(keepends=True)[:4]), r"no rows of 2 updates, 4 and later"),
        (lambda text: "".join(text.splitlines(keepends=True)[:5]), r"no rows of update 5, which the event log has"),
    ],
)
def test_metrics_that_were_cut_off_are_shown_as_far_as_they_go(
    folder: Path, capsys: Output, cut: Callable[[str], str], told: str
) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.write_text(cut(metrics.read_text()))
    notes = figures(folder, capsys)["notes"]
    assert len(notes) == 1
    assert re.search(told, notes[0])
    assert 'id="learning"' in (folder / "report.html").read_text()


def test_a_page_that_cannot_be_written_names_the_flag(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"needed .* \(--out FILE\)$"):
        report.main([str(folder), "--out", str(tmp_path / "none" / "report.html")])


def test_a_log_that_nothing_was_written_into_is_as_none(folder: Path, capsys: Output) -> None:
    (folder / "events.log").write_bytes(b"")
    assert figures(folder, capsys)["notes"] == ["Nothing was written into events.log: no schedule can be shown."]


def test_a_damaged_log_is_drawn_up_to_the_damage(folder: Path, capsys: Output) -> None:
    log = bytearray((folder / "events.log").read_bytes())
    log[len(log) * 3 // 4] ^= 1
    (folder / "events.log").write_bytes(log)
    found = figures(folder, capsys)
    assert "damaged" in found["notes"][0]
    assert 0 < found["updates"] < 6


def test_a_run_without_an_update_has_a_page(folder: Path, capsys: Output) -> None:
    log = (folder / "events.log").read_bytes()
    (folder / "events.log").write_bytes(log[: len(log) // 40 + 4000])
    found = figures(folder, capsys)
    assert found["what_if"] is None or found["updates"]
    assert (folder / "report.html").is_file()


def test_a_folder_of_a_newer_version_is_refused_with_both_formats(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format": 2}))
    with pytest.raises(
        RecordError, match=r"another format, written by penstock 0\.1\.0 .*given format 2.*newer penstock"
    ):
        report.main([str(folder)])
    (folder / "config.json").write_text(json.dumps({**config, "flags": {**config["flags"], "telepathy": True}}))
    with pytest.raises(RecordError, match=r"telepathy.*newer penstock"):
        report.main([str(folder)])


def test_a_log_of_a_newer_version_is_refused(folder: Path) -> None:
    log = (folder / "events.log").read_bytes()
    (folder / "events.log").write_bytes(log.replace(b"penstock events 3", b"penstock events 1", 1))
    with pytest.raises(RecordError, match="needed an event log of format 3"):
        report.main([str(folder)])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run"):
        report.main([str(tmp_path)])


def test_a_stopped_run_with_a_long_log_is_not_kept_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.report.write.LARGE_LOG", 100)
    path, reason = end_with_report(RunFolder.open(folder), 10.0, stopped=True)
    assert (path, "not drawn yet" in reason) == (None, True)
    path, reason = end_with_report(RunFolder.open(folder), 10.0, stopped=False)
    assert (path, reason) == (folder / "report.html", "")
