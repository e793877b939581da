"""A plain function becomes an environment: a node with one option more, whose firings do not wait for each other."""

import json
import time
from typing import Any

import pytest
import torch

from penstock.graph import Graph, GraphError, Metrics, Rewards, Rollouts, alternate, broadcast, check, program, trace
from penstock.graph.types import Context, Replies
from penstock.nodes.environments.environment import Calls, OverdueError, environment
from penstock.nodes.environments.guessing_game import guessing_game
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update


@environment
def content(rollouts: Rollouts, *, word: str = "fine") -> Replies:
    """Replies the same to everybody, and is done."""
    return Replies((word,), ("user",), torch.tensor([True]))


@environment(pool="arcade", deadline=5.0)
def counted(rollouts: Rollouts, *, seconds: float = 0.0) -> tuple[Replies, Metrics]:
    time.sleep(seconds)
    return Replies(("",), ("user",), torch.tensor([True])), {"rows": 1.0}


@environment
def own_deadline(rollouts: Rollouts, *, deadline: float = 1.0) -> Replies:
    raise NotImplementedError


@program
def chat(policy: FakePolicy, prompts: FakePrompts, *, deadline: float = 60.0) -> FakePolicy:
    rollouts, _ = alternate(fake_generate, content, prompts, broadcast(policy), turns=2, deadline=deadline)
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def twice_named(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts, _ = alternate(fake_generate, own_deadline, prompts, broadcast(policy), turns=2)
    return fake_update(policy, rollouts, fake_score(rollouts))


def answered(calls: Calls) -> Any:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if found := calls.step():
            return found[0][1]
    raise AssertionError("no answer")


def test_outside_of_a_program_it_is_the_function() -> None:
    assert content(None, word="well").texts == ("well",)  # type: ignore[arg-type]


def test_the_graph_knows_its_pool_its_deadline_and_that_it_works_on_several_groups_at_once() -> None:
    graph = trace(chat, {"deadline": 2.5})
    node = graph["content"]
    assert (node.pool, node.stream, node.stateful, node.answers) == ("environment", True, False, True)
    assert dict(node.options) == {"deadline": 2.5, "word": "fine"}
    assert [o.name for o in node.outputs] == ["out"]
    assert check(graph, batch=2) == []
    loaded = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert (loaded, loaded.digest()) == (graph, graph.digest())


def test_the_deadline_is_the_decorator_s_unless_the_program_says_another() -> None:
    assert dict(content.interface.options) == {"word": "fine", "deadline": 60.0}
    assert counted.interface.options["deadline"] == 5.0
    assert counted.pool == "arcade"
    assert dict(python_tool.interface.options)["deadline"] > dict(guessing_game.interface.options)["deadline"]


def test_an_option_of_that_name_is_refused() -> None:
    with pytest.raises(GraphError, match="own_deadline: option 'deadline'"):
        trace(twice_named, {})


def test_a_worker_s_state_is_the_calls_and_what_they_return_fits_the_node() -> None:
    for definition, options, metrics in ((content, {"word": "so"}, {}), (counted, {"seconds": 0.0}, {"rows": 1.0})):
        assert definition.init is not None
        calls = definition.init(Context(), deadline=60.0, **options)
        assert isinstance(calls, Calls)
        calls.submit("x", {"rollouts": None})
        state, outputs, figures = definition.split(answered(calls), stateful=False)
        assert state is None
        assert isinstance(outputs["out"], Replies)
        assert figures == metrics


def test_the_deadline_holds_for_each_call() -> None:
    assert counted.init is not None
    calls = counted.init(Context(), deadline=0.1, seconds=60.0)
    calls.submit("counted[4.1]", {"rollouts": None})
    error = answered(calls)
    assert isinstance(error, OverdueError)
    assert str(error).startswith("counted[4.1]: given no reply within 0.1 s")


def test_a_reply_of_another_type_is_told_as_the_function_s() -> None:
    with pytest.raises(TypeError, match=r"counted returned tuple\[Rewards, dict\], needed tuple\[.*Replies, Metrics\]"):
        counted.split((Rewards(torch.ones(1)), {}), stateful=False)
