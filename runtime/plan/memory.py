"""Bytes of each GPU by what they hold, of a trainer's ranks and of a generator's. Pure.

Adam in mixed precision keeps, per parameter of a shard: the weight in bfloat16 (2 bytes), its gradient (4, float32), a
float32 master copy (4) and two moments (8): 18 bytes (Rajbhandari et al., 2020, section 3.1; gradients in float32).
Activations of a layer with flash attention: 34 · s · b · h / t bytes, of which full recomputation keeps the layer's
input, 2 · s · b · h / t (Korthikanti et al., 2022, section 4; the share of attention's square is gone with flash
attention).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.runtime.cluster.gpus import BYTES
from penstock.runtime.plan.collectives import added
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.train_cost import Trainer, cache_bytes

# CUDA's context, NCCL's buffers, fragments: what a process has no use of.
RESERVED = 3e9
# Tokens for which a trainer has logits at once: it works through longer micro-batches in parts.
LOGIT_CHUNK = 4096


@dataclass(frozen=True)
class Memory:
    """`parts` are bytes on the rank that holds most, by component."""

    parts: Mapping[str, float]

    @cached_property
    def bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def used(self) -> float:
        """Bytes but for those that a GPU reserves, which it does once for all that share it."""
        return self.bytes - self.parts.get("reserved", 0.0)

    def __add__(self, other: "Memory") -> "Memory":
        """Both at once on the same GPU."""
        return Memory({**added(self.parts, other.parts), "reserved": RESERVED})

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{self.bytes / 1e9:.1f} GB: " + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size)


def trainer_memory(trainer: Trainer, copies: int = 0) -> Memory:
    """Of a rank of the first stage, which keeps activations of as many micro-batches as there are stages (1F1B).
    `copies` follow the policy: each is there in bfloat16, whole as the weights are, and as a shard in float32."""
    shape, mesh = trainer.shape, trainer.mesh
    # ZeRO-1 shards the optimizer's state alone: weights and gradients stay whole.
    kept = trainer.shard if trainer.zero3 else trainer.local
    own = 0.0 if trainer.frozen else 1.0
    tokens = trainer.micro_tokens / mesh.tp
    # A pass that no backward one follows keeps no inputs of layers.
    per_token = (34.0 * (1 - trainer.recompute) + 2.0 * own * trainer.recompute) * shape.hidden
    parts = {
        "weights": 2 * kept,
        "gradients": 4 * kept * own,
        "moments": 12 * trainer.shard * own,
        "copies": (2 * kept + 4 * trainer.shard) * copies,
        # A layer that is being repeated has all of its own.
        "activations": tokens * (per_token * trainer.layers * mesh.pp + 34.0 * shape.hidden),
        # In bfloat16 and float32: 6 bytes. Embedding and head are whole on every rank of a trainer.
        "logits": min(trainer.micro_tokens, LOGIT_CHUNK) * shape.vocab * 6.0,
        # Two layers of bfloat16 weights: one that computes, and the next one, which is being gathered.
        "unsharded blocks": 2 * 2 * trainer.local / trainer.layers if trainer.zero3 and mesh.fsdp > 1 else 0.0,
        "reserved": RESERVED,
    }
    return Memory(parts)


def beside_memory(trainer: Trainer, models: Models) -> Memory:
    """Of models that are cut as the trainer's: weights of those that never change, all that a critic needs to learn."""
    own = trainer_memory(trainer).parts
    # A critic has no activations of its own: it works when the policy does not.
    critics = {f"critic {name}": own[name] * models.critics for name in ("weights", "gradients", "moments")}
    frozen = {"frozen model": own["weights"] * models.frozen} if models.frozen else {}
    return Memory({**frozen, **critics} if models.critics else frozen)


def generator_memory(generator: Generator, context: float, copies: int = 2) -> Memory:
    """Of a rank with all slots in use, `context` tokens in each on average. Of two `copies` of the weights one is in
    use while the next version arrives."""
    shape, mesh = generator.shape, generator.mesh
    return Memory(
        {
            "weights": shape.parameters / mesh.ranks * BYTES[generator.precision] * copies,
            "cache": cache_bytes(shape, mesh.tp, mesh.pp) * generator.slots * context,
            "activations": generator.slots * shape.hidden * 2 * 8.0,
            "logits": generator.slots * shape.vocab * 6.0 / mesh.tp,
            "reserved": RESERVED,
        }
    )
