"""`check(graph)`: all faults of a graph at once, before anything starts.

The rules that `check` applies to a graph, each a function that yields its faults.

A rule says nothing about what another rule has found broken (a name that does not exist is one fault, not five), so
all rules run on every graph.

The rules of `check` for what a program says beside calling nodes: slower clocks, delays, turns, steps.
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, get_args

from penstock.graph.errors import Fault, nearest
from penstock.graph.imports import path_of, short
from penstock.graph.ir import Argument, Construct, Graph, Input, Node, Output, Ref
from penstock.graph.protocols import Source
from penstock.graph.requires import View, calls
from penstock.graph.trace import ANY
from penstock.graph.types import Context, Model


def say(what: Node | Argument, item: Input | None = None) -> str:
    if item is not None:
        return f"{what.name}: input {item.name!r}"
    return what.name if isinstance(what, Node) else f"{what.kind} {what.name!r}"


def _short(type_: str, other: str = "") -> str:
    """A type's name; its whole path where the name alone is that of another type too."""
    name = short(type_)
    return (type_ if name == short(other) else name) or "a value of no known type"


def _names(view: View) -> Iterator[Fault]:
    seen: dict[str, Node | Argument] = {}
    for thing in view.things:
        if thing.name in seen:
            given = f"the name a second time; the first is at {seen[thing.name].where or 'the same place'}"
            yield Fault(say(thing), given, "a name of its own: two producers of one value", thing.where)
        seen.setdefault(thing.name, thing)


def _forms(view: View) -> Iterator[Fault]:
    """Clocks and constructs that the language has."""
    for node in view.graph.nodes:
        if node.clock not in ("group", "update"):
            yield Fault(f"{node.name}: clock", repr(node.clock), '"group" or "update"', node.where)
        if node.construct not in get_args(Construct):
            needed = " or ".join(f'"{name}"' for name in get_args(Construct))
            yield Fault(f"{node.name}: construct", repr(node.construct), needed, node.where)
        elif node.fires and node.lag is not None:
            yield Fault(f"{node.name}: lag", repr(node.lag), "none: a lag belongs to a broadcast or delay", node.where)
        elif not node.fires and (len(node.inputs) != 1 or node.clock != "update"):
            given = f"{len(node.inputs)} inputs, clock {node.clock!r}"
            yield Fault(node.name, given, f"a {node.construct} of one value, once per update", node.where)
        elif node.construct == "keep" and (len(node.inputs) != len(node.outputs) or node.clock != "group"):
            given = f"{len(node.inputs)} inputs, {len(node.outputs)} outputs, clock {node.clock!r}"
            yield Fault(node.name, given, "per group, an output for each value", node.where)


def _references(view: View) -> Iterator[Fault]:
    known = [*view.arguments, *view.nodes]

    def missing(ref: Ref) -> tuple[str, str] | None:
        if view.type_of(ref) is not None:
            return None
        if ref.node not in known:
            return f"{str(ref)!r}, which is nowhere in the graph", f"an argument or node{nearest(ref.node, known)}"
        outputs = [o.name for o in view.nodes[ref.node].outputs] if ref.node in view.nodes else ["out"]
        has = f"an output of {ref.node}: {', '.join(outputs)}" if outputs else "a node with outputs"
        return f"{str(ref)!r}, an output that {ref.node} does not have", has

    for node, item in view.inputs():
        if said := missing(item.ref):
            yield Fault(say(node, item), *said, node.where)
    for name, ref in view.graph.results:
        if said := missing(ref):
            yield Fault(f"the next {name!r}", *said, view.graph.where)


def _types(view: View) -> Iterator[Fault]:
    for node, item in view.inputs():
        given = view.type_of(item.ref)
        if given is not None and not view.fits(given, item.type):
            yield Fault(
                say(node, item), f"{_short(given, item.type)} (from {item.ref})", _short(item.type, given), node.where
            )
    for name, ref in view.graph.results:
        given, argument = view.type_of(ref), view.arguments.get(name)
        if given is not None and argument is not None and not view.fits(given, argument.type):
            where = view.nodes[ref.node].where if ref.node in view.nodes else view.graph.where
            yield Fault(
                f"the next {name!r}",
                f"{_short(given, argument.type)} (from {ref})",
                _short(argument.type, given),
                where,
            )


def _clocks(view: View) -> Iterator[Fault]:
    """What may be read by a node that fires per group, per update, or by a broadcast."""
    for node in view.graph.nodes:
        if not node.fires:
            for item in node.inputs:
                argument = view.arguments.get(item.ref.node)
                if view.type_of(item.ref) is not None and (argument is None or argument.kind != "carried"):
                    given = f"{str(item.ref)!r}, which is " + ("a source" if argument else "the output of a node")
                    yield Fault(node.name, given, "a carried value: an argument that the program returns", node.where)
        elif node.clock == "group":
            for item in node.inputs:
                maker = view.nodes.get(item.ref.node)
                if maker is not None and maker.clock == "update" and maker.fires:
                    needed = "a per-group value, or a carried value through broadcast(…, lag=k)"
                    given = f"{str(item.ref)!r}, which {maker.name} makes once per update"
                    yield Fault(f"{say(node, item)} of a per-group node", given, needed, node.where)
            if not any(view.per_group(i.ref) or view.type_of(i.ref) is None for i in node.inputs):
                reads = ", ".join(str(i.ref) for i in node.inputs) or "no input"
                needed = "an input per group (a source, or what a per-group node makes)"
                needed += f"; or {short(node.op)}.per_update, which fires once per update" if node.inputs else ""
                yield Fault(f"{node.name} fires per group", reads, needed, node.where)
        elif not node.inputs:
            yield Fault(node.name, "no input", "an input that says when it fires, such as the rewards", node.where)


def _carried(view: View) -> Iterator[Fault]:
    """Each carried value has one next value, made once per update, and a reader."""
    graph, seen = view.graph, set()
    names = [name for name, _ in graph.results]
    for name, ref in graph.results:
        argument = view.arguments.get(name)
        node = view.nodes.get(ref.node)
        what, where = f"the next {name!r}", node.where if node is not None else graph.where
        if argument is None or argument.kind != "carried":
            kind = "a source" if argument else "no argument"
            carried = [a.name for a in graph.carried]
            yield Fault(what, f"{name!r}, which is {kind}", f"a carried value{nearest(name, carried)}", where)
        elif name in seen:
            yield Fault(what, "two producers of one value", "one result for each carried value", where)
        elif node is None and ref != Ref(name) and view.type_of(ref) is not None:
            needed = f"{name!r} itself, or what a node makes (a copy needs a node)"
            yield Fault(what, f"another argument, {str(ref)!r}", needed, where)
        elif node is not None and (node.clock != "update" or not node.fires):
            kind = f"a {node.construct}" if not node.fires else "made once per group"
            needed = 'what a node with @node(clock="update") makes'
            needed += f", such as {short(node.op)}.per_update" if node.construct == "call" else ""
            yield Fault(what, f"{str(ref)!r}, which is {kind}", needed, where)
        elif node is not None and (other := next((n for n, r in graph.results if r == ref and n in seen), None)):
            needed = "an output of its own for each carried value: an update may change it in place"
            yield Fault(what, f"{str(ref)!r}, which is the next {other!r} too", needed, where)
        seen.add(name)
    for argument in graph.arguments:
        if argument.kind == "carried" and argument.name not in names:
            needed = f'its next value among what the program returns: "{argument.name}": …, itself if it never changes'
            yield Fault(say(argument), "no next value", needed, argument.where)
        if not argument.maker and view.readers(argument.name):
            needed = "a type with the class attribute `maker`, the import path of what makes the value in a worker"
            if argument.type == ANY:
                needed = f"the argument annotated with its type, such as {argument.name.rpartition('.')[2]}: Prompts"
            yield Fault(say(argument), f"{_short(argument.type)}, without a maker", needed, argument.where)


def _donations(view: View) -> Iterator[Fault]:
    """An update changes a carried value in place, so only one node may be given a value to update."""
    for carried in view.graph.carried:
        takers = [n for n in view.graph.nodes if carried.name in _taken(view, n)]
        for second in takers[1:]:
            given = f"{carried.name!r}, which {takers[0].name} ({takers[0].where}) updates too"
            needed = f"one update of a value; the second takes what {takers[0].name} returns"
            yield Fault(f"{second.name} updates a value", given, needed, second.where)


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
            back = (
                nx.shortest_path(flow, node.name, maker)
                if maker in flow and nx.has_path(flow, node.name, maker)
                else []
            )
            given = f"the cycle without a lag {' → '.join([name, *back, name])}" if back else f"{name!r}, which changes"
            yield Fault(say(node, item), given, f"broadcast({name}, lag=k)", node.where)
    waits = [
        (n.name, view.makers[i.ref.node])
        for n, i in view.inputs()
        if n.fires and n.clock == "update" and view.changing(i.ref) and n.name != view.makers[i.ref.node]
    ]
    flow.add_edges_from((reader, maker) for reader, maker in waits if maker in flow)
    for names in nx.strongly_connected_components(flow):
        part = flow.subgraph(names)
        if part.number_of_edges():
            cycle = [tail for tail, _ in nx.find_cycle(part)]
            yield _cycle_fault(view, cycle, waits)


def _cycle_fault(view: View, cycle: list[str], waits: list[tuple[str, str]]) -> Fault:
    first = min(cycle, key=list(view.nodes).index)
    at = cycle.index(first)
    names = cycle[at:] + cycle[:at]
    needed = "no cycle but through a carried value and broadcast(…, lag=k)"
    if any(step in waits for step in zip(names, names[1:] + names[:1], strict=True)):
        needed = (
            "an end of the circle: a node that makes a carried value's next value fires after all that read the value "
            "as it was; give one of these nodes the next value that another returns, in place of the value"
        )
    given = f"the cycle without a lag {' → '.join([*names, names[0]])}"
    return Fault(f"{first} waits for itself", given, needed, view.nodes[first].where)


def _unused(view: View) -> Iterator[Fault]:
    used = {i.ref for _, i in view.inputs()} | {ref for _, ref in view.graph.results}
    for node in view.graph.nodes:
        for output in node.outputs:
            silent = node.construct == "keep" and any(Ref(node.name, o.name) in used for o in node.outputs)
            if Ref(node.name, output.name) not in used and not silent and not node.answers:
                yield Fault(f"{node.name}: output {output.name!r}", *_without_reader(view, node, output), node.where)
    for argument in view.graph.arguments:
        if not view.readers(argument.name):
            needed = f"a node that is called with it, or no such argument of {view.graph.name}"
            yield Fault(say(argument), "no node that reads it", needed, argument.where)


def _without_reader(view: View, node: Node, output: Output) -> tuple[str, str]:
    """What is given and needed of an output that no node reads and the program does not return."""
    what = f"{Ref(node.name, output.name)} ({_short(output.type)})"
    given = f"{what}, which no node reads and {view.graph.name} does not return"
    if not node.fires:
        return given, f"a node that is called with it, or no {node.construct}"
    fits = [a.name for a in view.graph.carried if node.clock == "update" and view.fits(output.type, a.type)]
    returned = f', or its place in what {view.graph.name} returns: "{fits[0]}": …' if fits else ""
    needed = f"a node that is called with it{returned}, or no call of {short(node.op) or node.name}"
    return given, f"{needed} (for figures alone, a node returns Metrics)" if node.construct == "call" else needed


def _updates(view: View) -> Iterator[Fault]:
    """What is sampled waits for an update, which is over when its nodes have fired: without one a run has no end."""
    clocks = {node.clock for node in view.graph.nodes if node.fires}
    made = any(ref.node in view.nodes for _, ref in view.graph.results)  # by a node per group, which is said elsewhere
    if "group" in clocks and "update" not in clocks and not made:
        given = "nodes that fire per group, and none that fires at each update"
        needed = 'a node that consumes the groups of an update: one with clock="update", such as accuracy(rewards)'
        yield Fault(view.graph.name, given, needed, view.graph.where)


def _numbers(view: View) -> Iterator[Fault]:
    def wrong(value: Any, least: int) -> bool:
        return type(value) is not int or value < least

    if view.batch is not None and wrong(view.batch, 1):
        yield Fault(
            "batch", repr(view.batch), "a whole number of prompt groups per update, at least 1", view.graph.where
        )
    for node in view.graph.nodes:
        if not node.fires and wrong(node.lag, 0):
            needed, given = "a whole number of updates, at least 0 (0 is synchronous)", repr(node.lag)
            if node.lag is None and node.inputs and view.changing(ref := node.inputs[0].ref):
                given += f", for the weights of {ref.node!r}, which updates change"
                needed += f": how old they may be, broadcast({ref.node}, lag=k)"
            yield Fault(f"{node.name}: lag", given, needed, node.where)
        if wrong(node.every, 1):
            yield Fault(f"{node.name}: every", repr(node.every), "a whole number of updates, at least 1", node.where)
        for name, value in node.options:
            if name == "samples" and wrong(value, 1):
                needed = "a whole number of responses per prompt, at least 1"
                yield Fault(f"{node.name}: option 'samples'", repr(value), needed, node.where)


def _places(view: View) -> Iterator[Fault]:
    """A carried value stays in its pool, and so does its next one."""
    nexts = {ref: name for name, ref in view.graph.results}
    for node, item in view.inputs():
        argument = view.arguments.get(nexts.get(item.ref, item.ref.node))
        if argument is None or argument.kind != "carried" or not node.fires:
            continue
        if view.pools[node.name] != view.pools[argument.name] and not (
            node.clock == "group" and view.changing(item.ref)
        ):
            given = f"{argument.name!r}, which pool {view.pools[argument.name]!r} holds"
            needed = f"a value of its own pool {view.pools[node.name]!r}, or broadcast({argument.name}, lag=k)"
            yield Fault(say(node, item), given, needed, node.where)


RULES: tuple[Callable[[View], Iterator[Fault]], ...] = (
    _names,
    _forms,
    _references,
    _types,
    _clocks,
    _carried,
    _donations,
    _cycles,
    _unused,
    _updates,
    _numbers,
    _places,
)


MODEL = path_of(Model)


def _beats(view: View) -> Iterator[Fault]:
    """Nodes and ways that take part in some updates only."""
    for node in view.graph.nodes:
        if type(node.every) is not int or node.every <= 1:
            continue
        if starved := starving(node):
            yield starved
        elif node.fires and node.clock != "update":
            needed = f"a node that fires per update: {short(node.op)}.per_update.every({node.every})"
            yield Fault(f"{node.name}: every", f"{node.every}, of a node per {node.clock}", needed, node.where)
        for item in node.inputs if node.fires else ():
            if view.per_group(item.ref):
                given = f"{str(item.ref)!r}, of which each update has a batch of its own"
                needed = (
                    f"{short(node.op)} without .every({node.every}); or {short(node.op)}.every({node.every}) of what a "
                    f'node with @node(clock="update") makes of {str(item.ref)!r} at each update'
                )
                yield Fault(f"{say(node, item)}, at every {node.every}. update", given, needed, node.where)
    for reader, item in view.inputs():
        maker = view.nodes.get(item.ref.node)
        if maker is not None and maker.fires and maker.every > 1 and reader.every % maker.every:
            given = f"{str(item.ref)!r}, which {maker.name} makes at every {maker.every}. update"
            needed = f"a reader at those updates: {short(reader.op)}.every({maker.every})"
            made = [f"{name!r}" for name, by in view.makers.items() if by == maker.name]
            needed += f"; or the carried value {made[0]}, which stays as it is in between" if made else ""
            yield Fault(say(reader, item), given, needed, reader.where)


def starving(node: Node) -> Fault | None:
    """What is wrong with a broadcast whose weights come so seldom that some update would wait for ever."""
    if node.construct != "broadcast" or type(node.lag) is not int or node.every <= node.lag + 1:
        return None
    given = f"every={node.every}, lag={node.lag}"
    needed = f"every={node.lag + 1} at most, or lag={node.every - 1}: update {node.lag + 1} would wait for ever"
    return Fault(f"{node.name}: weights too seldom for their lag", given, needed, node.where)


def _delays(view: View) -> Iterator[Fault]:
    """A delayed value is read per group where it is held; one that never changes needs no delay."""
    for node in view.graph.nodes:
        if node.construct != "delay" or len(node.inputs) != 1:
            continue
        carried = node.inputs[0].ref.node
        argument = view.arguments.get(carried)
        if argument is not None and argument.kind == "carried" and carried not in view.makers:
            needed = f"{carried!r} without delay: it is the same at every update"
            yield Fault(node.name, f"{carried!r}, which never changes", needed, node.where)
        if argument is not None and MODEL in view.bases.get(argument.type, ()):
            given = f"{carried!r}, a {short(argument.type)}, of whose weights lag + 2 copies would be kept"
            needed = f"broadcast({carried}, lag=k) for its weights; or delay(…) of a small carried value of your own"
            yield Fault(node.name, given, needed, node.where)
        maker = view.nodes.get(view.makers.get(carried, ""))
        if maker is not None and maker.every > 1:
            given = f"{carried!r}, which {maker.name} makes at every {maker.every}. update"
            needed = f"{short(maker.op)} without .every({maker.every}): a delay is exact, so each update must make it"
            yield Fault(node.name, given, needed, node.where)
        if filters := [n.name for n in view.nodes.values() if n.construct == "keep"]:
            given = f"{node.name} beside {', '.join(filters)}, which drops groups"
            needed = "a program without keep or without delay: behind a filter, a group's update is known too late"
            yield Fault(f"{node.name} is exact", given, needed, node.where)
        for reader in view.readers(node.name):
            if reader.clock != "group":
                needed = f"{carried!r} without delay; a node per update reads the value as it is"
                yield Fault(f"{reader.name} reads {node.name}", "a node per update", needed, reader.where)
            elif argument is not None and view.pools[reader.name] != view.pools[carried]:
                given = f"{carried!r}, which pool {view.pools[carried]!r} holds"
                needed = f'{reader.name}.on("{view.pools[carried]}"), or another pool for what makes {carried!r}'
                yield Fault(
                    f"{reader.name} reads {node.name} in pool {view.pools[reader.name]!r}", given, needed, reader.where
                )


def _turns(view: View) -> Iterator[Fault]:
    """Two nodes that take turns: bounded, per group, each the other's."""
    for node in view.graph.nodes:
        back = [item for item in node.inputs if item.back]
        if node.turns is None:
            for item in back:
                yield Fault(say(node, item), "a value of the turn before", "a node of `alternate`", node.where)
            continue
        if (type(node.turns) is not int or node.turns < 1) and not node.answers:
            given = "no bound" if node.turns == inf else repr(node.turns)
            yield Fault(f"{node.name}: turns", given, "turns=k, a whole number of at least 1", node.where)
        if node.clock != "group":
            yield Fault(f"{node.name}: takes turns", "a node per update", "a node per group", node.where)
        if node.stateful:
            needed = "a Stream, or a node without state: groups take their turns in any order"
            yield Fault(f"{node.name}: takes turns", "a node that passes a state on", needed, node.where)


def _steps(view: View) -> Iterator[Fault]:
    """Several optimizer steps per batch: minibatches of whole prompt groups, equally many in each."""
    for node in view.graph.nodes:
        options = dict(node.options)
        for name in ("epochs", "minibatches"):
            count = options.get(name, 1)
            if type(count) is not int or count < 1:
                yield Fault(f"{node.name}: {name}", repr(count), "a whole number of at least 1", node.where)
            elif name == "minibatches" and node.clock == "update" and type(view.batch) is int and view.batch % count:
                given = f"minibatches={count} for a batch of {view.batch} prompt groups"
                needed = f"a number that divides {view.batch}"
                yield Fault(f"{node.name}: minibatches", given, needed, node.where)


CONSTRUCT_RULES: tuple[Callable[[View], Iterator[Fault]], ...] = (_beats, _delays, _turns, _steps)


def check(
    graph: Graph,
    *,
    batch: int | None = None,
    pools: Mapping[str, str] | None = None,
    sources: Mapping[str, Source] | None = None,
    contexts: Mapping[str, Context] | None = None,
) -> list[Fault]:
    """The graph's faults, by file and line; none if it can run.

    `batch` is the number of prompt groups per update, if it is known. `pools` is where the plan puts nodes and
    arguments, if not where their labels say. `sources` and the `contexts` of nodes and arguments, by name, are those of
    the run that it is checked for, if it is for one. What nodes themselves require of their calls (see `requires`) is
    known where their modules are imported.
    """
    view = View(graph, batch, dict(pools or {}), sources, contexts)
    faults = [fault for rule in (*RULES, *CONSTRUCT_RULES, calls) for fault in rule(view)]
    return sorted(faults, key=by_place)


def by_place(fault: Fault) -> tuple[str, int]:
    """The key that sorts faults."""
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (fault.where, 0)
