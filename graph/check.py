"""`check(graph)`: all faults of a graph at once, before anything starts.

Each rule is a function that yields its faults. A rule says nothing of what another rule finds broken (an unknown name
is one fault, not five), so all rules run on every graph, edited JSON included.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import inf
from typing import Any, get_args

from penstock.graph.errors import Fault, nearest
from penstock.graph.imports import path_of, short
from penstock.graph.ir import Argument, Construct, Graph, Input, Node, Ref
from penstock.graph.protocols import Source
from penstock.graph.requires import View, calls
from penstock.graph.trace import ANY
from penstock.graph.types import Context, Model


def check(
    graph: Graph,
    *,
    batch: int | None = None,
    pools: Mapping[str, str] | None = None,
    sources: Mapping[str, Source] | None = None,
    contexts: Mapping[str, Context] | None = None,
) -> list[Fault]:
    """The graph's faults, by file and line; none if it can run.

    Args:
        graph: any graph.
        batch: prompt groups per update, if it is known.
        pools: where the plan puts nodes and arguments, by name; without one, their labels say.
        sources: the sources of the run that the graph is checked for, by name.
        contexts: the contexts of that run, by the names of nodes and arguments.

    What nodes themselves require of their calls (see `requires`) is checked for imported modules only.
    """
    view = View(graph, batch, pools or {}, sources or {}, contexts or {})
    return sorted((fault for rule in RULES for fault in rule(view)), key=by_place)


def by_place(fault: Fault) -> tuple[str, int]:
    """The key that sorts faults."""
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (fault.where, 0)


def _said(thing: Node | Argument) -> str:
    return thing.name if isinstance(thing, Node) else f"{thing.kind} {thing.name!r}"


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


def _names(view: View) -> Iterator[Fault]:
    seen: dict[str, Node | Argument] = {}
    for thing in view.things:
        if thing.name in seen:
            given = f"the name a second time; the first is at {seen[thing.name].where or 'the same place'}"
            needed = "a name of its own: two producers of one value"
            yield Fault("duplicate-name", _said(thing), given, needed, thing.where)
        seen.setdefault(thing.name, thing)


def _forms(view: View) -> Iterator[Fault]:
    """Clocks and constructs that the language has."""
    for node in view.graph.nodes:
        if node.clock not in ("group", "update"):
            yield Fault("unknown-clock", f"{node.name}: clock", repr(node.clock), '"group" or "update"', node.where)
        if node.construct not in get_args(Construct):
            needed = " or ".join(f'"{name}"' for name in get_args(Construct))
            yield Fault("unknown-construct", f"{node.name}: construct", repr(node.construct), needed, node.where)
        elif node.fires and node.lag is not None:
            needed = "none: a lag belongs to a broadcast or delay"
            yield Fault("bad-construct", f"{node.name}: lag", repr(node.lag), needed, node.where)
        elif not node.fires and (len(node.inputs) != 1 or node.clock != "update"):
            given = f"{len(node.inputs)} inputs, clock {node.clock!r}"
            needed = f"a {node.construct} of one value, once per update"
            yield Fault("bad-construct", node.name, given, needed, node.where)
        elif node.construct == "keep" and (len(node.inputs) != len(node.outputs) or node.clock != "group"):
            given = f"{len(node.inputs)} inputs, {len(node.outputs)} outputs, clock {node.clock!r}"
            yield Fault("bad-construct", node.name, given, "per group, an output for each value", node.where)


def _edges(view: View) -> Iterator[Fault]:
    """Each edge begins at a value, and the value has the type that its end needs."""
    known = [*view.arguments, *view.nodes]
    ends = [(_input(node, item), item.ref, item.type, node.where) for node, item in view.inputs()]
    for name, ref in view.graph.results:
        argument, maker = view.arguments.get(name), view.nodes.get(ref.node)
        # An unknown result has its fault from `_carried`.
        ends.append((f"the next {name!r}", ref, argument.type if argument else ANY, maker.where if maker else ""))
    for what, ref, needed, where in ends:
        given = view.type_of(ref)
        where = where or view.graph.where
        if given is not None:
            if not view.fits(given, needed):
                said = f"{_short(given, needed)} (from {ref})"
                yield Fault("wrong-type", what, said, _short(needed, given), where)
        elif ref.node not in known:
            said = f"{str(ref)!r}, which is nowhere in the graph"
            yield Fault("unknown-input", what, said, f"an argument or node{nearest(ref.node, known)}", where)
        else:
            outputs = [o.name for o in view.nodes[ref.node].outputs] if ref.node in view.nodes else ["out"]
            has = f"an output of {ref.node}: {', '.join(outputs)}" if outputs else "a node with outputs"
            yield Fault("unknown-output", what, f"{str(ref)!r}, an output that {ref.node} does not have", has, where)


def _unused(view: View) -> Iterator[Fault]:
    used = {i.ref for _, i in view.inputs()} | {ref for _, ref in view.graph.results}
    for node in view.graph.nodes:
        # Of a filter one used output is enough: the others are what it decides by.
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
            yield Fault("unused-argument", _said(argument), "no node that reads it", needed, argument.where)


# Clocks and pools


def _clocks(view: View) -> Iterator[Fault]:
    """What may be read by a node that fires per group, per update, or by a broadcast."""
    for node in view.graph.nodes:
        if not node.fires:
            for item in node.inputs:
                argument = view.arguments.get(item.ref.node)
                if view.type_of(item.ref) is not None and (argument is None or argument.kind != "carried"):
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
            if not any(view.per_group(i.ref) or view.type_of(i.ref) is None for i in node.inputs):
                reads = ", ".join(str(i.ref) for i in node.inputs) or "no input"
                needed = "an input per group (a source, or what a per-group node makes)"
                needed += f"; or {short(node.op)}.per_update, which fires once per update" if node.inputs else ""
                yield Fault("no-group-input", f"{node.name} fires per group", reads, needed, node.where)
        elif not node.inputs:
            needed = "an input that says when it fires, such as the rewards"
            yield Fault("no-input", node.name, "no input", needed, node.where)


def _updates(view: View) -> Iterator[Fault]:
    """Groups wait for an update, which ends when its nodes have fired: without one a run has no end."""
    clocks = {node.clock for node in view.graph.nodes if node.fires}
    made = any(ref.node in view.nodes for _, ref in view.graph.results)  # per group, which `_carried` refuses
    if "group" in clocks and "update" not in clocks and not made:
        given = "nodes that fire per group, and none that fires at each update"
        needed = 'a node that consumes the groups of an update: one with clock="update", such as accuracy(rewards)'
        yield Fault("no-update", view.graph.name, given, needed, view.graph.where)


def _places(view: View) -> Iterator[Fault]:
    """A carried value stays in its pool, and so does its next one."""
    nexts = {ref: name for name, ref in view.graph.results}
    for node, item in view.inputs():
        argument = view.arguments.get(nexts.get(item.ref, item.ref.node))
        if argument is None or argument.kind != "carried" or not node.fires:
            continue
        # A changing value that a per-group node reads is a fault of `_cycles`.
        elsewhere = view.pools[node.name] != view.pools[argument.name]
        if elsewhere and not (node.clock == "group" and view.changing(item.ref)):
            given = f"{argument.name!r}, which pool {view.pools[argument.name]!r} holds"
            needed = f"a value of its own pool {view.pools[node.name]!r}, or broadcast({argument.name}, lag=k)"
            yield Fault("other-pool", _input(node, item), given, needed, node.where)


# Carried values


def _carried(view: View) -> Iterator[Fault]:
    """Each carried value has one next value, made once per update, and a maker."""
    graph = view.graph
    seen: dict[str, Ref] = {}
    for name, ref in graph.results:
        argument = view.arguments.get(name)
        node = view.nodes.get(ref.node)
        what, where = f"the next {name!r}", node.where if node is not None else graph.where
        if argument is None or argument.kind != "carried":
            kind = "a source" if argument else "no argument"
            needed = f"a carried value{nearest(name, [a.name for a in graph.carried])}"
            yield Fault("not-carried", what, f"{name!r}, which is {kind}", needed, where)
        elif name in seen:
            needed = "one result for each carried value"
            yield Fault("two-results", what, "two producers of one value", needed, where)
        elif node is None and ref != Ref(name) and view.type_of(ref) is not None:
            needed = f"{name!r} itself, or what a node makes (a copy needs a node)"
            yield Fault("other-argument", what, f"another argument, {str(ref)!r}", needed, where)
        elif node is not None and (node.clock != "update" or not node.fires):
            kind = f"a {node.construct}" if not node.fires else "made once per group"
            needed = 'what a node with @node(clock="update") makes'
            needed += f", such as {short(node.op)}.per_update" if node.construct == "call" else ""
            yield Fault("result-per-group", what, f"{str(ref)!r}, which is {kind}", needed, where)
        elif node is not None and ref in seen.values():
            other = next(earlier for earlier, its in seen.items() if its == ref)
            needed = "an output of its own for each carried value: an update may change it in place"
            yield Fault("shared-result", what, f"{str(ref)!r}, which is the next {other!r} too", needed, where)
        seen.setdefault(name, ref)
    for argument in graph.arguments:
        if argument.kind == "carried" and argument.name not in seen:
            needed = f'its next value among what the program returns: "{argument.name}": …, itself if it never changes'
            yield Fault("no-next-value", _said(argument), "no next value", needed, argument.where)
        if not argument.maker and view.readers(argument.name):
            needed = "a type with the class attribute `maker`, the import path of what makes the value in a worker"
            if argument.type == ANY:
                needed = f"the argument annotated with its type, such as {argument.name.rpartition('.')[2]}: Prompts"
            given = f"{_short(argument.type)}, without a maker"
            yield Fault("no-maker", _said(argument), given, needed, argument.where)


def _donations(view: View) -> Iterator[Fault]:
    """An update changes a carried value in place, so only one node may be given a value to update."""
    for carried in view.graph.carried:
        takers = [n for n in view.graph.nodes if carried.name in _taken(view, n)]
        for second in takers[1:]:
            given = f"{carried.name!r}, which {takers[0].name} ({takers[0].where}) updates too"
            needed = f"one update of a value; the second takes what {takers[0].name} returns"
            yield Fault("updated-twice", f"{second.name} updates a value", given, needed, second.where)


def _taken(view: View, node: Node) -> set[str]:
    """The carried values that a node updates: those it makes; else, if it makes something of the same type, the one
    that is its first input, which is where the value to update stands."""
    if node.clock != "update" or not node.fires:
        return set()
    reads = {i.ref.node for i in node.inputs}
    made = {c for c, maker in view.makers.items() if maker == node.name}
    if made or not node.inputs or not view.changing(node.inputs[0].ref):
        return made & reads
    first = view.arguments[node.inputs[0].ref.node]
    return {first.name} if any(view.fits(o.type, first.type) for o in node.outputs) else set()


def _cycles(view: View) -> Iterator[Fault]:
    """Feedback goes through updates: a per-group node reads what changes through a broadcast only."""
    import networkx as nx  # type: ignore[import-untyped]  # late: it takes longer to import than a graph to check

    flow = nx.DiGraph([(i.ref.node, n.name) for n, i in view.inputs() if i.ref.node in view.nodes and not i.back])
    flow.add_nodes_from(view.nodes)
    for node, item in view.inputs():
        if node.clock == "group" and view.changing(item.ref):
            maker, name = view.makers[item.ref.node], item.ref.node
            needed = f"broadcast({name}, lag=k)"
            if maker in flow and nx.has_path(flow, node.name, maker):
                given = " → ".join([name, *nx.shortest_path(flow, node.name, maker), name])
                given = f"the cycle without a lag {given}"
                yield Fault("cycle-without-lag", _input(node, item), given, needed, node.where)
            else:
                yield Fault("changing-input", _input(node, item), f"{name!r}, which changes", needed, node.where)
    # An update changes a value in place, so it waits for all other readers of the value as it was.
    waits = [
        (n.name, view.makers[i.ref.node])
        for n, i in view.inputs()
        if n.fires and n.clock == "update" and view.changing(i.ref) and n.name != view.makers[i.ref.node]
    ]
    flow.add_edges_from((reader, maker) for reader, maker in waits if maker in flow)
    for names in nx.strongly_connected_components(flow):
        part = flow.subgraph(names)
        if not part.number_of_edges():
            continue
        cycle = [tail for tail, _ in nx.find_cycle(part)]
        at = cycle.index(min(cycle, key=list(view.nodes).index))
        cycle = [*cycle[at:], *cycle[:at], cycle[at]]
        code, needed = "cycle-without-lag", "no cycle but through a carried value and broadcast(…, lag=k)"
        if any(step in waits for step in pairwise(cycle)):
            code = "update-cycle"
            needed = (
                "an end of the circle: a node that makes a carried value's next value fires after all that read the "
                "value as it was; give one of these nodes the next value that another returns, in place of the value"
            )
        given = f"the cycle without a lag {' → '.join(cycle)}"
        yield Fault(code, f"{cycle[0]} waits for itself", given, needed, view.nodes[cycle[0]].where)


# Numbers


def _numbers(view: View) -> Iterator[Fault]:
    if view.batch is not None and _not_whole(view.batch, 1):
        needed = "a whole number of prompt groups per update, at least 1"
        yield Fault("bad-batch", "batch", repr(view.batch), needed, view.graph.where)
    for node in view.graph.nodes:
        if not node.fires and _not_whole(node.lag, 0):
            needed, given = "a whole number of updates, at least 0 (0 is synchronous)", repr(node.lag)
            if node.lag is None and node.inputs and view.changing(ref := node.inputs[0].ref):
                given += f", for the weights of {ref.node!r}, which updates change"
                needed += f": how old they may be, broadcast({ref.node}, lag=k)"
            yield Fault("bad-lag", f"{node.name}: lag", given, needed, node.where)
        if _not_whole(node.every, 1):
            needed = "a whole number of updates, at least 1"
            yield Fault("bad-every", f"{node.name}: every", repr(node.every), needed, node.where)
        options = dict(node.options)
        if _not_whole(options.get("samples", 1), 1):
            needed = "a whole number of responses per prompt, at least 1"
            yield Fault("bad-samples", f"{node.name}: option 'samples'", repr(options["samples"]), needed, node.where)


def _steps(view: View) -> Iterator[Fault]:
    """Several optimizer steps per batch: minibatches of whole prompt groups, equally many in each."""
    for node in view.graph.nodes:
        for name in ("epochs", "minibatches"):
            count = dict(node.options).get(name, 1)
            if _not_whole(count, 1):
                needed = "a whole number of at least 1"
                yield Fault("bad-count", f"{node.name}: {name}", repr(count), needed, node.where)
            elif name == "minibatches" and node.clock == "update" and type(view.batch) is int and view.batch % count:
                given = f"minibatches={count} for a batch of {view.batch} prompt groups"
                needed = f"a number that divides {view.batch}"
                yield Fault("indivisible-batch", f"{node.name}: minibatches", given, needed, node.where)


# Constructs


def _every(view: View) -> Iterator[Fault]:
    """Nodes and broadcasts that take part in some updates only."""
    for node in view.graph.nodes:
        if type(node.every) is not int or node.every <= 1:
            continue
        if starved := starving(node):
            yield starved
        elif node.fires and node.clock != "update":
            needed = f"a node that fires per update: {short(node.op)}.per_update.every({node.every})"
            given = f"{node.every}, of a node per {node.clock}"
            yield Fault("every-per-group", f"{node.name}: every", given, needed, node.where)
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


def starving(node: Node) -> Fault | None:
    """The fault of a broadcast that sends so seldom that some update would wait for ever; None if there is none."""
    if node.construct != "broadcast" or type(node.lag) is not int or node.every <= node.lag + 1:
        return None
    given = f"every={node.every}, lag={node.lag}"
    needed = f"every={node.lag + 1} at most, or lag={node.every - 1}: update {node.lag + 1} would wait for ever"
    return Fault("weights-too-seldom", f"{node.name}: weights too seldom for their lag", given, needed, node.where)


MODEL = path_of(Model)


def _delays(view: View) -> Iterator[Fault]:
    """A delayed value is read per group where it is held; one that never changes needs no delay."""
    for node in view.graph.nodes:
        if node.construct != "delay" or len(node.inputs) != 1:
            continue
        carried = node.inputs[0].ref.node
        argument = view.arguments.get(carried)
        if argument is not None and argument.kind == "carried" and carried not in view.makers:
            needed = f"{carried!r} without delay: it is the same at every update"
            yield Fault("delay-of-frozen", node.name, f"{carried!r}, which never changes", needed, node.where)
        if argument is not None and MODEL in view.bases.get(argument.type, ()):
            given = f"{carried!r}, a {short(argument.type)}, of whose weights lag + 2 copies would be kept"
            needed = f"broadcast({carried}, lag=k) for its weights; or delay(…) of a small carried value of your own"
            yield Fault("delay-of-model", node.name, given, needed, node.where)
        maker = view.nodes.get(view.makers.get(carried, ""))
        if maker is not None and maker.every > 1:
            given = f"{carried!r}, which {maker.name} makes at every {maker.every}. update"
            needed = f"{short(maker.op)} without .every({maker.every}): a delay is exact, so each update must make it"
            yield Fault("delay-of-every", node.name, given, needed, node.where)
        if filters := [n.name for n in view.nodes.values() if n.construct == "keep"]:
            given = f"{node.name} beside {', '.join(filters)}, which drops groups"
            needed = "a program without keep or without delay: behind a filter, a group's update is known too late"
            yield Fault("delay-beside-filter", f"{node.name} is exact", given, needed, node.where)
        for reader in view.readers(node.name):
            what = f"{reader.name} reads {node.name}"
            if reader.clock != "group":
                needed = f"{carried!r} without delay; a node per update reads the value as it is"
                yield Fault("delay-per-update", what, "a node per update", needed, reader.where)
            elif argument is not None and view.pools[reader.name] != view.pools[carried]:
                what += f" in pool {view.pools[reader.name]!r}"
                given = f"{carried!r}, which pool {view.pools[carried]!r} holds"
                needed = f'{reader.name}.on("{view.pools[carried]}"), or another pool for what makes {carried!r}'
                yield Fault("other-pool", what, given, needed, reader.where)


def _turns(view: View) -> Iterator[Fault]:
    """Two nodes that take turns: bounded, per group, each the other's."""
    for node in view.graph.nodes:
        if node.turns is None:
            for item in node.inputs:
                if item.back:
                    what, needed = _input(node, item), "a node of `alternate`"
                    yield Fault("turn-outside-alternate", what, "a value of the turn before", needed, node.where)
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
        if node.stateful:
            needed = "a Stream, or a node without state: groups take their turns in any order"
            yield Fault("turns-with-state", what, "a node that passes a state on", needed, node.where)


# All rules. Faults of one line keep this order.
RULES: tuple[Callable[[View], Iterator[Fault]], ...] = (
    _names,
    _forms,
    _edges,
    _clocks,
    _carried,
    _donations,
    _cycles,
    _unused,
    _updates,
    _numbers,
    _places,
    _every,
    _delays,
    _turns,
    _steps,
    calls,
)
