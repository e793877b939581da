"""The public surface, and what importing it costs."""

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
