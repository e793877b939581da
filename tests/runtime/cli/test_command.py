"""The command itself, in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.cli.main import VERBS
from penstock.runtime.record.metrics import read_rows

NODE = """
from penstock.graph import Rewards, Rollouts, broadcast, node, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update

@node(pool="scorer")
def looked_at(rollouts: Rollouts, rewards: Rewards) -> Rewards:
    if rollouts.ordinals[0] == 3:
        breakpoint()
    return rewards

@program
def mine(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, looked_at(rollouts, fake_score(rollouts)))
"""


def penstock(*words: str, cwd: Path, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock.runtime.cli.main", *words]
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, text=True, timeout=120, check=False)


def test_no_verb_shows_them_all(tmp_path: Path) -> None:
    done = penstock(cwd=tmp_path)
    assert done.returncode == 2
    assert all(f"  {verb}" in done.stdout for verb in VERBS)
    assert penstock("--help", cwd=tmp_path).returncode == 0
    assert penstock("--version", cwd=tmp_path).stdout.startswith("penstock 0.")


def test_an_unknown_verb_gets_the_nearest(tmp_path: Path) -> None:
    done = penstock("simulat", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "penstock: there is no verb 'simulat'; did you mean 'simulate'?\n")


def test_the_command_line_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import importlib, sys\n"
        "from penstock.runtime.cli.main import VERBS\n"
        "for verb in VERBS: importlib.import_module(f'penstock.runtime.cli.{verb}')\n"
        "import penstock.runtime.control.controller\n"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('penstock.nodes')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("verb", ["resume", "replay", "agent", "doctor"])
def test_help_of_a_verb_has_an_example(verb: str, tmp_path: Path) -> None:
    done = penstock(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert f"penstock {verb}" in done.stdout.partition("Example")[2]


def test_what_the_user_can_mend_is_said_in_a_line(tmp_path: Path) -> None:
    done = penstock("show", "aipoo", cwd=tmp_path)
    assert done.returncode == 2
    assert "the nearest: aipo" in done.stderr
    assert "Traceback" not in done.stderr
    done = penstock("run", "toy", "--updatse", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "--updates" in done.stderr


def test_a_run_leaves_a_folder_that_replays(tmp_path: Path) -> None:
    words = "run toy --updates 4 --batch 3 --generate-ms 5 --update-ms 5 --out here --json"
    done = penstock(*words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["updates"], summary["groups"]) == ("done", 4, 12)
    folder = tmp_path / "here"
    assert [row["update"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert not (folder / "processes.json").exists()
    assert "Equal: all" in penstock("replay", "here", cwd=tmp_path).stdout


def test_a_debugger_stops_in_a_users_node(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NODE)
    words = "run mine.py:mine --in-process --updates 3 --batch 2 --out here"
    done = penstock(*words.split(), cwd=tmp_path, given="p 'ordinal', rollouts.ordinals[0] * 14\nc\n")
    assert done.returncode == 0, done.stderr
    assert "('ordinal', 42)" in done.stdout
    assert "status     done" in done.stdout
