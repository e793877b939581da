"""What a rank needs to know before it is set up, and what graphs and plan say about the names in it.

It needs no torch: `run_config` makes it, also for the controller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from penstock.graph.context import Context
from penstock.graph.imports import load
from penstock.graph.ir import Firing, Graph, Node
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.record.timeline import pool_of
from penstock.runtime.tensor.shm import owner_of


@dataclass(frozen=True, slots=True)
class InputRead:
    """Where an input comes from that firings make: output `output` of `node`.

    `joined`: from the firings of all groups of the batch. Otherwise from that of the reader's own group or update; in a
    bounded cycle at the same turn (`at_turn`) or at the previous turn (`back`).
    """

    name: str
    node: str
    output: str
    joined: bool
    at_turn: bool
    back: bool

    def firings(self, firing: Firing, groups: Sequence[int]) -> list[Firing]:
        """The firings whose output `firing` reads, on `groups`; none if it would be the turn before the first."""
        if self.joined:
            return [Firing(self.node, group) for group in groups]
        turn = firing.turn - 1 if self.back else firing.turn if self.at_turn else 0
        return [] if turn < 0 else [Firing(self.node, firing.index, turn)]


def input_reads(graph: Graph, node: Node) -> tuple[InputRead, ...]:
    """The inputs of a node that firings make, in order; without carried values and published weights."""
    # Sources make a value for each group, as per-group nodes do.
    clocks = {n.name: n.clock for n in graph.nodes if n.fires} | {source.name: "group" for source in graph.sources}
    return tuple(
        InputRead(
            item.name,
            item.ref.node,
            item.ref.output,
            joined=node.clock == "update" and clocks[item.ref.node] == "group",
            at_turn=node.answers and item.ref.node in graph and graph[item.ref.node].turns is not None,
            back=item.back,
        )
        for item in node.inputs
        if item.ref.node in clocks
    )


@dataclass(frozen=True)
class RankSetup:
    """`contexts` has one for each node and argument that the rank may hold; `restore` is a checkpoint's folder.

    `offload`: whether values leave the device between updates. "auto": those that can; "on": a value that updates
    change must be able to. `patience` is the seconds for each move. `run` is the run's id over all its lives, as in
    `config.json`: a shard of another run's checkpoint is refused. `elastic` are the replicas that may be lost. Of every
    `batch` consecutive groups, texts and rewards of the first `save_samples` are kept.
    """

    graphs: tuple[Graph, ...]
    plan: Plan
    replica: str
    rank: int
    contexts: Mapping[str, Context]
    folder: Path
    restore: Path | None = None
    offload: Literal["auto", "on", "off"] = "off"
    patience: float = 60.0
    run: str = ""
    elastic: frozenset[str] = frozenset()
    batch: int = 1
    save_samples: int = 0

    @property
    def pool(self) -> str:
        return pool_of(self.replica)

    @property
    def holds(self) -> tuple[str, ...]:
        return next(p.holds for p in self.plan.pools if p.name == self.pool)

    @cached_property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        """For each node and argument, its outputs by name, with the import path of the declared class."""
        found: dict[str, Mapping[str, str]] = {}
        for graph in self.graphs:
            found |= {a.name: {"out": a.type} for a in graph.arguments}
            found |= {n.name: {o.name: o.type for o in n.outputs} for n in graph.nodes}
        return found

    @cached_property
    def makes(self) -> Mapping[str, Mapping[str, str]]:
        """For each node that makes next values of carried values: the output by the value's name."""
        found: dict[str, dict[str, str]] = {}
        for graph in self.graphs:
            for name, ref in graph.results:
                found.setdefault(ref.node, {})[name] = ref.output
        return found

    @cached_property
    def exported(self) -> frozenset[str]:
        """Nodes and sources of this rank whose outputs other processes read."""
        # With several replicas, one may read what another has made.
        several = len(next(p.replicas for p in self.plan.pools if p.name == self.pool)) > 1
        names = set()
        for graph in self.graphs:
            for node in graph.nodes:
                read_elsewhere = node.fires and (several or node.name not in self.holds)
                names |= {i.ref.node for i in node.inputs if read_elsewhere and i.ref.node in self.holds}
        return frozenset(names)

    @cached_property
    def asked_from_afar(self) -> bool:
        """True if ranks on other hosts may read values of this rank."""
        # A server for other hosts costs a thread and a port: it is started only where it is needed.
        home = self.plan.replica(self.replica).ranks[self.rank].host
        readers = {
            self.plan.pool_of(node.name)
            for graph in self.graphs
            for node in graph.nodes
            if node.fires and any(item.ref.node in self.exported for item in node.inputs)
        }
        if self.exported:
            readers.add(self.plan.pool_of(self.holds[0]))  # a paused firing may go on in another replica
        return any(rank.host != home for pool in readers for replica in pool.replicas for rank in replica.ranks)

    @cached_property
    def perishable(self) -> frozenset[str]:
        """The owners of values that may be lost before this replica has read them: ranks of replicas that may be lost,
        except those on this replica's host, if it has a single one."""
        home = self.plan.replica(self.replica).hosts
        ranks = [(r.name, n, one.host) for r in self.plan.replicas for n, one in enumerate(r.ranks)]
        return frozenset(owner_of(name, n) for name, n, host in ranks if name in self.elastic and home != (host,))

    def declared(self, firing: Firing, output: str) -> type:
        """The class that the graph declares for a value. Classes come from the graph, never from a message."""
        path = self.outputs[firing.node][output]
        found = load(path)
        if not isinstance(found, type):
            raise TypeError(f"{path}: given a {type(found).__name__}, needed the class of an edge")
        return found
