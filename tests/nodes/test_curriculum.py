"""The curriculum takes the candidate of the kind whose rewards vary most, as far as it has seen."""

import pytest
import torch

from penstock.graph.types import Context, Prompts, Rewards
from penstock.nodes.curriculum import (
    MEMORY,
    Candidates,
    Varied,
    carries,
    choose,
    make_varied,
    open_candidates,
    remember,
)

CANDIDATES = Candidates((7, 7, 7), ("111+222=", "199+1=", "508-99="), ("333", "200", "409"))


def seen(**variances: float) -> Varied:
    varied = Varied()
    varied.variances = dict(variances)
    return varied


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("123+456=", "+0"),
        ("199+101=", "+2"),
        ("999+999=", "+3"),
        ("500-499=", "-2"),
        ("987-123=", "-0"),
        ("7+12=", "+0"),
        ("7+93=", "+2"),
    ],
)
def test_a_problem_is_known_by_its_sign_and_carries(text: str, kind: str) -> None:
    assert carries(text) == kind


def test_a_prompt_that_is_no_arithmetic_needs_kinds_of_its_own() -> None:
    with pytest.raises(ValueError, match="given 'How many apples', needed a problem such as"):
        carries("How many apples")


def by_first(text: str) -> str:
    return text[0]


def test_the_most_varied_kind_is_chosen_and_what_was_never_seen_comes_first() -> None:
    def chosen(varied: Varied) -> str:
        prompts, _ = choose.fn(CANDIDATES, varied, by=by_first)
        assert prompts.ordinals == (7,)
        assert prompts.answers[0] == dict(zip(CANDIDATES.texts, CANDIDATES.answers, strict=True))[prompts.texts[0]]
        text: str = prompts.texts[0]
        return text

    assert chosen(seen(**{"1": 0.1, "5": 0.2})) == "508-99="
    assert chosen(seen(**{"1": 0.2, "5": 0.1})) == "111+222="
    assert chosen(seen(**{"1": 0.2})) == "508-99="
    assert choose.fn(CANDIDATES, seen(**{"1": 0.2}), by=by_first)[1] == {"unseen": 1.0}


def test_what_is_remembered_is_the_variance_within_each_group() -> None:
    prompts = Prompts((0, 1, 2), ("1", "5", "1"), ("", "", ""))
    rewards = Rewards(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]))
    varied, figures = remember.fn(seen(), prompts, rewards, by=by_first)
    assert varied.variances == pytest.approx({"1": MEMORY * 0.25, "5": 0.0})
    assert figures == {"kinds": 2.0}


def test_rewards_that_do_not_fit_the_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="given 3 rewards of 2 groups"):
        remember.fn(seen(), Prompts((0, 1), ("1", "5"), ("", "")), Rewards(torch.ones(3)), by=by_first)


def test_each_group_has_candidates_of_its_own_that_depend_on_its_ordinal_alone() -> None:
    source = open_candidates(Context(node="c", seed=3, data="arithmetic", options={"candidates": 3}))
    first, second = source.read(0), source.read(1)
    assert len(set(first.texts + second.texts)) == 6
    assert source.read(1) == second
    with pytest.raises(ValueError, match="given 0, needed at least 1"):
        open_candidates(Context(data="arithmetic", options={"candidates": 0}))


def test_it_goes_on_where_it_was() -> None:
    varied = seen(**{"+1": 0.125})
    again = make_varied(Context())
    again.restore(*varied.state())
    assert again.state() == varied.state()
