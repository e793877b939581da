"""For an infeasible request, why nothing fits, and the smallest change that makes it feasible. Pure except for the
clock of its searches.

`refuse` says in numbers how much memory each role needs at least, and what would make that role fit. `enough` looks for
a change that makes the whole request fit: no given flags, the fewest hosts of the kind with most memory, or the longest
responses that fit. It names a change only if a search has found a whole plan with it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil, inf
from typing import NamedTuple

from penstock.graph.protocols import num_ranks
from penstock.runtime.cluster.capabilities import Kind, axis_lack, cut_lack
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.cluster.placement import spelled
from penstock.runtime.plan.candidates import (
    FEWEST_SLOTS,
    RESORTS,
    LayoutCandidates,
    NodeGroup,
    Pins,
    sharings,
    trainer_meshes,
)
from penstock.runtime.plan.decode_cost import generator_memory
from penstock.runtime.plan.model_shape import Parallel
from penstock.runtime.plan.roles import Models, PlanError, Roles
from penstock.runtime.plan.search import Search
from penstock.runtime.plan.train_cost import Memory, Trainer, host_moments, trainer_memory
from penstock.runtime.plan.workload import Lengths, Listed, Lognormal

# The codes of a workload that fits nowhere, and of moments that exceed the memory of their host.
NO_FIT, HOST_MEMORY = "no-fit", "host-memory"
MOST_GPUS = 4096
# The shortest responses that are proposed, and the step between proposals, in tokens.
SHORTEST = 64


def check_pins(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> None:
    """Raises PlanError for a given mesh with more ranks than any node group has GPUs, or that no layout can have."""
    largest = max(node_groups, key=lambda nodes: nodes.gpus)
    own = {roles.trainer: candidates.pins.trainer, roles.generator: candidates.pins.generator}
    for pool, axes in {**own, **candidates.pins.beside}.items():
        if axes is None:
            continue
        ranks = num_ranks(axes)
        given = f"--mesh {pool}={spelled(axes)}: given {ranks} ranks"
        kind: Kind = "generator" if pool == roles.generator else "trainer"
        if lack := axis_lack(kind, axes) or cut_lack(kind, candidates.work.shape, axes):
            raise PlanError(f"--mesh {pool}={spelled(axes)} [{lack.code}]: given {lack.given}, needed {lack.needed}")
        if ranks > largest.gpus:
            raise PlanError(f"{given}, needed at most the {largest.gpus} GPUs of kind {largest.kind}")
        if pool == roles.generator:
            known = any(candidates.bases(nodes) for nodes in node_groups)
        else:
            known = any(candidates.cuts(nodes, ranks, axes) for nodes in node_groups if ranks in nodes.sizes)
        if not known:
            needed = (
                "whole hosts, a divisor of one or any part of a single one, and tp within a host or over whole ones"
            )
            raise PlanError(f"{given} for {candidates.work.shape.name}, needed {needed}")


def refuse(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup]) -> PlanError:
    """Make the error for a workload that fits nowhere: a line for each role that does not fit even on all GPUs of a
    kind, or, if each role would fit by itself, how many GPUs each needs."""
    model, total = candidates.work.shape.name, sum(nodes.gpus for nodes in node_groups)
    head = f"{model} does not fit on {total} GPU{'s' * (total > 1)} [{NO_FIT}]"
    free, lines = replace(candidates, pins=Pins()), [head]
    for role, layouts in ((roles.trainer, _trainers), (roles.generator, _generators)):
        found = [(needs, nodes) for nodes in node_groups for needs in layouts(candidates, nodes)]
        if not found:
            raise PlanError(f"{role}: given no layout of {model}, needed heads that tp divides")
        # Prefer a layout that lacks only host memory to one that lacks GPU memory.
        needs, nodes = min(
            found, key=lambda each: (each[0].memory.bytes > each[1].gpu.memory_bytes, each[0].share(each[1]))
        )
        if needs.share(nodes) > 1:
            lacking, where = needs.memory.bytes - nodes.gpu.memory_bytes, "GPU"
            given = f"given {nodes.gpu.memory_bytes / 1e9:.1f} GB of memory on each GPU, needed {needs.memory}"
            if lacking <= 0:
                lacking, where = needs.host_bytes - nodes.host_bytes, "host"
                given = f"given {nodes.host_bytes / 1e9:.1f} GB of memory of each host [{HOST_MEMORY}], "
                given += f"needed {needs.host_bytes / 1e9:.1f} GB for AdamW's moments, which lie there"
            unpinned = partial(layouts, free)
            enough = nodes if _any_fits(unpinned, nodes) else next(_more_hosts(nodes, unpinned), None)
            # More hosts do not help a replica within one host: only larger GPUs do.
            larger = sorted(GPUS.items(), key=lambda kind: kind[1].memory_gib)
            others = (replace(nodes, kind=kind, gpu=gpu.in_hosts_of(nodes.each)) for kind, gpu in larger)
            enough = enough or next((each for each in others if _any_fits(partial(layouts, candidates), each)), None)
            change = f"{lacking / 1e9:.1f} GB are lacking on each {where}"
            if enough:
                change = f"It would fit {f'without {candidates.pins.flags}' if enough is nodes else f'on {enough}'}"
            lines.append(f"{role} ({needs.mesh}): {given}. {change}")
    if len(lines) > 1:
        return PlanError("\n".join(lines))
    states = _states(candidates, node_groups)
    every = [replace(candidates, resorts=replace(candidates.resorts, host_state=on_host)) for on_host in states]
    alone = [n for i in node_groups for n in i.sizes if any(each.trainers(i, n, Models(0)).at(0) for each in every)]
    tables = [(i, candidates.generators(i, i.sizes, None)) for i in node_groups]
    decoding = [n for i, table in tables for n in i.sizes if n in table.gpus]
    if not (alone and decoding):
        most = candidates.work.responses
        return PlanError(f"{head}: given layouts that fit, needed pools of {most} replicas at most")
    needed = f"{min(alone)} GPUs for {roles.trainer} and {min(decoding)} for {roles.generator}"
    return PlanError(f"{head}: needed at least {needed}" + "".join(f", and those of {pool}" for pool in roles.beside))


def enough(roles: Roles, candidates: LayoutCandidates, node_groups: Sequence[NodeGroup], deadline: float) -> str:
    """For a request without a plan, the smallest changes with which it has one, in a sentence; and whether a feature
    that no run has would help. "" if no change that is tried before `deadline` is found to be enough."""
    free, work = replace(candidates, pins=Pins()), candidates.work
    pinned = candidates.pins != Pins()

    def fits(asked: LayoutCandidates, groups: Sequence[NodeGroup]) -> bool:
        """True if a search finds a plan within its grace period."""
        every = (
            replace(asked, resorts=replace(asked.resorts, host_state=on_host)) for on_host in _states(asked, groups)
        )
        searches = (Search(roles, each, tuple(groups)) for each in every)
        return any(search.run(time.monotonic(), second=False).best is not None for search in searches)

    if pinned and fits(free, node_groups):
        return f"All of it would fit without {candidates.pins.flags}"
    shared = not candidates.resorts.cp and fits(replace(free, resorts=RESORTS[-1]), node_groups)
    changes: list[str] = []
    until = (time.monotonic() + deadline) / 2  # the other half is for shorter responses
    widest = max(node_groups, key=lambda nodes: nodes.gpu.memory_bytes * nodes.each)
    others = [nodes for nodes in node_groups if nodes is not widest]
    # Checking only the trainer takes microseconds, and rejects most numbers of hosts that are too few.
    for grown in _more_hosts(widest, partial(_trainers, free)):
        if fits(free, (grown, *others)):
            changes.append(f"on {grown}{f' and without {candidates.pins.flags}' * pinned}")
            break
        if time.monotonic() > until:
            break

    def shorter(longest: int) -> bool:
        # A generator's slot has room for the longest prompt and the longest response.
        slot = max(0, work.slot_tokens - work.lengths.longest + longest) if work.slot_tokens else 0
        asked = replace(candidates, work=replace(work, lengths=_cut(work.lengths, longest), slot_tokens=slot))
        return time.monotonic() < deadline and fits(asked, node_groups)

    if longest := _largest(work.lengths.longest, shorter):
        cut = _cut(work.lengths, longest)
        changes.append(f"with --max-tokens {longest}")
        if isinstance(cut, Lognormal) and cut.mean != work.lengths.mean:
            changes[-1] += f" and --lengths {cut.mean:g},{cut.sigma:g}"
    said = [f"All of it would fit {', or '.join(changes)}"] if changes else []
    if shared:
        said.append("It would fit with sequences that several ranks share (cp), which no run has [mesh-axis]")
    return "\n".join(said)


def _cut(lengths: Lengths, longest: int) -> Lengths:
    """The same lengths, cut at `longest` tokens. A lognormal keeps its mean if the cut is at least twice the mean; else
    its mean is a fourth of the cut, the default for a given --max-tokens."""
    if isinstance(lengths, Listed):
        return Listed(tuple(min(length, longest) for length in lengths.lengths))
    return Lognormal(lengths.mean if longest >= 2 * lengths.mean else longest / 4, lengths.sigma, longest)


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """The most tokens of a response that fit, under `below` and in steps of SHORTEST; 0 if none do."""
    low, high = 0, ceil(below / SHORTEST)  # in steps: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * SHORTEST) else (low, middle)
    return low * SHORTEST


class Needs(NamedTuple):
    """The least memory of a rank with a mesh, and the host memory that the ranks on one host take."""

    memory: Memory
    mesh: Parallel
    host_bytes: float = 0.0

    def share(self, nodes: NodeGroup) -> float:
        """The needed share of the available memory; at most 1 if it fits."""
        return max(self.memory.bytes / nodes.gpu.memory_bytes, self.host_bytes / nodes.host_bytes)


# Yields a role's needs with each of its layouts on a node group.
Layouts = Callable[[NodeGroup], Iterable[Needs]]


def _more_hosts(nodes: NodeGroup, layouts: Layouts) -> Iterator[NodeGroup]:
    """The node group with more hosts, the fewest first, if a role with these layouts fits there by itself. If it does
    not fit on the most hosts, it fits on no fewer: a rank's share shrinks with the number of hosts."""

    def of(count: int) -> NodeGroup:
        return replace(nodes, hosts=tuple(f"host{number}" for number in range(count)))

    most = MOST_GPUS // nodes.each
    if most > len(nodes.hosts) and _any_fits(layouts, of(most)):
        yield from (group for group in map(of, range(len(nodes.hosts) + 1, most + 1)) if _any_fits(layouts, group))


def _states(candidates: LayoutCandidates, groups: Iterable[NodeGroup]) -> list[bool]:
    """The choices of whether AdamW's moments are on the host: first the one with less GPU memory, and only that if the
    memory of no host is known."""
    found = [on_host for on_host in (True, False) if candidates.pins.host_state in (None, on_host)]
    return found if any(nodes.host_bytes < inf for nodes in groups) else found[:1]


def _trainers(candidates: LayoutCandidates, nodes: NodeGroup) -> Iterator[Needs]:
    """A trainer's needs, with each mesh on all GPUs of a node group, or with the given mesh."""
    work, pin, states = candidates.work, candidates.pins.trainer, _states(candidates, (nodes,))
    for gpus in (nodes.gpus,) if pin is None else nodes.sizes:
        for mesh in trainer_meshes(work.shape, nodes, gpus, candidates.resorts):
            if pin not in (None, mesh.axes):
                continue
            for cp, on_host in product(sharings(mesh, candidates.resorts), states):
                trainer = Trainer(
                    work.shape, nodes.gpu, mesh, micro_tokens=max(work.context, candidates.pins.micro_tokens or 0),
                    recompute=max(candidates.recomputes), zero3=mesh.fsdp > 1, cp=cp,
                    host_state=on_host,
                )  # fmt: skip
                memory = trainer_memory(trainer, candidates.models.copies, candidates.snapshots)
                held = host_moments(trainer) * min(gpus, nodes.each) if nodes.host_bytes < inf else 0.0
                yield Needs(memory, mesh, held)


def _generators(candidates: LayoutCandidates, nodes: NodeGroup) -> Iterator[Needs]:
    """A generator's needs, with few slots."""
    for base in candidates.bases(nodes):
        few = replace(base, slots=min(FEWEST_SLOTS, candidates.slots))
        yield Needs(generator_memory(few, candidates.context), base.mesh)


def _any_fits(layouts: Layouts, nodes: NodeGroup) -> bool:
    return any(each.share(nodes) <= 1 for each in layouts(nodes))
