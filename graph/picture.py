"""A graph as boxes and links, as people draw it: a broadcast is not a box but the link that feeds weights back."""

from dataclasses import dataclass
from typing import Literal

from penstock.graph.ir import Argument, Graph, Json, Node, Ref
from penstock.graph.paths import names_function, short


@dataclass(frozen=True, slots=True)
class Box:
    """An argument or a node. `note` is a second, short line."""

    name: str
    title: str
    note: str
    pool: str
    kind: Literal["source", "frozen", "node"]


@dataclass(frozen=True, slots=True)
class Link:
    """From a box's output to a box: within an update ("data"), to a later one ("feedback"), or to the next update of
    the same box ("own")."""

    tail: str
    output: str
    head: str
    label: str
    kind: Literal["data", "feedback", "own"]


def picture(graph: Graph) -> tuple[list[Box], list[Link]]:
    """The boxes in program order and the links between them. Arguments that updates change have no box of their own:
    the node that makes their next value stands for them."""
    boxes = [_argument(a) for a in graph.arguments if graph.producer(a.name) is None]
    boxes += [_node(n) for n in graph.nodes if n.fires]
    known = {box.name for box in boxes}
    links = [_link(graph, item.ref, n, item.back) for n in graph.nodes if n.fires for item in n.inputs]
    return boxes, [link for link in links if link.tail in known]


def value(option: Json) -> str:
    """An option as the program would write it."""
    if names_function(option):
        name, bound = short(str(option["path"])), option.get("options", {})
        return f"partial({', '.join([name, *(f'{k}={value(v)}' for k, v in bound.items())])})" if bound else name
    if isinstance(option, list):
        return f"({', '.join(map(value, option))}{',' if len(option) == 1 else ''})"
    return repr(option)


def told(node: Node) -> list[str]:
    """The options that the call wrote, as it wrote them."""
    options = dict(node.options)
    return [f"{name}={value(options[name])}" for name in node.given if name in options]


def _brief(node: Node) -> list[str]:
    """The same, of functions the name only."""
    options = dict(node.options)
    bare = {name: {"path": o["path"]} if names_function(o) else o for name, o in options.items()}
    return [f"{name}={value(bare[name])}" for name in node.given if name in bare]


def clock(node: Node) -> str:
    if node.clock == "update" and node.every > 1:
        return f"every {node.every} updates"
    return f"per {node.clock}" + (f", at most {node.turns} turns" if node.turns is not None else "")


def _argument(argument: Argument) -> Box:
    frozen = argument.kind == "carried"
    note = f"{short(argument.type)}, frozen" if frozen else "source"
    return Box(argument.name, argument.name, note, argument.pool, "frozen" if frozen else "source")


def _node(node: Node) -> Box:
    """The note tells the clock, if it is not plain, and the first options that the call wrote."""
    words = _brief(node)[:2]
    beat = [] if words and node.clock == "group" and node.turns is None else [clock(node)]
    return Box(node.name, node.label, ", ".join([*beat, *words]), node.pool, "node")


def _link(graph: Graph, ref: Ref, head: Node, back: bool) -> Link:
    lag = ""
    if ref.node in graph and not graph[ref.node].fires:
        node = graph[ref.node]
        lag, ref = f", {_way(node)}", node.inputs[0].ref
    maker = graph.producer(ref.node)
    if maker is not None:
        kind: Literal["own", "feedback"] = "own" if maker == head.name and not lag else "feedback"
        return Link(maker, dict(graph.results)[ref.node].output, head.name, ref.node + lag, kind)
    if back:
        return Link(ref.node, ref.output, head.name, "next turn", "own" if ref.node == head.name else "feedback")
    return Link(ref.node, ref.output, head.name, "Weights" if lag else _type(graph, ref), "data")


def _way(node: Node) -> str:
    """How a carried value is read."""
    exactly = "delay" if node.construct == "delay" else "lag"
    return f"{exactly}={node.lag}" + (f", every {node.every} updates" if node.every > 1 else "")


def _type(graph: Graph, ref: Ref) -> str:
    if ref.node in graph:
        return next((short(o.type) for o in graph[ref.node].outputs if o.name == ref.output), "")
    argument = graph.argument(ref.node)
    return short(argument.type) if argument else ""
