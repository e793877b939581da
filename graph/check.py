"""`check(graph)`: all faults of a graph at once, before anything starts.

Each rule is a function that yields its faults. All rules run on every graph. They need not look for malformed graphs,
such as one with an edge from nowhere: `Graph` itself refuses those.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from math import inf
from typing import Any

from penstock.graph.context import Context
from penstock.graph.errors import Fault
from penstock.graph.imports import imported, path_of, short
from penstock.graph.ir import ANY, PRECISIONS, Graph, Input, Node, Ref
from penstock.graph.node import NodeDef
from penstock.graph.protocols import Source
from penstock.graph.requires import View, calls
from penstock.graph.types import Model


def check(
    graph: Graph,
    *,
    batch: int | None = None,
    sources: Mapping[str, Source] | None = None,
    contexts: Mapping[str, Context] | None = None,
) -> list[Fault]:
    """The graph's faults, by file and line; none if it can run.

    Args:
        graph: any graph.
        batch: prompt groups per update, if it is known.
        sources: the sources of the run that the graph is checked for, by name.
        contexts: the contexts of that run, by the names of nodes and arguments.

    Requirements that nodes declare (see `requires`) are checked for imported modules only.
    """
    view = View(graph, batch, sources or {}, contexts or {})
    return sorted((fault for rule in RULES for fault in rule(view)), key=by_place)


def by_place(fault: Fault) -> tuple[str, int]:
    """The key that sorts faults: by file, and by line or row in it."""
    file, _, number = fault.where.rpartition(", row " if ", row " in fault.where else ":")
    return (file, int(number)) if number.isdigit() else (fault.where, 0)


def _input(node: Node, item: Input) -> str:
    return f"{node.name}: input {item.name!r}"


def _short(type_: str, other: str = "") -> str:
    """A type's name; its whole path where another type has the same name."""
    name = short(type_)
    return (type_ if name == short(other) else name) or "a value of no known type"


def _not_whole(value: Any, least: int) -> bool:
    # `type`, since True is an `int`.
    return type(value) is not int or value < least


# Edges and types


def _types(view: View) -> Iterator[Fault]:
    """The value of each edge has the type that its end needs."""
    ends = [(_input(node, item), item.ref, item.type, node.where) for node, item in view.inputs()]
    for name, ref in view.graph.results:
        where = view.nodes[ref.node].where if ref.node in view.nodes else view.graph.where
        ends.append((f"the next {name!r}", ref, view.arguments[name].type, where))
    for what, ref, needed, where in ends:
        given = view.graph.type_of(ref)
        if not view.fits(given, needed):
            yield Fault("wrong-type", what, f"{_short(given, needed)} (from {ref})", _short(needed, given), where)


def _unused(view: View) -> Iterator[Fault]:
    used = {i.ref for _, i in view.inputs()} | {ref for _, ref in view.graph.results}
    for node in view.graph.nodes:
        # One used output of a filter is enough: the others may be for its predicate only.
        if node.answers or (node.construct == "keep" and any(Ref(node.name, o.name) in used for o in node.outputs)):
            continue
        for output in node.outputs:
            ref = Ref(node.name, output.name)
            if ref in used:
                continue
            fits = [a.name for a in view.graph.carried if node.clock == "update" and view.fits(output.type, a.type)]
            returned = f', or its place in what {view.graph.name} returns: "{fits[0]}": …' if fits else ""
            needed = f"a node that is called with it{returned}, or no call of {short(node.op) or node.name}"
            if not node.fires:
                needed = f"a node that is called with it, or no {node.construct}"
            elif node.construct == "call":
                needed += " (for figures alone, a node returns Metrics)"
            given = f"{ref} ({_short(output.type)}), which no node reads and {view.graph.name} does not return"
            yield Fault("unused-output", f"{node.name}: output {output.name!r}", given, needed, node.where)
    for argument in view.graph.arguments:
        if not view.readers(argument.name):
            needed = f"a node that is called with it, or no such argument of {view.graph.name}"
            what = f"{argument.kind} {argument.name!r}"
            yield Fault("unused-argument", what, "no node that reads it", needed, argument.where)


# Clocks and pools


def _clocks(view: View) -> Iterator[Fault]:
    """What per-group nodes, per-update nodes and broadcasts may read."""
    for node in view.graph.nodes:
        if not node.fires:
            for item in node.inputs:
                argument = view.arguments.get(item.ref.node)
                if argument is None or argument.kind != "carried":
                    given = f"{str(item.ref)!r}, which is " + ("a source" if argument else "the output of a node")
                    needed = "a carried value: an argument that the program returns"
                    yield Fault("not-carried", node.name, given, needed, node.where)
        elif node.clock == "group":
            for item in node.inputs:
                maker = view.nodes.get(item.ref.node)
                if maker is not None and maker.clock == "update" and maker.fires:
                    needed = "a per-group value, or a carried value through broadcast(…, lag=k)"
                    given = f"{str(item.ref)!r}, which {maker.name} makes once per update"
                    yield Fault("slower-input", f"{_input(node, item)} of a per-group node", given, needed, node.where)
            if not any(view.per_group(item.ref) for item in node.inputs):
                reads = ", ".join(str(i.ref) for i in node.inputs) or "no input"
                needed = "an input per group (a source, or what a per-group node makes)"
                needed += f"; or {short(node.op)}.per_update, which fires once per update" if node.inputs else ""
                yield Fault("no-group-input", f"{node.name} fires per group", reads, needed, node.where)
        elif not node.inputs:
            needed = "an input that says when it fires, such as the rewards"
            yield Fault("no-input", node.name, "no input", needed, node.where)


def _updates(view: View) -> Iterator[Fault]:
    """At least one node fires per update: groups wait for an update, so a run without one never ends."""
    clocks = {node.clock for node in view.graph.nodes if node.fires}
    # `_carried` reports a next value that is made per group; a second fault would add nothing.
    made = any(ref.node in view.nodes for _, ref in view.graph.results)
    if "group" in clocks and "update" not in clocks and not made:
        given = "nodes that fire per group, and none that fires at each update"
        needed = 'a node that consumes the groups of an update: one with clock="update", such as accuracy(rewards)'
        yield Fault("no-update", view.graph.name, given, needed, view.graph.where)


def _places(view: View) -> Iterator[Fault]:
    """A carried value stays in its pool, and so does its next one."""
    # An update changes a carried value in place, so the next value is in the same pool.
    nexts = {ref: name for name, ref in view.graph.results}
    for node, item in view.inputs():
        argument = view.arguments.get(nexts.get(item.ref, item.ref.node))
        if argument is None or argument.kind != "carried" or not node.fires:
            continue
        # `_cycles` reports a per-group node that reads a changing value.
        elsewhere = node.pool != argument.pool
        if elsewhere and not (node.clock == "group" and view.changing(item.ref)):
            given = f"{argument.name!r}, which pool {argument.pool!r} holds"
            needed = f"a value of its own pool {node.pool!r}, or broadcast({argument.name}, lag=k)"
            yield Fault("other-pool", _input(node, item), given, needed, node.where)


# Carried values


def _carried(view: View) -> Iterator[Fault]:
    """Each carried value has a next value of its own, made once per update, and each argument a maker."""
    graph = view.graph
    seen: dict[Ref, str] = {}
    for name, ref in graph.results:
        node = view.nodes.get(ref.node)
        what, where = f"the next {name!r}", node.where if node is not None else graph.where
        if node is None and ref != Ref(name):
            needed = f"{name!r} itself, or what a node makes (a copy needs a node)"
            yield Fault("other-argument", what, f"another argument, {str(ref)!r}", needed, where)
        elif node is not None and (node.clock != "update" or not node.fires):
            kind = f"a {node.construct}" if not node.fires else "made once per group"
            needed = 'what a node with @node(clock="update") makes'
            needed += f", such as {short(node.op)}.per_update" if node.construct == "call" else ""
            yield Fault("result-per-group", what, f"{str(ref)!r}, which is {kind}", needed, where)
        elif ref in seen:
            needed = "an output of its own for each carried value: an update may change it in place"
            yield Fault("shared-result", what, f"{str(ref)!r}, which is the next {seen[ref]!r} too", needed, where)
        seen.setdefault(ref, name)
    for argument in graph.arguments:
        if not argument.maker and view.readers(argument.name):
            needed = "a type with the class attribute `maker`, the import path of what makes the value in a worker"
            if argument.type == ANY:
                needed = f"the argument annotated with its type, such as {argument.name.rpartition('.')[2]}: Prompts"
            what, given = f"{argument.kind} {argument.name!r}", f"{_short(argument.type)}, without a maker"
            yield Fault("no-maker", what, given, needed, argument.where)
        if argument.kind == "source" and MODEL in view.bases.get(argument.type, ()) and view.readers(argument.name):
            given = f"{_short(argument.type)}, which {graph.name} does not return"
            needed = f'a carried value, also if it never changes: return {{…, "{argument.name}": {argument.name}}}'
            yield Fault("not-carried", f"argument {argument.name!r}", given, needed, argument.where)


def _donations(view: View) -> Iterator[Fault]:
    """An update changes a value in place, so only one node may be given a value to update, and none the next value."""
    nexts = {ref: name for name, ref in view.graph.results if ref.node in view.nodes}
    for ref, (first, *others) in view.takers.items():
        name = ref.node
        alternative = f", or {name!r} after its first input if it changes nothing" if name in view.nodes else ""
        for second in map(view.nodes.__getitem__, others):
            given = f"{name!r}, which {first} ({view.nodes[first].where}) updates too"
            needed = f"one update of a value; the second takes what {first} returns{alternative}"
            yield Fault("updated-twice", f"{second.name} updates a value", given, needed, second.where)
        if ref in nexts:
            given = f"{name!r}, which is the next {nexts[ref]!r}"
            needed = f"what {first} returns as the next {nexts[ref]!r}{alternative}"
            yield Fault("updated-twice", f"{first} updates a value", given, needed, view.nodes[first].where)


def _cycles(view: View) -> Iterator[Fault]:
    """Feedback goes through updates: a per-group node reads a changing value through a broadcast only."""
    flow = [(i.ref.node, n.name) for n, i in view.inputs() if i.ref.node in view.nodes and not i.back]
    reads, waits = [], []
    for node, item in view.inputs():
        maker = view.makers.get(item.ref.node)
        if maker is not None and node.clock == "group":
            reads.append((node, item, maker))
        elif node.fires:
            # An update changes a value in place, so it waits for all other readers of the old value. Two that take one
            # value are refused anyway (`_donations`).
            takers = view.takers.get(item.ref, ())
            changers = (maker, *takers) if len(takers) < 2 else (maker,)
            waits += [(node.name, changer) for changer in changers if changer not in (None, node.name)]
    if not reads and _acyclic([*flow, *waits]):
        return
    import networkx as nx  # type: ignore[import-untyped]  # late: importing it takes longer than checking a graph

    graph = nx.DiGraph(flow)
    graph.add_nodes_from(view.nodes)
    for node, item, maker in reads:
        name = item.ref.node
        code, given = "changing-input", f"{name!r}, which changes"
        if nx.has_path(graph, node.name, maker):
            path = " → ".join([name, *nx.shortest_path(graph, node.name, maker), name])
            code, given = "cycle-without-lag", f"the cycle without a lag {path}"
        yield Fault(code, _input(node, item), given, f"broadcast({name}, lag=k)", node.where)
    graph.add_edges_from(waits)
    for names in nx.strongly_connected_components(graph):
        if len(names) > 1:
            cycle = [tail for tail, _ in nx.find_cycle(graph.subgraph(names))]
            at = cycle.index(min(cycle, key=list(view.nodes).index))
            cycle = [*cycle[at:], *cycle[:at], cycle[at]]
            given = f"the cycle without a lag {' → '.join(cycle)}"
            needed = (
                "an end of the circle: a node that makes a carried value's next value fires after all that read the "
                "value as it was; give one of these nodes the next value that another returns, in place of the value"
            )
            yield Fault("update-cycle", f"{cycle[0]} waits for itself", given, needed, view.nodes[cycle[0]].where)


def _acyclic(edges: Iterable[tuple[str, str]]) -> bool:
    order: TopologicalSorter[str] = TopologicalSorter()
    for before, after in edges:
        order.add(after, before)
    try:
        order.prepare()
    except CycleError:
        return False
    return True


# Numbers


def _numbers(view: View) -> Iterator[Fault]:
    if view.batch is not None and _not_whole(view.batch, 1):
        needed = "a whole number of prompt groups per update, at least 1"
        yield Fault("bad-batch", "batch", repr(view.batch), needed, view.graph.where)
    for node in view.graph.nodes:
        if not node.fires and _not_whole(node.lag, 0):
            needed, given = "a whole number of updates, at least 0 (0 is synchronous)", repr(node.lag)
            if node.lag is None and view.changing(ref := node.inputs[0].ref):
                given += f", for the weights of {ref.node!r}, which updates change"
                needed += f": how old they may be, broadcast({ref.node}, lag=k)"
            yield Fault("bad-lag", f"{node.name}: lag", given, needed, node.where)
        options = dict(node.options)
        for code, name, value, unit in (
            ("bad-every", "every", node.every, "updates"),
            ("bad-samples", "option 'samples'", options.get("samples", 1), "responses per prompt"),
            ("bad-count", "epochs", options.get("epochs", 1), "passes over a batch"),
            ("bad-count", "minibatches", options.get("minibatches", 1), "minibatches of whole prompt groups"),
        ):
            if value is None:  # its annotation says whether it may be
                continue
            if _not_whole(value, 1):
                needed = f"a whole number of {unit}, at least 1"
                yield Fault(code, f"{node.name}: {name}", repr(value), needed, node.where)
            elif name == "minibatches" and node.clock == "update" and type(view.batch) is int and view.batch % value:
                given = f"minibatches={value} for a batch of {view.batch} prompt groups"
                needed = f"a number that divides {view.batch}"
                yield Fault("indivisible-batch", f"{node.name}: minibatches", given, needed, node.where)


# Constructs


def _every(view: View) -> Iterator[Fault]:
    """Nodes and broadcasts with `every` > 1."""
    for node in view.graph.nodes:
        if type(node.every) is not int or node.every <= 1:
            continue
        if starved := starving(node):
            yield starved
        elif node.fires and node.clock != "update":
            needed = f"a node that fires per update: {short(node.op)}.per_update.every({node.every})"
            given = f"{node.every}, of a node per {node.clock}"
            yield Fault("every-per-group", f"{node.name}: every", given, needed, node.where)
        # The groups of the updates between its firings would be lost.
        for item in node.inputs if node.fires else ():
            if view.per_group(item.ref):
                given = f"{str(item.ref)!r}, of which each update has a batch of its own"
                needed = (
                    f"{short(node.op)} without .every({node.every}); or {short(node.op)}.every({node.every}) of what a "
                    f'node with @node(clock="update") makes of {str(item.ref)!r} at each update'
                )
                what = f"{_input(node, item)}, at every {node.every}. update"
                yield Fault("every-skips-groups", what, given, needed, node.where)
    for reader, item in view.inputs():
        maker = view.nodes.get(item.ref.node)
        if maker is not None and maker.fires and maker.every > 1 and reader.every % maker.every:
            given = f"{str(item.ref)!r}, which {maker.name} makes at every {maker.every}. update"
            needed = f"a reader at those updates: {short(reader.op)}.every({maker.every})"
            made = [f"{name!r}" for name, by in view.makers.items() if by == maker.name]
            needed += f"; or the carried value {made[0]}, which stays as it is in between" if made else ""
            yield Fault("reader-too-often", _input(reader, item), given, needed, reader.where)


def _accumulates(view: View) -> Iterator[Fault]:
    """Updates that take their batch in parts: no input of theirs may need the whole batch."""
    for node in view.graph.nodes:
        if node.accumulate == 0:
            continue
        what = f"{node.name}: accumulate"
        if _not_whole(node.accumulate, 1):
            needed = "a whole number of prompt groups, at least 1; or 0, the whole batch at once"
            yield Fault("bad-accumulate", what, repr(node.accumulate), needed, node.where)
            continue
        if type(view.batch) is int and view.batch % node.accumulate:
            given = f"parts of {node.accumulate} groups of a batch of {view.batch}"
            yield Fault("indivisible-batch", what, given, f"a number that divides {view.batch}", node.where)
        if not any(view.per_group(item.ref) for item in node.inputs):
            reads = ", ".join(str(item.ref) for item in node.inputs)
            yield Fault("accumulate-nothing", what, reads, "an input per group, of which it takes parts", node.where)
        if node.name not in view.makers.values():
            needed = "a node that makes a carried value's next value, in which it adds up what the parts give"
            yield Fault("accumulate-nothing", what, "a node that updates no value", needed, node.where)
        if node.stateful:
            needed = "sums in the carried value: a checkpoint between two parts has states, and nothing of the parts"
            yield Fault("accumulate-state", what, "a node that passes a state on", needed, node.where)
        options = dict(node.options)
        for name in ("epochs", "minibatches"):
            if type(options.get(name, 1)) is int and options.get(name, 1) > 1:
                needed = f"{name}=1: a step before the batch is whole would be one on a part of it"
                yield Fault("accumulate-steps", what, f"{name}={options[name]}", needed, node.where)
        for item in node.inputs:
            maker = view.nodes.get(item.ref.node)
            if maker is None or view.per_group(item.ref):
                continue
            given = f"{str(item.ref)!r}, which {maker.name} makes once per update"
            needed = "values per group, and carried ones as they are, which are there before the batch is whole"
            if maker.construct == "broadcast" and not view.changing(maker.inputs[0].ref):
                continue  # of a value that never changes
            if not maker.fires:
                given = f"{maker.inputs[0].ref.node!r} through {maker.name}, whose versions change between the parts"
            yield Fault("accumulate-whole-batch", f"{_input(node, item)}, in parts", given, needed, node.where)


def starving(node: Node) -> Fault | None:
    """The fault of a broadcast that sends too seldom for its lag, so that an update would wait for ever; else None."""
    if node.construct != "broadcast" or type(node.lag) is not int or node.every <= node.lag + 1:
        return None
    given = f"every={node.every}, lag={node.lag}"
    needed = f"every={node.lag + 1} at most, or lag={node.every - 1}: update {node.lag + 1} would wait for ever"
    return Fault("weights-too-seldom", f"{node.name}: weights too seldom for their lag", given, needed, node.where)


def _precisions(view: View) -> Iterator[Fault]:
    """Eight-bit weights go to nodes that compute with them. All weights of one value for one pool have one format."""
    chosen: dict[tuple[str, str], Node] = {}
    for node in view.graph.nodes:
        if node.construct != "broadcast":
            continue
        what = f"{node.name}: option 'precision'"
        if node.precision not in ("", *PRECISIONS):
            needed = f'{" or ".join(PRECISIONS)}, or "" for the format of the model'
            yield Fault("bad-precision", what, repr(node.precision), needed, node.where)
            continue
        for reader in view.readers(node.name):
            channel = node.inputs[0].ref.node, reader.pool
            first = chosen.setdefault(channel, node)
            if first.precision != node.precision:
                given = f"{node.precision!r} beside {first.name} ({first.where}) with {first.precision!r}"
                needed = f"one format for the weights of {channel[0]!r} that go to pool {reader.pool!r}"
                yield Fault("bad-precision", what, given, needed, node.where)
            # Not `load`: looking at a graph must not run the user's modules.
            definition = imported(reader.op) if node.precision else None
            if isinstance(definition, NodeDef) and node.precision not in definition.precisions:
                able = ", ".join(definition.precisions) or "none"
                given = f"weights in {node.precision} (from {node.name}, {node.where})"
                needed = (
                    f"a precision that {short(reader.op)} computes in: {able}; or a broadcast of its own without one"
                )
                yield Fault("no-precision", f"{reader.name} reads {node.name}", given, needed, reader.where)


MODEL = path_of(Model)


def _delays(view: View) -> Iterator[Fault]:
    """A delayed value changes at each update, is no model, and is read per group in the pool that holds it."""
    # Behind a filter, a later group takes the place of a dropped one: a group's update is known too late.
    filters = [node.name for node in view.graph.nodes if node.construct == "keep"]
    for node in view.graph.nodes:
        argument = view.arguments.get(node.inputs[0].ref.node) if node.construct == "delay" else None
        if argument is None or argument.kind != "carried":  # `_clocks` reports it
            continue
        carried, maker = argument.name, view.nodes.get(view.makers.get(argument.name, ""))
        if maker is None:
            needed = f"{carried!r} without delay: it is the same at every update"
            yield Fault("delay-of-frozen", node.name, f"{carried!r}, which never changes", needed, node.where)
        elif maker.every > 1:
            given = f"{carried!r}, which {maker.name} makes at every {maker.every}. update"
            needed = f"{short(maker.op)} without .every({maker.every}): a delay is exact, so each update must make it"
            yield Fault("delay-of-every", node.name, given, needed, node.where)
        if MODEL in view.bases.get(argument.type, ()):
            given = f"{carried!r}, a {short(argument.type)}, of whose weights lag + 2 copies would be kept"
            needed = f"broadcast({carried}, lag=k) for its weights; or delay(…) of a small carried value of your own"
            yield Fault("delay-of-model", node.name, given, needed, node.where)
        if filters:
            given = f"{node.name} beside {', '.join(filters)}, which drops groups"
            needed = "a program without keep or without delay: behind a filter, a group's update is known too late"
            yield Fault("delay-beside-filter", f"{node.name} is exact", given, needed, node.where)
        for reader in view.readers(node.name):
            what = f"{reader.name} reads {node.name}"
            if reader.clock != "group":
                needed = f"{carried!r} without delay; a node per update reads the value as it is"
                yield Fault("delay-per-update", what, "a node per update", needed, reader.where)
            elif reader.pool != argument.pool:
                what += f" in pool {reader.pool!r}"
                given = f"{carried!r}, which pool {argument.pool!r} holds"
                needed = f'{reader.name}.on("{argument.pool}"), or another pool for what makes {carried!r}'
                yield Fault("other-pool", what, given, needed, reader.where)


def _turns(view: View) -> Iterator[Fault]:
    """Nodes that take turns have a bound, fire per group, and pass on no state."""
    for node in view.graph.nodes:
        if node.turns is None:
            continue
        what = f"{node.name}: takes turns"
        if _not_whole(node.turns, 1) and not node.answers:
            given, needed = (
                "no bound" if node.turns == inf else repr(node.turns),
                "turns=k, a whole number of at least 1",
            )
            yield Fault("unbounded-turns", f"{node.name}: turns", given, needed, node.where)
        if node.clock != "group":
            yield Fault("turns-per-update", what, "a node per update", "a node per group", node.where)
        # Its state would pass from group to group in an order that differs from run to run.
        if node.stateful:
            needed = "a Stream, or a node without state: groups take their turns in any order"
            yield Fault("turns-with-state", what, "a node that passes a state on", needed, node.where)


# All rules. Faults of one line keep this order.
RULES: tuple[Callable[[View], Iterator[Fault]], ...] = (
    _types,
    _clocks,
    _carried,
    _donations,
    _cycles,
    _unused,
    _updates,
    _numbers,
    _places,
    _every,
    _accumulates,
    _precisions,
    _delays,
    _turns,
    calls,
)
