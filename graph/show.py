"""A graph for people and for files: text that reads like the program, Mermaid, and JSON.

`picture` returns boxes and links, as people draw a graph: a broadcast is no box, but the link that feeds weights back.
"""

import json
import textwrap
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from penstock.graph.imports import names_function, short
from penstock.graph.ir import Argument, Graph, Json, Node, Ref


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


def written(node: Node, *, brief: bool = False) -> list[str]:
    """The options that the call wrote, as it wrote them; with `brief`, functions without their own options."""
    options = dict(node.options)
    if brief:
        options = {name: {"path": o["path"]} if names_function(o) else o for name, o in options.items()}
    return [f"{name}={value(options[name])}" for name in node.given if name in options]


def clock(node: Node) -> str:
    if node.clock == "update" and node.every > 1:
        return f"every {node.every} updates"
    parts = f", in parts of {node.accumulate} group{'s' * (node.accumulate != 1)}" if node.accumulate else ""
    return f"per {node.clock}" + (f", at most {node.turns} turns" if node.turns is not None else "") + parts


def _argument(argument: Argument) -> Box:
    frozen = argument.kind == "carried"
    note = f"{short(argument.type)}, frozen" if frozen else "source"
    return Box(argument.name, argument.name, note, argument.pool, "frozen" if frozen else "source")


def _node(node: Node) -> Box:
    """A node's box. Its note has the clock, unless that is plain, and the first options that the call wrote."""
    # More options would make a box too wide.
    words = written(node, brief=True)[:2]
    plain = words and node.clock == "group" and node.turns is None
    note = ", ".join(words if plain else [clock(node), *words])
    return Box(node.name, node.label, note, node.pool, "node")


def _link(graph: Graph, ref: Ref, head: Node, back: bool) -> Link:
    lag = ""
    if ref.node in graph and not graph[ref.node].fires:
        node = graph[ref.node]
        exactly = "delay" if node.construct == "delay" else "lag"
        lag = f", {exactly}={node.lag}" + (f", every {node.every} updates" if node.every > 1 else "")
        lag += f", {node.precision}" if node.precision else ""
        ref = node.inputs[0].ref
    # A value that updates change has no box: the node that makes its next value stands for it.
    maker = graph.producer(ref.node)
    if maker is not None:
        kind: Literal["own", "feedback"] = "own" if maker == head.name and not lag else "feedback"
        return Link(maker, dict(graph.results)[ref.node].output, head.name, ref.node + lag, kind)
    if back:
        return Link(ref.node, ref.output, head.name, "next turn", "own" if ref.node == head.name else "feedback")
    return Link(ref.node, ref.output, head.name, "Weights" if lag else short(graph.type_of(ref)), "data")


WIDTH = 88


def text(graph: Graph, columns: int | None = None) -> str:
    """The graph as a program: each value has the name that its first reader gives it. Comments stand behind the calls,
    or above them where lines would be longer than `columns`."""
    width = min(WIDTH, columns or WIDTH)
    names = _names(graph)
    arguments = [f"{_local(a.name)}: {short(a.type)}" for a in graph.arguments]
    options = [f"{name}={value(v)}" for name, v in graph.options]
    head = f"def {graph.name}({', '.join([*arguments, '*', *options] if options else arguments)}):"
    lines = textwrap.wrap(head, width, subsequent_indent=" " * (len(graph.name) + 5), break_long_words=False)
    if graph.doc:
        quoted, indent = f'"""{graph.doc.splitlines()[0]}"""', " " * 4
        lines += textwrap.wrap(
            quoted, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    # If the last call alone makes the result, it is written into the return statement.
    inline, results = None, dict(graph.results)
    if len(results) == 1 and graph.nodes and graph.arguments[0].name in results:
        last = graph.nodes[-1]
        inline = last if results[graph.arguments[0].name].node == last.name and len(last.outputs) == 1 else None
    # Two nodes that take turns have one statement: that of the speaking node.
    shown = [node for node in graph.nodes if not node.answers]
    calls = [(_statement(graph, n, names, width, returned=n is inline), f"# {_comment(graph, n)}") for n in shown]
    # Align the comments.
    column = max((len(statement[0]) for statement, _ in calls), default=0) + 2
    behind = columns is None or all(column + len(comment) <= columns for _, comment in calls)
    for (first, *rest), comment in calls:
        lines += [f"{first:<{column}}{comment}", *rest] if behind else [f"    {comment}", first, *rest]
    if inline is None:
        returned = [f'"{name}": {names.get(ref, ref)}' for name, ref in graph.results]
        alone = len(results) == 1 and graph.arguments and graph.arguments[0].name in results
        lines.append(f"    return {returned[0].partition(': ')[2] if alone else '{' + ', '.join(returned) + '}'}")
    return "\n".join(lines)


def mermaid(graph: Graph) -> str:
    """The picture in Mermaid's language, as GitHub draws it in a Markdown file."""
    boxes, links = picture(graph)
    ids = {box.name: f"n{i}" for i, box in enumerate(boxes)}
    lines = ["flowchart LR"]
    for number, pool in enumerate(dict.fromkeys(box.pool for box in boxes)):
        lines.append(f'  subgraph p{number}["{pool}"]')
        for box in boxes:
            if box.pool == pool:
                opening, closing = ("[", "]") if box.kind == "node" else ("([", "])")
                lines.append(f'    {ids[box.name]}{opening}"{_escape(box.title)}<br/>{_escape(box.note)}"{closing}')
        lines.append("  end")
    for link in links:
        arrow = "-->" if link.kind == "data" else "-.->"
        lines.append(f'  {ids[link.tail]} {arrow}|"{_escape(link.label)}"| {ids[link.head]}')
    return "\n".join(lines) + "\n"


def dumps(graph: Graph) -> str:
    """The graph as JSON text; `Graph.from_json` makes an equal graph of the parsed text."""
    return json.dumps(graph.to_json(), indent=1, ensure_ascii=False) + "\n"


def _local(name: str) -> str:
    """A name without the prefix that a second graph of a run has."""
    return name.rpartition(".")[2]


def _names(graph: Graph) -> dict[Ref, str]:
    """A variable's name for each value: "next_policy" for the next policy, else the name of its first reader's input;
    if that is taken, its type's name."""
    # A variable with the name of a function would hide the function from later calls.
    functions = {_function(node) for node in graph.nodes}
    names = {Ref(a.name): _local(a.name) for a in graph.arguments}
    results = {ref: f"next_{name}" for name, ref in graph.results if ref not in names}
    called: dict[Ref, str] = {}
    # Only calls name their inputs: those of a filter are numbers, that of a broadcast is `value`.
    for node in graph.nodes:
        for item in node.inputs if node.construct == "call" else ():
            called.setdefault(item.ref, item.name.partition("[")[0])
    for node in graph.nodes:
        for output in node.outputs:
            ref = Ref(node.name, output.name)
            own = f"{_local(node.label)}_{output.name}"
            kept = f"kept_{names.get(node.inputs[int(output.name)].ref)}" if node.construct == "keep" else None
            past = f"past_{names.get(node.inputs[0].ref)}" if node.construct == "delay" else None
            wishes = (results.get(ref), kept, past, called.get(ref), short(output.type).lower(), own)
            names[ref] = next((wish for wish in wishes if wish and wish not in {*names.values(), *functions}), own)
    return names


def _statement(graph: Graph, node: Node, names: dict[Ref, str], width: int, *, returned: bool) -> list[str]:
    """The call's lines, with the options that it wrote; two nodes that take turns are one call."""
    outputs, options = [Ref(node.name, o.name) for o in node.outputs], written(node)
    words = _arguments(node, names)
    function = _function(node)
    if node.turns is not None and (other := _partner(graph, node)) is not None:
        # `given` has the answering node's own inputs, and its options that both nodes have.
        read = [item for item in other.inputs if not item.back and item.ref.node != node.name]
        own = _arguments(replace(other, inputs=tuple(read), given=tuple(item.name for item in read)), names)
        both = {name for name, _ in node.options}
        for option in written(other):
            (own if option.partition("=")[0] in both else options).append(option)
        words = [function, f"{_function(other)}.given({', '.join(own)})" if own else _function(other), *words]
        options.append(f"turns={node.turns}")
        outputs += [Ref(other.name, o.name) for o in other.outputs]
        function = "alternate"
    words += [f"lag={node.lag}"] if not node.fires else []
    words += [f"every={node.every}"] if not node.fires and node.every > 1 else []
    words += [f"precision={node.precision!r}"] if node.precision else []
    targets = ", ".join(names[ref] for ref in outputs)
    start = "    return " if returned else f"    {targets} = " if targets else "    "
    opening = f"{start}{function}("
    words += options
    # Non-breaking spaces keep each argument in one piece.
    body = ", ".join(word.replace(" ", "\xa0") for word in words) + ")"
    wrapped = textwrap.wrap(
        body, width, initial_indent=opening, subsequent_indent=" " * len(opening), break_long_words=False
    )
    return [line.replace("\xa0", " ") for line in wrapped]


def _arguments(node: Node, names: dict[Ref, str]) -> list[str]:
    """The inputs as the call writes them: by place, or by keyword after one that was left out; a list as a list."""
    words, lists = [], dict[str, list[str]]()
    for item in node.inputs:
        if item.back:
            continue
        name, (parameter, several, _) = names.get(item.ref, str(item.ref)), item.name.partition("[")
        if several:
            lists.setdefault(parameter, []).append(name)
        else:
            words.append(f"{item.name}={name}" if item.name in node.given else name)
    return [*words, *(f"{parameter}=[{', '.join(values)}]" for parameter, values in lists.items())]


def _comment(graph: Graph, node: Node) -> str:
    named = [] if node.name == _function(node) else [node.label]
    if not node.fires:
        return ", ".join([*named, f"to {node.pool}"])
    other = _partner(graph, node)
    pools = dict.fromkeys([node.pool, other.pool] if other is not None else [node.pool])
    return ", ".join(
        [*named, " and ".join(pools), clock(node), *(["drops groups"] if node.construct == "keep" else [])]
    )


def _function(node: Node) -> str:
    return short(node.op) if node.construct == "call" else node.construct


def _partner(graph: Graph, node: Node) -> Node | None:
    """The answering node of a speaking node; None for any other node."""
    heard = [i.ref.node for i in node.inputs if i.back and i.ref.node != node.name]
    return graph[heard[0]] if heard and heard[0] in graph else None


def _escape(words: str) -> str:
    return escape(words, quote=False).replace('"', "&quot;")
