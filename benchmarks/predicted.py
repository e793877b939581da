"""Predictions of published rows: seconds by component, and the seconds of a step from calibrated components."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np
from published import Row, mesh_of, nemo_layouts

from penstock.runtime.cluster.gpus import Efficiency, Gpu, HostTime, Precision
from penstock.runtime.plan.collectives import Cost, exchange_s
from penstock.runtime.plan.decode_cost import Generator, generator_memory
from penstock.runtime.plan.model_shape import Parallel, StageShape
from penstock.runtime.plan.sync_cost import switch_cost, tensors
from penstock.runtime.plan.train_cost import Memory, Trainer
from penstock.runtime.plan.workload import IntArray, Lognormal

PROMPT, SIGMA, SLOTS = 128, 0.7, 1024
"""NeMo-RL: tokens of a prompt, spread of lengths, and vLLM's default batch size on GPUs of 70 GiB and more."""
VLLM_STEP = {"eager": False, "step_ms": 4.0, "row_us": 10.0}
"""vLLM replays CUDA graphs. Scheduling takes 29 % and the GPU 38 % of vLLM 0.5's time for an 8B model on an H100 (its
blog, 2024-09-05), whose step takes 5.1 ms of the GPU (batch 1): 4 ms. Its processing of outputs took 8.7 % of a step of
70B on four H100 (same source): about 2 ms for some 200 rows."""
VLLM = {**VLLM_STEP, "switch_s": 9.6}
"""Handing over shared GPUs takes 7.5, 9.6 and 21.8 s besides the transfer (NeMo-RL, pull request 3294: "total refit"
minus "transfer + update" of Qwen3-30B-A3B, Nemotron Nano 3, Qwen3-235B-A22B): the median."""
LOADED_S = 0.5e-3
"""Seconds per tensor that a colocated vLLM loads, each matrix of an expert counted: 9.67 s for 18,900 and 18.4 s for
37,000 (the same pull request; Qwen3-30B-A3B, Qwen3-235B-A22B; both are also converted to MXFP8 in that time)."""
BROADCAST = 90e9
"""Bytes per second of the whole model to generators on other GPUs: 5.5 s for Qwen3-235B-A22B, 14 s for DeepSeek-V3
(NeMo-RL, pull request 1379)."""
FIRST_FORCED = (0, 7)
"""The first release whose recipes set `force_on_policy_ratio`, which saves the pass for log-probabilities. It requires
one update per step. The table's rows are from 0.5 and 0.6."""
KEEPS_ACTIVATIONS = ("qwen3-32b", "qwen3-30b-a3b")
"""Models whose recipes do not recompute activations."""
ATTENTION = {"cuDNN": 0.6, "FA3": 0.6}
"""Share of the tensor cores' rate; the value for FlashAttention-2 is in `gpus.py`."""
ROWWISE_BYTES = 12.0
"""Bytes read and written per number to scale by rows and, separately, by columns: each reads the number for the
maximum, reads it again, and writes it."""
PASSES = {"compile": 1.0, "eager": 2.5}
"""How many times as much elementwise kernels read and write as fused ones: without a compiler each operation is its own
kernel, and norms are in float32. The value for eager makes llm-foundry's steps come out right (`outside.py`)."""
SHARES = {"On": 0.6, "1off": 0.8, "8off": 0.8}
"""The share of the memory that the recipes give to vLLM."""
COMPUTING = (
    "products", "reading weights", "attention", "elementwise", "logits", "launches", "routing", "optimizer", "bubble",
    "stage",
)  # fmt: skip
SCALARS = ("computing", "communicating", "generating", "rows", "once")
"""The scalars that calibration fits. `rows` is host seconds per row of a decoding step, `once` is seconds per step;
both are added to what the model already has, and so are 0 without calibration."""


ASYNC_TP = 0.5
"""Share of tensor parallelism's collectives that is not hidden when they are split and overlap with the products
(torchtitan, section 2.2.2: "async TP")."""


@dataclass(frozen=True)
class Recipe(Trainer):
    """A trainer with features of other systems that plans lack: collectives of tensor parallelism that overlap with the
    products (`async_tp`), `chunks` of the model per pipeline stage (a bubble of (p - 1) / chunks, Narayanan et al.,
    2021, section 2.2), and activations that are kept on the host (`offload`)."""

    async_tp: bool = False
    chunks: int = 1
    offload: bool = False
    fused: float = 1.0
    rowwise: bool = False

    @cached_property
    def stages(self) -> tuple[StageShape, ...]:
        """All stages are taken to be equal, with the mean number of layers rounded up: these systems give fewer layers
        to the stage with the head."""
        shape, pp = self.shape, self.mesh.pp
        if pp == 1:
            return super().stages
        layers, share = ceil(shape.layers / pp), ceil(shape.layers / pp) / shape.layers
        each = StageShape(
            layers, ceil(shape.moe_layers / pp), int(shape.dense_parameters * share),
            int(shape.expert_parameters * share), int(shape.active_parameters * share), 1 / pp,  # type: ignore[arg-type]
        )  # fmt: skip
        return (each,) * pp

    def _computing(self, tokens: float, squares: float, backward: bool) -> dict[str, float]:
        parts = super()._computing(tokens, squares, backward)
        elements = parts["elementwise"] * self.fused
        if self.rowwise:
            # Scales by rows: the tensors that tensor parallelism gathers in bfloat16 are converted afterwards, whole on
            # each rank, and twice, since the backward pass needs scales along the other dimension. These are two inputs
            # of each layer in the forward pass and two gradients in the backward pass.
            gathered = tokens * self.slowest.layers * self.shape.hidden
            elements += ROWWISE_BYTES * gathered * (2 + (2 + 2 * self.recompute) * backward) / self.gpu.bandwidth
        return parts | {"elementwise": elements}

    def _tensor_s(self, tokens: float, backward: bool) -> float:
        # With one scale for a tensor, gathers carry fp8; reductions stay in bfloat16.
        narrow = 0.75 if self.precision == "fp8" and not self.rowwise else 1.0
        return super()._tensor_s(tokens, backward) * narrow * (ASYNC_TP if self.async_tp else 1.0)

    def _exchange_s(self, tokens: float) -> float:
        # Whole experts are also distributed over the ranks of tp, each of which sends its own tokens (sequence
        # parallelism).
        sent = tokens / self.mesh.tp * self.shape.active * self.shape.hidden * 2
        return exchange_s(self.gpu, sent, self.mesh.ep * self.mesh.tp)

    def _micro_batch(self, tokens: float, squares: float, *, backward: bool) -> Cost:
        cost = super()._micro_batch(tokens, squares, backward=backward)
        if not (self.offload and backward):
            return cost
        # Each layer's input goes to the host and back, overlapping with everything else.
        moved = 2 * tokens / self.mesh.tp * self.shape.hidden * 2 * self.layers / self.gpu.pcie
        return Cost({**cost.parts, "offload": max(0.0, moved - cost.seconds)})

    def _pipeline(self, alone: Cost, micro: int, *, backward: bool) -> Cost:
        parts = dict(super()._pipeline(alone, micro, backward=backward).parts)
        return Cost({**parts, "bubble": parts["bubble"] / self.chunks})


def slots_that_fit(generator: Generator, context: float, copies: int, beside: Memory | None = None) -> int:
    """Return how many rows of `context` tokens each fit next to `copies` of the weights and the memory of `beside`; 0
    if these do not fit."""
    empty, one = (generator_memory(replace(generator, slots=n), context, copies).bytes for n in (0, 1))
    room = generator.gpu.memory_bytes - empty - (beside.used if beside else 0.0)
    return max(0, int(room // (one - empty)))


@dataclass(frozen=True)
class Prediction:
    """Lower bounds on the seconds of a step, each a sum of components; has the seconds of each scalar's component."""

    bounds: tuple[Mapping[str, float], ...]

    def seconds(self, scalars: Mapping[str, float]) -> float:
        return max(_sum(bound, scalars) for bound in self.bounds) + scalars["once"]

    def active(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return each scalar's coefficient in the largest sum."""
        largest = max(self.bounds, key=lambda bound: _sum(bound, scalars))
        return dict.fromkeys(SCALARS, 0.0) | {"once": 1.0} | dict(largest)


def _sum(bound: Mapping[str, float], scalars: Mapping[str, float]) -> float:
    return sum(scalars[name] * size for name, size in bound.items())


def predict(row: Row) -> Prediction:
    return _reinforced(row) if row.system == "NeMo-RL" else Prediction((_sides(_pretrained(row)),))


def _sides(cost: Cost) -> dict[str, float]:
    computing = sum(seconds for part, seconds in cost.parts.items() if part in COMPUTING)
    return {"computing": computing, "communicating": cost.seconds - computing}


def _pretrained(row: Row) -> Cost:
    """Predict one step with one micro-batch per data-parallel rank or, with stages, one per sequence."""
    titan = row.system == "torchtitan"
    mesh, cp = mesh_of(row.layout) if titan else (Parallel(fsdp=row.gpus), 1)
    batch = int(row.work.removeprefix("local bs ")) if titan else 1
    small = row.shape.name == "llama-8b"  # its configuration recomputes selectively
    kernel = next((name for name in ATTENTION if name in row.mode), "FA2")
    trainer = Recipe(
        row.shape,
        _with(row.gpu, kernel, row.gpu.engine.model_copy(update={"stage_s": 0.0, "eager": False})),
        mesh,
        fused=PASSES["eager" if "eager" in row.mode or not titan else "compile"],
        precision="fp8" if "fp8" in row.mode else "bf16",
        micro_tokens=row.longest if mesh.pp > 1 else batch * row.longest,
        recompute=0.5 if titan and small and "full AC" not in row.mode else 1.0,
        frozen="LoRA" in row.mode,
        zero3=mesh.pp == 1,
        cp=cp,
        async_tp="asyncTP" in row.mode + row.layout,
        rowwise="rowwise" in row.mode,
        chunks=2 if "I1F1B" in row.layout else 1,
        offload="Offload" in row.mode,
    )
    return trainer.update(np.full(batch * mesh.data // cp, row.longest))


def _with(gpu: Gpu, kernel: str, engine: HostTime) -> Gpu:
    share = ATTENTION.get(kernel, gpu.efficiency.attention)
    efficiency: Efficiency = gpu.efficiency.model_copy(update={"attention": share})
    return gpu.model_copy(update={"efficiency": efficiency, "engine": engine})


def _reinforced(row: Row) -> Prediction:
    (mesh, cp, ep), width, replicas = nemo_layouts(row)
    share = SHARES[row.mode.split()[1]]
    gpu = _with(row.gpu, "cuDNN", row.gpu.engine.model_copy(update=VLLM))
    room = gpu.model_copy(update={"memory_gib": gpu.memory_gib * share})
    generator = Generator(row.shape, room, width, SLOTS, "fp8" if row.mode.endswith("FP8") else "bf16")
    slots = slots_that_fit(generator, PROMPT + row.mean, copies=1)
    generator = replace(generator, slots=max(1, min(SLOTS, slots)))
    sampled, batch = (int(word) for word in row.work.replace("G-GBS ", "").replace("T-GBS ", "").split(" / "))
    lengths = Lognormal(row.mean, SIGMA, row.longest - PROMPT).take(sampled)
    samples = 32 if sampled == 2048 else 16
    ends = generator.rollout(lengths, PROMPT, samples, replicas)
    rollout_s = float(ends.max())
    precision: Precision = "fp8" if row.mode.endswith("FP8") else "bf16"
    recompute = float(row.shape.name not in KEEPS_ACTIVATIONS)
    trainer = Recipe(
        row.shape, gpu, replace(mesh, ep=max(1, ep // mesh.tp)), precision, row.longest, recompute, zero3=False, cp=cp
    )  # fmt: skip
    # A pass of the policy before its update (unless `forced`) and one of the reference; then the update's steps.
    forced = sampled == batch and row.release >= FIRST_FORCED
    trained = trainer.logprobs(lengths + PROMPT) * (1 if forced else 2)
    trained = trained + trainer.update(lengths + PROMPT, minibatches=sampled // batch)
    if row.staleness:
        refit = Cost({"wire": 2 * row.shape.parameters / BROADCAST})
    else:
        moments, routed = 12 * trainer.shard, row.shape.moe_layers * row.shape.experts * 3
        refit = switch_cost(gpu, moments, moments) + Cost({"loading": (len(tensors(row.shape)) + routed) * LOADED_S})
    tokens, trains = float(lengths.sum()) / replicas, _sides(trained + refit)
    batch_s = {"generating": rollout_s, "rows": tokens}
    if row.staleness:
        # Batches that are decoded at the same time slow each other, as in plans (`search.period_terms`).
        shared = max(0.0, 1 - sum(trains.values()) / rollout_s) * row.staleness
        batch_s["generating"] += shared * beside_s(generator, lengths, PROMPT, samples, replicas, 1 + row.staleness)
    around = {name: size / (1 + row.staleness) for name, size in {**batch_s, **trains}.items()}
    if not row.staleness:
        return Prediction((around,))
    # Both sides run concurrently, but a version, its samples and the training on them are sequential.
    stream = {"generating": stream_s(generator, lengths, PROMPT, samples, replicas), "rows": tokens}
    return Prediction((around, stream, trains))


def beside_s(
    generator: Generator, responses: IntArray, prompt_tokens: int, samples: int, replicas: int, batches: int
) -> float:
    """Return the seconds by which one batch slows another, with `batches` in flight: what its rows and their contexts
    cost in each step."""
    fixed, slope = generator.lines.fixed, float(generator.lines.slope[1])
    flying = min(generator.slots, ceil(len(responses) * batches / replicas))
    lengths = responses.astype(float)
    rows = lengths.sum() * (fixed[flying] - fixed[1]) / max(1, flying - 1)
    contexts = slope * (lengths * prompt_tokens + lengths * (lengths - 1) / 2).sum()
    prompts = len(responses) / samples * generator.prefill_s(prompt_tokens)
    return float(rows + contexts + prompts) / replicas


def stream_s(generator: Generator, responses: IntArray, prompt_tokens: int, samples: int, replicas: int) -> float:
    """Return the seconds of one batch in a stream without pauses: those of three batches minus those of two."""
    two, three = (generator.rollout(np.tile(responses, n), prompt_tokens, samples, replicas).max() for n in (2, 3))
    return float(three - two)
