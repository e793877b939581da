"""The public surface, and what importing it costs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.graph
from penstock.graph import Fault, GraphError
from penstock.graph.errors import nearest


def test_the_public_names_are_counted() -> None:
    names = """Advantages Context Fault Firing Graph GraphError Logprobs Mean Metrics NodeDef NodeWarning Policy
    Program Prompts Rewards Rollouts Weights alternate broadcast check delay keep load node opens program
    requires trace"""
    assert sorted(penstock.graph.__all__) == names.split()
    assert all(hasattr(penstock.graph, name) for name in penstock.graph.__all__)


def test_a_program_finds_all_that_it_needs_in_one_module() -> None:
    names = """Advantages Average Batchable Context Critic Demonstrations FrozenModel Graph GraphError LearningRate
    Logprobs Mean Metrics NodeWarning Policy Program Prompts Reference Replies RewardModel Rewards Rollouts Teacher
    TokenAdvantages TurnRewards Weights aipo_update alternate broadcast carried check code_tests converse critic_update
    critic_values delay dpo_update ema environment evaluate exact gae generate group_advantage keep
    leave_one_out_advantage length load math_answer measure node opens outcome policy_logprobs policy_update program
    python_tool reference_logprobs refresh regex remote_score replay requires reward_scores score sft_update term trace
    turn_rewards"""
    assert dir(penstock) == names.split()
    stub = ast.parse(Path(str(penstock.__file__)).with_suffix(".pyi").read_text())
    homes = {
        alias.name: importlib.import_module(str(found.module))
        for found in stub.body
        if isinstance(found, ast.ImportFrom)
        for alias in found.names
    }
    assert sorted(homes) == dir(penstock)
    assert all(getattr(penstock, name) is getattr(home, name) for name, home in homes.items())
    for name in ("os", "ppo", "private_folder"):
        with pytest.raises(AttributeError):
            getattr(penstock, name)


def test_the_public_names_are_imported_when_they_are_asked_for() -> None:
    code = """
import sys
import penstock
print("generate" in dir(penstock), [name for name in sys.modules if name.startswith("penstock.")])
from penstock import Policy, broadcast, program, trace
print([name for name in ("torch", "numpy") if name in sys.modules])
from penstock import *
print(generate.__module__, "importlib" in globals())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True []\n[]\npenstock.nodes.generate False\n"


def test_the_language_and_a_sound_programs_check_and_bound_import_neither_torch_nor_networkx() -> None:
    code = """
import sys
from penstock.graph import check, load, trace
from penstock.graph.analysis import period_bound
graph = trace(load(f"{sys.argv[1]}:aipo"))
assert not check(graph) and period_bound(graph, {node.name: 1.0 for node in graph.nodes}, 1).cycle
print([name for name in ("torch", "networkx", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, str(Path(__file__).with_name("programs_for_tests.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_an_error_of_several_faults_shows_them_all() -> None:
    faults = (Fault("no-input", "a", "1", "2", "f.py:1"), Fault("no-update", "b", "3", "4"))
    with pytest.raises(ValueError, match=r"f\.py:1: a") as raised:
        raise GraphError(*faults)
    assert (
        str(raised.value)
        == "f.py:1: a [no-input]\n    given   1\n    needed  2\nb [no-update]\n    given   3\n    needed  4"
    )
    assert raised.value.faults == faults  # type: ignore[attr-defined]


def test_the_nearest_names_come_first() -> None:
    assert nearest("scoer", ["score", "generate"]) == "; the nearest: score"
    assert nearest("apio", ["dapo", "aipo", "ppo", "sft"]) == "; the nearest: aipo, dapo, ppo"
    assert nearest("x", ["beta", "alpha"]) == "; there are: alpha, beta"
    assert nearest("x", []) == ""
    assert nearest("num_generations", ["samples", "generators"]) == "; here it is samples"  # as TRL calls it
    assert nearest("--max-new-tokens", ["--max-tokens", "--tokens"]) == "; here it is --max-tokens"
    assert nearest("exam.reward_mean", ["reward_mean", "judge.reward_mean"]).startswith("; the nearest: ")
    assert nearest("x", [f"name{i:02}" for i in range(20)]).endswith("name11, …")
