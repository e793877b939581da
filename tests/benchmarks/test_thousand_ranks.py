"""The benchmark of a controller with many ranks, run with few: the fake ranks do what a run asks of them."""

from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)


def script() -> Any:
    return import_module("thousand_ranks")


@pytest.mark.slow
def test_a_run_of_fake_ranks_ends_well_and_is_counted() -> None:
    found = script().steps(script().Layout(hosts=4, trainer=4, generators=2, tp=2, batch=4), 4, 0.1, processes=2)
    assert (found["ranks"], found["groups"]) == (8, 4)
    assert found["controller_s"] >= 0
    # Per update, at least one event for each group's nodes: ranks of one host that did the same send one answer.
    assert found["events"] > 4 * (2 + 1 + 1)


@pytest.mark.slow
def test_agents_enrol_all_at_once() -> None:
    assert script().enrolment(3)["agents"] == 3


def test_a_starts_steps_are_reckoned_for_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    own = script()
    monkeypatch.setattr(own, "importing", lambda: 2.0)
    monkeypatch.setattr(own, "forking", lambda: 0.01)
    monkeypatch.setattr(own, "meeting", lambda size: 0.001 * size**2)
    layout = own.Layout(hosts=4, trainer=32, generators=8, tp=4, batch=4)
    steps = own.start_steps(layout, {"ranks": 64, "start_processor_s": 0.5}, {"agents": 4, "enrolled_s": 0.25})
    seconds = {step["step"]: step["seconds"] for step in steps}
    assert seconds["forks of a host"] == pytest.approx(16 * 0.01)
    assert seconds["gloo's connections of 32 ranks"] == pytest.approx(31 * 0.001)
