"""What the child that imports a program reports: graphs, faults, missing inputs, and its own failures."""

import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph import Graph, Policy, Program, Prompts, broadcast, load, program, trace, types
from penstock.graph.errors import Fault
from penstock.graph.requires import opened
from penstock.graph.types import Model, Teacher
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM, save_model
from penstock.nodes.open_model import initial_model
from penstock.nodes.score import math_answer, score
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.cli.children import answer, check_meshes, try_inputs
from penstock.runtime.cli.tracing import CommandError, ask_child, require_inputs, trace_program
from penstock.runtime.cluster.cluster import ClusterError
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.control.signals import Preempted, interrupt, on_stop

FILE = """
from penstock.graph import Policy, Prompts, Rewards, Rollouts, broadcast, node, program, requires, types
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update, open_prompts

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
def mistyped(policy: FakePolicy, prompts: FakePrompts):
    rollouts = fake_generate(prompts, broadcast(policy, lag=-1), samples=3, by=3)
    fake_generate(prompts, policy, nope=1)
    return rollouts

@program
def no_numbers(policy: FakePolicy, prompts: FakePrompts):
    rollouts = fake_generate(prompts, broadcast(policy, lag="1"))
    return fake_update.every(2.0)(policy, rollouts, fake_score(rollouts))

@program
def raising(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1):
    return {}["no such key"]

thing = 3

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
def shelved(first: Shelved, second: Shelved, prompts: FakePrompts, *, shelf: str = ""):
    rewards = fake_score(fake_generate(prompts, broadcast(first)))
    return {"first": step(first, rewards), "second": step(second, rewards)}

def has_data(context):
    if not context.data:
        raise ValueError("data: given none, needed a file")

@requires(has_data)
def open_file(context):
    open(context.data).close()
    return open_prompts(context)

class Filed(types.Prompts):
    maker = f"{__file__}:open_file"

class Lost(types.Prompts):
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


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def faults(verb: str, name: str, *words: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = answer(verb, name, words)["faults"]
    return found


def test_a_program_of_a_users_file_is_traced_and_a_built_in_one_has_its_evaluation(file: str) -> None:
    found = answer("run", f"{file}:mine", ["--lag", "3", "--batch", "4"])
    graph = Graph.from_json(found["graph"])
    assert found["faults"] == []
    assert (graph["shorter"].op, graph["broadcast"].lag) == (f"{file}:shorter", 3)
    assert (found["flags"]["batch"], found["typed"]) == (4, {"lag": ["--lag", "3"], "batch": ["--batch", "4"]})
    assert Graph.from_json(answer("show", "aipo", [])["evaluation"]).sources[0].name == "evaluate.prompts"
    assert "evaluation" not in answer("run", "aipo", ["--eval-groups", "0"])


def test_all_faults_are_found_at_once(file: str) -> None:
    found = faults("check", f"{file}:faulty", "--batch", "0")
    assert len(found) >= 3
    assert {fault["where"].rpartition(":")[0] for fault in found} == {file}
    told = [fault["what"] for fault in faults("check", f"{file}:mistyped", "--batch", "0")]
    assert "graph" not in answer("check", f"{file}:mistyped", ["--batch", "0"])
    assert told[:2] == ["batch", "fake_generate: option 'by'"]
    assert told.count("broadcast: lag") == told.count("fake_generate: option 'nope'") == 1
    assert {"the next 'policy'", "fake_generate_2: input 'behaviour'"} < set(told)


def test_numbers_that_are_none_are_faults_and_their_graph_stays_in_the_child(file: str) -> None:
    traced = trace_program("check", [f"{file}:no_numbers"])
    assert {"bad-every", "bad-lag"} <= {fault.code for fault in traced.faults}
    assert traced.graph is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("aipoo", "the nearest: aipo"),
        ("{file}:mien", "the nearest: mine"),
        ("{file}:thing", "given a value of type int, needed a function with @program"),
        ("/nowhere/x.py:mine", "there is no file"),
        ("no_such_package.module:f", "no module"),
        ("aipo --data {data} --model new", "data.jsonl:2"),
        ("aipo --model {folder}", "config.json"),
        ("aipo --model {folder}/mamba", "needed one of: llama"),
        ("distill", "teacher_model: no directory, needed a model directory with the policy's tokenizer: "),
        ("distill --teacher-model /nowhere", "/nowhere: no such directory"),
        ("rlhf", "reward_model: no directory, needed a directory that a run of the program reward_model"),
        ("rlhf --reward-model /nowhere", "/nowhere: no such directory"),
        ("ppo --model /nowhere", "/nowhere: no such directory"),
        ("reward_model --model /nowhere", "/nowhere: no such directory"),
        # The maker is called once and creates nothing; the data source is not opened before this check.
        ("{file}:shelved --shelf none", "shelf: 'none', needed one that is there: first"),
        ("{file}:closed", "data: none, needed a file"),
    ],
)
def test_what_a_run_cannot_begin_with_is_an_error(words: str, said: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1+1?", "answer": "2 #### 2"}\n{"question": "2+2?"}\n')
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    name, *argv = words.format(file=file, folder=tmp_path, data=tmp_path / "data.jsonl").split()
    found = answer("run", name, argv)
    told = found.get("error") or " ".join("{given}, needed {needed}".format(**fault) for fault in found["faults"])
    assert (said in told, "Traceback" in told, found.get("status", 2)) == (True, False, 2), told


MINE = "from penstock import Policy, program\n@program\ndef mine(policy: Policy): return policy\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINE, ""),
        (f"{MINE}alias, helper = mine, print\nfrom penstock.programs.aipo import aipo\n", ""),
        (f"{MINE}{MINE.replace('mine', 'yours')}def helper(): pass\n", 'a name after ":"; there are: mine, yours'),
        ("from penstock.programs.aipo import aipo\n", 'a name after ":"; there are: aipo'),
        (f"{MINE.replace('@program', '')}", "a function with @program in it"),
    ],
)
def test_a_file_alone_is_its_only_program(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "file.py").write_text(text)
    found = answer("show", str(tmp_path / "file.py"), [])
    if said:
        assert found["error"].endswith(f"given   '{tmp_path}/file.py'\n    needed  {said}")
    else:
        assert found["path"] == f"{tmp_path}/file.py:mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys\nsys.exit(0)  # the end\n", "sys.exit(0)  # the end"),
        ("import math\nimport no_such_package_at_all\n", "No module named 'no_such_package_at_all'"),
        ("import math\nx = = 3\n", "SyntaxError: invalid syntax"),
        ("import math\nprint(y)\n", "NameError: name 'y'"),
        (f"{FILE.splitlines()[1]}\n@program\ndef f(policy: Policy): return {{}}['no key']\n", "KeyError: 'no key'"),
    ],
)
def test_a_file_that_cannot_be_run_shows_its_own_lines_alone(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    error = answer("run", f"{tmp_path}/broken.py:f", [])["error"]
    assert said in error
    assert error.count("  File ") == 1
    assert f'broken.py", line {2 if "@" not in text else 3}' in error


def test_prompts_longer_than_the_context_are_told_with_their_lines_before_anything_starts(tmp_path: Path) -> None:
    rows = [{"question": "é" * half, "answer": "#### 2"} for half in (9, 1016, 1017, 9, 1500)]
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    words = ["--data", str(tmp_path / "d.jsonl"), "--model", "new"]
    needed = "at most 2032: the model's context of 2048 less --max-tokens 16"
    assert [(fault["given"], fault["needed"], fault["where"]) for fault in faults("run", "aipo", *words)] == [
        ("a prompt of 2034 tokens", needed, f"{tmp_path}/d.jsonl:5"),
        ("a prompt of 3000 tokens", needed, f"{tmp_path}/d.jsonl:9"),
    ]
    (fault,) = faults("run", "aipo", *words, "--max-tokens", "14")
    assert fault["where"] == f"{tmp_path}/d.jsonl:9"
    # If another bound than the model's context is exceeded, the fault names that bound.
    told = faults("run", "aipo", *words, "--max-prompt", "2000")
    assert [fault["given"] for fault in told] == [
        "a prompt of 2032 tokens",
        "a prompt of 2034 tokens",
        told[2]["given"],
    ]
    assert {fault["needed"] for fault in told} == {"at most 2000 (--max-prompt)"}
    # Of a generated source, only the first prompts are checked.
    (fault,) = faults("run", "aipo", "--max-tokens", "25")
    assert (fault["given"], fault["where"]) == ("a prompt of 8 tokens", "group 0")
    assert faults("run", "aipo", "--max-tokens", "24") == []


@pytest.mark.parametrize("verb", ["run", "check"])
def test_faults_of_rows_are_in_their_order(tmp_path: Path, verb: str) -> None:
    # A tenth of the prompts belongs to the evaluation, which is checked separately.
    rows = [{"question": "q" * (2100 + row), "answer": "#### 2"} for row in range(20)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    told = faults(verb, "aipo", "--data", str(tmp_path / "d.json"), "--model", "new")
    numbers = [int(fault["where"].removeprefix(f"{tmp_path}/d.json, row ")) for fault in told]
    assert numbers == sorted(numbers)
    assert len(numbers) > 5


def test_rows_to_learn_from_that_are_longer_than_the_context_are_told_with_their_lines(tmp_path: Path) -> None:
    words = ["--data", str(tmp_path / "d.jsonl"), "--model", "new"]

    def found(program: str, *rows: dict[str, str]) -> list[tuple[str, str, str]]:
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        told = faults("run", program, *words)
        return [(fault["code"], fault["given"], fault["where"].rpartition("/")[2]) for fault in told]

    fits, long = "b" * 2042, "b" * 2043
    shown = [{"question": "aaaaa", "answer": answer} for answer in ("b", fits, long)]
    assert found("sft", *shown) == [("row-too-long", "a demonstration of 2049 tokens", "d.jsonl:3")]
    assert found("sft", *shown[:2]) == []
    pairs = [{"prompt": "aaaaa", "chosen": "b", "rejected": rejected} for rejected in (fits, long)]
    given = "a response with its prompt of 2049 tokens"
    assert found("reward_model", *pairs) == [("row-too-long", given, "d.jsonl:2")]


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ("--data d.jsonl", 4),
        ("--data d.jsonl --eval-groups 3", 3),
        ("--data d.jsonl --eval-data e.jsonl", 7),
        ("--eval-groups 700", 500),
        ("--eval-groups 0", 0),
    ],
)
def test_accuracy_is_measured_on_each_problem_once(
    words: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("d.jsonl", 40), ("e.jsonl", 7)):
        Path(name).write_text("\n".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}' for n in range(count)))
    assert answer("run", "aipo", ["--model", "new", *words.split()])["flags"]["eval_groups"] == groups


@pytest.mark.parametrize(
    ("name", "words", "held_out", "batch"),
    [
        ("evaluate", "--data d.jsonl", 0, 40),
        ("evaluate", "--data d.jsonl --batch 7", 0, 7),
        ("evaluate", "--data d.jsonl --held-out 3", 3, 37),
        ("evaluate", "--data arithmetic", None, 500),
        ("watched.py:measured", "--data d.jsonl", None, 32),
        ("aipo", "--data d.jsonl", None, 32),
        ("aipo", "--data d.jsonl --eval-groups 0", 0, 32),
        ("reward_model", "--data pairs.jsonl", 0, 4),
    ],
)
def test_rows_are_held_out_only_where_something_is_measured_on_them(
    name: str, words: str, held_out: int | None, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("watched.py").write_text(WATCHED)
    for file, fields in (("d", ', "answer": "1"'), ("pairs", ', "chosen": "1", "rejected": "2"')):
        of_prompt = '"prompt"' if file == "pairs" else '"question"'
        Path(f"{file}.jsonl").write_text("\n".join(f'{{{of_prompt}: "{n}+1="{fields}}}' for n in range(40)))
    flags = answer("run", name, ["--model", "new", *words.split()])["flags"]
    assert (flags["held_out"], flags["batch"]) == (held_out, batch)


WATCHED = """
from penstock.graph import Policy, Prompts, broadcast, program
from penstock.nodes.evaluate import measure
from penstock.nodes.generate import generate
from penstock.nodes.score import accuracy, math_answer, score

@program
def measured(policy: Policy, prompts: Prompts) -> Policy:
    measure(broadcast(policy))
    accuracy(score(generate(prompts, broadcast(policy), samples=1), by=math_answer))
    return policy
"""


def test_flags_of_evaluation_are_refused_where_no_evaluation_reads_them(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "e.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    words = ["--eval-data", str(tmp_path / "e.jsonl"), "--eval-groups", "3"]

    def refused(verb: str, name: str, *more: str) -> list[str]:
        return [fault["what"] for fault in faults(verb, name, "--model", "new", *more)]

    for verb in ("check", "run"):
        for name in ("evaluate", "reward_model", "toy"):
            assert refused(verb, name, *words) == ["--eval-data", "--eval-groups"]
        # It opens the data itself, but its number of problems is an option of the node.
        assert refused(verb, f"{tmp_path}/watched.py:measured", *words) == ["--eval-groups"]
        assert refused(verb, "evaluate", "--eval-groups", "0") == []
        assert refused(verb, "aipo", *words) == []
    (fault,) = faults("check", "evaluate", "--eval-split", "test")
    assert (fault["code"], fault["given"]) == ("unmet-rule", "test for evaluate, which has no evaluation")
    assert fault["needed"].startswith("--data-split, ")


@pytest.mark.parametrize("name", ["tool_sft", "tool_use", "guessing"])
def test_flags_of_data_are_refused_where_all_data_is_made(name: str) -> None:
    words = ["--data", "no.jsonl", "--row", "no.py:f", "--system", "hi"]
    for verb in ("check", "run"):
        assert [fault["what"] for fault in faults(verb, name, *words)] == ["--data", "--row", "--system"]
        assert "--data" not in [fault["what"] for fault in faults(verb, name, "--data", "arithmetic")]


def test_a_limit_of_mismatches_is_refused_without_an_engine_that_could_have_some() -> None:
    words = ("--model", "new", "--mismatch-limit", "0.5")
    for verb in ("check", "run"):
        for name in ("aipo", "toy"):
            assert [fault["what"] for fault in faults(verb, name, *words)] == ["--mismatch-limit"]
    assert "--mismatch-limit" not in [fault["what"] for fault in faults("check", "aipo", *words, "--engine", "vllm")]


def make_short_model(folder: Path) -> None:
    """Save an arithmetic model whose context has 24 tokens."""
    config = replace(initial_model("")[0], max_position_embeddings=24)
    model = CausalLM(config, torch.float32, "cpu")
    model.init_weights(0)
    save_model(model, model.state_dict(), folder)
    byte_tokenizer("0123456789+-=:").save(folder)


@pytest.mark.parametrize("program", ["sft", "reward_model"])
def test_made_up_rows_to_learn_from_are_looked_at_in_the_first_group(program: str, tmp_path: Path) -> None:
    make_short_model(tmp_path)
    words = ["--model", str(tmp_path), "--eval-groups", "0", "--data"]
    assert faults("check", program, *words, "arithmetic") == []
    for fault in (found := faults("check", program, *words, "arithmetic:6")):
        assert (fault["code"], fault["where"].partition(",")[0]) == ("row-too-long", "group 0")
    assert found


@pytest.mark.parametrize(("words", "most"), [([], 31), (["--model", "{model}"], 23)])
def test_responses_that_leave_no_room_for_a_prompt_are_told_before_anything_starts(
    tmp_path: Path, words: list[str], most: int
) -> None:
    make_short_model(tmp_path)
    given = [word.format(model=tmp_path) for word in words]
    for verb in ("check", "run"):
        (fault,) = faults(verb, "aipo", *given, "--max-tokens", str(most + 1))
        assert (fault["what"], fault["given"]) == ("--max-tokens", str(most + 1))
        assert f"1 to {most}: the model's context has {most + 1} tokens" in fault["needed"]


def test_check_tells_what_run_refuses_of_makers_and_of_options_that_are_flags(file: str) -> None:
    (fault,) = faults("check", f"{file}:closed")
    told = fault["what"], fault["given"], fault["needed"]
    assert told == ("source 'prompts'", "data: none", "a file")
    for verb in ("check", "run"):
        assert faults(verb, f"{file}:closed", "--data", file) == []
    found = faults("check", f"{file}:clashing", "--data", file, "--batch", "8")
    names = [f"clashing: option '{name}'" for name in ("updates", "batch", "eval_groups")]
    assert [fault["what"] for fault in found] == names
    refused = answer("run", f"{file}:clashing", ["--data", file])
    assert refused == {"error": "\n".join(str(Fault(**fault)) for fault in found), "status": 2}
    (fault,) = faults("check", f"{file}:lost")
    assert (fault["what"], "open_file" in fault["needed"]) == ("source 'prompts': maker", True)
    assert faults("run", f"{file}:lost") == [fault]
    for name in ("distill", "rlhf"):
        (fault,) = faults("check", name)
        assert fault["what"].startswith("carried ")
        assert "no directory" in fault["given"]


@pytest.mark.timeout(200)
def test_a_child_that_does_not_answer_or_dies_is_told(file: str) -> None:
    Path(file).write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(CommandError, match=r"X has not answered within 0\.5 s"):
        ask_child("penstock.runtime.cli.children:traced", "run", f"{file}:mine", [], what="X", deadline=0.5)
    for status in (0, 2, 3):
        # Of another length each time: else the bytecode of the last one may be taken for its own.
        Path(file).write_text(f"import os\nos._exit({status})\n" + status * "\n")
        with pytest.raises(
            CommandError, match=rf"mine\.py:mine: .* ended with exit status {status}, without an answer"
        ):
            trace_program("run", [f"{file}:mine"])


def test_a_child_at_whose_start_an_interrupt_comes_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(Preempted), on_stop(interrupt):
        ask_child("time:sleep", 1000, what="X")
    assert begun[0].poll() == -signal.SIGKILL


# Meshes --------------------------------------------------------------------------------------------------------------


@program
def taught(policy: Policy, teacher: Teacher, prompts: Prompts, *, teacher_model: str = "") -> dict[str, object]:
    """The teacher generates, and the policy learns from it."""
    rollouts = generate(prompts, broadcast(teacher), samples=2)
    learnt = aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
    return {"policy": learnt, "teacher": teacher}


def graph(of: str | Program[..., Any], **options: Any) -> Graph:
    found = load(of) if isinstance(of, str) else of
    assert isinstance(found, Program)
    return trace(found, options)


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., str]:
    """Return a maker of directories of a model with three key-value heads."""

    def make(**facts: Any) -> str:
        shape = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **heads, **facts}))
        byte_tokenizer().save(tmp_path)
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("trainer=tp3", "tensor parallelism: given 4 attention heads, 2 key-value heads, .*needed numbers that tp 3"),
        ("trainer=fsdp2xtp4", "given 2 key-value heads, needed numbers that tp 4 divides$"),
        ("generator=tp8", "given 4 attention heads, needed numbers that tp 8 divides"),
        ("generator=fsdp2", "given a mesh of fsdp 2, needed the axis tp or the axis ep alone: replicas are more"),
        ("generator=ep2", "given a llama without experts"),
        ("trainer=fsdp2xep2", "given a llama without experts"),
        ("trainer=pp9", "pipeline: given 9 stages, needed 1 to 2, the number of layers"),
    ],
)
def test_a_mesh_that_the_model_cannot_take_is_told_with_what_it_needs(mesh: str, said: str) -> None:
    with pytest.raises(ClusterError, match=rf"^--mesh {mesh} \[mesh-(cut|axis)\]: .*{said}"):
        check_meshes([graph("aipo")], RunOptions(mesh=(mesh,)))


@pytest.mark.parametrize(
    "meshes", [("trainer=fsdp7", "generator=tp4"), ("trainer=dp2xfsdp3xtp2",), ("trainer=pp2xtp2",), ("scorer=1",)]
)
def test_a_mesh_that_fits_is_not_refused(meshes: tuple[str, ...]) -> None:
    check_meshes([graph("aipo"), graph("evaluate")], RunOptions(mesh=meshes))


def test_the_shape_is_that_of_the_model_whose_weights_a_pool_has(model_dir: Callable[..., str]) -> None:
    folder = model_dir()
    check_meshes([graph("aipo")], RunOptions(model=folder, mesh=("trainer=tp3xpp3", "generator=tp3")))
    distill = graph("distill", teacher_model=folder)
    pool = next(a.pool for a in distill.carried if a.name == "teacher")
    for found, model, name in (
        (graph("aipo"), folder, "trainer"),
        (distill, "", pool),
        (graph(taught, teacher_model=folder), "", "generator"),
    ):
        check_meshes([found], RunOptions(model=model, mesh=(f"{name}=tp3",)))
        with pytest.raises(ClusterError, match=rf"{name}=tp2 \[mesh-cut\]: .*given 3 key-value heads"):
            check_meshes([found], RunOptions(model=model, mesh=(f"{name}=tp2",)))
    tied = model_dir(tie_word_embeddings=True)
    with pytest.raises(ClusterError, match="given tied embeddings over 3 stages"):
        check_meshes([graph("aipo")], RunOptions(model=tied, mesh=("trainer=pp3",)))


def test_whole_distributions_need_a_mesh_on_which_each_rank_has_the_same_words_of_both(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    for rows in (tokenizer.vocab_size, tokenizer.vocab_size + 6):
        config = replace(initial_model("bytes")[0], vocab_size=rows)
        made = CausalLM(config)
        made.init_weights(1)
        save_model(made, made.state_dict(), tmp_path / str(rows))
        tokenizer.save(tmp_path / str(rows))
    small, large = (str(tmp_path / str(rows)) for rows in (tokenizer.vocab_size, tokenizer.vocab_size + 6))

    def told(teacher: str, mesh: str) -> list[str]:
        flags = RunOptions(model=small, mesh=(f"trainer={mesh}",), max_tokens=64)
        found = try_inputs([graph("distill", teacher_model=teacher, full=True)], flags)
        return [f"{fault.what} [{fault.code}] {fault.given}" for fault in found]

    assert not told(small, "fsdp2xtp2")
    assert not told(large, "fsdp2")
    assert told(large, "pp2") == ["distill_update [mesh-cut] a mesh of pp 2"]
    sizes = f"a policy of vocab_size {tokenizer.vocab_size} and a teacher of {tokenizer.vocab_size + 6}"
    assert told(large, "tp2") == [f"distill_update [mesh-cut] {sizes}, over a mesh of tp 2"]


def test_every_model_of_the_package_says_which_it_opens() -> None:
    models = [vars(t) for t in vars(types).values() if isinstance(t, type) and issubclass(t, Model)]
    makers = {attributes["maker"] for attributes in models if "maker" in attributes}
    assert len(makers) > 6
    assert not [maker for maker in makers if opened(maker) is None]


@pytest.mark.parametrize(("name", "base"), [("aipo", True), ("reward_model", True), ("toy", False)])
def test_a_maker_says_whether_its_run_begins_with_the_base_model(name: str, base: bool) -> None:
    assert answer("run", name, ["--eval-groups", "0"])["base"] is base


def test_a_command_without_torch_asks_a_child_of_meshes() -> None:
    assert "mesh" in answer("run", "aipo", ["--mesh", "generator=tp2", "trainer=fsdp2xtp2"])["flags"]
    require_inputs([graph("toy")], RunOptions(mesh=("trainer=dp2",)))
    with pytest.raises(CommandError, match=r"^--mesh trainer=tp3 \[mesh-cut\]: .*4 attention heads"):
        require_inputs([graph("aipo")], RunOptions(mesh=("trainer=tp3",)))
