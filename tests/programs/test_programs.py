"""Each program fits on a page, traces, has no fault, and explains its flags."""

import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import programs
from penstock.graph import Graph, Program, check, load, trace
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Durations, simulate

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


def test_aipo_is_the_algorithm_of_the_paper() -> None:
    traced = graph("aipo", lag=3, rho=2.5)
    assert names(traced) == ["broadcast", "generate", "score", "group_advantage", "aipo_update"]
    assert traced["broadcast"].lag == 3
    assert traced["aipo_update"].option("rho") == 2.5
    assert traced["score"].option("by") == {"path": "penstock.nodes.score:math_answer"}
    assert traced.producer("policy") == "aipo_update"
    assert {n.name: n.pool for n in traced.nodes} == {
        "broadcast": "generator",
        "generate": "generator",
        "score": "scorer",
        "group_advantage": "scorer",
        "aipo_update": "trainer",
    }


def test_grpo_is_synchronous_and_leaves_the_reference_out() -> None:
    traced = graph("grpo")
    assert traced["broadcast"].lag == 0
    assert [a.name for a in traced.carried] == ["policy"]
    assert [i.name for i in traced["policy_update"].inputs] == ["policy", "rollouts", "advantage"]
    assert "reference" not in traced.pools()


def test_grpo_with_a_penalty_holds_a_frozen_reference_in_a_pool_of_its_own() -> None:
    traced = graph("grpo", kl=0.1)
    reference = traced.argument("reference")
    assert reference is not None
    assert (reference.kind, reference.pool) == ("carried", "reference")
    assert reference.maker == "penstock.nodes.policy:make_reference"
    assert traced.producer("reference") is None
    assert [i.name for i in traced["policy_update"].inputs] == ["policy", "rollouts", "advantage", "reference"]
    assert not check(traced)


@pytest.mark.parametrize("name", ["tis", "decoupled_ppo"])
def test_the_trainers_own_logprobs_are_made_once_per_update_where_the_policy_is(name: str) -> None:
    traced = graph(name)
    node = traced["policy_logprobs"]
    assert (node.pool, node.clock) == ("trainer", "update")
    assert {i.name: i.ref.node for i in node.inputs} == {"policy": "policy", "rollouts": "generate"}
    assert {i.name: i.ref.node for i in traced["policy_update"].inputs}["proximal"] == "policy_logprobs"


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


def test_sft_needs_no_generator() -> None:
    assert graph("sft").pools() == ("trainer",)


def test_evaluate_answers_greedily_once() -> None:
    generate = graph("evaluate")["generate"]
    assert (generate.option("samples"), generate.option("temperature")) == (1, 0.0)


def test_toy_passes_its_durations_to_fake_nodes() -> None:
    traced = graph("toy", generate_ms=7.0, score_ms=8.0, update_ms=9.0)
    durations = {n.name: n.option("ms") for n in traced.nodes if n.construct == "call"}
    assert durations == {"fake_generate": 7.0, "fake_score": 8.0, "fake_update": 9.0}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_programs_schedule_can_be_simulated(name: str, lag: int) -> None:
    made = graph(name, **({"lag": lag} if any(flag.name == "lag" for flag in program(name).flags) else {}))
    plan = place([made], Cluster(hosts=(Host(name="local", cores=2),)), slots=64)
    durations = Durations({node.name: 0.01 for node in made.nodes if node.fires})
    simulated = simulate(Tables(made, plan), Rules(batch=4, end=8), durations)
    assert len(simulated.ends) == 8
    assert simulated.period_s > 0
