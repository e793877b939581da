"""Seconds of what happens between updates: a weight sync, a switch of shared GPUs. Pure.

A sync takes as long as its busiest rank: the bytes that the real resharding plan has each rank send and receive, over
that rank's NIC (both ways at once), and a message for each peer. Packing and checksums are left out. A run has one plan
for each replica, all alike, so that trainers send to n replicas n times as much as to one; unless weights cross hosts
and a chain is faster (`tensor.broadcast_chain`): then trainers send to its heads only, and the last replica of a chain
is behind the first one by a bucket for each link.

The resharding plan is of a decoder's logical tensors, cut as those of the models that run (a test compares them), for
any shape. A layer's routed experts are one tensor per matrix, dealt out by expert.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from penstock.graph.protocols import Rule
from penstock.runtime.cluster.gpus import Gpu, Precision
from penstock.runtime.plan.collectives import Cost
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.tensor.layout import Layout, Mesh, sharded
from penstock.runtime.tensor.reshard import BUCKET, num_heads, reshard


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        own = {**_attention(shape), **_mlp(shape, layer)}
        own |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (shape.hidden,))
        found |= {f"model.layers.{layer}.{name}": size for name, size in own.items()}
    found["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocab, shape.hidden)
    return found


def _attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = shape.hidden, shape.qk_width, shape.kv_heads * shape.head_dim
    if (latent := shape.latent) is None:
        return {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
        }
    return {
        "self_attn.q_a_proj.weight": (latent.q_rank, hidden),
        "self_attn.q_b_proj.weight": (queries, latent.q_rank),
        "self_attn.kv_a_proj.weight": (latent.kv_rank + latent.rope_dim, hidden),
        "self_attn.kv_b_proj.weight": (shape.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "self_attn.o_proj.weight": (hidden, shape.value_width),
    }


def _mlp(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    if not shape.experts or layer < shape.dense_layers:
        return _gated("mlp", (), shape.inner, shape.hidden)
    shared = _gated("mlp.shared_experts", (), shape.shared * shape.expert_inner, shape.hidden) if shape.shared else {}
    routed = _gated("mlp.experts", (shape.experts,), shape.expert_inner, shape.hidden)
    return {"mlp.gate.weight": (shape.experts, shape.hidden), **shared, **routed}


def _gated(name: str, first: tuple[int, ...], inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = (*first, inner, hidden), (*first, hidden, inner)
    return {f"{name}.gate_proj.weight": wide, f"{name}.up_proj.weight": wide, f"{name}.down_proj.weight": narrow}


def rules(shape: Shape) -> dict[str, Rule]:
    """What tensor parallelism cuts, by the end of a tensor's name."""
    cut: dict[str, Rule] = {
        "embed_tokens.weight": (0, 0),
        "lm_head.weight": (0, 0),
        "q_proj.weight": (0, shape.heads),
        "k_proj.weight": (0, shape.kv_heads),
        "v_proj.weight": (0, shape.kv_heads),
        "o_proj.weight": (1, shape.heads),
        "q_b_proj.weight": (0, shape.heads),
        "kv_b_proj.weight": (0, shape.heads),
        "gate_proj.weight": (0, 0),
        "up_proj.weight": (0, 0),
        "down_proj.weight": (1, 0),
    }
    experts: dict[str, Rule] = {f"experts.{name}_proj.weight": (0, shape.experts) for name in ("gate", "up", "down")}
    shared = {f"shared_experts.{name}_proj.weight": cut[f"{name}_proj.weight"] for name in ("gate", "up", "down")}
    whole: dict[str, Rule] = dict.fromkeys(
        ("norm.weight", "layernorm.weight", "mlp.gate.weight", "q_a_proj.weight", "kv_a_proj.weight")
    )
    return {**cut, **experts, **shared, **whole}


def stages(shape: Shape, count: int) -> dict[str, tuple[int, ...]]:
    """The pipeline stages that hold each tensor: layers in runs of nearly equal length."""
    found: dict[str, tuple[int, ...]] = {}
    for name in tensors(shape):
        if name.startswith("model.layers."):
            found[name] = (int(name.split(".")[2]) * count // shape.layers,)
        else:
            found[name] = (0,) if "embed" in name and not shape.tied else (count - 1,)
    if shape.tied:
        found["model.embed_tokens.weight"] = tuple(sorted({0, count - 1}))
    return found


@lru_cache(maxsize=64)
def layout(shape: Shape, mesh: Parallel, dtype: str, replicas: int = 1, hosts: tuple[str, ...] = ()) -> Layout:
    """On `replicas` copies of a mesh. The context's axis shards as FSDP's does; matrices are of `dtype`, norms bf16."""
    sizes = (("replica", replicas), ("pp", mesh.pp), ("dp", mesh.dp), ("fsdp", mesh.fsdp * mesh.cp), ("tp", mesh.tp))
    axes = Mesh(tuple((name, size) for name, size in sizes if size > 1) or (("replica", 1),))
    listed = [(name, size, dtype if len(size) > 1 else "bfloat16") for name, size in tensors(shape).items()]
    return sharded(listed, axes, rules(shape), stages(shape, mesh.pp), hosts)


DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp4": "float8_e4m3fn"}
"""What travels: no narrower format than fp8 does yet."""


@dataclass(frozen=True)
class Traffic:
    """To one replica: bytes of the busiest sender and of the busiest receiver, and the most peers that a rank has."""

    sent: int
    received: int
    peers: int


@lru_cache(maxsize=256)
def traffic(shape: Shape, trainer: Parallel, generator: Parallel, precision: Precision) -> Traffic:
    """What a sync from the trainer's mesh to one replica of a generator moves, from its resharding plan."""
    plan = reshard(layout(shape, trainer, DTYPE[precision]), layout(shape, generator, DTYPE[precision]))
    ends = {0, plan.destinations - 1}
    peers = max(len({route.source for route in plan.routes(destination=rank)}) for rank in ends)
    return Traffic(max(plan.bytes_out), max(plan.bytes_in), peers)


def sync_cost(
    moved: Traffic, replicas: int, trainer: Gpu, generator: Gpu, *, together: bool = False, chained: bool = False
) -> Cost:
    """Seconds of a sync to so many replicas: over NICs, or over NVLink where both are on the same GPUs (`together`).
    `chained`: along chains where that is the better way, as in a run across hosts."""
    heads = num_heads(moved.sent, moved.received, replicas) if chained else replicas
    out = moved.sent * heads / (trainer.nvlink if together else trainer.nic)
    into = moved.received / (generator.nvlink if together else generator.nic)
    latency_s, hops = max(trainer.latency_s, generator.latency_s), ceil(replicas / heads) - 1
    parts = {"wire": max(out, into), "messages": moved.peers * latency_s}
    return Cost({**parts, "chain": hops * (BUCKET / generator.nic + latency_s)} if hops else parts)


def switch_cost(gpu: Gpu, leaving: float, coming: float) -> Cost:
    """Seconds until a GPU that two roles share has the other one's state: `leaving` bytes go to the host, `coming` ones
    come back, one after the other, since there is no room for both."""
    return Cost({"to the host": leaving / gpu.pcie, "from the host": coming / gpu.pcie})
