"""`check` reports what nodes and losses cannot work with, at the line of the call, before anything starts."""

import linecache
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.graph import Context, Policy, Prompts, Rollouts, broadcast, check, load, node, program, trace
from penstock.graph.types import LearningRate
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.guessing_game import guessing_game
from penstock.nodes.generate import converse, generate
from penstock.nodes.learn.losses import Loss, Sampled, importance_weighted, ppo, tis
from penstock.nodes.learn.optimizer import cosine, linear
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import length, math_answer, penalize_overlong, score
from penstock.runtime.cli.children import answer

from .faults import assert_told, marked

FILE = Path(__file__).parent / "programs_for_misuse.py"


def source(where: str) -> str:
    """Return the source line of a fault."""
    file, _, number = where.rpartition(":")
    return linecache.getline(file, int(number))


MARKED = marked(FILE)


@pytest.mark.parametrize("name", MARKED)
def test_what_a_node_or_a_loss_cannot_work_with_is_a_fault_at_its_line(name: str) -> None:
    assert_told(FILE, name, MARKED[name])


def with_bonus(logprobs_P: Tensor, sampled: Sampled, *, base: Loss, bonus: float = 0.1) -> Tensor:
    """A user's loss on top of another one."""
    return base(logprobs_P, sampled)[0] - bonus * logprobs_P


@node(pool="scorer", clock="update")
def slowed(rollouts: Rollouts) -> LearningRate:
    return LearningRate(1e-4)


def by_update(update: int) -> float:
    return 1e-4 / (update + 1)


LOSS = "policy_update: loss"
OPTION = "policy_update: option"
RANGE, TYPE = "out-of-range", "wrong-option-type"
WIDE: dict[str, Any] = {"clip_low": "wide", "dual_clip": 1}


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"lr": cosine}, [("unbound-schedule", f"{OPTION} 'lr'", "cosine without peak")]),
        ({"lr": by_update}, [(TYPE, f"{OPTION} 'lr'", "by_update: too many positional arguments")]),
        ({"lr": partial(linear, peak=1e-4, warmup=-1)}, [(RANGE, "policy_update: lr linear: option 'warmup'", "-1")]),
        ({"kl": 0.1}, [("missing-reference", f"{OPTION} 'kl'", "0.1 without a reference")]),
        ({"kl": 0.0}, []),
        ({"loss": partial(tis, cap=3.0)}, [("missing-proximal", f"{LOSS} tis", "no proximal_P for it")]),
        (
            {"loss": partial(with_bonus, base=partial(tis, cap=-1.0))},
            [
                ("missing-proximal", f"{LOSS} with_bonus: base tis", "no proximal_P for it"),
                (RANGE, f"{LOSS} with_bonus: base tis: option 'cap'", "-1.0"),
            ],
        ),
        (
            {"loss": partial(importance_weighted, level="sequance", bound="mask"), "average": "tokenmean"},  # type: ignore[arg-type]
            [
                (TYPE, f"{OPTION} 'average'", "'tokenmean'"),
                (TYPE, f"{LOSS} importance_weighted: option 'level'", "'sequance'"),
            ],
        ),
        (
            {"loss": partial(importance_weighted, cap=2.0, floor=2.5)},
            [(RANGE, f"{LOSS} importance_weighted: option 'floor'", "2.5")],
        ),
        ({"loss": "ppo"}, [(TYPE, f"{OPTION} 'loss'", "'ppo'")]),
        (
            {"loss": partial(ppo, **WIDE), "clip_norm": 0, "betas": (0.9, 1.0), "micro_tokens": 0},
            [
                (RANGE, f"{OPTION} 'clip_norm'", "0"),
                (RANGE, f"{OPTION} 'micro_tokens'", "0"),
                (RANGE, f"{OPTION} 'betas'", "[0.9, 1.0]"),
                (RANGE, f"{LOSS} ppo: option 'clip_low'", "'wide'"),
                (RANGE, f"{LOSS} ppo: option 'dual_clip'", "1"),
            ],
        ),
    ],
)
def test_options_of_an_update_that_cannot_work_are_all_told(
    options: dict[str, Any], faults: list[tuple[str, str, str]]
) -> None:
    @program
    def updated(policy: Policy, prompts: Prompts) -> Policy:
        rollouts = generate(prompts, broadcast(policy), samples=4)
        advantage = group_advantage(score(rollouts, by=math_answer))
        return policy_update(policy, rollouts, advantage, **{"loss": ppo, **options})

    assert [(f.code, f.what, f.given) for f in check(trace(updated))] == faults


def falling(update: int, updates: int) -> float:
    return 1e-4 / (update + 1)


@pytest.mark.parametrize("flags", [{"lr_warmup": 3}, {"lr_warmup": 0}, {"lr_decay": "linear"}])
def test_flags_of_a_rate_are_refused_where_nothing_could_follow_them(flags: dict[str, Any]) -> None:
    def faults(lr: object, rated: bool) -> list[tuple[str, str]]:
        @program
        def updated(policy: Policy, prompts: Prompts) -> Policy:
            rollouts = generate(prompts, broadcast(policy), samples=4)
            options = {"rate": slowed(rollouts)} if rated else {"lr": lr}
            advantage = group_advantage(score(rollouts, by=math_answer))
            return policy_update(policy, rollouts, advantage, loss=ppo, **options)

        graph = trace(updated)
        names = [each.name for each in graph.nodes] + [each.name for each in graph.arguments]
        contexts = {name: Context(node=name, **flags) for name in names}
        return [(fault.code, fault.what) for fault in check(graph, contexts=contexts)]

    refused = [("two-learning-rates", f"{OPTION} 'lr'")]
    assert (faults(falling, rated=False), faults(None, rated=True)) == (refused, refused)
    assert faults(partial(linear, peak=1e-4), rated=False) == faults(1e-4, rated=False) == []


@pytest.mark.parametrize(
    ("bounds", "faults"),
    [
        ({"at_least": 5, "at_most": 3}, [(RANGE, "score: by length: option 'at_least'", "5")]),
        ({"at_least": "5", "at_most": 3}, [(RANGE, "score: by length: option 'at_least'", "'5'")]),
        ({"at_least": 3, "at_most": 3}, []),
        ({"at_most": 0}, []),
    ],
)
def test_bounds_between_which_there_is_nothing_are_refused(
    bounds: dict[str, Any], faults: list[tuple[str, str, str]]
) -> None:
    @program
    def bounded(policy: Policy, prompts: Prompts) -> Policy:
        rollouts = generate(prompts, broadcast(policy), samples=4)
        advantage = group_advantage(score(rollouts, by=partial(length, **bounds)))
        return policy_update(policy, rollouts, advantage, loss=ppo)

    assert [(f.code, f.what, f.given) for f in check(trace(bounded))] == faults


@pytest.mark.parametrize(("options", "faults"), [({}, [RANGE]), ({"max_length": 40}, [])])
def test_a_price_on_the_length_of_conversations_needs_the_longest_one(
    options: dict[str, Any], faults: list[str]
) -> None:
    @program
    def brief(policy: Policy, prompts: Prompts) -> Policy:
        rollouts, _ = converse(prompts, broadcast(policy), environment=guessing_game, turns=3, samples=4)
        rewards = penalize_overlong(score(rollouts, by=math_answer), rollouts, buffer=4, **options)
        return policy_update(policy, rollouts, group_advantage(rewards), loss=ppo)

    assert [fault.code for fault in check(trace(brief))] == faults


FACTORS = "a finite number of at least 0"


@pytest.mark.parametrize(
    ("name", "options", "what", "needed"),
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
def test_numbers_that_cannot_work_are_faults(name: str, options: dict[str, Any], what: str, needed: str) -> None:
    assert (what, needed) in {(fault.what, fault.needed) for fault in check(trace(load(name), options))}


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
    found = check(trace(load(f"{FILE}:learns_from_odd_samples"), options))
    assert [f.what for f in found] == [f"generate: option {name!r}" for name in faults]
    for fault, name in zip(found, faults, strict=True):
        assert fault.given.startswith(f"{options[name]}, of rollouts that are scored by policy_update ({FILE}:")
        assert "= generate(prompts, behaviour, samples=4, **told)" in source(fault.where)


def test_data_without_mu_is_told_to_a_loss_that_needs_it_and_to_no_other() -> None:
    """`run` reads the first value of a source, and so knows what it lacks, before it starts any process."""
    (fault,) = answer("run", f"{FILE}:offline", [])["faults"]
    assert (fault["what"], fault["given"]) == ("policy_update: loss ppo", "no behaviour_P for it")
    assert "policy_update(policy, kept, group_advantage(rewards), loss=ppo)" in source(fault["where"])
    assert "logprobs_NT were recorded" in fault["needed"]
    assert answer("run", f"{FILE}:offline", ["--recorded"])["faults"] == []
    assert answer("run", f"{FILE}:offline_without_ratios", [])["faults"] == []
    assert answer("run", f"{FILE}:offline_filled", [])["faults"] == []


def test_a_graph_whose_nodes_are_not_imported_is_checked_without_them() -> None:
    made = trace(load(f"{FILE}:alone"))
    nodes = tuple(replace(node, op="nowhere.to_be:found") if node.fires else node for node in made.nodes)
    assert check(made.replace(nodes=nodes)) == []
