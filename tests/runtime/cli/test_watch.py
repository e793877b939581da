"""Watching a run in progress: access control, the event stream, the page that updates in place, and the terminal."""

import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from penstock.runtime.cli.watch import watch_in_terminal
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.page import page
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.summary import make_report
from tests.runtime.report.runs import ACCURACY, simulated_run

from .conftest import Output, Refuse, Say

if TYPE_CHECKING:
    from playwright.sync_api import Page


PENSTOCK = (sys.executable, "-m", "penstock.runtime.cli.main")
PATIENCE_S = 60.0
get = partial(httpx.get, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "made"
    return simulated_run(path, updates=4, batch=4, lag=1).folder.path


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> RunFolder:
    """A copy that tests may change."""
    return RunFolder(Path(shutil.copytree(finished, tmp_path / "run")))


class Watching:
    """A `penstock watch` process, and requests to it."""

    def __init__(self, path: Path, *words: str) -> None:
        command = [*PENSTOCK, "watch", str(path), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.url = httpx.URL(self.process.stdout.readline().strip())
        self.bare = self.url.copy_with(query=None)

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.end()

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def watching(finished: Path) -> Iterator[Watching]:
    with Watching(finished) as found:
        yield found


def test_it_listens_on_loopback_only(watching: Watching) -> None:
    sockets = psutil.Process(watching.process.pid).net_connections(kind="inet")
    assert {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN} == {
        ("127.0.0.1", watching.url.port)
    }


def test_without_the_token_nothing_is_said(watching: Watching) -> None:
    for path in ("", "events", "live.js", "nothing"):
        answer = get(watching.bare.join(path))
        assert answer.status_code == 403
        assert "no token" in answer.text
        assert "?token=" in answer.text
    wrong = get(watching.bare, params={"token": "é"})
    assert (wrong.status_code, "a wrong token" in wrong.text) == (403, True)
    assert "set-cookie" not in wrong.headers


def test_a_name_that_somebody_made_point_here_is_refused(watching: Watching) -> None:
    answer = get(watching.url, headers={"Host": f"evil.example:{watching.url.port}"})
    assert answer.status_code == 403
    assert "evil.example" in answer.text
    assert get(watching.url, headers={"Host": f"localhost:{watching.url.port}"}).status_code == 200


def test_the_cookie_stands_for_the_token_and_every_answer_has_its_headers(watching: Watching) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        first = client.get(watching.url)
        assert {"HttpOnly", "SameSite=Strict"} <= set(first.headers["set-cookie"].split("; "))
        stale = client.get(watching.bare, params={"token": "of an earlier start"})
        again = client.get(watching.bare)
    assert stale.status_code == 200
    for answer in (first, again, get(watching.bare)):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert again.status_code == 200
    posted = httpx.post(watching.url, timeout=PATIENCE_S)
    assert (posted.status_code, posted.headers["cache-control"]) == (501, "no-store")


@pytest.mark.parametrize("other", ['x={"a":1}', "foo", "a b=1", "path=1", "k@=1", "k[0]=1"])
def test_cookies_of_other_servers_of_this_machine_do_no_harm(watching: Watching, other: str) -> None:
    own = f"penstock_{watching.url.port}={watching.url.params['token']}"
    assert get(watching.bare, headers={"Cookie": f"{other}; {own}"}).status_code == 200


def test_a_request_whose_address_is_none_is_answered(watching: Watching) -> None:
    with socket.create_connection(("127.0.0.1", watching.url.port or 0), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
        assert b" 400 " in connection.makefile("rb").readline()


def test_the_stream_of_a_finished_run_has_a_page_and_an_end(watching: Watching) -> None:
    answer = get(watching.bare.join("events"), params=dict(watching.url.params))
    events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["page", "ended"]
    assert "id: 4-" in answer.text
    assert 'id="what-if"' in get(watching.url).text


def test_a_port_in_use_is_told(watching: Watching, finished: Path, refuse: Refuse) -> None:
    status, said = refuse("watch", finished, "--port", watching.url.port)
    assert (status, f"--port: given {watching.url.port}, which is in use" in said) == (2, True)


def test_ctrl_c_ends_it_without_a_word_even_while_somebody_reads(folder: RunFolder) -> None:
    folder.lock()  # a run in progress, so that the stream does not end
    with Watching(folder.path) as found:
        where = found.bare.join("events")
        with httpx.stream("GET", where, params=dict(found.url.params), timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith("event:")) == "event: page"
            assert found.end() == (130, "")
    folder.unlock()


def test_what_a_run_that_goes_on_has_not_written_yet_is_no_fault(folder: RunFolder) -> None:
    (folder.path / "summary.json").unlink()
    log = folder.events.read_bytes()
    folder.events.write_bytes(log[: len(log) * 2 // 3])
    assert read_facts(folder).notes
    facts = read_facts(folder, alive=True)
    assert facts.notes == []
    assert facts.summary is not None
    assert facts.summary["status"] == "running"


def test_the_accuracy_before_training_is_known_as_soon_as_training_begins(folder: RunFolder, capsys: Output) -> None:
    (folder.path / "summary.json").unlink()
    folder.lock()  # a run in progress
    facts = read_facts(folder, alive=True)
    assert facts.accuracy == {"before": ACCURACY}
    shown = page(make_report(facts, lambda: True))
    assert f"{100 * ACCURACY:.1f} %</dd" in shown.replace(" <small>before training</small>", "")
    assert "Accuracy on held-out problems" in shown
    assert watch_in_terminal(folder, plain=False, once=True) == 0
    assert f"{100 * ACCURACY:.1f} %" in capsys.readouterr().out
    folder.unlock()


def test_one_picture_and_plain_lines_of_a_finished_run(finished: Path, say: Say) -> None:
    shown = say("watch", finished, "--once")
    assert "4/4" in shown
    assert "generator" in shown
    assert "update 4/4" in say("watch", finished, "--plain")


def test_a_finished_run_without_its_summary_was_not_killed(folder: RunFolder, capsys: Output) -> None:
    (folder.path / "summary.json").unlink()
    assert watch_in_terminal(folder, plain=True, once=False) == 0
    assert "killed" not in capsys.readouterr().err
    folder.events.write_bytes(folder.events.read_bytes()[:-1])
    for once in (False, True):
        assert watch_in_terminal(folder, plain=not once, once=once) == 0
        assert "it was killed" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"update": 3, "los', '{"update": 3, "loss": NaN}'])
def test_rows_before_a_damaged_one_are_shown(folder: RunFolder, say: Say, line: str) -> None:
    rows = folder.metrics.read_text().splitlines()[:-1]
    folder.metrics.write_text("\n".join([*rows, line, ""]))
    picture, lines = say("watch", folder.path, "--once"), say("watch", folder.path, "--plain")
    assert "3/4" in picture
    assert "update 3/4" in lines
    for shown in (picture, lines):
        assert "metrics.jsonl is damaged; what comes before" in " ".join(shown.replace("│", "").split())


HALF, UPDATES = 30, 60
HELD = f"""
from pathlib import Path
from time import sleep

from penstock.graph import Metrics, Rewards, Rollouts, broadcast, node, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update

@node(pool="trainer", clock="update")
def step(policy: FakePolicy, rollouts: Rollouts, rewards: Rewards) -> tuple[FakePolicy, Metrics]:
    while policy.version == {HALF} and not Path(__file__).with_name("go").exists():
        sleep(0.01)
    return fake_update.fn(policy, rollouts, rewards, ms=50.0)

@program
def held(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag), ms=50.0)
    return step(policy, rollouts, fake_score(rollouts, ms=5.0))
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A run that waits halfway for the file `go` beside its folder, however slowly a browser starts."""
    (tmp_path / "held.py").write_text(HELD)
    command = [*PENSTOCK, "run", "held.py:held", "--updates", str(UPDATES), "--batch", "8", "--out", "run", "--plain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its folder exists now
        threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            yield tmp_path / "run"
        finally:
            process.send_signal(signal.SIGINT)  # no effect if it has ended
            process.wait(PATIENCE_S)


VIEW = """(() => {
  const view = document.querySelector(".schedule").view;
  return {zoom: [view.from, view.to], ends: view.data.ends.length,
          seen: document.elementFromPoint(innerWidth / 2, innerHeight / 2).closest(".chart") === view.chart,
          open: document.querySelector("#graph details").open, focus: document.activeElement.className};
})()"""


def until_shown(page: "Page", updates: int) -> None:
    """Wait until the schedule has this many updates; polled from here, since the page forbids evaluating strings."""
    until, shown = monotonic() + PATIENCE_S, "document.querySelector('.schedule')?.view?.data.ends.length ?? 0"
    while page.evaluate(shown) < updates:
        assert monotonic() < until, f"{updates} updates were not shown within {PATIENCE_S:.0f} s"
        page.wait_for_timeout(200)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_page_changes_in_place_while_the_run_goes_on(running: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    complaints: list[str] = []
    with Watching(running) as found, playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(str(found.url))
        page.wait_for_selector("html[data-page]")  # from now on it follows the run
        until_shown(page, 3)
        page.click("button[data-do=in]")
        page.evaluate("document.querySelector('#graph details').open = false")
        page.evaluate("document.querySelector('.chart').focus()")
        page.evaluate("document.querySelector('.chart').scrollIntoView({block: 'center'})")
        before: dict[str, Any] = page.evaluate(VIEW)
        running.with_name("go").touch()
        page.wait_for_selector("html[data-live=ended]")
        after = page.evaluate(VIEW)
        status = page.inner_text("#live .said")
        browser.close()
        assert found.end() == (130, "")
    assert after.pop("ends") == UPDATES > HALF >= before.pop("ends")
    assert after == before
    assert (status, complaints) == ("The run has ended.", [])
