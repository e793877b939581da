"""Why nothing fits, and for an infeasible request the smallest change that makes it feasible. Pure but for the clock of
its searches.

`refuse` has each role's least memory and what would make that role fit, in numbers. `Enough` looks for what would make
all of it fit: no given meshes, the fewest hosts of the kind with most memory, or the longest responses of half, a
quarter … of the length. Each is named only where a search has found a whole plan.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.graph.protocols import num_ranks
from penstock.runtime.cluster.placement import spelled
from penstock.runtime.plan.candidates import FEWEST_SLOTS, LayoutCandidates, NodeGroup, Pins, trainer_meshes
from penstock.runtime.plan.memory import (
    Memory,
    Misfit,
    check_generator,
    check_trainer,
    generator_memory,
    trainer_memory,
)
from penstock.runtime.plan.roles import AskedError, Models, PlanError, Roles
from penstock.runtime.plan.search import Search
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.workload import Lengths, Listed, Lognormal


def check_pins(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> None:
    """Raises PlanError for a mesh of more ranks than any island has GPUs, or that no layout has."""
    largest = max(node_groups, key=lambda nodes: nodes.gpus)
    own = {roles.trainer: candidates.pins.trainer, roles.generator: candidates.pins.generator}
    for pool, axes in {**own, **candidates.pins.beside}.items():
        if axes is None:
            continue
        ranks = num_ranks(axes)
        given = f"--mesh {pool}={spelled(axes)}: given {ranks} ranks"
        if ranks > largest.gpus:
            raise AskedError(f"{given}, needed at most the {largest.gpus} GPUs of kind {largest.kind}")
        if pool == roles.generator:
            known = any(candidates.bases(nodes) for nodes in node_groups)
        else:
            known = any(candidates.cuts(nodes, ranks, axes) for nodes in node_groups if ranks in nodes.sizes)
        if not known:
            needed = "whole hosts, a divisor of one or any part of a single one, tp within a host, "
            needed += "and heads and layers that it divides"
            raise AskedError(f"{given} for {candidates.work.shape.name}, needed {needed}")


def refuse(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> PlanError:
    """The error for a workload that fits nowhere: a line for each role that does not fit even on all GPUs of a kind,
    or, where each would by itself, how many GPUs each needs."""
    misfits = [_trainer(roles, candidates, node_groups), _generator(roles, candidates, node_groups)]
    lines = [str(misfit) for misfit in misfits if misfit is not None]
    total = sum(nodes.gpus for nodes in node_groups)
    head = f"{candidates.work.shape.name} does not fit on {total} GPU{'s' * (total > 1)}"
    if lines:
        return PlanError("\n".join((head, *lines)))
    trains = [n for i in node_groups for n in i.sizes if candidates.trainers(i, n, Models(0)).at(0)]
    decodes = [n for i in node_groups for n in i.sizes if n in candidates.dedicated(i).gpus]
    if not (trains and decodes):
        return PlanError(
            f"{head}: given layouts that fit, needed pools of {candidates.work.responses} replicas at most"
        )
    needed = f"{min(trains)} GPUs for {roles.trainer} and {min(decodes)} for {roles.generator}"
    return PlanError(f"{head}: needed at least {needed}" + "".join(f", and those of {pool}" for pool in roles.beside))


def _trainer(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> Misfit | None:
    """Of the layout that needs least memory; None if it fits."""
    sizes = [(i, n) for i in node_groups for n in ((i.gpus,) if candidates.pins.trainer is None else i.sizes)]
    cuts = [cut for nodes, gpus in sizes for cut in candidates.cuts(nodes, gpus, candidates.pins.trainer)]
    found = [trainer for cut in cuts for trainer in cut.layouts()]
    if not found:
        raise PlanError(
            f"{roles.trainer}: given no layout of {candidates.work.shape.name}, needed heads that tp divides"
        )
    least = min(found, key=lambda trainer: trainer_memory(trainer).bytes / trainer.gpu.memory_bytes)
    sharded = replace(least, zero3=True)
    copies = Memory({"copies": trainer_memory(sharded, roles.models.copies).parts["copies"]})
    return check_trainer(sharded, roles.trainer, copies if roles.models.copies else None, candidates.work.context)


def _generator(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> Misfit | None:
    best, share = None, inf
    for nodes in node_groups:
        for base in candidates.bases(nodes):
            least = replace(base, slots=min(FEWEST_SLOTS, candidates.slots))
            needed = generator_memory(least, candidates.context).bytes / nodes.gpu.memory_bytes
            if needed < share:
                best, share = least, needed
    if best is None:
        raise PlanError(
            f"{roles.generator}: given no layout of {candidates.work.shape.name}, needed heads that tp divides"
        )
    return check_generator(best, candidates.context, roles.generator)


MOST_GPUS = 4096
SHORTEST = 64
"""Tokens of a response."""


@dataclass(frozen=True)
class Enough:
    """A question that has no plan, and until when others like it may be asked."""

    roles: Roles
    candidates: LayoutCandidates
    node_groups: Sequence[NodeGroup]
    deadline: float

    def __str__(self) -> str:
        """ "" where nothing that is tried is known to be enough."""
        if self.candidates.pins != Pins() and self._fits(self._free, self.node_groups):
            return "All of it would fit without --mesh"
        ways = [way for way in (self._hosts(), self._shorter()) if way]
        return f"All of it would fit {', or '.join(ways)}" if ways else ""

    @property
    def _free(self) -> LayoutCandidates:
        return replace(self.candidates, pins=Pins())

    def _hosts(self) -> str:
        widest = max(self.node_groups, key=lambda nodes: nodes.gpu.memory_bytes * nodes.each)
        others = [nodes for nodes in self.node_groups if nodes is not widest]
        for count in range(len(widest.hosts) + 1, MOST_GPUS // widest.each + 1):
            grown = replace(widest, hosts=tuple(f"host{number}" for number in range(count)))
            if self._trains(grown) and self._fits(self._free, (grown, *others)):
                without = " and without --mesh" if self.candidates.pins != Pins() else ""
                return f"on {count} hosts of {widest.each} {widest.kind}, {grown.gpus} GPUs{without}"
            if time.monotonic() > self.deadline:
                break
        return ""

    def _shorter(self) -> str:
        lengths, longest = self.candidates.work.lengths, self.candidates.work.lengths.longest // 2
        while longest >= SHORTEST and (cut := _cut(lengths, longest)) and time.monotonic() < self.deadline:
            if self._fits(replace(self.candidates, work=replace(self.candidates.work, lengths=cut)), self.node_groups):
                return f"with --max-tokens {longest}"
            longest //= 2
        return ""

    def _trains(self, nodes: NodeGroup) -> bool:
        """Whether a trainer fits on all GPUs of a node group, alone."""
        work, copies = self.candidates.work, self.candidates.models.copies
        for mesh in trainer_meshes(work.shape, nodes, nodes.gpus):
            least = Trainer(work.shape, nodes.gpu, mesh, micro_tokens=work.context, zero3=mesh.fsdp > 1)
            if trainer_memory(least, copies).bytes <= nodes.gpu.memory_bytes:
                return True
        return False

    def _fits(self, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> bool:
        """Whether there is any plan, as far as a search finds one in its grace."""
        return Search(self.roles, candidates, tuple(node_groups)).run(time.monotonic(), second=False).best is not None


def _cut(lengths: Lengths, longest: int) -> Lengths | None:
    """None where so little is left that they would be other responses."""
    if isinstance(lengths, Listed):
        return Listed(tuple(min(length, longest) for length in lengths.lengths))
    return Lognormal(lengths.mean, lengths.sigma, longest) if 2 * lengths.mean <= longest else None
