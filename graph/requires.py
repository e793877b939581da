"""Requirements of nodes and makers, and the view of a graph that the rules of `check` read.

`@requires` declares requirements of a node, a function or a maker; `@opens` declares the model that a maker opens.
`check` calls the requirements of nodes with a `Call`: its options, its inputs, and where these come from. No process of
a run has started by then.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from penstock.graph.context import Context
from penstock.graph.errors import Fault, GraphError, defined
from penstock.graph.imports import imported, load, names_function, path_of, short
from penstock.graph.interface import mistyped
from penstock.graph.ir import ANY, Argument, Graph, Input, Json, Node, Ref
from penstock.graph.node import NodeDef
from penstock.graph.protocols import Source
from penstock.graph.types import Prefixes, Prompts, Rollouts


class View:
    """A graph with the tables that the rules look up."""

    def __init__(
        self, graph: Graph, batch: int | None, sources: Mapping[str, Source], contexts: Mapping[str, Context]
    ) -> None:
        self.graph, self.batch, self.sources, self.contexts = graph, batch, sources, contexts
        self.nodes = {node.name: node for node in graph.nodes}
        self.arguments = {argument.name: argument for argument in graph.arguments}
        self.bases = {name: {name, *bases} for name, bases in graph.types}
        # By carried value, the node that makes its next value.
        self.makers = {name: ref.node for name, ref in graph.results if ref.node in self.nodes}
        self.takers = graph.takers()

    def inputs(self) -> Iterator[tuple[Node, Input]]:
        for node in self.graph.nodes:
            for item in node.inputs:
                yield node, item

    def readers(self, name: str) -> list[Node]:
        return [node for node, item in self.inputs() if item.ref.node == name]

    def fits(self, given: str, needed: str) -> bool:
        return self.graph.fits(given, needed)

    def changing(self, ref: Ref) -> bool:
        """True if it names a carried value that updates change."""
        return ref.node in self.makers

    def per_group(self, ref: Ref) -> bool:
        if ref.node in self.arguments:
            return self.arguments[ref.node].kind == "source"
        return self.nodes[ref.node].clock == "group"


ROLLOUTS, PREFIXES = path_of(Rollouts), path_of(Prefixes)


class Call:
    """A call of a node, or a function that is an option of that call, as a check of `requires` gets it.

    Attributes:
        options: the node's, as the graph has them; those bound to the function override them.
        clock: "group" or "update".
        left_out: the optional inputs that the call does not pass.
        context: the node's, if the graph is checked for a run; otherwise None.
        what: the beginning of a fault's message.
    """

    def __init__(
        self, view: View, node: Node, definition: "NodeDef[..., Any]", what: str, bound: Mapping[str, Json]
    ) -> None:
        self.view, self.node, self.what = view, node, what
        self.clock, self.context = node.clock, view.contexts.get(node.name)
        self.options: dict[str, Json] = {**dict(node.options), **bound}
        self._inputs = {item.name: item.ref for item in node.inputs if not item.back}
        self.left_out = frozenset(p.name for p in definition.interface.inputs if p.optional) - {
            item.name.partition("[")[0] for item in node.inputs
        }

    def lack(
        self, given: str, needed: str, option: str = "", *, input: str = "", code: str = "unmet-requirement"
    ) -> GraphError:
        """The error to raise, at the line of the call. `option` or `input` is the one that it is about."""
        about = f": option {option!r}" if option else f": input {input!r}" if input else ""
        return GraphError(Fault(code, f"{self.what}{about}", given, needed, self.node.where))

    def numbers(self, needed: str, fit: Callable[[float], bool], *options: str) -> None:
        """Raises one GraphError for all `options` that are no numbers or do not fit. Skips None and missing ones."""
        given = {name: self.options[name] for name in options if self.options.get(name) is not None}
        wrong = [name for name, value in given.items() if type(value) not in (int, float) or not fit(value)]
        errors = [self.lack(repr(given[name]), needed, name, code="out-of-range") for name in wrong]
        if errors:
            raise GraphError(*(fault for error in errors for fault in error.faults))

    def samples(self, name: str) -> int | None:
        """Responses per prompt of an input: the option `samples` of the nodes that it comes from.

        None if that is not one number, or if a node makes rollouts of rollouts, since it may fork or pick rows.
        """
        counts: set[int | None] = set()
        behind, seen = [(self._inputs[name].node, False)] if name in self._inputs else [], set()
        # Back along the edges, as (name, whether a node on the path has said how many rows a group has).
        while behind:
            step = behind.pop()
            if step in seen:
                continue
            seen.add(step)
            name, counted = step
            node, argument = self.view.nodes.get(name), self.view.arguments.get(name)
            if node is not None and node.fires:
                count = dict(node.options).get("samples")
                if type(count) is int:
                    counts.add(count)
                elif node.construct == "call" and ROLLOUTS in (
                    {i.type for i in node.inputs} & {o.type for o in node.outputs}
                ):
                    counts.add(None)
                # Responses that continue prefixes have a row count of their own.
                inputs = [i for i in node.inputs if not i.back and i.type != PREFIXES]
                behind += [(i.ref.node, counted or type(count) is int) for i in inputs]
            elif argument is not None and argument.kind == "source" and not counted:
                # Nothing on this path says how many rows a group of the source has.
                counts.add(None)
        return counts.pop() if len(counts) == 1 else None

    def behind(self, name: str) -> list[str]:
        """The sampling nodes that an input comes from: on each path back, the first with an option `samples`."""
        pending, seen, found = [self._inputs[name].node] if name in self._inputs else [], set[str](), []
        while pending:
            if (step := pending.pop()) in seen or (node := self.view.nodes.get(step)) is None:
                continue
            seen.add(step)
            if type(dict(node.options).get("samples")) is int:
                found.append(step)
            else:
                pending += [item.ref.node for item in node.inputs if not item.back]
        return found

    def origins(self, name: str) -> set[str]:
        """The nodes and sources of the rollouts that an input comes from, however far back: those that make some and
        read none. Responses that continue prefixes are other ones than those from which these were cut."""
        view = self.view

        def are_rollouts(type_: str) -> bool:
            return type_ != ANY and view.fits(type_, ROLLOUTS)

        def makes(node: Node) -> bool:
            reads = any(are_rollouts(item.type) for item in node.inputs if not item.back)
            return not reads and any(are_rollouts(output.type) for output in node.outputs)

        pending, seen, found = [self._inputs[name].node] if name in self._inputs else [], set[str](), set[str]()
        while pending:
            if (step := pending.pop()) in seen:
                continue
            seen.add(step)
            if (argument := view.arguments.get(step)) is not None and are_rollouts(argument.type):
                found.add(step)
            if (node := view.nodes.get(step)) is not None:
                inputs = [item for item in node.inputs if not item.back]
                if makes(node):
                    found.add(step)
                    inputs = [item for item in inputs if item.type != PREFIXES]
                pending += [item.ref.node for item in inputs]
        return found

    def branched(self, name: str) -> bool:
        """True if an input comes from responses that continue prefixes."""
        return any(item.type == PREFIXES for step in self.behind(name) for item in self.view.nodes[step].inputs)

    def weights_of(self, name: str) -> Argument | None:
        """The carried value whose weights an input is; None for any other input."""
        ref = self._inputs.get(name)
        sent = self.view.nodes.get(ref.node) if ref is not None else None
        if sent is None or sent.construct != "broadcast" or not sent.inputs:
            return None
        return self.view.arguments.get(sent.inputs[0].ref.node)

    def carried(self, name: str) -> Argument | None:
        """The carried value that an input is; None for any other input."""
        ref = self._inputs.get(name)
        argument = None if ref is None else self.view.arguments.get(ref.node)
        return argument if argument is not None and argument.kind == "carried" else None

    def readers(self, *types: type, sure: bool = False) -> Iterator[Node]:
        """The nodes that read this call's outputs of these types, directly or through nodes that pass such values on.

        A node with several inputs of the types may pass on any of them, or only compare them; with `sure` the search
        ends at such a node.
        """
        paths = {path_of(type_) for type_ in types}

        def fits(given: str) -> bool:
            return not paths.isdisjoint(self.view.bases.get(given, {given}))

        found: dict[str, Node] = {}
        pending = [Ref(self.node.name, output.name) for output in self.node.outputs if fits(output.type)]
        seen = set(pending)
        while pending:
            ref = pending.pop()
            for node, item in self.view.inputs():
                if item.ref != ref:
                    continue
                found[node.name] = node
                outputs = node.outputs
                if node.construct == "keep":  # what comes out is what went in
                    outputs = outputs[node.inputs.index(item) :][:1]
                elif sure and sum(fits(other.type) for other in node.inputs if not other.back) > 1:
                    outputs = ()
                further = {Ref(node.name, output.name) for output in outputs if fits(output.type)} - seen
                seen |= further
                pending += further
        yield from found.values()

    def sources(self) -> list[Source]:
        """The sources that the inputs come from, however far back; none if the graph is not checked for a run."""
        found: dict[str, Source | None] = {}
        pending = [ref.node for ref in self._inputs.values()]
        while pending:
            if (name := pending.pop()) not in found:
                found[name] = self.view.sources.get(name)
                node = self.view.nodes.get(name)
                pending += [item.ref.node for item in node.inputs] if node is not None else []
        return [source for source in found.values() if source is not None]

    def first(self, name: str) -> Any:
        """The first value of the source that an input is; None if `source` returns None."""
        source = self.source(name)
        return None if source is None else source.read(0)

    def source(self, name: str) -> Source | None:
        """The source that an input is, filtered or not; None for any other input, and if the graph is not checked for a
        run."""
        return self._source(self._inputs.get(name))

    def prompts(self, name: str) -> int:
        """How many prompts a group of the rewards or rollouts has that an input is: those of the first value of the
        source that was sampled from. 1 if no node samples from a source, and if the graph is not checked for a run."""
        read = [self._source(item.ref) for step in self.behind(name) for item in self.view.nodes[step].inputs]
        firsts = [source.read(0) for source in read if source is not None]
        return max((len({*first.texts}) for first in firsts if isinstance(first, Prompts)), default=1)

    def _source(self, ref: Ref | None) -> Source | None:
        seen = set[Ref]()
        # Through filters, which pass their inputs on.
        while ref is not None and ref not in seen:
            seen.add(ref)
            node = self.view.nodes.get(ref.node)
            if node is None:
                return self.view.sources.get(ref.node)
            passed = zip(node.inputs, node.outputs, strict=False) if node.construct == "keep" else ()
            ref = next((item.ref for item, output in passed if output.name == ref.output), None)
        return None


S = TypeVar("S")
# Raises ValueError, with what was given and what is needed, if a requirement is not met; a node's, `call.lack(…)`.
Check = Callable[[S], object]

M = TypeVar("M", bound=Callable[..., Any])


def requires(*checks: Check[Any]) -> Callable[[M], M]:
    """Have each check called by `penstock check`, and before a run starts or a source is opened.

    Above a maker, a check gets the maker's context. It looks at options, directories and files, and makes nothing: the
    maker is called later, once in each process.

        @requires(check_teacher)
        def open_teacher(context: Context) -> Carried: ...

    Above a node, or a function that is an option of a node, such as a loss, a check gets the `Call`. What it raises is
    among the faults that `check` returns.

        @requires(several_samples)
        @node(pool="scorer")
        def group_advantage(rewards: Rewards) -> Advantages: ...
    """

    def mark(made: M) -> M:
        made.requires = (*checks, *requirements(made))  # type: ignore[attr-defined]
        return made

    return mark


class Opens(NamedTuple):
    """What a maker says of the model that it opens (see `opens`)."""

    spec: Callable[[Context], Any]
    lm_head: bool
    base: bool
    lora: bool
    config: Callable[[Mapping[str, Any]], Any] | None


def opens(
    spec: Callable[[Context], Any],
    *,
    lm_head: bool = True,
    base: bool = False,
    lora: bool = False,
    config: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Callable[[M], M]:
    """Declare which model a maker opens: `spec(context)` returns what is known of it before any weights are read.

    A node that computes with the weights of a carried value, such as `generate`, takes the shape and the tokenizer from
    the spec of that value's maker, which is called with the maker's context. For the nodes of this package a spec is a
    `penstock.nodes.open_model.ModelSpec`. If a spec has a method `check_mesh(mesh, decodes=…)`, which raises
    ValueError, it is called for the meshes of a run before any rank starts.

    `lm_head` is False for a model whose head gives a number. `base`: the maker opens the run's own model, and a run
    without `--model` begins with the base model, which is built for it. `lora`: with `--lora` the model has adapters,
    and only these are trained and sent. `config`, called with the content of a `config.json`, raises ValueError for a
    model that the maker cannot open: `penstock plan` knows so of what a run cannot have, without weights or tokenizer.

        @opens(judge_spec)
        def open_judge(context: Context) -> Carried: ...
    """

    def mark(made: M) -> M:
        made.opens = Opens(spec, lm_head, base, lora, config)  # type: ignore[attr-defined]
        return made

    return mark


def reads_no_data(maker: M) -> M:
    """Declare that a maker's source makes its values, and reads none of `--data`. `check` refuses the flags of data for
    a program of which all sources do so."""
    maker.reads_no_data = True  # type: ignore[attr-defined]
    return maker


def opened(maker: str) -> Opens | None:
    """What `opens` says of the maker of this import path; None for a maker that says nothing of a model."""
    # An attribute, so that a maker stays the plain function that it is.
    found: Opens | None = getattr(load(maker), "opens", None)
    return found


def requirements(made: Callable[..., Any] | None) -> tuple[Check[Any], ...]:
    """The checks that `requires` declares for a maker, a node or a function."""
    found: tuple[Check[Any], ...] = getattr(made, "requires", ())
    return found


def calls(view: View) -> Iterator[Fault]:
    """A rule of `check`: the requirements of nodes, and of the functions among their options, however deep.

    Nodes and functions of modules that this process has not imported are skipped. A process that has traced the program
    has imported all of them.
    """
    for node in view.graph.nodes:
        # Not `load`: looking at a graph must not run the user's modules.
        definition = imported(node.op) if node.construct == "call" else None
        if not isinstance(definition, NodeDef):
            continue
        own = dict(node.options)
        yield from mistyped(definition.fn, own, node.name, node.where)
        yield from _lacks(definition, Call(view, node, definition, node.name, {}))
        for function, what, bound in _functions(node.name, own):
            yield from mistyped(function, bound, what, node.where)
            yield from _lacks(function, Call(view, node, definition, what, bound))


def _functions(what: str, options: Mapping[str, Json]) -> Iterator[tuple[Callable[..., Any], str, dict[str, Json]]]:
    """The functions among options, however deep, as (function, beginning of a message, options bound to it)."""
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
            yield Fault("unmet-requirement", call.what, str(error), needed, call.node.where)
