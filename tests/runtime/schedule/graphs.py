"""Graphs and plans for the scheduler's tests, named after what programs trace to, and random ones."""

from collections.abc import Mapping, Sequence
from random import Random

from penstock.graph.ir import Argument, Clock, Graph, Input, Node, Output, Ref
from penstock.runtime.plan.plan import Plan, Pool, Rank, Replica

POLICY, ITEM, WEIGHTS = "tests:Policy", "tests:Item", "penstock.graph.types:Weights"


def call(name: str, reads: Sequence[str], pool: str = "scorer", clock: Clock = "group", stateful: bool = False) -> Node:
    """A node that reads the default output of each name in `reads`."""
    inputs = tuple(Input(f"x{i}", ITEM, Ref(r)) for i, r in enumerate(reads))
    return Node(name, f"tests:{name}", inputs, (Output("out", ITEM),), pool=pool, clock=clock, stateful=stateful)


def broadcast(name: str, carried: str, lag: int, pool: str = "generator") -> Node:
    inputs = (Input("value", POLICY, Ref(carried)),)
    outputs = (Output("out", WEIGHTS),)
    return Node(name, "broadcast", inputs, outputs, pool=pool, clock="update", construct="broadcast", lag=lag)


def graph(name: str, carried: Mapping[str, str], sources: Sequence[str], nodes: Sequence[Node]) -> Graph:
    """`carried` maps each carried value to the node that makes its next value, or to itself if it never changes."""
    arguments = [Argument(c, "carried", POLICY, "tests:make", "trainer") for c in carried]
    arguments += [Argument(s, "source", ITEM, "tests:open", "generator") for s in sources]
    results = tuple((c, Ref(maker)) for c, maker in carried.items())
    return Graph(name, f"tests:{name}", tuple(arguments), tuple(nodes), results)


def aipo(lag: int = 1) -> Graph:
    nodes = (
        broadcast("broadcast", "policy", lag),
        call("generate", ["prompts", "broadcast"], "generator"),
        call("score", ["generate"]),
        call("advantage", ["score"]),
        call("update", ["policy", "generate", "advantage"], "trainer", "update"),
    )
    return graph("aipo", {"policy": "update"}, ["prompts"], nodes)


def sft() -> Graph:
    nodes = (call("pack", ["texts"]), call("update", ["policy", "pack"], "trainer", "update"))
    return graph("sft", {"policy": "update"}, ["texts"], nodes)


def evaluate() -> Graph:
    """The policy is returned as it is; the names are those of an evaluation beside `aipo`."""
    nodes = (
        broadcast("evaluate.broadcast", "policy", 0),
        call("evaluate.generate", ["evaluate.prompts", "evaluate.broadcast"], "generator"),
        call("evaluate.score", ["evaluate.generate"]),
        call("evaluate.accuracy", ["evaluate.score"], "trainer", "update"),
    )
    return graph("evaluate", {"policy": "policy"}, ["evaluate.prompts"], nodes)


def actor_critic(lag: int = 1) -> Graph:
    """Two carried values that change, one that does not, and a per-update value between the two updates."""
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
    """The pools that the labels ask for, or what `merge` puts in their place; capacity 1 in the trainer, else 4."""
    merge = merge or {}
    holds: dict[str, list[str]] = {}
    items: list[Argument | Node] = [*graph.arguments, *(n for n in graph.nodes if n.construct == "call")]
    for item in items:
        holds.setdefault(merge.get(item.pool, item.pool), []).append(item.name)

    def pool(name: str) -> Pool:
        room = (capacity or {}).get(name, 1 if name == "trainer" else 4)
        count = (replicas or {}).get(name, 1)
        return Pool(
            name, tuple(holds[name]), tuple(Replica(f"{name}/{i}", (Rank(),) * ranks, room) for i in range(count))
        )

    return Plan(tuple(pool(name) for name in holds))


def random_graph(rng: Random, lags: Sequence[int], update_lags: Sequence[int]) -> Graph:
    """One to four group nodes, at most two carried values with an update each, and perhaps values between them.

    `lags` are those of per-group readers of weights, `update_lags` of per-update ones.
    """
    changing = ["policy", "critic"][: rng.choice([1, 1, 2])]
    carried = {c: f"update_{c}" for c in changing}
    if frozen := rng.random() < 0.3:
        carried["reference"] = "reference"
    sources = ["prompts", "images"][: rng.choice([1, 1, 1, 2])]
    weightless = rng.random() < 0.15
    nodes: list[Node] = []

    def weights(pool: str, lags: Sequence[int] = lags) -> str:
        name = f"broadcast_{len(nodes)}"
        nodes.append(broadcast(name, rng.choice(changing), rng.choice(lags), pool))
        return name

    values = list(sources)
    unread = set(sources)
    for index in range(rng.randint(1, 4)):
        reads = set(sources) if index == 0 else set(rng.sample(values, min(len(values), rng.choice([1, 1, 2]))))
        pool = "generator" if index == 0 else rng.choice(["generator", "scorer", "trainer"])
        edges = []
        if not weightless and (index == 0 or rng.random() < 0.25):
            edges.append(weights(pool))
        if frozen and pool == "trainer":
            edges.append("reference")
        elif frozen and not weightless and rng.random() < 0.3:
            nodes.append(broadcast(f"reference_{len(nodes)}", "reference", 0, pool))
            edges.append(nodes[-1].name)
        nodes.append(call(f"group_{index}", [*sorted(reads), *edges], pool, stateful=rng.random() < 0.15))
        values.append(f"group_{index}")
        unread = (unread - reads) | {f"group_{index}"}
    between: list[str] = []
    if rng.random() < 0.4:
        reads = {rng.choice(values)}
        edges = [rng.choice(changing)] if rng.random() < 0.6 else []
        pool = "trainer" if edges or weightless else rng.choice(["generator", "scorer", "trainer"])
        if not weightless and rng.random() < 0.5:
            edges.append(weights(pool, update_lags))
        nodes.append(call("between", [*sorted(reads), *edges], pool, "update", rng.random() < 0.3))
        between, unread = ["between"], unread - reads
    if rng.random() < 0.3:
        # One whose output nobody reads: it reports figures.
        edges = [rng.choice(changing)] if weightless or rng.random() < 0.5 else []
        pool = "trainer" if edges else rng.choice(["generator", "scorer"])
        edges = edges or [weights(pool, update_lags)]
        nodes.append(call("watch", [rng.choice(values), *edges], pool, "update"))
    for name in changing:
        chained = [f"update_{changing[0]}"] if name != changing[0] and rng.random() < 0.4 else []
        nodes.append(call(f"update_{name}", [name, *sorted(unread), *between, *chained], "trainer", "update"))
        unread = {rng.choice(values)}
    return graph("random", carried, sources, nodes)


def random_plan(rng: Random, graph: Graph) -> Plan:
    """Up to 2 x 2 ranks a pool; labels kept, some merged, or everything on one replica."""
    merge = rng.choice(
        [{}, {}, {"scorer": "generator"}, {"scorer": "trainer"}, {"generator": "trainer", "scorer": "trainer"}]
    )
    pools = ("generator", "scorer", "trainer")
    replicas = {p: 1 if p == "trainer" else rng.choice([1, 2]) for p in pools}
    capacity = {p: rng.choice([1, 1, 2]) if p == "trainer" else rng.choice([1, 2, 5]) for p in pools}
    return place(graph, replicas, capacity, rng.choice([1, 2]), merge)
