"""What a program can say beside calling nodes: how weights travel, which groups stay, what is read later, turns."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast, overload

from penstock.graph.definition import NodeDef
from penstock.graph.faults import fault
from penstock.graph.recorder import Recorder, current
from penstock.graph.types import Replies, Rollouts, Weights

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
Q = ParamSpec("Q")


def broadcast(value: Any, *, lag: int = 0, every: int = 1) -> Weights:
    """The weights of a carried value for another pool, at most `lag` updates old: the feedback edge of a program.

    `every`: only every so-manieth version is sent, which must not be later than the lag allows.
    """
    return cast(Weights, _recorder("broadcast").broadcast(value, lag, every))


def delay(value: A, *, lag: int = 0) -> A:
    """A carried value exactly as it was `lag` updates ago, for nodes that fire per group in its own pool.

    The groups of update u see its version max(0, u − lag): what the updates up to u − 1 − lag have made of it. Which
    update a group is for must be known by then, so a program has delays or filters, not both. At each update the value
    is copied whole, and lag + 2 copies are kept: it should be small, and must not be a model.
    """
    return cast(A, _recorder("delay").delay(value, lag))


@overload
def keep(value: A, /, *, when: Callable[[A], bool]) -> A: ...
@overload
def keep(first: A, second: B, /, *, when: Callable[[A, B], bool]) -> tuple[A, B]: ...
@overload
def keep(first: A, second: B, third: C, /, *, when: Callable[[A, B, C], bool]) -> tuple[A, B, C]: ...
def keep(*values: Any, when: Callable[..., bool] | None = None) -> Any:
    """The values of those prompt groups for which `when(*values)` is true. The others are dropped, and the next groups
    take their place: an update consumes its `batch` kept ones, in order."""
    return _recorder("keep").keep(values, when)


@overload
def alternate(
    speak: NodeDef[P, A], answer: NodeDef[Q, Rollouts], *inputs: Any, turns: int | None = None, **options: Any
) -> tuple[A, Replies]: ...
@overload
def alternate(
    speak: NodeDef[P, A], answer: NodeDef[Q, B], *inputs: Any, turns: int | None = None, **options: Any
) -> tuple[A, B]: ...
def alternate(
    speak: NodeDef[..., Any], answer: NodeDef[..., Any], *inputs: Any, turns: int | None = None, **options: Any
) -> Any:
    """Let two nodes take turns on each prompt group, such as a generator and an environment, at most `turns` times.

    `speak` gets `inputs`, and from the second turn on also what both made in the turn before, as its optional inputs
    `conversation` and `replies`. `answer` gets what `speak` has made, and ends it by an output whose attribute `done`
    is true; it hears the last turn too, and what it makes of that, such as a reward, is the group's. Whoever reads
    their outputs gets those of the last turn.

    A generator that answers, `generate.of(judge)`, is the node `reply`: what its model says are the replies.

    Inputs of the answering node's own are given to it beforehand: `customer.given(persona=personas)`,
    `generate.of(judge)`. Both nodes start when all inputs of both are there. An optional input `earlier` of it is what
    it made itself in the turn before. `options` go to the one that has them; one that both have is given to the
    answering node by `given`.
    """
    for role, node in (("speaks", speak), ("answers", answer)):
        if not isinstance(node, NodeDef):
            needed = "a function with @node or, for an environment, @environment"
            raise fault(f"alternate: the node that {role}", repr(node), needed)
    return _recorder("alternate").alternate(speak, answer.answers(), inputs, turns, options)


def _recorder(construct: str) -> Recorder:
    recorder = current.get()
    if recorder is None:
        raise fault(construct, "a call outside of a program", "a call in a function with @program")
    return recorder
