"""What does not fit: the numbers, and the smallest change that would. Pure.

Changes are tried from the cheapest to the dearest; of each the least that fits is named. Only if none alone does, more
memory is: so many GB.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.gpus import HOST, Gpu
from penstock.runtime.plan.memory import Memory, generator_memory, slots_that_fit, trainer_memory
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.shape import Shape
from penstock.runtime.plan.training import Trainer

MOST_TIMES = 32
"""How much larger an axis may be."""


@dataclass(frozen=True)
class Misfit:
    """A role that does not fit on its GPUs, laid out so. `change` is what would make it fit."""

    role: str
    mesh: Parallel
    needed: Memory
    available: float
    change: str

    def __str__(self) -> str:
        given = f"{self.available / 1e9:.1f} GB of memory on each GPU"
        return f"{self.role} ({self.mesh}): given {given}, needed {self.needed}. {self.change}"


def check_trainer(
    trainer: Trainer, role: str = "trainer", beside: Memory | None = None, shortest: int = 256
) -> Misfit | None:
    """None if it fits; `beside` is what else is on the same GPUs. No micro-batch has less than `shortest` tokens."""
    needed, room = _total(trainer_memory(trainer), beside), trainer.gpu.memory_bytes
    if needed.bytes <= room:
        return None
    for words, changed in _trainer_changes(trainer, shortest):
        if _total(trainer_memory(changed), beside).bytes <= room:
            return Misfit(role, trainer.mesh, needed, room, f"It would fit with {words}")
    return Misfit(role, trainer.mesh, needed, room, _more(needed, room))


def check_generator(
    generator: Generator, context: float, role: str = "generator", beside: Memory | None = None, arenas: int = 2
) -> Misfit | None:
    """None if all slots fit, with `context` tokens in each on average."""
    needed = _total(generator_memory(generator, context, arenas=arenas), beside)
    room = generator.gpu.memory_bytes
    if needed.bytes <= room:
        return None
    for words, changed in _generator_changes(generator, context, arenas, beside):
        if _total(generator_memory(changed, context, arenas=arenas), beside).bytes <= room:
            return Misfit(role, generator.mesh, needed, room, f"It would fit with {words}")
    return Misfit(role, generator.mesh, needed, room, _more(needed, room))


def _total(own: Memory, beside: Memory | None) -> Memory:
    return own if beside is None else own + beside


def _more(needed: Memory, room: float) -> str:
    return f"No single change makes it fit; {(needed.bytes - room) / 1e9:.1f} GB are lacking on each GPU"


def _trainer_changes(trainer: Trainer, shortest: int) -> Iterator[tuple[str, Trainer]]:
    if trainer.recompute < 1:
        yield "all activations recomputed", replace(trainer, recompute=1.0)
    tokens = trainer.micro_tokens // 2
    while tokens >= shortest:
        yield f"micro-batches of {tokens} tokens", replace(trainer, micro_tokens=tokens)
        tokens //= 2
    if not trainer.zero3 and trainer.mesh.fsdp > 1:
        yield "weights sharded, too (zero3)", replace(trainer, zero3=True)
    dp, fsdp = trainer.mesh.dp, trainer.mesh.fsdp
    for part in (part for part in range(2, dp + 1) if dp % part == 0):
        mesh = replace(trainer.mesh, dp=dp // part, fsdp=fsdp * part)
        yield f"fsdp {mesh.fsdp} instead of {fsdp}, dp {mesh.dp} instead of {dp}", replace(trainer, mesh=mesh)
    for words, mesh in _larger(trainer.mesh, ("fsdp", "tp", "pp"), trainer.shape, trainer.gpu):
        yield f"{words}: {mesh.ranks} GPUs", replace(trainer, mesh=mesh)


def _generator_changes(
    generator: Generator, context: float, arenas: int, beside: Memory | None
) -> Iterator[tuple[str, Generator]]:
    slots = slots_that_fit(generator, context, arenas, beside)
    if slots:
        yield f"{slots} slots instead of {generator.slots}", replace(generator, slots=slots)
    if generator.precision == "bf16":
        yield "weights in fp8", replace(generator, precision="fp8")
    if generator.cache == "bf16":
        yield "a cache in fp8", replace(generator, cache="fp8")
    for words, mesh in _larger(generator.mesh, ("tp", "pp"), generator.shape, generator.gpu):
        yield words, replace(generator, mesh=mesh)


def _larger(mesh: Parallel, axes: Sequence[str], shape: Shape, gpu: Gpu) -> Iterator[tuple[str, Parallel]]:
    """Meshes of which one axis is larger, the fewest GPUs first: a part that divides a host, or whole hosts."""
    each = min(HOST, gpu.nvlink_gpus)
    found = [
        (f"{axis} {size} instead of {getattr(mesh, axis)}", replace(mesh, **{axis: size}))
        for axis in axes
        for size in range(getattr(mesh, axis) + 1, MOST_TIMES * getattr(mesh, axis) + 1)
    ]
    for words, larger in sorted(found, key=lambda change: change[1].ranks):
        whole = each % larger.ranks == 0 or larger.ranks % each == 0
        if whole and larger.tp <= gpu.nvlink_gpus and not larger.faults(shape):
            yield words, larger
