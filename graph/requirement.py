"""What a maker needs of a run, and a node of its call, looked at before any process of a run starts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from penstock.graph.annotations import strange
from penstock.graph.call import Call
from penstock.graph.definition import NodeDef
from penstock.graph.faults import Fault, GraphError, defined
from penstock.graph.ir import Json
from penstock.graph.paths import imported, load, names_function, short
from penstock.graph.types import Context
from penstock.graph.view import View

S = TypeVar("S")
Check = Callable[[S], object]
"""Raises ValueError, with what was given and what is needed, for what lacks something; a node's `call.lack(…)`."""

M = TypeVar("M", bound=Callable[..., Any])


def requires(*checks: Check[Any]) -> Callable[[M], M]:
    """Have each check called by `penstock check`, and before a run starts or a source is opened.

    Above a maker, it gets the maker's context. It looks at options, directories and files, and makes nothing: the maker
    is called later, once in each process.

        @requires(check_teacher)
        def open_teacher(context: Context) -> Carried: ...

    Above a node, or a function that a node is given as an option, such as a loss, it gets the `Call`, and `check` has
    what it raises among the faults of the graph.

        @requires(several_samples)
        @node(pool="scorer")
        def group_advantage(rewards: Rewards) -> Advantages: ...
    """

    def mark(made: M) -> M:
        made.requires = (*checks, *requirements(made))  # type: ignore[attr-defined]
        return made

    return mark


def opens(spec: Callable[[Context], Any], *, words: bool = True) -> Callable[[M], M]:
    """Say of a maker which model it opens: `spec(context)` gives what is known of it before any weights are read.

    A node that computes with the weights of a carried value, such as `generate`, takes the shape and the tokenizer from
    the spec of that value's maker, which is called with the context that the maker is given. For the nodes of this
    package a spec is a `penstock.nodes.base.ModelSpec`. `words` is False for a model whose head gives a number.

        @opens(judge_spec)
        def open_judge(context: Context) -> Carried: ...
    """

    def mark(made: M) -> M:
        made.opens = spec, words  # type: ignore[attr-defined]
        return made

    return mark


def opened(maker: str) -> tuple[Callable[[Context], Any], bool] | None:
    """The spec that the maker of this import path was given by `opens`, and whether its model says words; None for a
    maker that says nothing of a model."""
    found: tuple[Callable[[Context], Any], bool] | None = getattr(load(maker), "opens", None)
    return found


def requirements(made: Callable[..., Any] | None) -> tuple[Check[Any], ...]:
    """What `requires` was given for a maker, a node or a function; nothing for one that needs nothing."""
    found: tuple[Check[Any], ...] = getattr(made, "requires", ())
    return found


def calls(view: View) -> Iterator[Fault]:
    """What nodes require, and functions that are their options, or are bound to these in turn: a rule of `check`.

    Only modules that this process has imported are asked, as one has that has traced the program.
    """
    for node in view.graph.nodes:
        definition = imported(node.op) if node.construct == "call" else None
        if not isinstance(definition, NodeDef):
            continue
        own = dict(node.options)
        yield from strange(definition.fn, own, node.name, node.where)
        yield from _lacks(definition, Call(view, node, definition, node.name, {}))
        for function, what, bound in _functions(node.name, own):
            yield from strange(function, bound, what, node.where)
            yield from _lacks(function, Call(view, node, definition, what, bound))


def _functions(what: str, options: Mapping[str, Json]) -> Iterator[tuple[Callable[..., Any], str, dict[str, Json]]]:
    """The functions among options, however deep: (the function, how the message begins, what is bound to it)."""
    for name, option in options.items():
        for item in option if isinstance(option, list) else [option]:
            if names_function(item) and callable(function := imported(item["path"])):
                said, bound = f"{what}: {name} {short(item['path'])}", item.get("options", {})
                if not isinstance(function, NodeDef):
                    yield function, said, bound
                yield from _functions(said, bound)


def _lacks(made: Callable[..., Any], call: Call) -> Iterator[Fault]:
    for check in requirements(made):
        try:
            check(call)
        except GraphError as error:
            yield from error.faults
        except ValueError as error:
            needed = f"what {getattr(check, '__name__', 'its check')} requires ({defined(check)})"
            yield Fault(call.what, str(error), needed, call.node.where)
