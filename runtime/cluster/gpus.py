"""The rates of GPUs by kind, as their maker gives them, and the share of them that programs reach. Pure data.

Rates are those of the data sheets, dense (without structured sparsity): NVIDIA's for A100, H100, H200, B200, GB200
NVL72 and RTX A6000. NVLink and NIC are one way, per GPU; a NIC is what machines of that kind usually have. Memory is
what `nvidia-smi` counts, in GiB, whatever the name of the kind says.

The shares that programs reach (`Efficiency`), and the host's time (`HostTime`), are listed here. None is fitted to a
row that `benchmarks/planner.py` predicts; `benchmarks/outside.py` compares them with public figures:

- matmul: 0.6 of the tensor cores within a training step on H100 and later, 0.7 on A100. With these the steps of
  llm-foundry and Megatron-Bridge are predicted well; alone, large products in bfloat16 reach about 0.7.
- attention: forward and backward together, at long sequences and heads of 128. FlashAttention-2, which PyTorch has,
  reaches 0.35 on H100 (Shah et al., 2024, section 1) and 0.65 on A100 (Dao, 2023, section 4). Its kernels do not use
  the newer tensor cores of Blackwell, so they reach about the same FLOP/s there: 0.17.
- memory: 0.8 of the peak, which STREAM-like kernels and decoding reach.
- link: 0.8 of NVLink and NIC, nccl-tests' bus bandwidth at large messages.
- experts: 0.6 of matmul; Megatron-Bridge's mixtures. decode: 0.75 of matmul for products of some hundred rows;
  TensorRT-LLM under full load.
- latency_us, network_us: fitted to SGLang's steps of DeepSeek-R1 on 8 GPUs of one host, and on 16 of two.
- step_ms, row_us, eager_us: this project's engine with an H200 (`benchmarks/results/gpu_nvidia_h200.json`): a step of
  1B takes 0.5 ms longer than its kernels; if these are launched one by one, 13 a layer, each takes 40 us.
- experts_ms: fitted to the median of Megatron-Bridge's mixtures, which differ by a factor of three.
- Grace: GH200 is bound by its host up to four times the batch of x86 with H100 (arXiv 2504.11750): twice the time.
- stage_s: NeMo-RL's "buffer_sampling", "logprob_inference_prep" and "training_prep" took 1.4, 1.3 and 1.1 s (its pull
  request 1052). swap_s: "weight_sync" took 0.13 s there. switch_s: vLLM wakes from sleep in 0.1 to 6 s (its blog,
  2025-10-26).
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["fp32", "bf16", "fp8", "fp4", "int8"]
# GPUs of a usual host.
HOST = 8
# Bytes of an element.
BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "int8": 1.0}


class Efficiency(BaseModel):
    """The shares of a data sheet's rates that programs reach: between 0 and 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    matmul: float = Field(default=0.6, gt=0, le=1)
    attention: float = Field(default=0.35, gt=0, le=1)
    memory: float = Field(default=0.8, gt=0, le=1)
    link: float = Field(default=0.8, gt=0, le=1)
    experts: float = Field(default=0.6, gt=0, le=1)
    decode: float = Field(default=0.75, gt=0, le=1)


class HostTime(BaseModel):
    """The host's time that decoding and stages take in addition to the work of GPUs.

    A decoding step waits `step_ms` for the host (outputs, scheduling, inputs), and `row_us` more for each row. An
    `eager` engine replays a CUDA graph only on a GPU that holds a whole model without experts; for other steps it
    launches operations one by one, `eager_us` apart. An engine that is not `eager` replays all steps. Training waits
    `experts_ms` for the rows of each expert, in each layer's forward pass. In seconds: `stage_s` before each pass and
    each update (its inputs are collected, divided and distributed), `swap_s` for a generator to swap weights,
    `switch_s` to hand shared GPUs from training to decoding and back, without the copies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    eager: bool = True
    step_ms: float = Field(default=0.5, ge=0)
    row_us: float = Field(default=3.0, ge=0)
    eager_us: float = Field(default=40.0, ge=0)
    experts_ms: float = Field(default=1.0, ge=0)
    stage_s: float = Field(default=1.2, ge=0)
    swap_s: float = Field(default=0.1, ge=0)
    switch_s: float = Field(default=2.0, ge=0)


class Tflops(BaseModel):
    """10^12 operations per second by precision; 0 for one in which the kind does not compute. All compute in bf16."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bf16: float = Field(gt=0)
    fp32: float = Field(default=0.0, ge=0)
    fp8: float = Field(default=0.0, ge=0)
    fp4: float = Field(default=0.0, ge=0)


class Gpu(BaseModel):
    """One GPU of a kind, with its links. GiB are 2^30 bytes, GB 10^9; latency is that of a message between two GPUs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: float = Field(gt=0)
    tflops: Tflops
    memory_gb_s: float = Field(gt=0)
    nvlink_gb_s: float = Field(ge=0)
    nvlink_gpus: int = Field(default=8, ge=1, description="how many reach each other by NVLink")
    nic_gb_s: float = Field(gt=0)
    pcie_gb_s: float = Field(default=50.0, gt=0)
    launch_us: float = Field(default=3.0, ge=0)
    latency_us: float = Field(default=10.0, ge=0)
    network_us: float = Field(default=40.0, ge=0)
    efficiency: Efficiency = Efficiency()
    engine: HostTime = HostTime()

    def in_hosts_of(self, each: int) -> "Gpu":
        """The GPU in hosts with `each` of them: an NVLink domain of up to `HOST` GPUs ends at the host, a larger one
        spans hosts."""
        if each >= self.nvlink_gpus or self.nvlink_gpus > HOST:
            return self
        return self.model_copy(update={"nvlink_gpus": each})

    def computes(self, precision: Precision) -> bool:
        """True if its tensor cores compute in this precision, by the data sheet."""
        return bool(getattr(self.tflops, precision, 0.0))

    def flops(self, precision: Precision) -> float:
        """FLOP/s of matrix products. A precision in which a kind does not compute is converted to bfloat16 first."""
        return (getattr(self.tflops, precision) or self.tflops.bf16) * 1e12 * self.efficiency.matmul

    @property
    def attention_flops(self) -> float:
        """FLOP/s of attention, which is in bfloat16 whatever the weights are."""
        return self.tflops.bf16 * 1e12 * self.efficiency.attention

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    @property
    def bandwidth(self) -> float:
        """Bytes per second that kernels read and write."""
        return self.memory_gb_s * 1e9 * self.efficiency.memory

    @property
    def nvlink(self) -> float:
        """Bytes per second one way; without NVLink, those of PCIe."""
        return (self.nvlink_gb_s or self.pcie_gb_s) * 1e9 * self.efficiency.link

    @property
    def nic(self) -> float:
        return self.nic_gb_s * 1e9 * self.efficiency.link

    @property
    def pcie(self) -> float:
        return self.pcie_gb_s * 1e9 * self.efficiency.link

    @property
    def launch_s(self) -> float:
        return self.launch_us * 1e-6

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6

    @property
    def network_s(self) -> float:
        return self.network_us * 1e-6


_AMPERE = Efficiency(matmul=0.7, attention=0.65)
_BLACKWELL = Efficiency(attention=0.17)
_GRACE = HostTime(step_ms=1.0, row_us=6.0, eager_us=80.0)

# By kind. `[gpus.NAME]` of a cluster file adds to them.
GPUS: dict[str, Gpu] = {
    "A100": Gpu(
        memory_gib=80, tflops=Tflops(bf16=312, fp32=19.5), memory_gb_s=2039, nvlink_gb_s=300, nic_gb_s=25, pcie_gb_s=25,
        efficiency=_AMPERE,
    ),
    "A6000": Gpu(
        memory_gib=48, tflops=Tflops(bf16=154.8, fp32=38.7), memory_gb_s=768, nvlink_gb_s=0, nic_gb_s=12.5,
        pcie_gb_s=25, efficiency=_AMPERE,
    ),
    "H100": Gpu(
        memory_gib=79.6, tflops=Tflops(bf16=989, fp32=67, fp8=1979), memory_gb_s=3350, nvlink_gb_s=450, nic_gb_s=50,
    ),
    "H200": Gpu(
        memory_gib=140.4, tflops=Tflops(bf16=989, fp32=67, fp8=1979), memory_gb_s=4800, nvlink_gb_s=450, nic_gb_s=50,
    ),
    "B200": Gpu(
        memory_gib=179.1, tflops=Tflops(bf16=2250, fp32=75, fp8=4500, fp4=9000), memory_gb_s=8000, nvlink_gb_s=900,
        nic_gb_s=50, efficiency=_BLACKWELL,
    ),
    "GB200": Gpu(
        memory_gib=185, tflops=Tflops(bf16=2500, fp32=80, fp8=5000, fp4=10000), memory_gb_s=8000, nvlink_gb_s=900,
        nvlink_gpus=72, nic_gb_s=50, pcie_gb_s=225, launch_us=6.0,
        efficiency=_BLACKWELL, engine=_GRACE,
    ),
}  # fmt: skip


# Other GPUs, and variants of these kinds, by the driver's names. Bridges between two cards do not count as links. A
# `--cluster` word cannot name these kinds.
_OTHERS: dict[str, Gpu] = {
    name: GPUS[like].model_copy(update={"nvlink_gb_s": 0.0, **figures})
    for name, like, figures in (
        ("A100-SXM4-40GB", "A100", {"memory_gb_s": 1555, "nvlink_gb_s": 300}),
        ("A100-PCIE-40GB", "A100", {"memory_gb_s": 1555}),
        ("A100 80GB PCIe", "A100", {"memory_gb_s": 1935}),
        ("H100 PCIe", "H100", {"memory_gb_s": 2000, "tflops": Tflops(bf16=756, fp32=51, fp8=1513)}),
        ("H100 NVL", "H100", {"memory_gb_s": 3900, "tflops": Tflops(bf16=835, fp32=60, fp8=1671)}),
        ("H200 NVL", "H200", {"tflops": Tflops(bf16=835, fp32=60, fp8=1671)}),
        ("GH200", "H100", {"memory_gb_s": 4000, "pcie_gb_s": 450, "launch_us": 6.0, "engine": _GRACE}),
        ("L40S", "A6000", {"memory_gb_s": 864, "tflops": Tflops(bf16=362, fp32=91.6, fp8=733)}),
    )
}
# The first compute capability whose tensor cores multiply fp8.
FP8_SINCE = 8, 9


def gpu_like(name: str, memory_gib: float, capability: tuple[int, int] | None = None) -> Gpu:
    """The figures of a GPU with a driver's name, such as "NVIDIA H100 80GB HBM3", and so much memory. One of no known
    kind has the figures of an A100, and no links to others. It computes in fp8 if its `capability` says so, or if that
    is None; then the device itself may refuse."""
    if known := _known(name):
        return (GPUS | _OTHERS)[known].model_copy(update={"memory_gib": memory_gib})
    like = GPUS["A100"]
    fp8 = 2 * like.tflops.bf16 if capability is None or capability >= FP8_SINCE else 0.0
    tflops = like.tflops.model_copy(update={"fp8": fp8})
    return like.model_copy(update={"memory_gib": memory_gib, "nvlink_gb_s": 0.0, "tflops": tflops})


def kind_of(name: str, memory_gib: float) -> str:
    """The kind in `GPUS` of a GPU with this driver's name, if the memory matches; otherwise a new name for the kind."""
    known = _known(name)
    own = known in GPUS and alike(GPUS[known], gpu_like(name, memory_gib))
    return known if known and own else re.sub(r"\W+", "-", name).strip("-")


def _known(name: str) -> str | None:
    # The longest match: "GB200" contains "B200".
    return max((kind for kind in GPUS | _OTHERS if kind in name), key=len, default=None)


# The share by which the memory of two GPUs may differ if they are to count as one kind.
ALIKE = 0.1


def alike(one: Gpu, other: Gpu) -> bool:
    return abs(one.memory_gib / other.memory_gib - 1) < ALIKE
