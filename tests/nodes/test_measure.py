"""A measurement is the greedy accuracy of one version on the held-out problems."""

from dataclasses import replace

import pytest

from penstock.graph.types import Context, Weights
from penstock.nodes.data import open_prompts
from penstock.nodes.evaluate import measure
from penstock.nodes.open_model import open_model
from penstock.nodes.score import math_answer

CONTEXT = Context(node="measure", seed=1, data="arithmetic", max_tokens=8, slots=16)


def weights(version: int) -> Weights:
    model, _ = open_model(CONTEXT)
    return Weights(version, {name: p.detach() for name, p in model.named_parameters()})


def ends_in_an_even_digit(prompt: str, response: str, answer: str) -> float:
    return float(answer[-1] in "02468")


def test_all_problems_count_once_and_the_version_is_told() -> None:
    assert measure.init is not None
    examiner = measure.init(CONTEXT, problems=24, by=ends_in_an_even_digit)
    answers = [examiner.source.read(ordinal).answers[0] for ordinal in range(24)]
    examiner, figures = measure.fn(examiner, weights(5), problems=24, by=ends_in_an_even_digit)
    expected = sum(answer[-1] in "02468" for answer in answers) / 24
    assert figures == {"accuracy": pytest.approx(expected), "accuracy_version": 5.0}
    assert 0 < expected < 1
    assert not examiner.busy()


def test_the_problems_are_held_out() -> None:
    assert measure.init is not None
    examiner = measure.init(CONTEXT, problems=1, by=math_answer)
    first = [open_prompts(replace(CONTEXT, split=split)).read(0) for split in ("evaluate", "train")]
    assert examiner.source.read(0) == first[0] != first[1]


def test_two_measurements_at_once_do_not_mix() -> None:
    assert measure.init is not None
    examiner = measure.init(CONTEXT, problems=3, by=math_answer)
    live = weights(2)
    for tag in ("a", "b"):
        examiner.submit(tag, {"behaviour": live})
    found = {}
    while examiner.busy():
        found.update(examiner.step())
    assert found["a"] == found["b"]
    examiner.submit("c", {"behaviour": live})
    examiner.reset()
    assert not examiner.busy()
