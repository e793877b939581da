"""A run looked at while it goes on: who may, what the stream says, that a page changes in place, and the terminal."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.runtime.cli.watch_terminal import watch_in_terminal
from penstock.runtime.control.config import RunConfig
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.facts import read_facts
from penstock.runtime.report.page import page
from penstock.runtime.report.report import make_report
from tests.runtime.report.runs import ACCURACY, simulated_run

PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "made"
    return simulated_run(path, updates=4, batch=4, lag=1).folder.path


def copy(made: Path, path: Path) -> RunFolder:
    shutil.copytree(made, path)
    return RunFolder.open(path)


class Watching:
    """`penstock watch`, and how to ask it."""

    def __init__(self, path: Path, *words: str) -> None:
        command = [*PENSTOCK, "watch", str(path), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.url = httpx.URL(self.process.stdout.readline().strip())
        self.bare = self.url.copy_with(query=None)

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def watching(finished: Path) -> Iterator[Watching]:
    found = Watching(finished)
    yield found
    if found.process.poll() is None:
        found.end()


def test_it_listens_on_loopback_only(watching: Watching) -> None:
    sockets = psutil.Process(watching.process.pid).net_connections(kind="inet")
    assert {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN} == {
        ("127.0.0.1", watching.url.port)
    }


def test_without_the_token_nothing_is_said(watching: Watching) -> None:
    for path in ("", "events", "live.js", "nothing"):
        answer = httpx.get(watching.bare.join(path))
        assert answer.status_code == 403
        assert "no token" in answer.text
        assert "?token=" in answer.text
    wrong = httpx.get(watching.bare, params={"token": "é"})
    assert (wrong.status_code, "a wrong token" in wrong.text) == (403, True)
    assert "set-cookie" not in wrong.headers


def test_a_name_that_somebody_made_point_here_is_refused(watching: Watching) -> None:
    answer = httpx.get(watching.url, headers={"Host": f"evil.example:{watching.url.port}"})
    assert answer.status_code == 403
    assert "evil.example" in answer.text
    assert httpx.get(watching.url, headers={"Host": f"localhost:{watching.url.port}"}).status_code == 200


def test_the_cookie_stands_for_the_token_and_every_answer_has_its_headers(watching: Watching) -> None:
    with httpx.Client() as client:
        first = client.get(watching.url)
        assert {"HttpOnly", "SameSite=Strict"} <= set(first.headers["set-cookie"].split("; "))
        stale = client.get(watching.bare, params={"token": "of an earlier start"})
        again = client.get(watching.bare)
    assert stale.status_code == 200
    for answer in (first, again, httpx.get(watching.bare)):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert again.status_code == 200
    assert httpx.post(watching.url).status_code == 405


def test_the_stream_of_a_finished_run_has_a_page_and_an_end(watching: Watching) -> None:
    answer = httpx.get(watching.bare.join("events"), params=dict(watching.url.params), timeout=60)
    events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["page", "ended"]
    assert "id: 4-" in answer.text
    assert 'id="what-if"' in httpx.get(watching.url).text


def test_a_port_in_use_is_told(watching: Watching, finished: Path) -> None:
    command = [*PENSTOCK, "watch", str(finished), "--port", str(watching.url.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"--port: given {watching.url.port}, which is in use" in done.stderr


def test_ctrl_c_ends_it_without_a_word_even_while_somebody_reads(finished: Path, tmp_path: Path) -> None:
    folder = copy(finished, tmp_path / "run")
    folder.lock()  # a run is alive there, so that the stream has no end
    found = Watching(folder.path)
    with httpx.stream("GET", found.bare.join("events"), params=dict(found.url.params), timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: page"
        assert found.end() == (130, "")
    folder.unlock()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for words in ((), ("--once",)):
        command = [*PENSTOCK, "watch", str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "holds no run" in done.stderr) == (1, True)


def test_what_a_run_that_goes_on_has_not_written_yet_is_no_fault(finished: Path, tmp_path: Path) -> None:
    folder = copy(finished, tmp_path / "run")
    (folder.path / "summary.json").unlink(missing_ok=True)
    log = folder.events.read_bytes()
    folder.events.write_bytes(log[: len(log) * 2 // 3])
    assert read_facts(folder).notes
    facts = read_facts(folder, alive=True)
    assert facts.notes == []
    assert facts.summary is not None
    assert facts.summary["status"] == "running"


def test_the_accuracy_before_training_is_known_as_soon_as_training_begins(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(finished, tmp_path / "run")
    (folder.path / "summary.json").unlink()
    folder.lock()  # a run is alive there
    facts = read_facts(folder, alive=True)
    assert facts.accuracy == {"before": ACCURACY}
    shown = page(make_report(facts, lambda: True))
    assert f"{100 * ACCURACY:.1f} %</dd" in shown.replace(" <small>before training</small>", "")
    assert "Accuracy on held-out problems" in shown
    assert watch_in_terminal(folder, plain=False, once=True) == 0
    assert f"{100 * ACCURACY:.1f} %" in capsys.readouterr().out
    folder.unlock()


def test_one_picture_and_plain_lines_of_a_finished_run(finished: Path) -> None:
    shown = subprocess.run([*PENSTOCK, "watch", str(finished), "--once"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert f"{RunConfig.load(RunFolder.open(finished)).flags.updates}" in shown.stdout
    assert "generator" in shown.stdout
    lines = subprocess.run([*PENSTOCK, "watch", str(finished), "--plain"], capture_output=True, text=True, timeout=60)
    assert lines.returncode == 0, lines.stderr
    assert "update 4/4" in lines.stdout


def test_a_finished_run_without_its_summary_was_not_killed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(finished, tmp_path / "run")
    (copy / "summary.json").unlink()
    assert watch_in_terminal(RunFolder(copy), plain=True, once=False) == 0
    assert "killed" not in capsys.readouterr().err
    log = copy / "events.log"
    log.write_bytes(log.read_bytes()[:-1])
    assert watch_in_terminal(RunFolder(copy), plain=True, once=False) == 0
    assert "it was killed" in capsys.readouterr().err


def test_only_the_page_imports_a_server() -> None:
    code = (
        "import sys, penstock.runtime.cli.watch, penstock.runtime.report.write\n"
        "print([m for m in ('uvicorn', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A toy run of some seconds."""
    path = tmp_path / "run"
    command = [*PENSTOCK, "run", "toy", "--updates", "60", "--batch", "8", "--out", str(path), "--plain"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()  # its folder is there
    yield path
    process.communicate(timeout=120)


VIEW = """(() => {
  const view = document.querySelector(".schedule").view;
  return {zoom: [view.from, view.to], ends: view.data.ends.length,
          top: Math.round(view.chart.getBoundingClientRect().top),
          open: document.querySelector("#graph details").open, focus: document.activeElement.className};
})()"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_page_changes_in_place_while_the_run_goes_on(running: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    found, complaints = Watching(running), []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(str(found.url))
        page.wait_for_selector(".schedule[data-ready]", timeout=60_000)
        while page.evaluate("document.querySelector('.schedule').view.data.ends.length") < 3:
            page.wait_for_timeout(200)
        page.click("button[data-do=in]")
        page.evaluate("document.querySelector('#graph details').open = false")
        page.evaluate("document.querySelector('.chart').focus(); scrollTo(0, 250)")
        before: dict[str, Any] = page.evaluate(VIEW)
        page.wait_for_selector("html[data-live=ended]", timeout=120_000)
        after = page.evaluate(VIEW)
        status = page.inner_text("#live .said")
        browser.close()
    assert after.pop("ends") == 60 > before.pop("ends")
    assert after == before
    assert (status, complaints) == ("The run has ended.", [])
    assert found.end() == (130, "")
