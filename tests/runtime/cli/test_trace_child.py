import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.graph.errors import Fault
from penstock.graph.ir import Graph
from penstock.nodes.model import Llama, save_model
from penstock.nodes.open_model import initial_model
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.cli.children import answer
from penstock.runtime.control.run_config import choose_device

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

MISTYPED = """
from penstock.graph import broadcast, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate

@program
def mistyped(policy: FakePolicy, prompts: FakePrompts):
    rollouts = fake_generate(prompts, broadcast(policy, lag=-1), samples=3, by=3)
    fake_generate(prompts, policy, nope=1)
    return rollouts
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


def test_options_that_a_node_does_not_have_are_told_beside_all_other_faults(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MISTYPED)
    found = answer("check", f"{tmp_path}/mine.py:mistyped", ["--batch", "0"])
    told = [fault["what"] for fault in found["faults"]]
    assert "graph" not in found
    assert told[:2] == ["batch", "fake_generate: option 'by'"]
    assert told.count("broadcast: lag") == told.count("fake_generate: option 'nope'") == 1
    assert {"the next 'policy'", "fake_generate_2: input 'behaviour'"} < set(told)


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


def test_a_file_that_leaves_the_process_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)  # the end of the script\n")
    found = answer("run", f"{tmp_path / 'script.py'}:main", [])
    assert "script.py" in found["error"]
    assert "sys.exit(0)  # the end of the script" in found["error"]


def test_a_failing_import_shows_the_users_lines(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\nimport no_such_package_at_all\n")
    error = answer("run", f"{tmp_path}/broken.py:f", [])["error"]
    assert "line 2" in error
    assert "No module named 'no_such_package_at_all'" in error
    assert "/runtime/cli/" not in error


@pytest.mark.parametrize(
    ("text", "said"),
    [("import math\nx = = 3\n", "SyntaxError: invalid syntax"), ("import math\nprint(y)\n", "NameError: name 'y'")],
)
def test_a_file_that_cannot_be_run_shows_its_own_line_alone(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    error = answer("run", f"{tmp_path}/broken.py:f", [])["error"]
    assert said in error
    assert error.count("  File ") == 1
    assert 'broken.py", line 2' in error


def test_a_program_that_raises_shows_the_users_lines(file: str) -> None:
    error = answer("run", f"{file}:raising", [])["error"]
    assert 'return {}["no such key"]' in error
    assert "KeyError: 'no such key'" in error
    assert "graph/program.py" not in error


def test_bad_data_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "2 #### 2"}\n{"question": "2+2?"}\n')
    found = answer("run", "aipo", ["--data", str(tmp_path / "d.jsonl"), "--model", "new"])
    assert "d.jsonl:2" in found["error"]
    assert not found["usage"]


def test_prompts_longer_than_the_context_are_told_with_their_lines_before_anything_starts(tmp_path: Path) -> None:
    rows = [{"question": "é" * half, "answer": "#### 2"} for half in (9, 1016, 1017, 9, 1500)]
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    words = ["--data", str(tmp_path / "d.jsonl"), "--model", "new"]
    needed = "at most 2032: the context of 2048 less max_tokens 16"
    found = answer("run", "aipo", words)["faults"]
    assert [(fault["given"], fault["needed"], fault["where"]) for fault in found] == [
        ("a prompt of 2034 tokens", needed, f"{tmp_path}/d.jsonl:5"),
        ("a prompt of 3000 tokens", needed, f"{tmp_path}/d.jsonl:9"),
    ]
    words += ["--max-tokens", "14"]
    assert [fault["where"] for fault in answer("run", "aipo", words)["faults"]] == [f"{tmp_path}/d.jsonl:9"]


def test_prompts_of_another_source_are_looked_at_by_the_first_of_them() -> None:
    found = answer("run", "aipo", ["--max-tokens", "25"])["faults"]
    assert {(fault["given"], fault["where"]) for fault in found} == {("a prompt of 8 tokens", "group 0")}
    assert answer("run", "aipo", ["--max-tokens", "24"])["faults"] == []


@pytest.mark.parametrize(("words", "most"), [([], 31), (["--model", "{model}"], 23)])
def test_responses_that_leave_no_room_for_a_prompt_are_told_before_anything_starts(
    tmp_path: Path, words: list[str], most: int
) -> None:
    config = replace(initial_model("")[0], max_position_embeddings=24)
    model = Llama(config, torch.float32, "cpu")
    save_model(model, model.state_dict(), tmp_path)
    byte_tokenizer("0123456789+-=:").save(tmp_path)
    given = [word.format(model=tmp_path) for word in words]
    (fault,) = answer("run", "aipo", [*given, "--max-tokens", str(most + 1)])["faults"]
    assert (fault["what"], fault["given"]) == ("--max-tokens", str(most + 1))
    assert f"1 to {most}: the model's context has {most + 1} tokens" in fault["needed"]


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


CLOSED = """
from penstock.graph import broadcast, program, requires
from penstock.graph.types import Prompts
from penstock.nodes.fake import FakePolicy, fake_generate, fake_score, fake_update, open_prompts

def look(context):
    if not context.data:
        raise ValueError("data: given none, needed a file")

@requires(look)
def open_file(context):
    open(context.data).close()
    return open_prompts(context)

class Filed(Prompts):
    maker = f"{__file__}:open_file"

class Lost(Prompts):
    maker = f"{__file__}:open_fiel"

def body(policy, prompts):
    rollouts = fake_generate(prompts, broadcast(policy))
    return fake_update(policy, rollouts, fake_score(rollouts))

@program
def closed(policy: FakePolicy, prompts: Filed):
    return body(policy, prompts)

@program
def clashing(policy: FakePolicy, prompts: Filed, *, updates: int = 3, batch: int = 2, eval_groups: int = 1):
    return body(policy, prompts)

@program
def lost(policy: FakePolicy, prompts: Lost):
    return body(policy, prompts)
"""


def test_a_source_is_not_opened_before_what_its_maker_requires_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text(CLOSED)
    name = f"{tmp_path}/closed.py:closed"
    assert answer("run", name, [])["error"] == "data: given none, needed a file"
    assert answer("run", name, ["--data", f"{tmp_path}/closed.py"])["faults"] == []


def test_check_tells_what_run_refuses_of_makers_and_of_options_that_are_flags(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text(CLOSED)
    file = f"{tmp_path}/closed.py"
    (fault,) = answer("check", f"{file}:closed", [])["faults"]
    assert (fault["what"], fault["given"]) == ("source 'prompts'", "data: given none, needed a file")
    assert answer("check", f"{file}:closed", ["--data", file])["faults"] == []
    found = answer("check", f"{file}:clashing", ["--data", file, "--batch", "8"])
    assert [fault["what"] for fault in found["faults"]] == [
        f"clashing: option '{name}'" for name in ("updates", "batch", "eval_groups")
    ]
    refused = answer("run", f"{file}:clashing", ["--data", file])
    assert refused["error"] == "\n".join(str(Fault(**fault)) for fault in found["faults"])
    assert refused["usage"]
    (fault,) = answer("check", f"{file}:lost", [])["faults"]
    assert (fault["what"], "open_file" in fault["needed"]) == ("source 'prompts': maker", True)
    assert answer("run", f"{file}:lost", [])["error"].endswith(fault["needed"])


@pytest.mark.parametrize("words", [["distill"], ["rlhf"]])
def test_check_tells_of_a_directory_that_a_model_lacks(words: list[str]) -> None:
    (fault,) = answer("check", words[0], words[1:])["faults"]
    assert fault["what"].startswith("carried ")
    assert "given no directory" in fault["given"]


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", "cpu:"])
def test_a_device_that_is_not_there_is_an_error(device: str) -> None:
    found = answer("run", "toy", ["--device", device])
    assert f"--device: given {device!r}" in found["error"]


def test_the_device_is_chosen() -> None:
    assert choose_device("cpu") == "cpu"
    assert answer("run", "toy", ["--device", "auto"])["flags"]["device"] in ("cpu", "cuda")
