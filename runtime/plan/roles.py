"""What the pools of a graph do, as far as the planner knows how to cost it. Pure.

One pool updates the policy, one decodes with its broadcast weights, at most one more holds a model that never changes
(a reference, a teacher, a reward model) and reads each response once; all others are small work on CPUs. Anything else
is refused by name: a plan that leaves work out would be wrong, not approximate.
"""

from dataclasses import dataclass

from penstock.graph.ir import Argument, Graph, Node
from penstock.runtime.plan.place import decodes, samples_of


class PlanError(ValueError):
    """No plan can be made: what was given, what is needed, and where."""


@dataclass(frozen=True)
class Roles:
    """Pools by what they do, and what the graph says of the work.

    `reader` is "" where no frozen model is read; `reads_groups`: it takes each group as it is finished, not a whole
    batch. `cycle` names what follows each other from one update of the policy to the next.
    """

    graph: str
    trainer: str
    generator: str
    reader: str
    small: tuple[str, ...]
    nodes: tuple[tuple[str, tuple[str, ...]], ...]
    samples: int
    lag: int
    epochs: int
    minibatches: int
    reads_groups: bool
    cycle: tuple[str, ...]

    def nodes_of(self, pool: str) -> tuple[str, ...]:
        return dict(self.nodes).get(pool, ())


def roles_of(graph: Graph) -> Roles:
    """Raises PlanError for a graph whose work is not covered, naming the node or the value."""
    decoder = _decoder(graph)
    broadcast = next(
        graph[i.ref.node] for i in decoder.inputs if i.ref.node in graph and graph[i.ref.node].construct == "broadcast"
    )
    policy = graph.argument(broadcast.inputs[0].ref.node)
    maker = graph.producer(policy.name) if policy else None
    if policy is None or maker is None:
        raise _uncovered(graph, f"{decoder.name} decodes with weights that no node updates", "a policy that is trained")
    update = graph[maker]
    frozen = _frozen(graph, policy)
    _check_nodes(graph, policy, update)
    used: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.fires:
            used.setdefault(node.pool, []).append(node.name)
    readers = [n for n in graph.nodes if frozen and any(i.ref.node == frozen.name for i in n.inputs)]
    models = {update.pool, decoder.pool, readers[0].pool if readers else ""}
    if update.pool == decoder.pool:
        raise _uncovered(graph, f"{update.name} and {decoder.name} share pool {update.pool}", "a pool for each")
    options = dict(update.options)
    return Roles(
        graph=graph.name,
        trainer=update.pool,
        generator=decoder.pool,
        reader=readers[0].pool if readers else "",
        small=tuple(pool for pool in used if pool not in models),
        nodes=tuple((pool, tuple(names)) for pool, names in used.items()),
        samples=samples_of(decoder),
        lag=broadcast.lag or 0,
        epochs=int(options.get("epochs", 1)),
        minibatches=int(options.get("minibatches", 1)),
        reads_groups=bool(readers) and all(node.clock == "group" for node in readers),
        cycle=(policy.name, broadcast.name, decoder.name, *(node.name for node in readers), update.name),
    )


def _decoder(graph: Graph) -> Node:
    found = [node for node in graph.nodes if decodes(graph, node)]
    if len(found) != 1:
        names = ", ".join(node.name for node in found) or "none"
        raise _uncovered(graph, f"{len(found)} nodes that decode with broadcast weights ({names})", "exactly one")
    return found[0]


def _frozen(graph: Graph, policy: Argument) -> Argument | None:
    """The one model beside the policy, which never changes."""
    others = [argument for argument in graph.carried if argument.name != policy.name]
    if changing := [argument.name for argument in others if graph.producer(argument.name)]:
        what = f"{', '.join(changing)}: models that change beside {policy.name}"
        raise _uncovered(graph, what, "models beside the policy that are only read")
    if len(others) > 1:
        raise _uncovered(graph, f"the frozen models {', '.join(a.name for a in others)}", "at most one")
    return others[0] if others else None


def _check_nodes(graph: Graph, policy: Argument, update: Node) -> None:
    """Work whose amount the graph does not say, or that the cost model has no formula for."""
    for node in graph.nodes:
        if node.turns is not None:
            raise _uncovered(graph, f"{node.name}, which takes turns with another", "one response per sample")
        if node.construct == "keep":
            raise _uncovered(graph, f"{node.name}, which drops an unknown share of the groups", "no filter")
        if node.construct == "delay":
            raise _uncovered(graph, f"{node.name}, which delays a value", "broadcasts only")
        if node.fires and node.clock == "update" and node.stateful:
            raise _uncovered(graph, f"{node.name}, which gives an update other groups than its own", "each group once")
        reads = any(item.ref.node == policy.name for item in node.inputs)
        if node.fires and reads and node.name != update.name:
            raise _uncovered(graph, f"{node.name}, a further pass over {policy.name}", f"only {update.name} to read it")


def _uncovered(graph: Graph, given: str, needed: str) -> PlanError:
    return PlanError(f"{graph.name}: plans do not cover this program: given {given}, needed {needed}")
