"""What nodes and losses cannot work with is told by `check`, at the line of the call, before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Graph, Program, check, load, trace
from penstock.runtime.cli.children import answer

FILE = Path(__file__).parent / "programs_for_misuse.py"


def graph(name: str, **options: Any) -> Graph:
    found = load(f"{FILE}:{name}")
    assert isinstance(found, Program)
    return trace(found, options)


def line(mark: str) -> str:
    """Where the misuse stands."""
    number = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if text.endswith(f"  # {mark}"))
    return f"{FILE}:{number}"


ONE = "rewards of samples=1, one response to a prompt"
MISUSE = {
    "alone": ("group_advantage", ONE, "too-few-samples"),
    "one_left_out": ("leave_one_out_advantage", ONE, "too-few-samples"),
    "alone_and_learnt": ("group_advantage", ONE, "too-few-samples"),
    "refused_plainly": ("unwell", "nobody can", "unmet-requirement"),
    "many_greedy": ("greedy_advantage", "greedy rewards of samples=4", "too-many-samples"),
    "no_pair": ("dpo_update", ONE, "too-few-samples"),
    "penalised_by_nothing": ("policy_update: option 'kl'", "0.1 without a reference", "missing-reference"),
    "expected_by_nothing": ("gae: option 'kl'", "0.1 without a reference", "missing-reference"),
    "without_old": ("policy_update: loss tis", "no proximal_P for it", "missing-proximal"),
    "without_a_peak": ("policy_update: option 'lr'", "cosine without peak", "unbound-schedule"),
    "below_nothing": ("policy_update: lr linear: option 'warmup'", "-1", "out-of-range"),
    "two_rates": ("policy_update: option 'lr'", "a learning rate beside the input `rate`", "two-learning-rates"),
    "twins": ("policy_update", "two terms of the name 'ppo'", "duplicate-term"),
    "dotted": ("term: option 'name'", "'my.term'", "bad-name"),
    "term_without_old": ("term: loss tis", "no proximal_P for it", "missing-proximal"),
    "unnamed": ("group_advantage: option 'by'", "sub-groups of no rollouts", "missing-rollouts"),
    "own": ("policy_update: loss own_loss", "no reference_P for it", "missing-reference"),
    "empty_exam": ("measure: option 'problems'", "0", "out-of-range"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_what_a_node_or_a_loss_cannot_work_with_is_a_fault_at_its_line(name: str) -> None:
    (fault,) = check(graph(name))
    assert (fault.what, fault.given, fault.code) == MISUSE[name]
    assert fault.where == line(name)


def test_all_options_that_are_too_small_are_told() -> None:
    faults = check(graph("empty_buffer"))
    assert [(f.what, f.given) for f in faults] == [("replay: option 'take'", "0"), ("replay: option 'max_age'", "-1")]
    assert {f.code for f in faults} == {"out-of-range"}
    assert {f.where for f in faults} == {line("empty_buffer")}


FACTORS = "a finite number of at least 0"


@pytest.mark.parametrize(
    ("program", "options", "what", "needed"),
    [
        ("aipo", {"rho": 0.0}, "aipo_update: option 'rho'", "a number above 0"),
        ("aipo", {"lr": -1.0}, "aipo_update: option 'lr'", f"{FACTORS}, or a schedule"),
        ("aipo", {"lr": float("inf")}, "aipo_update: option 'lr'", f"{FACTORS}, or a schedule"),
        ("grpo", {"clip": -0.2}, "policy_update: loss ppo: option 'clip_low'", "a number of at least 0"),
        ("cispo", {"clip_high": -4.0}, "policy_update: loss cispo: option 'clip_high'", "a number of at least 0"),
        ("tis", {"cap": 0.0}, "policy_update: loss tis: option 'cap'", "a number above 0"),
        ("grpo", {"kl": -0.1}, "policy_update: option 'kl'", FACTORS),
        ("ppo", {"lam": 1.5}, "gae: option 'lam'", "a number from 0 to 1"),
        ("online_dpo", {"beta": 0.0}, "dpo_update: option 'beta'", "a number above 0"),
        ("ema", {"decay": 1.0}, "ema: option 'decay'", "a number from 0 to below 1"),
        ("dapo", {"buffer": 0}, "penalize_overlong: option 'buffer'", "a whole number of at least 1"),
        (
            "dapo",
            {"buffer": 17, "max_length": 16},
            "penalize_overlong: option 'buffer'",
            "at most max_length=16, where the buffer ends",
        ),
        (
            "dapo",
            {"minibatches": 0},
            "policy_update: minibatches",
            "a whole number of minibatches of whole prompt groups, at least 1",
        ),
    ],
)
def test_numbers_that_cannot_work_are_faults(program: str, options: dict[str, Any], what: str, needed: str) -> None:
    found = load(program)
    assert isinstance(found, Program)
    faults = {(fault.what, fault.needed) for fault in check(trace(found, options))}
    assert (what, needed) in faults


def test_all_numbers_of_a_call_that_cannot_work_are_told() -> None:
    faults = check(graph("out_of_range"))
    assert {(f.what, f.given) for f in faults} == {
        ("generate: option 'temperature'", "-1"),
        ("generate: option 'top_k'", "1.5"),
        ("generate: option 'top_p'", "0.0"),
        ("policy_update: loss ppo: option 'clip_low'", "'wide'"),
        ("policy_update: loss ppo: option 'dual_clip'", "1"),
        ("policy_update: option 'clip_norm'", "0"),
        ("policy_update: option 'betas'", "[0.9, 1.0]"),
        ("policy_update: option 'micro_tokens'", "0"),
    }


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"temperature": 0.6}, []),
        ({"temperature": 0.0}, ["temperature"]),
        ({"temperature": 0}, ["temperature"]),
        ({"top_k": 40}, ["top_k"]),
        ({"temperature": 0.6, "top_k": 40, "top_p": 0.95}, ["top_k", "top_p"]),
    ],
)
def test_samples_that_no_policy_can_score_are_refused_where_they_are_made(
    options: dict[str, Any], faults: list[str]
) -> None:
    found = check(graph("learns_from_odd_samples", **options))
    assert [(f.what, f.where) for f in found] == [
        (f"generate: option {name!r}", line("learns_from_odd_samples")) for name in faults
    ]
    for fault, name in zip(found, faults, strict=True):
        assert fault.given.startswith(f"{options[name]}, of rollouts that are scored by policy_update ({FILE}:")


@pytest.mark.parametrize(
    ("name", "option", "scorer"),
    [("talks_oddly", "temperature", "mine"), ("rescores_odd_samples", "top_p", "reference_logprobs")],
)
def test_such_samples_are_refused_whoever_scores_them(name: str, option: str, scorer: str) -> None:
    (fault,) = check(graph(name))
    assert fault.where == line(name)
    assert fault.what.endswith(f": option {option!r}")
    assert f"scored by {scorer} (" in fault.given


def test_a_loss_that_is_bound_to_a_loss_is_asked_too() -> None:
    faults = check(graph("on_top"))
    assert [(f.what, f.given, f.where) for f in faults] == [
        ("policy_update: loss with_bonus: base tis", "no proximal_P for it", line("on_top")),
        ("policy_update: loss with_bonus: base tis: option 'cap'", "-1.0", line("on_top")),
    ]


def test_a_word_that_is_none_of_the_choices_is_a_fault() -> None:
    assert {(f.what, f.given, f.needed) for f in check(graph("misspelt"))} == {
        ("policy_update: option 'average'", "'tokenmean'", "'token_mean' or 'sequence_mean' or 'constant'"),
        ("policy_update: loss importance_weighted: option 'level'", "'sequance'", "'token' or 'sequence'"),
    }


def test_a_text_is_no_function() -> None:
    (fault,) = check(graph("named_by_a_text"))
    assert (fault.what, fault.given) == ("policy_update: option 'loss'", "'ppo'")
    assert fault.needed.startswith("a function: NAME")


def test_an_environment_and_its_tools_get_some_time() -> None:
    faults = {(f.what, f.given, f.needed) for f in check(graph("no_time"))}
    assert faults == {
        ("python_tool: option 'deadline'", "0", "a number above 0"),
        ("python_tool: option 'seconds'", "0.0", "a number above 0"),
        ("python_tool: option 'workers'", "0", "a whole number of at least 1"),
        ("python_tool: option 'memory_mib'", "8", "a whole number of at least 32"),
        ("python_tool: option 'on_timeout'", "None", "'reply' or 'fail'"),
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alone", {"samples": 2}),
        ("penalised_by_nothing", {"kl": 0.0}),
        ("compared_with_the_batch", {}),
        ("another", {}),
        ("judged_once", {}),
        ("forked", {}),
        ("offline", {}),
        ("compares_odd_samples", {}),
        ("chooses_by_odd_samples", {}),
    ],
)
def test_what_can_work_is_no_fault(name: str, options: dict[str, Any]) -> None:
    assert check(graph(name, **options)) == []


def test_data_without_mu_is_told_to_a_loss_that_needs_it_and_to_no_other() -> None:
    """What the first value of a source has is known once it has been read: by `run`, before any process starts."""
    (fault,) = answer("run", f"{FILE}:offline", [])["faults"]
    assert (fault["what"], fault["given"], fault["where"]) == (
        "policy_update: loss ppo",
        "no behaviour_P for it",
        line("offline"),
    )
    assert "logprobs_NT were recorded" in fault["needed"]
    assert answer("run", f"{FILE}:offline", ["--recorded"])["faults"] == []
    assert answer("run", f"{FILE}:offline_without_ratios", [])["faults"] == []
    assert answer("run", f"{FILE}:offline_filled", [])["faults"] == []


def test_a_graph_whose_nodes_are_not_imported_is_checked_without_them() -> None:
    strange = Graph.from_json(graph("alone").to_json())
    nodes = [node.__class__(**{**_fields(node), "op": "nowhere.to_be:found"}) for node in strange.nodes if node.fires]
    ways = [node for node in strange.nodes if not node.fires]
    assert check(strange.replace(nodes=(*ways, *nodes))) == []


def _fields(node: Any) -> dict[str, Any]:
    return {slot: getattr(node, slot) for slot in type(node).__slots__}
