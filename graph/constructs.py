"""The constructs: what a program can say besides calling nodes.

`broadcast` sends weights, `delay` reads an older value, `keep` filters groups, and `alternate` lets two nodes take
turns.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

from penstock.graph.errors import Fault, GraphError, caller, fault, nearest
from penstock.graph.imports import encode
from penstock.graph.ir import ANY, Input, Output, Ref
from penstock.graph.node import NodeDef
from penstock.graph.trace import Handle, recording
from penstock.graph.types import Replies, Rollouts, Weights

# Optional inputs of the speaking node: its own output and the answering node's, both of the previous turn.
BACK = ("conversation", "replies")
# Optional input of the answering node: its own output of the previous turn.
EARLIER = "earlier"


P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Q = ParamSpec("Q")


def _construct(fn: Callable[P, A]) -> Callable[P, A]:
    """The construct, where a call that does not fit the signature is a fault, as it is for nodes."""
    form = inspect.signature(fn)

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> A:
        try:
            form.bind(*args, **kwargs)
        except TypeError:
            raise _misfit(fn.__name__, form, args, kwargs) from None
        return fn(*args, **kwargs)

    return called


def _misfit(name: str, form: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphError:
    """The fault of a call that does not fit the signature of the construct `name`."""
    kinds = {key: parameter.kind for key, parameter in form.parameters.items()}
    places = [key for key, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    options = [key for key, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    several = inspect.Parameter.VAR_POSITIONAL in kinds.values()
    if len(args) > len(places) and not several:
        needed = f"{len(places)} ({', '.join(places)}); options are passed by keyword ({', '.join(options)})"
        return fault("too-many-inputs", f"{name}: inputs", f"{len(args)} positional values", needed)
    for key, given in kwargs.items():
        if key in places[: len(args)]:
            return fault("input-given-twice", f"{name}: input {key!r}", "two values, by place and by keyword", "one")
        if key not in [*places, *options] and inspect.Parameter.VAR_KEYWORD not in kinds.values():
            needed = f"an option of {name}{nearest(key, [*places, *options])}"
            return fault("unknown-option", f"{name}: option {key!r}", repr(given), needed)
    lacking = next(key for key in places[len(args) :] if key not in kwargs)
    return fault("missing-input", f"{name}: input {lacking!r}", "nothing", f"all of {', '.join(places)}")


@_construct
def broadcast(
    value: Any, *, lag: int = 0, every: int = 1, precision: Literal["", "int8", "fp8"] | None = ""
) -> Weights:
    """The weights of a carried value for another pool, at most `lag` updates old: the feedback edge of a program.

    Send only every `every`-th version. `every` must be ≤ `lag` + 1. With a `precision` the sender converts matrices to
    eight bits with a scale per row, and the reader computes in that format: int8 on CPUs, fp8 (e4m3) on GPUs.
    """
    precision = "" if precision is None else precision
    return cast(Weights, recording("broadcast").edge("broadcast", value, lag, every, precision))


@_construct
def delay(value: A, *, lag: int = 0) -> A:
    """A carried value exactly as it was `lag` updates ago, for nodes that fire per group in its own pool.

    The groups of update u see its version max(0, u − lag): the result of the updates up to u − 1 − lag. A group's
    update must be known when the group starts, so a program has delays or filters, not both. Each update copies the
    whole value, and lag + 2 copies are kept: the value should be small, and must not be a model.
    """
    return cast(A, recording("delay").edge("delay", value, lag))


@overload
def keep(value: A, /, *, when: Callable[[A], bool]) -> A: ...
@overload
def keep(first: A, second: B, /, *, when: Callable[[A, B], bool]) -> tuple[A, B]: ...
@overload
def keep(first: A, second: B, third: C, /, *, when: Callable[[A, B, C], bool]) -> tuple[A, B, C]: ...
@_construct
def keep(*values: Any, when: Callable[..., bool] | None = None) -> Any:
    """The values of those prompt groups for which `when(*values)` is true. Other groups are dropped, and the next ones
    take their place: an update consumes `batch` kept groups, in order."""
    recorder = recording("keep")
    if not values:
        raise fault("missing-input", "keep", "no value", "the values of a group, the last of them often its rewards")
    if not callable(when) or isinstance(when, Handle):
        needed = "a function of the values that returns True or False"
        raise fault("no-predicate", "keep: option 'when'", repr(when), needed)
    refs = [(str(i), recorder.ref(value, f"keep: value {i}", ANY)) for i, value in enumerate(values)]
    inputs = tuple(Input(name, recorder.type_of(ref), ref) for name, ref in refs)
    outputs = tuple(Output(name, recorder.type_of(ref)) for name, ref in refs)
    options = (("when", encode(when, "keep: option 'when'")),)
    kept = recorder.record("keep", inputs, outputs, options=options, given=("when",))
    return kept if len(kept) > 1 else kept[0]


@overload
def alternate(
    speak: NodeDef[P, A], answer: NodeDef[Q, Rollouts], *inputs: Any, turns: int | None = None, **options: Any
) -> tuple[A, Replies]: ...
@overload
def alternate(
    speak: NodeDef[P, A], answer: NodeDef[Q, B], *inputs: Any, turns: int | None = None, **options: Any
) -> tuple[A, B]: ...
@_construct
def alternate(
    speak: NodeDef[..., Any], answer: NodeDef[..., Any], *inputs: Any, turns: int | None = None, **options: Any
) -> Any:
    """Let two nodes take turns on each prompt group, such as a generator and an environment, at most `turns` times.

    `speak` gets `inputs`. From the second turn on it also gets the outputs of both nodes at the previous turn, as its
    optional inputs `conversation` and `replies`. `answer` gets the output of `speak`, and ends the turns with an output
    whose attribute `done` is true. It fires at the last turn, too: its output there, such as a reward, is the group's.
    Nodes that read the two get their outputs of the last turn.

    A generator that answers, `generate.of(judge)`, is the node `reply`: its model writes the replies.

    Give the answering node its other inputs beforehand: `customer.given(persona=personas)`, `generate.of(judge)`. Both
    nodes start when all inputs of both are ready. If the answering node has an optional input `earlier`, this is its
    own output of the previous turn. Each of `options` goes to the node that has it. If both have it, give the answering
    node its own with `given`.
    """
    for role, node in (("speaks", speak), ("answers", answer)):
        if not isinstance(node, NodeDef):
            needed = "a function with @node or, for an environment, @environment"
            raise fault("not-a-node", f"alternate: the node that {role}", repr(node), needed)
    recorder, answer = recording("alternate"), answer.answers()
    ports = {port.name: port for port in speak.interface.inputs}
    if not all(name in ports and ports[name].optional for name in BACK):
        needed = f"one with the optional inputs {' and '.join(BACK)}: what both made in the turn before"
        raise fault(
            "speaker-inputs", "alternate: the node that speaks", f"{speak.__name__}({', '.join(ports)})", needed
        )
    # An option goes to the node that has it.
    spoken = {*speak.interface.options, *ports.keys() - BACK}
    answered = answer.interface.options.keys() - answer.bound.keys()
    known = {*spoken, *answered}
    unknown = [name for name in options if name not in known]
    for name in unknown:
        needed = f"an option of {speak.__name__} or {answer.__name__}{nearest(name, known)}"
        what = f"alternate: option {name!r}"
        recorder.faults.append(Fault("unknown-option", what, repr(options[name]), needed, caller()))
    for name in options.keys() & spoken & answered:
        given = f"{options[name]!r}, and both {speak.__name__} and {answer.__name__} have it"
        needed = f"the answering one's own beside it: {answer.written}.given({name}=…)"
        recorder.faults.append(Fault("ambiguous-option", f"alternate: option {name!r}", given, needed, caller()))
    # Recorded at the end, with the edges between the turns, which need both nodes.
    said = recorder.node_of(speak, inputs, {k: v for k, v in options.items() if k in spoken})
    # The answering node's first input that is not bound is the speaking node's output.
    own = [p.name for p in answer.interface.inputs if not p.optional and p.name not in answer.bound]
    if len(own) > 1:
        needed = f"all but what it answers: {answer.written}.given({', '.join(f'{name}=…' for name in own[1:])})"
        if answer.written != answer.__name__ and own[1:] == answer.weights:
            needed = f"the weights that it answers with: {answer.written}"
        raise fault("answer-inputs", f"alternate: inputs of {answer.__name__}, which answers", "nothing", needed)
    first = [Handle(recorder, Ref(said.name, said.outputs[0].name))] if said.outputs else []
    heard = recorder.node_of(answer, first, {k: v for k, v in options.items() if k in answered})
    if not said.outputs or not heard.outputs:
        what = f"alternate: {(answer if said.outputs else speak).__name__}"
        raise fault("no-output", what, "a node without an output", "one for the other to read")
    # What each node reads of the previous turn: (the input, the node that made it).
    recalled = [p for p in answer.interface.inputs if p.name == EARLIER and p.optional and EARLIER not in answer.bound]
    ports |= {port.name: port for port in recalled}
    back = [(said, [*zip(BACK, (said, heard), strict=True)]), (heard, [(EARLIER, heard) for _ in recalled])]
    # A missing bound does not stop the trace: `check` reports it with all other faults.
    bound = encode(inf if turns is None else turns, "alternate: option 'turns'")
    for made, reads in back:
        edges = list(made.inputs)
        for name, maker in reads:
            type_, ref = recorder.declare(ports[name].type), Ref(maker.name, maker.outputs[0].name)
            edges.append(Input(name, type_, ref, back=True))
        op = "" if unknown else made.op
        recorder.nodes.append(dataclasses.replace(made, op=op, turns=bound, inputs=tuple(edges)))
    return recorder.outputs(speak, said), recorder.outputs(answer, heard)
