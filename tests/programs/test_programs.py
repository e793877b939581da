"""Each program fits on a page, and explains itself and its flags; its options change its graph as they say.

The graphs and simulated schedules of all programs with their default options are in `tests/golden`.
"""

import inspect
import pkgutil
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import programs
from penstock.graph import Graph, Program, check, load, trace
from penstock.runtime.record.metrics import read_rows
from tests.pages import SMALL, run

NAMES = tuple(module.name for module in pkgutil.iter_modules(programs.__path__))


def program(name: str) -> Program[..., Any]:
    found = load(name)
    assert isinstance(found, Program)
    return found


def graph(name: str, **options: Any) -> Graph:
    return trace(program(name), options)


def names(traced: Graph) -> list[str]:
    return [node.name for node in traced.nodes]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_one_page(name: str) -> None:
    path = Path(inspect.getsourcefile(program(name).fn) or "")
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_program_traces_without_a_fault(name: str) -> None:
    assert not check(graph(name))
    assert Graph.from_json(graph(name).to_json()) == graph(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("evaluate", "sft", "tool_sft", "toy")])
def test_an_algorithm_cites_its_paper_says_what_is_left_out_and_shows_its_graph(name: str) -> None:
    doc = " ".join((sys.modules[program(name).fn.__module__].__doc__ or "").split())
    assert "Left out" in doc
    assert re.search(r"arXiv \d{4}\.\d{5}|\b(19|20)\d\d\b", doc)
    assert re.search(r"─►|→", doc)


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_of_a_program_has_help(name: str) -> None:
    assert [flag.name for flag in program(name).flags if not flag.help] == []


@pytest.mark.parametrize("name", ["aipo", "grpo", "sft"])
def test_a_program_that_learns_is_evaluated_on_the_same_policy(name: str) -> None:
    evaluation = program(name).evaluation
    assert evaluation is program("evaluate")
    traced = trace(evaluation, {}, "evaluate.")
    assert [a.name for a in traced.arguments] == ["policy", "evaluate.prompts"]
    assert traced.producer("policy") is None
    assert not check(traced)


def test_what_is_only_measured_is_measured_once(tmp_path: Path) -> None:
    flags = replace(SMALL, updates=1)
    measured = run(program("evaluate"), tmp_path / "measured", flags)
    (row,) = read_rows(tmp_path / "measured" / "metrics.jsonl")
    assert (measured["status"], measured["accuracy"], row["groups"]) == ("done", row["accuracy"], flags.batch)
    begun = run(program("aipo"), tmp_path / "begun", replace(flags, updates=0))
    assert (begun["status"], begun["accuracy_before"], begun["accuracy_after"]) == ("done", 0.0, None)


def test_grpo_with_a_penalty_holds_a_frozen_reference_in_a_pool_of_its_own() -> None:
    traced = graph("grpo", kl=0.1)
    reference = traced.argument("reference")
    assert reference is not None
    assert (reference.kind, reference.pool) == ("carried", "reference")
    assert reference.maker == "penstock.nodes.policy:make_reference"
    assert traced.producer("reference") is None
    assert [i.name for i in traced["policy_update"].inputs] == ["policy", "rollouts", "advantage", "reference"]
    assert not check(traced)


def test_remax_samples_a_greedy_response_beside() -> None:
    traced = graph("remax", samples=3)
    drawn = [(n.option("samples"), n.option("temperature")) for n in traced.nodes if n.op.endswith(":generate")]
    assert drawn == [(3, 1.0), (1, 0.0)]


def test_dapo_keeps_the_groups_that_teach_something() -> None:
    traced = graph("dapo", clip_high=0.3)
    assert traced["keep"].option("when") == {"path": "penstock.nodes.score:mixed"}
    assert traced["policy_update"].option("loss")["options"] == {"clip_low": 0.2, "clip_high": 0.3}
    assert [i.ref.node for i in traced["policy_update"].inputs] == ["policy", "keep", "group_advantage"]


def test_reinforce_pp_takes_the_groups_mean_off_if_asked_to() -> None:
    assert "plain_advantage" in names(graph("reinforce_pp"))
    assert "group_advantage" in names(graph("reinforce_pp", baseline=True))


def test_toy_passes_its_durations_to_fake_nodes() -> None:
    traced = graph("toy", generate_ms=7.0, score_ms=8.0, update_ms=9.0)
    durations = {n.name: n.option("ms") for n in traced.nodes if n.construct == "call"}
    assert durations == {"fake_generate": 7.0, "fake_score": 8.0, "fake_update": 9.0}
