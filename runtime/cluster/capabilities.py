"""What a run can do, as one table. Pure.

Its readers:

- the planner (`plan/candidates.py`) proposes only layouts that a row allows;
- the placement (`placement.place`, `placement.place_as`) refuses meshes and hosts that a row does not allow;
- `check --plan` and `run --plan` check whether a run here accepts a plan;
- the options of a run (`control/run_config.py`) have their formats and transports from here.

A commit that builds a feature changes its row here; nothing else says what is possible. Nodes refuse by themselves what
they cannot do; `tests/runtime/plan/test_capabilities.py` compares that with these rows.

A lack is a `Fault` with a code of docs/check-errors.md: `mesh-axis`, `mesh-cut`, `mesh-hosts`, `no-precision`,
`not-invariant`, `model-kind`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from penstock.graph.errors import Fault
from penstock.graph.protocols import DATA, EXPERT, FSDP, STAGE, TENSOR, Axes, described
from penstock.runtime.cluster.gpus import Gpu, Precision

# What a pool does: it updates a policy, decodes, holds another model (a reference, a critic, a reward model), or has no
# model.
Kind = Literal["trainer", "generator", "beside", "small"]


@dataclass(frozen=True)
class Capability:
    """What replicas of one kind of pool may be.

    axes: the possible axes of its mesh, outermost first; none: one rank.
    one_axis: a mesh has at most one of these axes.
    over_hosts: the axes that may cross hosts; () if a replica must be on one host. `tp` is not among them: its ranks
        wait for each other several times a layer.
    replicas: there may be several replicas; otherwise more GPUs need a larger mesh.
    shared_heads: several ranks of `tp` may hold the same key-value head.
    zero1: weights may be whole over `fsdp`, with only the optimizer's state sharded.
    precisions: the possible precisions of the weights that it computes with.
    """

    axes: tuple[str, ...] = ()
    one_axis: bool = False
    over_hosts: tuple[str, ...] = ()
    replicas: bool = False
    shared_heads: bool = False
    zero1: bool = False
    precisions: tuple[Precision, ...] = ("bf16",)


_LEARNS = Capability(axes=(STAGE, DATA, FSDP, EXPERT, TENSOR), over_hosts=(STAGE, DATA, FSDP, EXPERT))

CAPABILITIES: Mapping[Kind, Capability] = {
    "trainer": _LEARNS,
    "beside": _LEARNS,
    "generator": Capability(
        axes=(EXPERT, TENSOR), one_axis=True, replicas=True, shared_heads=True, precisions=("bf16", "fp8", "int8")
    ),
    "small": Capability(),
}

# The values of `model_type` for which nodes have a decoder (`nodes/model/families/`).
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
# The families whose MLPs are mixtures of experts.
MIXTURES = ("qwen3_moe",)

# Formats of the computing model and of weights that are sent ("" is the model's), and the transports of weights.
Dtype = Literal["float32", "bfloat16", "float16"]
Wire = Literal["", "bfloat16", "int8", "fp8", "fp8_block"]
# What a generator computes in; "" is the run's dtype.
GeneratorPrecision = Literal["", "int8", "fp8"]
Transport = Literal["auto", "messages", "shm", "cuda_ipc", "nccl"]
# Whether the backward pass computes layers again; "auto" is decided before a run begins.
Recompute = Literal["auto", "none", "layer"]
# The first compute capability whose tensor cores compute in bfloat16.
BFLOAT16_SINCE = 8
# Where AdamW's moments lie outside the optimizer step; auto: on the host if nothing else fits.
OptimizerState = Literal["auto", "device", "host"]
# Whether state that is not needed between updates is kept on the host.
Offload = Literal["auto", "on", "off"]

# A slot's cache has room for the longest prompt and response from the start (`nodes/generate/kv_cache.py`).
DENSE_CACHE: bool = True
# The lag at which trainer and generator may take turns with the same GPUs: at others a batch is decoded meanwhile.
SHARED_LAG = 0


class Seen(Protocol):
    """The facts of a GPU that decide in which formats it computes."""

    @property
    def name(self) -> str: ...
    @property
    def major(self) -> int: ...


class Sizes(Protocol):
    """The facts of a model that decide how it can be split, such as a planner's `Shape`."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def expert_inner(self) -> int: ...
    @property
    def latent(self) -> object: ...
    @property
    def family(self) -> str: ...


def axis_lack(kind: Kind, mesh: Axes) -> Fault | None:
    """Which axes of a mesh replicas of this kind of pool cannot have."""
    row = CAPABILITIES[kind]
    used = [name for name, size in mesh if size > 1]
    others = [name for name in used if name not in row.axes]
    others = others or (used if row.one_axis and len(used) > 1 else [])
    if not others:
        return None
    needed = f"the axes {', '.join(row.axes)}" if row.axes else "one rank: it has no model"
    if row.one_axis:
        needed = f"one of the axes {', '.join(row.axes)}"
    more = "; more GPUs are more replicas" if row.replicas else ""
    return Fault("mesh-axis", f"a {kind}'s mesh", f"{', '.join(others)} in {described(mesh)}", needed + more)


def cut_lack(kind: Kind, sizes: Sizes, mesh: Axes) -> Fault | None:
    """Which sizes of a model a mesh does not divide: heads and width over `tp`, experts over `ep`, layers over `pp`."""
    row, axes, lacks = CAPABILITIES[kind], dict(mesh), []
    tp, ep, pp = axes.get(TENSOR, 1), axes.get(EXPERT, 1), axes.get(STAGE, 1)
    shared = row.shared_heads and tp % sizes.kv_heads == 0
    # Each rank of tp has a part of every expert.
    inner = sizes.expert_inner if sizes.experts else sizes.inner
    for count, name in ((sizes.heads, "heads"), (inner, "of an MLP's width")):
        lacks += [f"{count} {name} over tp {tp}"] if count % tp else []
    lacks += [] if sizes.kv_heads % tp == 0 or shared else [f"{sizes.kv_heads} key-value heads over tp {tp}"]
    # The vocabulary is split into equal pieces; the last one may be smaller, but not empty.
    if -(-sizes.vocab // tp) * (tp - 1) >= sizes.vocab:
        lacks.append(f"{sizes.vocab} words over tp {tp}")
    if ep > 1 and (not sizes.experts or sizes.experts % ep):
        lacks.append(f"{sizes.experts or 'no'} experts over ep {ep}")
    lacks += [f"{sizes.layers} layers over pp {pp}"] if pp > sizes.layers else []
    lacks += [f"tied embeddings over pp {pp}"] if sizes.tied and pp > 1 else []
    if not lacks:
        return None
    needed = "numbers that tp and ep divide, a layer for each stage, and a head of its own where there are stages"
    return Fault("mesh-cut", f"a {kind}'s mesh {described(mesh)}", ", ".join(lacks), needed)


def spread_lack(kind: Kind, mesh: Axes, hosts: Sequence[str], tp_over_hosts: bool) -> Fault | None:
    """Why a replica's ranks cannot be on these hosts, given for each rank in the order of the mesh."""
    where = ", ".join(dict.fromkeys(hosts))
    inner = len(hosts)
    for name, size in mesh:
        outer, inner = inner, inner // size
        # Ranks that differ only on this axis are a multiple of `inner` apart.
        apart = any(hosts[at] != hosts[at - at % outer + at % inner] for at in range(len(hosts)))
        if not apart or name in CAPABILITIES[kind].over_hosts or (name == TENSOR and tp_over_hosts):
            continue
        needed = f"{name} within a host"
        if name == TENSOR:
            needed += ", written last, or --tp-over-hosts: its ranks wait for each other several times a layer"
        return Fault("mesh-hosts", f"a {kind}'s mesh {described(mesh)}", f"{name}{size} over hosts ({where})", needed)
    return None


def precision_lack(kind: Kind, precision: Precision, gpu: Gpu | None = None, name: str = "GPUs") -> Fault | None:
    """Why replicas of this kind of pool cannot compute with weights of a precision: on any device, or on this kind of
    GPU, which is called `name`. A GPU without figures refuses by itself."""
    row, what = CAPABILITIES[kind], f"a {kind}'s weights"
    if precision not in row.precisions:
        needed = f"one of {', '.join(row.precisions)}: narrower weights travel (--wire), and are widened on arrival"
        return Fault("no-precision", what, precision, needed)
    if gpu is not None and not gpu.computes(precision):
        able = [
            f"{each}, or " for each in row.precisions if each in get_args(GeneratorPrecision) and gpu.computes(each)
        ]
        needed = f"{''.join(able)}none: weights in the run's dtype"
        return Fault("no-precision", what, f"{precision} on {name}", needed)
    return None


def precision_on_cpu_lack(precision: Precision) -> Fault | None:
    """As `precision_lack`, for a CPU, which would only emulate eight-bit floats."""
    if precision in ("fp8", "fp4"):
        return Fault(
            "no-precision", "a generator's weights", f"{precision} on a CPU", "int8, or a GPU that computes in it"
        )
    return None


def invariance_lack(pool: str, mesh: Axes) -> Fault | None:
    """Why the log-probabilities of a pool's ranks may differ in bits from those of one rank (`RunOptions.invariant`):
    sums over ranks, and pipeline stages, for which equality is not shown."""
    if cut := [f"{name}{size}" for name, size in mesh if size > 1 and name in (TENSOR, STAGE)]:
        given = f"{pool}={'x'.join(cut)}"
        return Fault("not-invariant", "--invariant", given, f"a {pool} without {TENSOR} and {STAGE}")
    return None


def dtype_lack(dtype: Dtype, seen: Sequence[Seen]) -> Fault | None:
    """Why GPUs of a machine cannot compute in a run's dtype."""
    older = [gpu for gpu in seen if gpu.major < BFLOAT16_SINCE]
    if dtype != "bfloat16" or not older:
        return None
    given = f"bfloat16 on {older[0].name}, of compute capability {older[0].major}"
    return Fault("no-precision", "--dtype", given, "float32, float16, or a GPU of 8.0 or later")


def model_lack(sizes: Sizes) -> Fault | None:
    """Why no run can have such a model, on any machine."""
    lacks = [f"a mixture of {sizes.experts} experts"] if sizes.experts and sizes.family not in MIXTURES else []
    lacks += ["latent attention"] if sizes.latent is not None else []
    lacks += [] if lacks or sizes.family in FAMILIES else [f"the model_type {sizes.family!r}"]
    if not lacks:
        return None
    needed = f"a model_type of {', '.join(FAMILIES)}"
    return Fault("model-kind", "the model", " and ".join(lacks), needed)
