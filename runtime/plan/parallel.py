"""How many ways the ranks of one replica share its work: the sizes of a mesh's axes. Pure.

Ranks count with `tp` fastest, then `cp`, `fsdp`, `dp`, and `pp` slowest, so that tensor parallelism stays within a
machine where it can. Experts are dealt out over `ep` neighbouring ranks of one stage.
"""

from dataclasses import dataclass

from penstock.graph.sharding import Axes
from penstock.runtime.plan.shape import Shape


@dataclass(frozen=True)
class Parallel:
    """Sizes of the axes: copies of the model (`dp`), shards of each tensor (`fsdp`), shares of each layer (`tp`),
    pipeline stages (`pp`), shares of each sequence (`cp`), and over how many ranks a layer's experts lie (`ep`; with 1
    they are cut by `tp` and `fsdp` as all else)."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.fsdp, self.tp, self.pp, self.cp, self.ep) < 1:
            raise ValueError(f"mesh: given {self}, needed sizes of 1 or more")
        if self.ep > 1 and self.stage % self.ep:
            raise ValueError(f"mesh: given experts over {self.ep} of {self.stage} ranks of a stage, needed a divisor")

    @property
    def ranks(self) -> int:
        return self.stage * self.pp

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.fsdp * self.cp * self.tp

    @property
    def data(self) -> int:
        """How many ways sequences are shared out."""
        return self.dp * self.fsdp

    @property
    def axes(self) -> Axes:
        """As a plan's mesh says it, outermost first; axes of one rank are left out."""
        found = (("pp", self.pp), ("dp", self.dp), ("fsdp", self.fsdp), ("tp", self.tp))
        return tuple((name, size) for name, size in found if size > 1)

    def faults(self, shape: Shape) -> list[str]:
        """Why a model cannot be cut so: empty if it can."""
        found = []
        if shape.heads % self.tp:
            found.append(f"{shape.heads} attention heads over tp {self.tp}, needed a divisor")
        if shape.latent is None and shape.kv_heads % self.tp and self.tp % shape.kv_heads:
            found.append(f"{shape.kv_heads} key-value heads over tp {self.tp}, needed a divisor or a multiple")
        if self.pp > shape.layers:
            found.append(f"{shape.layers} layers over pp {self.pp}, needed one for each stage")
        if self.ep > 1 and (not shape.experts or shape.experts % self.ep):
            found.append(f"{shape.experts} experts over ep {self.ep}, needed a divisor")
        return found

    def __str__(self) -> str:
        names = ("pp", "dp", "fsdp", "cp", "tp", "ep")
        return " × ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1) or "one GPU"
