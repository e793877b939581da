"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv 2106.09685): y = W x + alpha / rank · B A x, with W frozen.

A carried value holds, trains and sends only A and B; W is the base's, which every rank reads from the same directory.
Names and initial values are those of the package peft: A uniform within ±1 / √in, B zero, both without bias. Left out:
dropout of A's input, DoRA, rsLoRA, adapters of embedding and head.

Shapes: in, out: of W [out, in]; r: rank; A [r, in], B [out, r].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.graph.context import random_key
from penstock.graph.errors import nearest
from penstock.nodes.model.config import MOST, ModelError
from penstock.nodes.model.kernels import Linear

# The linear maps of a layer, in the order in which they compute; those of attention first.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# The suffixes of the names of an adapter's two matrices.
A, B = "lora_A.weight", "lora_B.weight"

# Settings in peft's file that do not change what existing adapters compute (or that say of which base they are), and
# settings that have one value here.
_IDLE = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout"),
    *("loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "task_type", "ensure_weight_tying"),
}
_FIXED = {"peft_type": "LORA", "bias": "none"}
# Initialisations that do not change the base.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Lora:
    """Adapters of all linear maps named `targets`. Raises ModelError for an invalid rank, alpha or target."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= MOST:
            raise ModelError(
                f"LoRA: given a rank of {self.rank!r}, needed a whole number of at least 1, at most {MOST}"
            )
        if not (type(self.alpha) in (int, float) and 0 < self.alpha < math.inf):
            raise ModelError(f"LoRA: given an alpha of {self.alpha!r}, needed a number above 0")
        if unknown := [name for name in self.targets if name not in TARGETS]:
            needed = f"linear maps of a layer{nearest(unknown[0], TARGETS)}"
            raise ModelError(f"LoRA: given the target {unknown[0]!r}, needed {needed}")
        if not self.targets:
            raise ModelError(f"LoRA: given no targets, needed some of {', '.join(TARGETS)}")
        # In one order, so that equal adapters are equal values.
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in self.targets))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def beyond_attention(self) -> tuple[str, ...]:
        """The targets that are maps of an MLP."""
        return tuple(name for name in self.targets if name not in ATTENTION)

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, targets {', '.join(self.targets)}"

    def to_json(self, base: str) -> dict[str, Any]:
        """The content of peft's `adapter_config.json` for adapters of the model in the directory `base`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Lora":
        """The adapters that an `adapter_config.json` describes. Raises ModelError for a setting with which they would
        compute something else."""
        for key, needed in _FIXED.items():
            if data.get(key, needed) != needed:
                raise ModelError(f"given {key} {data[key]!r}, needed {needed!r}")
        # Compare types, too: 1 == True and 0 == False.
        beginning = data.get("init_lora_weights")
        if not any(type(beginning) is type(known) and beginning == known for known in _BEGINNINGS):
            raise ModelError(f"given init_lora_weights {beginning!r}, which changes the base; needed true")
        known = {*_IDLE, *_FIXED, "init_lora_weights", "r", "lora_alpha", "target_modules"}
        # Null, false, and empty lists and mappings mean that a setting is not used; 0 may be a layer's number.
        unused = {key for key, value in data.items() if value is None or value is False or value in ([], {})}
        if used := sorted(data.keys() - known - unused):
            raise ModelError(f"given {used[0]} {data[used[0]]!r}, needed nothing of it: it would be computed otherwise")
        targets = data.get("target_modules")
        if targets == "all-linear":
            targets = TARGETS
        if not isinstance(targets, Sequence) or isinstance(targets, str) or not all(type(t) is str for t in targets):
            raise ModelError(f"given target_modules {targets!r}, needed a list of some of {', '.join(TARGETS)}")
        # peft may list each map of each layer: a map without an adapter is noticed when the tensors are read.
        return Lora(data.get("r", 8), data.get("lora_alpha", 8), tuple({name.rpartition(".")[2] for name in targets}))


class LoraLinear(Linear):
    """A linear map with an adapter, in the place of `base`."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias, self.scale = base.weight, base.bias, lora.scale
        self.lora_A, self.lora_B = Linear(self.in_features, lora.rank), Linear(lora.rank, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        # In peft's order of operations.
        low: Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + low * self.scale


def is_adapter(name: str) -> bool:
    """True for a parameter of an adapter."""
    return name.endswith((A, B))


def initial(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value of an adapter's matrix, float32: a function of the seed and of its name."""
    if name.endswith(B):
        return torch.zeros(*shape)
    generator = torch.Generator().manual_seed(random_key(seed, "lora", name))
    # Kaiming's uniform initialisation with a = √5, as in peft and in torch's linear maps.
    return (torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + alpha / rank · B A, added in float32 and rounded once to the dtype of W."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
