"""Graphs and plans for the scheduler's tests: builders, and examples named after the programs that they resemble."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.graph.ir import Argument, Clock, Graph, Input, Node, Output, Ref
from penstock.runtime.cluster.placement import Plan, Pool, Rank, Replica

POLICY, ITEM, WEIGHTS = "tests:Policy", "tests:Item", "penstock.graph.types:Weights"


def call(
    name: str,
    reads: Sequence[str],
    pool: str = "scorer",
    clock: Clock = "group",
    stateful: bool = False,
    every: int = 1,
    accumulate: int = 0,
) -> Node:
    """A node that reads the default output of each name in `reads`."""
    inputs = tuple(Input(f"x{i}", ITEM, Ref(r)) for i, r in enumerate(reads))
    out = (Output("out", ITEM),)
    more = {"pool": pool, "clock": clock, "stateful": stateful, "every": every, "accumulate": accumulate}
    return Node(name, f"tests:{name}", inputs, out, **more)  # type: ignore[arg-type]


def broadcast(name: str, carried: str, lag: int, pool: str = "generator", every: int = 1) -> Node:
    read = replace(call(name, [carried], pool, "update", every=every), outputs=(Output("out", WEIGHTS),))
    return replace(read, op="broadcast", construct="broadcast", lag=lag)


def delay(name: str, carried: str, lag: int) -> Node:
    return replace(call(name, [carried], "trainer", "update"), op="delay", construct="delay", lag=lag)


def keep(name: str, reads: Sequence[str], pool: str = "scorer") -> Node:
    """A filter of the values in `reads`."""
    outputs = tuple(Output(f"{i}" if i else "out", ITEM) for i in range(len(reads)))
    return replace(call(name, reads, pool), op="keep", construct="keep", outputs=outputs)


def alternate(
    speak: str,
    answer: str,
    reads: Sequence[str],
    turns: int,
    pool: str = "generator",
    answers: str = "environment",
    own: Sequence[str] = (),
    *,
    recalls: bool = False,
) -> tuple[Node, Node]:
    """Two nodes in a bounded cycle, as traced: the second one reads the first one's output, inputs of its `own`, and,
    if it `recalls`, its output of the previous turn."""
    said, heard = call(speak, reads, pool), call(answer, [speak, *own], answers)
    back = tuple(Input(f"back_{name}", ITEM, Ref(name), back=True) for name in (speak, answer))
    earlier = back[1:] if recalls else ()
    return (
        replace(said, inputs=said.inputs + back, turns=turns),
        replace(heard, inputs=heard.inputs + earlier, turns=turns),
    )


def graph(name: str, carried: Mapping[str, str], sources: Sequence[str], nodes: Sequence[Node]) -> Graph:
    """`carried` maps each carried value to the node that makes its next value, or to itself if it never changes."""
    arguments = [Argument(c, "carried", POLICY, "tests:make", "trainer") for c in carried]
    arguments += [Argument(s, "source", ITEM, "tests:open", "generator") for s in sources]
    results = tuple((c, Ref(maker)) for c, maker in carried.items())
    return Graph(name, f"tests:{name}", tuple(arguments), tuple(nodes), results)


def aipo(lag: int = 1, accumulate: int = 0) -> Graph:
    nodes = (
        broadcast("broadcast", "policy", lag),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate"]),
        call("advantage", ["score"]),
        call("update", ["policy", "generate", "advantage"], "trainer", "update", accumulate=accumulate),
    )
    return graph("aipo", {"policy": "update"}, ["prompts"], nodes)


def sft() -> Graph:
    nodes = (call("pack", ["texts"]), call("update", ["policy", "pack"], "trainer", "update"))
    return graph("sft", {"policy": "update"}, ["texts"], nodes)


def evaluate() -> Graph:
    """The policy is returned unchanged; the names are those of an evaluation next to `aipo`."""
    nodes = (
        broadcast("evaluate.broadcast", "policy", 0),
        call("evaluate.generate", ["evaluate.prompts", "evaluate.broadcast"], "generator"),
        call("evaluate.score", ["evaluate.generate"]),
        call("evaluate.accuracy", ["evaluate.score"], "trainer", "update"),
    )
    return graph("evaluate", {"policy": "policy"}, ["evaluate.prompts"], nodes)


def actor_critic(lag: int = 1) -> Graph:
    """Two carried values that change, a fixed one, and a per-update value between the two updates."""
    nodes = (
        broadcast("broadcast", "policy", lag),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate"]),
        call("refer", ["generate", "reference"], "trainer"),
        call("targets", ["critic", "generate", "score"], "trainer", "update"),
        call("update_policy", ["policy", "generate", "refer", "targets"], "trainer", "update"),
        call("update_critic", ["critic", "generate", "targets"], "trainer", "update"),
    )
    carried = {"policy": "update_policy", "critic": "update_critic", "reference": "reference"}
    return graph("actor_critic", carried, ["prompts"], nodes)


def place(
    graph: Graph,
    replicas: Mapping[str, int] | None = None,
    capacity: Mapping[str, int] | None = None,
    ranks: int = 1,
    merge: Mapping[str, str] | None = None,
) -> Plan:
    """Pools by label, or by `merge` of the label; the trainer has capacity 1, others 4."""
    holds: dict[str, list[str]] = {}
    items: list[Argument | Node] = [*graph.arguments, *(n for n in graph.nodes if n.fires)]
    for item in items:
        holds.setdefault((merge or {}).get(item.pool, item.pool), []).append(item.name)
    pools = []
    for name, held in holds.items():
        room, count = (capacity or {}).get(name, 1 if name == "trainer" else 4), (replicas or {}).get(name, 1)
        made = tuple(Replica(f"{name}/{i}", (Rank(),) * ranks, room) for i in range(count))
        pools.append(Pool(name, tuple(held), made))
    return Plan(tuple(pools))
