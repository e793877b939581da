"""`@node`: a function with a typed signature that a program can call.

`NodeDef` is the definition: in a program a call records a node, elsewhere it calls the plain function. Workers call
`fn` and split its result with `split`. `Filter` is the definition of a `keep`.
"""

import copy
import functools
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, TypeVarTuple, get_args, overload

from penstock.graph.errors import defined, fault, nearest
from penstock.graph.imports import path_of
from penstock.graph.interface import Interface, interface
from penstock.graph.ir import Clock
from penstock.graph.protocols import Stream
from penstock.graph.trace import Handle, current, recording
from penstock.graph.types import (
    COLUMNS,
    MOST_FIGURES,
    NAME_LENGTH,
    Advantages,
    AnyRewards,
    Batchable,
    Mean,
    Metrics,
    Replies,
    Weights,
    uneven,
)

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
Ts = TypeVarTuple("Ts")


class NodeDef(Generic[P, T]):
    """A node's definition. Its type is that of a call in a program: without the state, and without the metrics.

    Called in a program it records one node and returns handles. Called anywhere else it is the plain function `fn`:
    same arguments, state included, and same result, metrics included.

    `bound` are inputs and options that every call of this node is given, by name (see `given`). `answering` is the node
    that replaces this one as the second of `alternate`; None if it can be the second itself. `written` is this node as
    a program writes it, for messages. `precisions` are the eight-bit formats of weights, of `ir.PRECISIONS`, that it
    can compute with. `evaluates` is True for a node that reads held-out problems by itself.
    """

    __name__: str

    def __init__(self, fn: Callable[..., Any], pool: str, clock: Clock, init: Callable[..., Any] | None = None) -> None:
        if clock not in ("group", "update"):
            raise fault("unknown-clock", f"{fn.__name__}: clock", repr(clock), '"group" or "update"', defined(fn))
        functools.update_wrapper(self, fn)
        self.fn, self.path, self.pool, self.init = fn, path_of(fn), pool, init
        self.clock: Clock = clock
        self.period = 1
        self.part_groups = 0
        self.label = ""
        self.bound: Mapping[str, Any] = {}
        # Quoted, since the documentation's parser takes `node` for this module and for the function in it.
        self.answering: "NodeDef[..., Any] | None" = None  # noqa: UP037
        self.written: str = fn.__name__
        self.precisions: tuple[str, ...] = ()
        self.evaluates = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        recorder = current.get()
        if recorder is not None:
            made: T = recorder.call(self, args, kwargs)
            return made
        if any(isinstance(value, Handle) for value in (*args, *kwargs.values())):
            needed = "a call while the program is traced; values of a program exist only there"
            raise fault("outside-program", self.__name__, "a value of a program that has been traced", needed)
        result: T = self.fn(*args, **{**self.bound, **kwargs})
        return result

    def __repr__(self) -> str:
        return f"<node {self.path}>"

    @property
    def per_update(self) -> Self:
        """This node, fired once per update on the whole batch, its per-group inputs joined."""
        return self._changed(clock="update")

    def on(self, pool: str) -> Self:
        """This node, in another pool."""
        return self._changed(pool=pool)

    def named(self, name: str) -> Self:
        """This node, whose call is named `name` in the graph: in metrics (`solver.loss`), in flags
        (`--duration solver=0.3`) and on the display. Without it, a call has its function's name, with a number from the
        second call on (`policy_update_2`).

        Raises GraphError for a name that is not made of letters, digits and "_". A program refuses a name that another
        call has. The name of an argument may be used: `policy_update.named("solver")(solver, …)`.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII):
            needed = 'a name of letters, digits and "_", at most 64, such as "solver"'
            raise fault("bad-name", f"{self.__name__}.named", repr(name), needed)
        return self._changed(label=name)

    def every(self, updates: int) -> Self:
        """This per-update node, fired only at every `updates`-th update. Its outputs stay unchanged in between."""
        if self.clock != "update":
            needed = f"one that fires per update: {self.__name__}.per_update.every({updates!r})"
            raise fault("every-per-group", f"{self.__name__}.every({updates!r})", "a node that fires per group", needed)
        return self._changed(period=updates)

    def accumulate(self, groups: int) -> Self:
        """This update, fired in parts as its batch arrives: each on the next `groups` prompt groups, as soon as these
        are there. Gradients add up, and the last part makes the one step, so the result is the same. With 0 it fires
        once, on the whole batch.

        Raises GraphError for a node that cannot: its function has no keyword-only parameter `part: BatchPart | None`.
        """
        if self.clock != "update" or not self.interface.part:
            given = f"a node per {self.clock}" + ("" if self.interface.part else ", which knows of no parts of a batch")
            needed = "an update that takes its batch in parts, such as policy_update or aipo_update"
            raise fault("cannot-accumulate", f"{self.__name__}.accumulate({groups!r})", given, needed)
        return self._changed(part_groups=groups)

    def given(self, **values: Any) -> "NodeDef[..., T]":
        """This node with some of its inputs and options set, by name. A call then leaves these out.

        alternate(generate, customer.given(persona=personas, patience=3), prompts, behaviour, turns=4)
        """
        known = [*(port.name for port in self.interface.inputs), *self.interface.options]
        if unknown := [name for name in values if name not in known]:
            needed = f"an input or option of {self.__name__}{nearest(unknown[0], known)}"
            raise fault("unknown-option", f"{self.__name__}.given: {unknown[0]!r}", repr(values[unknown[0]]), needed)
        return self._changed(bound={**self.bound, **values})

    def of(self, value: Any) -> "NodeDef[..., T]":
        """This node with its input of weights set to those of a carried value: `generate.of(judge)`.

        Give a value that never changes as it is. For a value that updates change, give a broadcast, which says how old
        the weights may be: `generate.of(broadcast(judge, lag=1))`.
        """
        ports = self.weights
        if len(ports) != 1:
            given = f"a node with {len(ports)} inputs of weights" if ports else "a node without an input of weights"
            raise fault("no-weights-input", f"{self.__name__}.of", given, "one with a single input of the type Weights")
        weights = recording(f"{self.__name__}.of").weights(value, f"{self.__name__}.of")
        return self._changed(bound={**self.bound, ports[0]: weights})

    def answers(self) -> "NodeDef[..., Any]":
        """The node that answers in `alternate` for this one, with this one's bound inputs and options."""
        if self.answering is None:
            return self
        made = self.answering.given(**self.bound)
        return made._changed(pool=self.pool, label=self.label, written=f"{self.__name__}.of(…)")

    def _changed(self, **changes: Any) -> Self:
        # A definition is shared by all programs that call it, so a variant is a copy.
        made = copy.copy(self)
        made.__dict__.update(changes)
        return made

    @property
    def weights(self) -> list[str]:
        """The inputs that are weights."""
        return [port.name for port in self.interface.inputs if port.type is Weights]

    @functools.cached_property
    def interface(self) -> Interface:
        """Read at the first use, since annotations may name classes that are defined further down the file."""
        return interface(self.fn, stateful=self.init is not None)

    @functools.cached_property
    def _returned(self) -> str:
        return f"{defined(self.fn)}: {self.__name__} returned"

    def split(self, result: Any, *, stateful: bool) -> tuple[Any, dict[str, Any], Metrics]:
        """A result as (state, outputs by name, metrics). `stateful`: the state leads the result.

        The outputs of a `Stream` come without the state. Raises TypeError for a result that does not fit the return
        annotation, ValueError for malformed rewards or advantages, and for a group's value whose columns have different
        numbers of rows.
        """
        shape = self.interface
        # A result is (state, outputs, metrics), or those of them that the signature has.
        parts = list(result) if isinstance(result, tuple) and (stateful or shape.metrics) else [result]
        state = parts.pop(0) if stateful else None
        metrics: Any = parts.pop() if shape.metrics and parts else {}
        values = shape.values(parts[0] if len(parts) == 1 else tuple(parts))
        # Checked here, where the node is known, and not where the value is read.
        fit = len(values) == len(shape.outputs) and isinstance(metrics, dict)
        if not fit or not all(_fits(v, port.type) for v, port in zip(values, shape.outputs, strict=True)):
            names = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else ""
            given = f"tuple[{names}]" if names else type(result).__name__
            raise TypeError(f"{self._returned} {given}, needed {shape.returns}")
        lacks = [value.lack() for value in values if isinstance(value, AnyRewards | Advantages | Replies)]
        # Joined with other groups, the columns would no longer be about the same rows.
        lacks += [uneven(value) for value in values if isinstance(value, Batchable) and self.clock == "group"]
        for lack in lacks:
            if lack:
                raise ValueError(f"{self._returned} {lack}")
        # A dict that grows with each update would fill `metrics.jsonl` and the terminal.
        if len(metrics) > MOST_FIGURES:
            raise ValueError(f"{self._returned} {len(metrics)} figures, needed at most {MOST_FIGURES} of a firing")
        outputs = {port.name: v for port, v in zip(shape.outputs, values, strict=True)}
        figures = self._rewarded(values) | {name: self._metric(name, v) for name, v in metrics.items()}
        empty = {name for name, figure in figures.items() if isinstance(figure, Mean) and not figure.count}
        return state, outputs, {name: figure for name, figure in figures.items() if name not in empty}

    def _rewarded(self, values: Sequence[Any]) -> Metrics:
        """The mean over responses of each rewards output of a node: `reward_mean`, from the second output on with its
        name in front, or `NODE_reward_mean` of a node that makes them of other rewards. There is no mean of rewards
        whose sum is no float."""
        changes = any(port.type in get_args(AnyRewards) for port in self.interface.inputs)
        before = f"{self.__name__}_" if changes else ""
        made = [(p.name, v) for p, v in zip(self.interface.outputs, values, strict=True) if isinstance(v, AnyRewards)]
        means: Metrics = {}
        for place, (name, value) in enumerate(made):
            further = f"{name}_" if place else ""
            with suppress(OverflowError):
                means[f"{before}{further}reward_mean"] = Mean.of(value.values_N.tolist())
        return means

    def _metric(self, name: Any, value: Any) -> float:
        """One metric. Raises TypeError for a name that is no text or a value that is no number, ValueError for the name
        of a column that each row has anyway, or for a name that cannot be shown."""
        try:
            figure = value if isinstance(value, Mean) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor with several elements
            figure = None
        if figure is None or not isinstance(name, str):
            given = f"{reprlib.repr(name)}: {reprlib.repr(value)} among its metrics"
            raise TypeError(f"{self._returned} {given}, needed a name with one number")
        taken = sorted({*COLUMNS, f"{self.__name__}_update"})
        if name in taken:
            given = f"{name!r} among its metrics, which a row of metrics.jsonl has of its own"
            raise ValueError(f"{self._returned} {given}; needed another name than {', '.join(taken)}")
        if not (0 < len(name) <= NAME_LENGTH and name.isprintable()):
            given = f"a figure named {reprlib.repr(name)} ({len(name)} characters)"
            raise ValueError(f"{self._returned} {given}, needed a name of 1 to {NAME_LENGTH} printable characters")
        return figure


def _fits(value: Any, type_: Any) -> bool:
    return type_ is Any or getattr(type_, "_is_protocol", False) or isinstance(value, type_)


class Stateless(Protocol):
    """The type of `@node(pool=…)`."""

    @overload
    def __call__(self, fn: Callable[P, Metrics], /) -> NodeDef[P, None]: ...
    @overload
    def __call__(self, fn: Callable[P, tuple[T, Metrics]], /) -> NodeDef[P, T]: ...
    @overload
    def __call__(self, fn: Callable[P, tuple[*Ts, Metrics]], /) -> NodeDef[P, tuple[*Ts]]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /) -> NodeDef[P, T]: ...


class Stateful(Protocol[S]):
    """The type of `@node(init=…)`: the function's first parameter and its first result are the state."""

    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], tuple[S, Metrics]], /) -> NodeDef[P, None]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], tuple[S, T, Metrics]], /) -> NodeDef[P, T]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], tuple[S, T]], /) -> NodeDef[P, T]: ...


@overload
def node(fn: Callable[P, Metrics], /) -> NodeDef[P, None]: ...
@overload
def node(fn: Callable[P, tuple[T, Metrics]], /) -> NodeDef[P, T]: ...
@overload
def node(fn: Callable[P, tuple[*Ts, Metrics]], /) -> NodeDef[P, tuple[*Ts]]: ...
@overload
def node(fn: Callable[P, T], /) -> NodeDef[P, T]: ...
@overload
def node(*, pool: str = ..., clock: Clock = ..., init: None = ...) -> Stateless: ...
@overload
def node(*, pool: str = ..., clock: Clock = ..., init: Callable[..., S]) -> Stateful[S]: ...
def node(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    pool: str = "default",
    clock: Clock = "group",
    init: Callable[..., Any] | None = None,
) -> Any:
    """Make a function a node. Its signature is the interface.

    Values on edges are immutable to their readers: each firing gets its own copy of its inputs, under every driver of a
    run. A result is copied when it is returned, so changing it later has no effect. A node may change its own state,
    and the carried value whose next value it makes. A node that only reads a carried value or `Weights` must not change
    it: these are large and not copied.

    Positional parameters are inputs (their annotations the edges' types), keyword-only ones options, the return
    annotation the outputs: one class, `tuple[A, B]` or a NamedTuple. A `Metrics` (dict of float) at the end of a
    returned tuple is not an output: it is written to `metrics.jsonl`. A node that returns `Metrics` alone, or None, has
    no outputs.

    `pool` is a label for the planner. `clock` says how often it fires: once per prompt group, or once per update, on
    the whole batch. `init(context, **options)` makes it stateful: the function's first parameter is the state, and it
    returns `(state, outputs)` or `(state, outputs, metrics)`. A keyword-only parameter `context: Context | None = None`
    is no option: a run fills it with its settings. Nor is `part: BatchPart | None = None`, which an update has if it
    can `accumulate`: called with a part that is not the last, it adds the part up in the carried value, which otherwise
    stays unchanged, and returns that value and no metrics.

        @node(pool="scorer")
        def shorter_is_better(rollouts: Rollouts, rewards: Rewards, *, weight: float = 0.01) -> Rewards:
            return rewards - weight * rollouts.lengths()
    """
    if fn is not None:
        return NodeDef(fn, pool, clock)
    return lambda fn: NodeDef(fn, pool, clock, init)


class Dropped:
    """Instead of outputs: drop the group."""


@dataclass(frozen=True)
class Paused:
    """Instead of the outputs of a `Stream`: the firing pauses, and goes on later, perhaps on another replica.

    `value`, an instance of the class of the node's first output, is the result so far: the input `paused` of the next
    segment.
    """

    value: Any


def fire(stream: Stream, inputs: Mapping[str, Any]) -> Any:
    """The outputs of one firing of a stream that is called outside of a run. Raises the firing's exception."""
    tag = object()
    stream.submit(tag, inputs)
    while True:
        results = dict(stream.step())
        if isinstance(made := results.get(tag), Paused):
            stream.submit(tag, {**inputs, "paused": made.value})
        elif isinstance(made, BaseException):
            raise made
        elif tag in results:
            return made


class UntrustedError(RuntimeError):
    """A node raises it if its results can no longer be trusted. Its rank then answers nothing more, not even for other
    nodes, which may compute with the same weights; the run stops at once, and retries no firing."""


class Filter:
    """The definition of a `keep`, with the methods of a `NodeDef` that a worker calls. Its outputs are its inputs."""

    init = None

    def run(self, state: None, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> "tuple[Any, ...] | Dropped":
        """The inputs, or `Dropped`. Raises TypeError for a predicate that returns no truth value, such as None."""
        values, when = tuple(inputs.values()), options["when"]
        verdict = when(*values)
        # An array of one element, of any library, counts as its element.
        shape = getattr(verdict, "shape", None)
        answer = verdict.item() if shape is not None and all(length == 1 for length in shape) else verdict
        if not isinstance(answer, bool):
            given = f"keep: {path_of(getattr(when, 'func', when))} returned {verdict!r}"
            raise TypeError(f"{given}, needed True or False for the whole group")
        return values if answer else Dropped()

    def split(self, result: tuple[Any, ...], *, stateful: bool) -> tuple[None, dict[str, Any], Metrics]:
        return None, {str(index): value for index, value in enumerate(result)}, {}
