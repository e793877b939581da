"""Nodes that are given inputs and options beforehand: `given`, `of`, and the node that answers in `alternate`."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.graph import (
    Context,
    Graph,
    GraphError,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    alternate,
    broadcast,
    check,
    node,
    program,
    trace,
)
from penstock.graph.ir import Ref
from penstock.graph.show import dumps, loads
from penstock.graph.types import FrozenModel, Replies


class Slots:
    """A `Stream`."""

    def submit(self, tag: Any, inputs: Any) -> None: ...

    def step(self) -> list[Any]:
        return []

    def busy(self) -> bool:
        return False

    def reset(self) -> None: ...


def open_slots(context: Context, **options: Any) -> Slots:
    return Slots()


@node(pool="generator", init=open_slots)
def speak(
    slots: Slots,
    prompts: Prompts,
    behaviour: Weights,
    conversation: Rollouts | None = None,
    replies: Replies | None = None,
    *,
    samples: int = 4,
    heat: float = 1.0,
) -> tuple[Slots, Rollouts]:
    raise NotImplementedError


@node(pool="shop", init=open_slots)
def serve(
    slots: Slots,
    rollouts: Rollouts,
    persona: Prompts,
    behaviour: Weights,
    earlier: Replies | None = None,
    *,
    patience: int = 2,
    heat: float = 1.0,
) -> tuple[Slots, Replies]:
    raise NotImplementedError


@node(pool="scorer")
def judge_it(rollouts: Rollouts, replies: Replies, *, weight: float = 1.0) -> Rewards:
    raise NotImplementedError


@node(pool="scorer")
def compare(first: Rollouts, second: Rollouts) -> Rewards:
    raise NotImplementedError


@node(pool="trainer", clock="update")
def learn(policy: Policy, rollouts: Rollouts, rewards: Rewards) -> Policy:
    raise NotImplementedError


@program
def shop(policy: Policy, model: FrozenModel, prompts: Prompts, personas: Prompts) -> dict[str, object]:
    server = serve.given(persona=personas, heat=0.5).of(model)
    said, replies = alternate(
        speak, server, prompts, broadcast(policy, lag=1), turns=3, samples=2, patience=5, heat=0.9
    )
    return {"policy": learn(policy, said, judge_it.given(weight=0.5)(said, replies)), "model": model}


def faults(asked: Callable[..., Any]) -> list[str]:
    """What a program with a call that cannot be is told."""

    @program
    def made(policy: Policy, model: FrozenModel, prompts: Prompts) -> dict[str, object]:
        said = asked(policy, model, prompts)
        return {"policy": learn(policy, said, judge_it(said, said)), "model": model}

    try:
        found = check(trace(made))
    except GraphError as error:
        found = list(error.faults)
    return [str(fault) for fault in found]


def test_what_answers_has_inputs_and_options_of_its_own() -> None:
    graph = trace(shop)
    assert check(graph, batch=4) == []
    answer, said = graph["serve"], graph["speak"]
    own = {item.name: (item.ref, item.back) for item in answer.inputs}
    assert own == {
        "rollouts": (Ref("speak"), False),
        "persona": (Ref("personas"), False),
        "behaviour": (Ref("broadcast"), False),
        "earlier": (Ref("serve"), True),
    }
    assert (answer.option("heat"), said.option("heat"), answer.option("patience")) == (0.5, 0.9, 5)
    assert answer.answers
    assert not said.answers
    assert graph["judge_it"].option("weight") == 0.5
    assert Graph.from_json(graph.to_json()) == graph
    assert loads(dumps(graph)).digest() == graph.digest()


def test_the_printed_call_says_what_the_one_that_answers_is_given() -> None:
    lines = [line.partition("#")[0] for line in str(trace(shop)).splitlines()]
    printed = " ".join(" ".join(lines).split())
    assert "alternate(speak, serve.given(persona=personas, behaviour=behaviour, heat=0.5)," in printed
    assert "patience=5" in printed


def test_of_a_value_that_never_changes_no_lag_is_asked_and_one_broadcast_serves_all() -> None:
    @program
    def twice(policy: Policy, model: FrozenModel, prompts: Prompts) -> dict[str, object]:
        said, again = speak.of(model)(prompts, samples=1), speak.of(model)(prompts)
        return {"policy": learn(policy, said, compare(said, again)), "model": model}

    graph = trace(twice)
    assert [(n.name, n.lag) for n in graph.nodes if n.construct == "broadcast"] == [("broadcast", 0)]
    assert [item.name for item in graph["speak"].inputs] == ["prompts", "behaviour"]


def test_of_a_value_that_updates_change_the_lag_is_said() -> None:
    (told,) = [text for text in faults(lambda policy, model, prompts: speak.of(policy)(prompts)) if "lag" in text]
    assert "broadcast: lag" in told
    assert "broadcast(policy, lag=k)" in told
    assert not [t for t in faults(lambda p, m, x: speak.of(broadcast(p, lag=1))(x)) if "lag" in t]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda p, m, x: speak.given(personna=x)(x), "speak.given: 'personna'"),
        (lambda p, m, x: judge_it.of(m)(x, x), "a node without an input of weights"),
        (lambda p, m, x: speak.of(x)(x), "a carried value"),
        (lambda p, m, x: speak.of(m)(x, m), "needed  1 value"),
        (lambda p, m, x: alternate(speak, serve, x, broadcast(p), turns=2)[0], "serve.given(persona=…, behaviour=…)"),
        (
            lambda p, m, x: alternate(speak, serve.given(persona=x).of(m), x, broadcast(p), turns=2, heat=0.5)[0],
            "serve.given(heat=…)",
        ),
    ],
)
def test_what_cannot_be_given_is_told_with_what_to_write(asked: Callable[..., Any], words: str) -> None:
    told = faults(asked)
    assert any(words in text for text in told) or words.startswith("needed"), told
    assert told


def test_outside_of_a_program_a_node_is_called_with_what_it_is_given() -> None:
    @node
    def double(length: int, *, weight: float = 2.0) -> float:
        return length * weight

    assert double.given(weight=3.0)(2) == 6.0
    with pytest.raises(GraphError):
        speak.of(object())
