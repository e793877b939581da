"""What a run can do, as one table. Pure.

Who reads it, and what for:

- the planner (`plan/candidates.py`): it proposes no layout that a row does not have;
- the placement (`placement.place`, `placement.place_as`): it refuses meshes and hosts that a row does not have;
- `check --plan` and `run --plan` (`control/run_plan.py`): whether a run here would take a plan;
- the options of a run (`control/run_config.py`): the formats and transports that there are.

What builds a feature changes its row here in the same commit, and nothing else says what is possible. Nodes refuse by
themselves what they cannot do; `tests/runtime/plan/test_capabilities.py` compares that with these rows.

A lack is a `Fault`, whose code docs/check-errors.md has: `mesh-axis`, `mesh-cut`, `mesh-hosts`,
`no-precision`, `not-invariant`, `model-kind`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from penstock.graph.errors import Fault
from penstock.graph.protocols import DATA, EXPERT, FSDP, STAGE, TENSOR, Axes, described
from penstock.runtime.cluster.gpus import Gpu, Precision

# What a pool does: it updates a policy, decodes, holds a model beside the policy (a reference, a critic, a reward
# model), or none.
Kind = Literal["trainer", "generator", "beside", "small"]


@dataclass(frozen=True)
class Capability:
    """What replicas of one kind of pool may be.

    axes: those of its mesh, outermost first; none: one rank.
    one_axis: has a mesh one of them alone?
    over_hosts: the axes that may cross hosts, or () where a replica has one host. `tp` is not among them: its ranks
        wait for each other several times a layer.
    replicas: may there be several? Else more GPUs are a larger mesh.
    shared_heads: may several ranks of `tp` hold the same key-value head?
    zero1: can weights stay whole over `fsdp`, with the optimizer's state alone sharded?
    precisions: of the weights that it computes with, as a plan may have them.
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

# The `model_type`s that nodes have a decoder for (`nodes/model/families/`).
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
# Those of them whose MLPs are mixtures of experts.
MIXTURES = ("qwen3_moe",)

# Formats of the model that computes, of weights on their way ("" is the first), and how they go.
Dtype = Literal["float32", "bfloat16", "float16"]
Wire = Literal["", "bfloat16", "int8", "fp8", "fp8_block"]
# What a generator computes in, if that is not the run's dtype.
GeneratorPrecision = Literal["", "int8", "fp8"]
Transport = Literal["auto", "messages", "shm", "cuda_ipc", "nccl"]
# Whether the backward pass computes layers again; "auto" is decided before a run begins.
Recompute = Literal["auto", "none", "layer"]
# The first compute capability whose tensor cores do.
BFLOAT16_SINCE = 8
# Where AdamW's moments lie but for the step that is at them; auto: on the host where nothing else fits.
OptimizerState = Literal["auto", "device", "host"]
# Whether what is not needed between updates lies on the host.
Offload = Literal["auto", "on", "off"]

# A slot's cache has room for the longest prompt and response from the start (`nodes/generate/kv_cache.py`).
DENSE_CACHE: bool = True
# GPUs that trainer and generator share are used in turn only where no batch is decoded meanwhile: at this lag.
SHARED_LAG = 0


class Seen(Protocol):
    """What of a GPU decides in which formats it computes."""

    @property
    def name(self) -> str: ...
    @property
    def major(self) -> int: ...


class Sizes(Protocol):
    """What of a model decides how it can be cut, such as a planner's `Shape`."""

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
    """What a mesh has that replicas of this kind of pool cannot."""
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
    """What of a model a mesh does not divide: heads and width over `tp`, experts over `ep`, whole layers over `pp`."""
    row, axes, lacks = CAPABILITIES[kind], dict(mesh), []
    tp, ep, pp = axes.get(TENSOR, 1), axes.get(EXPERT, 1), axes.get(STAGE, 1)
    shared = row.shared_heads and tp % sizes.kv_heads == 0
    # Over tp each rank has a part of every expert.
    inner = sizes.expert_inner if sizes.experts else sizes.inner
    for count, name in ((sizes.heads, "heads"), (inner, "of an MLP's width")):
        lacks += [f"{count} {name} over tp {tp}"] if count % tp else []
    lacks += [] if sizes.kv_heads % tp == 0 or shared else [f"{sizes.kv_heads} key-value heads over tp {tp}"]
    # The vocabulary is cut into equal pieces, of which the last one may be smaller.
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
    """What keeps a replica's ranks from being on these hosts, one for each rank in the order of the mesh."""
    where = ", ".join(dict.fromkeys(hosts))
    inner = len(hosts)
    for name, size in mesh:
        outer, inner = inner, inner // size
        # Ranks that differ on this axis alone are `inner` apart.
        apart = any(hosts[at] != hosts[at - at % outer + at % inner] for at in range(len(hosts)))
        if not apart or name in CAPABILITIES[kind].over_hosts or (name == TENSOR and tp_over_hosts):
            continue
        needed = f"{name} within a host"
        if name == TENSOR:
            needed += ", written last, or --tp-over-hosts: its ranks wait for each other several times a layer"
        return Fault("mesh-hosts", f"a {kind}'s mesh {described(mesh)}", f"{name}{size} over hosts ({where})", needed)
    return None


def precision_lack(kind: Kind, precision: Precision, gpu: Gpu | None = None, name: str = "GPUs") -> Fault | None:
    """What keeps replicas of this kind of pool from computing with weights of a precision: on any device, or on this
    kind of GPU, which is called `name`. Of GPUs without figures the device itself says it."""
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
    """The same of a CPU, which emulates floats of eight bits."""
    if precision in ("fp8", "fp4"):
        return Fault(
            "no-precision", "a generator's weights", f"{precision} on a CPU", "int8, or a GPU that computes in it"
        )
    return None


def invariance_lack(pool: str, mesh: Axes) -> Fault | None:
    """What keeps log-probabilities of a pool's ranks from being the same bits as those of one (`RunOptions.invariant`):
    sums over ranks, and passes from stage to stage that nothing has shown."""
    if cut := [f"{name}{size}" for name, size in mesh if size > 1 and name in (TENSOR, STAGE)]:
        given = f"{pool}={'x'.join(cut)}"
        return Fault("not-invariant", "--invariant", given, f"a {pool} without {TENSOR} and {STAGE}")
    return None


def dtype_lack(dtype: Dtype, seen: Sequence[Seen]) -> Fault | None:
    """What keeps GPUs of a machine from computing in a run's format."""
    older = [gpu for gpu in seen if gpu.major < BFLOAT16_SINCE]
    if dtype != "bfloat16" or not older:
        return None
    given = f"bfloat16 on {older[0].name}, of compute capability {older[0].major}"
    return Fault("no-precision", "--dtype", given, "float32, float16, or a GPU of 8.0 or later")


def model_lack(sizes: Sizes) -> Fault | None:
    """What keeps a run from having such a model at all, whatever the machines."""
    lacks = [f"a mixture of {sizes.experts} experts"] if sizes.experts and sizes.family not in MIXTURES else []
    lacks += ["latent attention"] if sizes.latent is not None else []
    lacks += [] if lacks or sizes.family in FAMILIES else [f"the model_type {sizes.family!r}"]
    if not lacks:
        return None
    needed = f"a model_type of {', '.join(FAMILIES)}"
    return Fault("model-kind", "the model", " and ".join(lacks), needed)
