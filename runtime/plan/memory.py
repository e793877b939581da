"""Bytes of each GPU by what they hold, of a trainer's ranks and of a generator's. Pure.

Adam in mixed precision keeps, per parameter of a shard: the weight in bfloat16 (2 bytes), its gradient (4, float32), a
float32 master copy (4) and two moments (8): 18 bytes (Rajbhandari et al., 2020, section 3.1; gradients in float32).
Activations of a layer with flash attention: 34 · s · b · h / t bytes, of which full recomputation keeps the layer's
input, 2 · s · b · h / t (Korthikanti et al., 2022, section 4; the share of attention's square is gone with flash
attention).

For what does not fit there are the numbers, and the smallest change that would. Changes are tried from the cheapest to
the dearest, and of each the least that fits is named; if none alone does, how much memory is lacking.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from penstock.runtime.cluster.gpus import BYTES, HOST, Gpu
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.train_cost import Trainer, cache_bytes, weights_per_rank

RESERVED = 3e9
"""CUDA's context, NCCL's buffers, fragments: what a process has no use of."""
LOGIT_CHUNK = 4096
"""Tokens for which a trainer has logits at once: it works through longer micro-batches in parts."""


@dataclass(frozen=True)
class Memory:
    """`parts` are bytes on the rank that holds most, by component."""

    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())

    def __add__(self, other: "Memory") -> "Memory":
        """Both at once on the same GPU, which reserves once."""
        names = dict.fromkeys([*self.parts, *other.parts])
        summed = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        return Memory({**summed, "reserved": RESERVED})

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{self.bytes / 1e9:.1f} GB: " + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size)


def trainer_memory(trainer: Trainer, copies: int = 0) -> Memory:
    """Of a rank of the first stage, which keeps activations of as many micro-batches as there are stages (1F1B).
    `copies` follow the policy: each is there in bfloat16, whole as the weights are, and as a shard in float32."""
    shape, mesh = trainer.shape, trainer.mesh
    shards = mesh.fsdp * mesh.cp
    local = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep)
    shard = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep, shards)
    kept = shard if trainer.zero3 else local
    block = local / max(1, ceil(shape.layers / mesh.pp))
    own = 0.0 if trainer.frozen else 1.0
    parts = {
        "weights": 2 * kept,
        "gradients": 4 * kept * own,
        "moments": 12 * shard * own,
        "copies": (2 * kept + 4 * shard) * copies,
        "activations": _activations(trainer),
        "logits": _logits(trainer),
        "unsharded blocks": 2 * 2 * block if trainer.zero3 and shards > 1 else 0.0,
        "reserved": RESERVED,
    }
    return Memory(parts)


def _activations(trainer: Trainer) -> float:
    shape, mesh = trainer.shape, trainer.mesh
    tokens = trainer.micro_tokens / (mesh.cp * mesh.tp)
    inputs = 0.0 if trainer.offload else 2.0
    per_token = (34.0 * (1 - trainer.recompute) + inputs * trainer.recompute) * shape.hidden
    layers = ceil(shape.layers / mesh.pp)
    # A layer that is being repeated has all of its own.
    return tokens * (per_token * layers * mesh.pp + 34.0 * shape.hidden)


def _logits(trainer: Trainer) -> float:
    """In bfloat16 and float32, of one chunk: 6 bytes each. Embedding and head are whole on every rank of a trainer."""
    return min(trainer.micro_tokens / trainer.mesh.cp, LOGIT_CHUNK) * trainer.shape.vocab * 6.0


def beside_memory(trainer: Trainer, models: Models) -> Memory:
    """Of models that are cut as the trainer's: weights of those that never change, all that a critic needs to learn."""
    mesh = trainer.mesh
    held = weights_per_rank(trainer.shape, mesh.tp, mesh.pp, mesh.ep, mesh.fsdp if trainer.zero3 else 1)
    own = trainer_memory(trainer).parts
    critics = {f"critic {name}": own[name] * models.critics for name in ("weights", "gradients", "moments")}
    frozen = {"frozen model": 2 * held * models.frozen} if models.frozen else {}
    return Memory({**frozen, **critics} if models.critics else frozen)


def generator_memory(generator: Generator, context: float, arenas: int = 2) -> Memory:
    """Of a rank with all slots in use, `context` tokens in each on average. Two arenas: weights that arrive lie beside
    those in use."""
    shape, mesh = generator.shape, generator.mesh
    weights = weights_per_rank(shape, mesh.tp, mesh.pp, mesh.ep) * BYTES[generator.precision]
    cached = cache_bytes(shape, BYTES[generator.cache], mesh.tp, mesh.pp) * generator.slots * context
    return Memory(
        {
            "weights": weights * arenas,
            "cache": cached,
            "activations": generator.slots * shape.hidden * 2 * 8.0,
            "logits": generator.slots * shape.vocab * 6.0 / mesh.tp,
            "reserved": RESERVED,
        }
    )


def slots_that_fit(generator: Generator, context: float, arenas: int = 2, beside: Memory | None = None) -> int:
    """How many rows of `context` tokens each fit beside the weights and what else is there; 0 if the weights do not."""
    empty, each = row_bytes(generator, context, arenas)
    others = 0.0 if beside is None else beside.bytes - beside.parts.get("reserved", 0.0)  # a GPU reserves once
    return max(0, int((generator.gpu.memory_bytes - empty - others) // each))


def row_bytes(generator: Generator, context: float, arenas: int = 2) -> tuple[float, float]:
    """Bytes of a rank without any rows, and of each row."""
    empty, one = (generator_memory(replace(generator, slots=n), context, arenas=arenas).bytes for n in (0, 1))
    return empty, one - empty


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

    def needed(changed: Trainer) -> Memory:
        return trainer_memory(changed) + (beside or Memory({}))

    changes = _trainer_changes(trainer, shortest)
    return _misfit(role, trainer, needed(trainer), ((words, needed(changed)) for words, changed in changes))


def check_generator(
    generator: Generator, context: float, role: str = "generator", beside: Memory | None = None, arenas: int = 2
) -> Misfit | None:
    """None if all slots fit, with `context` tokens in each on average."""

    def needed(changed: Generator) -> Memory:
        return generator_memory(changed, context, arenas) + (beside or Memory({}))

    changes = _generator_changes(generator, context, arenas, beside)
    return _misfit(role, generator, needed(generator), ((words, needed(changed)) for words, changed in changes))


def _misfit(
    role: str, layout: Trainer | Generator, needed: Memory, changes: Iterator[tuple[str, Memory]]
) -> Misfit | None:
    """None if it fits; else with the first of the changes that makes it fit."""
    room = layout.gpu.memory_bytes
    if needed.bytes <= room:
        return None
    change = f"No single change makes it fit; {(needed.bytes - room) / 1e9:.1f} GB are lacking on each GPU"
    fits = (f"It would fit with {words}" for words, memory in changes if memory.bytes <= room)
    return Misfit(role, layout.mesh, needed, room, next(fits, change))


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
