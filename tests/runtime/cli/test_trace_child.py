from pathlib import Path
from typing import Any

import pytest

from penstock.graph.ir import Graph
from penstock.runtime.cli.flags import RunFlags
from penstock.runtime.cli.trace_child import answer, try_inputs

PROGRAM = """
from penstock.graph import Policy, Prompts, Rewards, Rollouts, broadcast, node, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update

@node(pool="scorer")
def shorter(rollouts: Rollouts, rewards: Rewards, *, weight: float = 0.01) -> Rewards:
    return rewards - rollouts.lengths() * weight

@program
def mine(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = shorter(rollouts, fake_score(rollouts))
    return fake_update(policy, rollouts, rewards)

@program
def faulty(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    rollouts = fake_generate(prompts, policy)
    fake_score(rollouts)
    return fake_update(policy, rollouts, rollouts)

@program
def raising(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    return {}["no such key"]

thing = 3
"""

OWN = """
from penstock.graph import Rewards, broadcast, node, program, requires
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score

def look(context):
    if context.options["shelf"] == "none":
        raise ValueError(f"shelf: given 'none', needed one that is there: {context.node}")

@requires(look)
def make(context):
    raise AssertionError("it is made by the ranks")

class Shelved(FakePolicy):
    maker = f"{__file__}:make"

@node(pool="trainer", clock="update")
def step(policy: Shelved, rewards: Rewards) -> Shelved:
    return policy

@program
def mine(first: Shelved, second: Shelved, prompts: FakePrompts, *, shelf: str = ""):
    rewards = fake_score(fake_generate(prompts, broadcast(first)))
    return {"first": step(first, rewards), "second": step(second, rewards)}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PROGRAM)
    return str(tmp_path / "mine.py")


def test_a_program_of_a_users_file_is_traced(file: str) -> None:
    found = answer("run", f"{file}:mine", ["--lag", "3", "--batch", "4"])
    graph = Graph.from_json(found["graph"])
    assert found["faults"] == []
    assert graph["shorter"].op == f"{file}:shorter"
    assert graph["broadcast"].lag == 3
    assert (found["flags"]["batch"], found["flags"]["device"]) == (4, "cpu")


def test_a_built_in_program_comes_with_its_evaluation() -> None:
    found = answer("show", "aipo", [])
    assert Graph.from_json(found["evaluation"]).sources[0].name == "evaluate.prompts"
    assert "evaluation" not in answer("run", "aipo", ["--eval-groups", "0"])


def test_all_faults_are_found_at_once(file: str) -> None:
    faults = answer("check", f"{file}:faulty", ["--batch", "0"])["faults"]
    assert len(faults) >= 3
    assert {fault["where"].rpartition(":")[0] for fault in faults} == {file}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aipoo", "the nearest: aipo"),
        ("{file}:mien", "the nearest: mine"),
        ("{file}:thing", "given a value of type int, needed a function with @program"),
        ("/nowhere/x.py:mine", "there is no file"),
        ("no_such_package.module:f", "no module"),
    ],
)
def test_what_is_no_program_is_a_usage_error(file: str, name: str, said: str) -> None:
    found = answer("run", name.format(file=file), [])
    assert said in found["error"]
    assert found["usage"]


def test_a_failing_import_shows_the_users_lines(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\nimport no_such_package_at_all\n")
    error = answer("run", f"{tmp_path}/broken.py:f", [])["error"]
    assert "line 2" in error
    assert "No module named 'no_such_package_at_all'" in error
    assert "/runtime/cli/" not in error


def test_a_program_that_raises_shows_the_users_lines(file: str) -> None:
    error = answer("run", f"{file}:raising", [])["error"]
    assert 'return {}["no such key"]' in error
    assert "KeyError: 'no such key'" in error
    assert "graph/build.py" not in error


def test_bad_data_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "2 #### 2"}\n{"question": "2+2?"}\n')
    found = answer("run", "aipo", ["--data", str(tmp_path / "d.jsonl"), "--model", "new"])
    assert "d.jsonl:2" in found["error"]
    assert not found["usage"]


def test_a_model_directory_that_does_not_fit_is_told_before_anything_starts(tmp_path: Path) -> None:
    assert "config.json" in answer("run", "aipo", ["--model", str(tmp_path)])["error"]
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "needed one of: llama" in answer("run", "aipo", ["--model", str(tmp_path)])["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distill"], "teacher_model: given no directory, needed a model directory with the policy's tokenizer: --te"),
        (["distill", "--teacher-model", "/nowhere"], "/nowhere/config.json: cannot be read"),
        (["rlhf"], "reward_model: given no directory, needed a directory that a run of the program reward_model"),
        (["rlhf", "--reward-model", "/nowhere"], "/nowhere: given no weights"),
        (["ppo", "--model", "/nowhere"], "/nowhere/config.json: cannot be read"),
        (["reward_model", "--model", "/nowhere"], "/nowhere/config.json: cannot be read"),
    ],
)
def test_a_model_that_a_program_lacks_is_told_before_anything_starts(words: list[str], said: str) -> None:
    found = answer("run", words[0], words[1:])
    assert said in found["error"]
    assert not found["usage"]
    assert "Traceback" not in found["error"]


def test_what_a_maker_of_ones_own_requires_is_looked_at_once_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = answer("run", f"{tmp_path}/own.py:mine", ["--shelf", "none"])
    assert found["error"] == "shelf: given 'none', needed one that is there: first"
    assert "error" not in answer("run", f"{tmp_path}/own.py:mine", ["--shelf", "there"])


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", "cpu:"])
def test_a_device_that_is_not_there_is_an_error(device: str) -> None:
    found: dict[str, Any] = try_inputs([], RunFlags(device=device))
    assert f"--device: given {device!r}" in found["error"]


def test_the_device_is_chosen() -> None:
    assert try_inputs([], RunFlags(device="cpu"))["flags"]["device"] == "cpu"
    assert try_inputs([], RunFlags(device="auto"))["flags"]["device"] in ("cpu", "cuda")
