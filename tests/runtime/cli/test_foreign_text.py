"""Text and names from others in a terminal: control characters are shown, not executed; any path works."""

import ast
import json
import os
import re
import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from penstock.graph import Graph
from penstock.runtime.cli import resume, starting, tracing
from penstock.runtime.cli.display import PlainDisplay, Progress, dashboard
from penstock.runtime.cli.main import main
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.endpoints import ipc_endpoint
from penstock.runtime.control.security import Join, Keys
from penstock.runtime.record.errors import visible
from penstock.runtime.record.timeline import Bar
from penstock.runtime.record.trace_formats import gantt_text
from penstock.runtime.record.trackers import TensorBoard, TrackedRun, lacks
from penstock.runtime.tensor.checkpoint import StateFile, save_state
from tests.runtime.report.runs import simulated_run

from .conftest import Output, Patch, Processes, Refuse, Say

EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31m\r\x9b31m\u202eevil\x00\x7f"
ODD = os.fsdecode(b"na\xff me")
"""A name that is not UTF-8, as Python decodes it."""


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_control_characters_are_made_visible() -> None:
    assert is_plain(visible(EVIL))
    assert visible("two\nlines\t– ü 漢") == "two\nlines\t– ü 漢"
    assert visible(visible(EVIL)) == visible(EVIL)
    text = json.dumps({"path": ODD + EVIL}, ensure_ascii=False)
    assert json.loads(visible(text)) == {"path": ODD + EVIL}


def test_no_display_obeys_what_an_error_or_a_name_says() -> None:
    progress, said = Progress(EVIL, 3), list[str]()
    display = PlainDisplay(progress, lambda text: said.append(visible(text)))
    row = {"update": 0, "version": 1, "pools": {EVIL: {"busy": 1.0, EVIL: 2.0}}}
    for line in (
        {"kind": "note", "text": EVIL},
        {"kind": "error", "text": EVIL},
        {"kind": "external", "join": EVIL, "host": EVIL},
        {"kind": "status", "stage": EVIL, "pools": {EVIL: {"doing": [f"{EVIL}[0]"], "version": 1}}},
        {"kind": "row", "row": row},
    ):
        display.tell(line)
    console = Console(file=StringIO(), width=120, color_system=None)
    with console.capture() as capture:
        console.print(dashboard(progress, f"[red]{EVIL}[/]", 120, 1.0))
    assert is_plain(capture.get())
    assert "[red]" in capture.get()  # shown as text, not taken as markup
    assert said
    assert all(map(is_plain, [*said, *progress.errors]))


@pytest.mark.parametrize("verb", ["", "report", "replay", "agent", "run"])
def test_what_a_command_complains_of_is_shown_and_not_obeyed(verb: str, capsys: Output, monkeypatch: Patch) -> None:
    def fail(*words: object, **more: object) -> None:
        raise CommandError(EVIL)

    monkeypatch.setattr(tracing, "ask_child", fail)
    with pytest.raises(SystemExit, match=r"[12]"):
        main([*verb.split(), EVIL.replace("\0", "")])
    captured = capsys.readouterr()
    assert "evil" in captured.err
    assert is_plain(captured.out + captured.err)


RUNTIME = Path(__file__).resolve().parents[3] / "runtime"


def test_whatever_is_printed_is_visible() -> None:
    """Every `print` gets a constant, JSON, or output of `visible`; a picture of `simulate` has colours and nodes."""
    raw = []
    for path in sorted(RUNTIME.rglob("*.py")):
        tree = ast.parse(path.read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
        for call in calls:
            text = "".join(ast.unparse(argument) for argument in call.args)
            constant = all(isinstance(argument, ast.Constant) for argument in call.args)
            known = "__version__" in text or "OVERVIEW" in text
            if not (constant or known or "visible(" in text or "json.dumps(" in text):
                raw.append(f"{path.relative_to(RUNTIME)}:{call.lineno}")
    assert raw == []


def test_the_picture_of_a_schedule_has_its_colours_in_a_terminal(say: Say, monkeypatch: Patch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = say("simulate", "toy", "--updates", 2)
    assert "\x1b[38;2;" in shown
    assert is_plain(re.sub(r"\x1b\[[0-9;]*m", "", shown))
    assert "u001b" not in shown
    drawn = gantt_text([Bar(f"{EVIL}/0", EVIL, 0, 0.0, 1.0)], 60, color=True)
    assert is_plain(re.sub(r"\x1b\[38;2;[0-9;]*m|\x1b\[0m|\x1b\[2m", "", drawn))


def test_a_finished_run_may_lie_under_a_path_that_is_no_utf8(tmp_path: Path, say: Say) -> None:
    path = simulated_run(tmp_path / ODD / "run", updates=2, batch=2).folder.path
    for verb, *words in (
        ("report",),
        ("report", "--json"),
        ("report", "--out", tmp_path / ODD / f"{ODD}.html"),
        ("replay",),
        ("watch", "--once"),
        ("watch", "--plain"),
    ):
        assert is_plain(say(verb, path, *words))
    assert (path / "report.html").read_text().count("\\udcff") > 0


def test_a_run_may_lie_under_a_path_that_is_no_utf8(processes: Processes, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / ODD).mkdir()
    path = tmp_path / ODD / "run"
    assert starting.run(["toy", "--updates", "2", "--out", str(path), "--plain"]) == 0
    assert resume.resume([str(path), "--updates", "3", "--plain"]) == 0
    assert is_plain(capsys.readouterr().out)
    endpoint = ipc_endpoint(path, tmp_path)
    Keys.make("run1", endpoint, ["local"]).join("local", endpoint, path).write(path / "keys" / "local.json")
    assert Join.read(path / "keys" / "local.json").folder == str(path)
    endpoint.encode()
    save_state(path / f"{ODD}.safetensors", {"a": torch.ones(2)}, {"b": 1})
    kept = StateFile.open(path / f"{ODD}.safetensors")
    tensors, facts = kept.tensors(), kept.facts
    assert (tensors["a"].tolist(), facts) == ([1.0, 1.0], {"b": 1})
    if not lacks("tensorboard"):
        board = TensorBoard(TrackedRun(path, "0123", "run", "", {}, {}, -1, 0.0))
        board.log(0, {"loss": 0.5})
        board.close("done", 0, {}, None)
        assert [p.stat().st_size > 0 for p in (path / "tensorboard").iterdir()] == [True]


def test_a_program_that_is_not_to_run_may_lie_under_a_path_that_is_no_utf8(
    tmp_path: Path, say: Say, refuse: Refuse, processes: Processes
) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    shutil.copy(RUNTIME.parent / "programs" / "toy.py", folder / "toy.py")
    program = f"{folder}/toy.py:toy"
    assert is_plain(say("show", program))
    graph = Graph.from_json(json.loads(say("show", program, "--json")))
    say("show", program, "--json", "--out", folder / "g.json")
    assert Graph.from_json(json.loads((folder / "g.json").read_text())) == graph
    assert graph.op == program
    pictures = (word for kind in ("svg", "html", "trace") for word in (f"--{kind}", folder / f"a.{kind}"))
    say("simulate", program, "--updates", 2, *pictures)
    for words in ((program,), ("toy", "--data", folder / "data.jsonl")):
        for verb in ("check", "run"):
            assert "no UTF-8" in refuse(verb, *words, "--out", tmp_path / "run")[1]
    assert not (tmp_path / "run").exists()
