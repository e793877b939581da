"""The rules of `check` for what a program says beside calling nodes: slower clocks, delays, turns, steps."""

from collections.abc import Callable, Iterator
from math import inf

from penstock.graph.faults import Fault
from penstock.graph.ir import Node
from penstock.graph.paths import path_of, short
from penstock.graph.rules import say
from penstock.graph.types import Model
from penstock.graph.view import View

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
