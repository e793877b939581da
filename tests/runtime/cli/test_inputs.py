"""A resume needs what the run was given, from wherever it is called."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.runtime.cli import run, tracing
from penstock.runtime.cli.tracing import CommandError, ask_child, require_inputs
from penstock.runtime.control.launcher import DONE, INTERRUPTED
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.folder import RunFolder

from .conftest import SUMMARY, Processes

DATA = '{"question": "1+1?", "answer": "#### 2"}\n'
MINE = """
from penstock.graph import broadcast, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update

@program
def mine(policy: FakePolicy, prompts: FakePrompts):
    rollouts = fake_generate(prompts, broadcast(policy, lag=1))
    return fake_update(policy, rollouts, fake_score(rollouts))
"""


@pytest.fixture
def stopped(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of the user's own program, given by relative paths, that was stopped; this is another folder now."""
    home = tmp_path / "home"
    (home / "m").mkdir(parents=True)
    (home / "m" / "config.json").write_text("{}")
    (home / "d.jsonl").write_text(DATA)
    (home / "mine.py").write_text(MINE)
    monkeypatch.chdir(home)
    processes.status, processes.summary = INTERRUPTED, {**SUMMARY, "status": "stopped"}
    given = ["--data", "d.jsonl", "--eval-data", "d.jsonl", "--model", "m", "--device", "cpu"]
    assert run.main(["mine.py:mine", *given, "--out", "run"]) == INTERRUPTED
    monkeypatch.chdir(tmp_path)
    processes.status, processes.summary = DONE, SUMMARY
    return RunFolder.open(home / "run")


def test_paths_are_kept_absolute_so_that_a_run_goes_on_from_anywhere(stopped: RunFolder, processes: Processes) -> None:
    home = stopped.path.parent
    flags = processes.configs[0].flags
    assert (flags.data, flags.eval_data, flags.model) == (str(home / "d.jsonl"),) * 2 + (str(home / "m"),)
    asked = stopped.read_json("config.json")["asked"]
    assert asked["digests"] == {str(home / "d.jsonl"): hashlib.sha256(DATA.encode()).hexdigest()}
    assert run.resume([str(stopped.path), "--plain"]) == 0


def test_data_that_has_changed_is_refused_before_anything_is_touched(stopped: RunFolder, processes: Processes) -> None:
    (stopped.path.parent / "d.jsonl").write_text(DATA.replace("2", "3"))
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(CommandError, match=r"(?s)nothing was changed.*d.jsonl: it has changed.*given.*needed \w{64}"):
        run.resume([str(stopped.path), "--updates", "999"])
    assert {path: path.read_bytes() for path in before} == before
    assert len(processes.configs) == 1


def test_all_that_is_missing_is_said_before_anything_is_touched(stopped: RunFolder, processes: Processes) -> None:
    home = stopped.path.parent
    for name in ("d.jsonl", "mine.py", "m/config.json"):
        (home / name).unlink()
    graphs = stopped.read_json("graph.json")
    graphs["graph"]["nodes"][1]["op"] = f"{home / 'mine.py'}:own_score"
    graphs["graph"]["nodes"][2]["op"] = "their_package.scores:score"
    stopped.write_json("graph.json", graphs)
    with pytest.raises(CommandError) as error:
        run.resume([str(stopped.path)])
    for needed in (
        f"the model {home / 'm'}: given a folder without config.json",
        f"the data {home / 'd.jsonl'}: given no file there",
        f"the program's file {home / 'mine.py'}: given no file there",
        f"the program's module their_package.scores: given a folder from which it cannot be imported, needed a resume "
        f"from {home}",
    ):
        assert needed in str(error.value)
    assert stopped.read_json("summary.json")["status"] == "stopped"
    assert len(processes.configs) == 1


NEEDY = """
from pathlib import Path
from penstock.graph import Rewards, broadcast, node, program, requires
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score

def look(context):
    if not Path(context.options["shelf"]).is_dir():
        raise ValueError(f"shelf: given {context.options['shelf']}, needed a folder")

@requires(look)
def make(context):
    return FakePolicy(context)

class Shelved(FakePolicy):
    maker = f"{__file__}:make"

@node(pool="trainer", clock="update")
def step(policy: Shelved, rewards: Rewards) -> Shelved:
    return policy

@program
def needy(policy: Shelved, prompts: FakePrompts, *, shelf: Path | None = None):
    return step(policy, fake_score(fake_generate(prompts, broadcast(policy, lag=1))))
"""


def test_an_option_that_is_a_path_is_found_from_anywhere_and_required_again(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "shelf").mkdir(parents=True)
    (home / "needy.py").write_text(NEEDY)
    monkeypatch.chdir(home)
    processes.status, processes.summary = INTERRUPTED, {**SUMMARY, "status": "stopped"}
    assert run.main(["needy.py:needy", "--shelf", "shelf", "--out", "run"]) == INTERRUPTED
    monkeypatch.chdir(tmp_path)
    assert dict(processes.configs[0].graph.options) == {"shelf": str(home / "shelf")}
    assert run.resume([str(home / "run"), "--plain"]) == INTERRUPTED
    (home / "shelf").rmdir()
    with pytest.raises(CommandError, match=f"shelf: given {home}/shelf, needed a folder"):
        run.resume([str(home / "run")])
    assert len(processes.configs) == 2


ONE_GPU = """
import sys, types
sees_one = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
sys.modules["torch"] = types.SimpleNamespace(cuda=sees_one)
"""


def test_a_gpu_is_looked_for_with_the_torch_that_the_nodes_bring(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = needy_config(processes, tmp_path, monkeypatch)
    on_gpu = replace(config.flags, device="cuda")
    with pytest.raises(CommandError, match="PyTorch sees 0 GPUs here"):
        require_inputs(config.graphs, on_gpu)
    (tmp_path / "needy.py").write_text(NEEDY + ONE_GPU)
    require_inputs(config.graphs, on_gpu)


def test_nodes_are_imported_before_any_process_of_a_run_starts(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = needy_config(processes, tmp_path, monkeypatch)
    (tmp_path / "needy.py").write_text(NEEDY.replace("def step", "def stride").replace("step(", "stride("))
    with pytest.raises(CommandError, match=r"needy\.py:step'\n.*stride"):
        require_inputs(config.graphs, config.flags)


def needy_config(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shelf").mkdir()
    (tmp_path / "needy.py").write_text(NEEDY)
    run.main(["needy.py:needy", "--shelf", "shelf", "--device", "cpu", "--out", "run"])
    monkeypatch.setattr(tracing, "ask_child", ask_child)
    return processes.configs[0]


def test_data_that_is_made_up_needs_no_file(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic").write_text("a file of that name is not meant")
    run.main(["toy", "--data", "arithmetic", "--out", "run"])
    assert processes.configs[0].flags.data == "arithmetic"
