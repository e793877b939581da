"""Why nothing fits: each role's least memory and what would make it fit, in numbers. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from penstock.graph.sharding import num_ranks
from penstock.runtime.plan.fit import Misfit, check_generator, check_trainer
from penstock.runtime.plan.islands import Island
from penstock.runtime.plan.layouts import FEWEST_SLOTS
from penstock.runtime.plan.memory import Memory, generator_memory, trainer_memory
from penstock.runtime.plan.meshes import spelled
from penstock.runtime.plan.roles import AskedError, Models, PlanError, Roles
from penstock.runtime.plan.sides import Sides


def check_pins(roles: Roles, sides: Sides, islands: Sequence[Island]) -> None:
    """Raises PlanError for a mesh of more ranks than any island has GPUs, or that no layout has."""
    largest = max(islands, key=lambda island: island.gpus)
    own = {roles.trainer: sides.pins.trainer, roles.generator: sides.pins.generator}
    for pool, axes in {**own, **sides.pins.beside}.items():
        if axes is None:
            continue
        ranks = num_ranks(axes)
        given = f"--mesh {pool}={spelled(axes)}: given {ranks} ranks"
        if ranks > largest.gpus:
            raise AskedError(f"{given}, needed at most the {largest.gpus} GPUs of kind {largest.kind}")
        if pool == roles.generator:
            known = any(sides.decoding.bases(island) for island in islands)
        else:
            known = any(True for i in islands if ranks in i.sizes for _ in sides.candidates.on(i, ranks, axes))
        if not known:
            needed = "whole hosts, a divisor of one or any part of a single one, tp within a host, "
            needed += "and heads and layers that it divides"
            raise AskedError(f"{given} for {sides.work.shape.name}, needed {needed}")


def refuse(roles: Roles, sides: Sides, islands: Sequence[Island]) -> PlanError:
    """The error for a workload that fits nowhere: a line for each role that does not fit even on all GPUs of a kind,
    or, where each would by itself, how many GPUs each needs."""
    misfits = [_trainer(roles, sides, islands), _generator(roles, sides, islands)]
    lines = [str(misfit) for misfit in misfits if misfit is not None]
    total = sum(island.gpus for island in islands)
    head = f"{sides.work.shape.name} does not fit on {total} GPU{'s' * (total > 1)}"
    if lines:
        return PlanError("\n".join((head, *lines)))
    trains = [n for i in islands for n in i.sizes if sides.training.trainers(i, n, Models(0))]
    decodes = [n for i in islands for n in i.sizes if n in sides.decoding.own(i).block.gpus]
    if not (trains and decodes):
        return PlanError(f"{head}: given layouts that fit, needed pools of {sides.work.responses} replicas at most")
    needed = f"{min(trains)} GPUs for {roles.trainer} and {min(decodes)} for {roles.generator}"
    return PlanError(f"{head}: needed at least {needed}" + "".join(f", and those of {pool}" for pool in roles.beside))


def _trainer(roles: Roles, sides: Sides, islands: Sequence[Island]) -> Misfit | None:
    """Of the layout that needs least memory; None if it fits."""
    sizes = [(i, n) for i in islands for n in ((i.gpus,) if sides.pins.trainer is None else i.sizes)]
    pin, made = sides.pins.trainer, sides.candidates
    found = [trainer for island, gpus in sizes for trainer in made.on(island, gpus, pin)]
    if not found:
        raise PlanError(f"{roles.trainer}: given no layout of {sides.work.shape.name}, needed heads that tp divides")
    least = min(found, key=lambda trainer: trainer_memory(trainer).bytes / trainer.gpu.memory_bytes)
    sharded = replace(least, zero3=True)
    copies = Memory({"copies": trainer_memory(sharded, roles.models.copies).parts["copies"]})
    return check_trainer(sharded, roles.trainer, copies if roles.models.copies else None, sides.work.context)


def _generator(roles: Roles, sides: Sides, islands: Sequence[Island]) -> Misfit | None:
    best, share = None, inf
    for island in islands:
        for base in sides.decoding.bases(island):
            least = replace(base, slots=min(FEWEST_SLOTS, sides.slots))
            needed = generator_memory(least, sides.decoding.context).bytes / island.gpu.memory_bytes
            if needed < share:
                best, share = least, needed
    if best is None:
        raise PlanError(f"{roles.generator}: given no layout of {sides.work.shape.name}, needed heads that tp divides")
    return check_generator(best, sides.decoding.context, roles.generator)
