"""Seconds of work between updates: a weight sync, and a switch of shared GPUs. Pure.

A sync takes as long as its busiest rank: the bytes that this rank sends and receives in the real resharding plan, over
its NIC (both ways at once), and a message for each peer. Packing and checksums are left out. A run has an equal plan
for each replica, so trainers send n times as much to n replicas as to one. Exception: if weights cross hosts and a
chain is faster (`tensor.broadcast_chain`), trainers send only to the heads of the chains, and each link of a chain adds
the delay of one round.

The resharding plan is for a decoder's logical tensors of any shape, cut like those of the real models (a test compares
them).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from penstock.graph.protocols import Rule, stage_of_layer
from penstock.runtime.cluster.gpus import Gpu, Precision
from penstock.runtime.plan.collectives import Cost
from penstock.runtime.plan.model_shape import Parallel, Shape
from penstock.runtime.tensor.layout import Layout, Mesh, sharded
from penstock.runtime.tensor.reshard import nccl_round, num_heads, reshard

# Tensors by name: the size of each, and how tensor parallelism cuts it, as `rule_of` reads it.
Table = dict[str, tuple[tuple[int, ...], Rule]]


def layer_tensors(shape: Shape, *, dense: bool) -> Table:
    """The tensors of one layer, with an MLP that all tokens use (`dense`) or with experts."""
    hidden, queries, keys = shape.hidden, shape.qk_width, shape.kv_heads * shape.head_dim
    by_head: Rule = (0, shape.heads)

    def mlp(name: str, inner: int, *experts: int) -> Table:
        """An MLP's tensors. Routed experts are one tensor per matrix, cut between experts; others are cut by width."""
        wide, narrow = (*experts, inner, hidden), (*experts, hidden, inner)
        first, last = ((0, shape.experts), (0, shape.experts)) if experts else ((0, 0), (1, 0))
        return {
            f"{name}.gate_proj.weight": (wide, first),
            f"{name}.up_proj.weight": (wide, first),
            f"{name}.down_proj.weight": (narrow, last),
        }

    if (latent := shape.latent) is None:
        found: Table = {
            "self_attn.q_proj.weight": ((queries, hidden), by_head),
            "self_attn.k_proj.weight": ((keys, hidden), (0, shape.kv_heads)),
            "self_attn.v_proj.weight": ((keys, hidden), (0, shape.kv_heads)),
            "self_attn.o_proj.weight": ((hidden, queries), (1, shape.heads)),
        }
    else:
        values = shape.heads * (latent.nope_dim + latent.value_dim)
        found = {
            "self_attn.q_a_proj.weight": ((latent.q_rank, hidden), None),
            "self_attn.q_b_proj.weight": ((queries, latent.q_rank), by_head),
            "self_attn.kv_a_proj.weight": ((latent.kv_rank + latent.rope_dim, hidden), None),
            "self_attn.kv_b_proj.weight": ((values, latent.kv_rank), by_head),
            "self_attn.o_proj.weight": ((hidden, shape.value_width), (1, shape.heads)),
        }
    if dense:
        found |= mlp("mlp", shape.inner)
    else:
        found["mlp.gate.weight"] = (shape.experts, hidden), None
        found |= mlp("mlp.shared_experts", shape.shared * shape.expert_inner) if shape.shared else {}
        found |= mlp("mlp.experts", shape.expert_inner, shape.experts)
    # A bias is cut like the weight of its linear map.
    vectors = {
        name: ((length,), found[name.replace("bias", "weight")][1] if name.endswith("bias") else None)
        for name, length in shape.vectors.items()
    }
    return {**found, **vectors}


def adapter_tensors(shape: Shape) -> Table:
    """The tensors of one layer's adapters: one of the two matrices is cut like the linear map."""
    found: Table = {}
    for name, (_, rule) in layer_tensors(replace(shape, lora=None), dense=True).items():
        target = name.split(".")[1]
        if shape.lora is not None and target in shape.lora.targets and name.endswith("weight") and rule is not None:
            given, made = shape.maps[target]
            own: tuple[Rule, Rule] = (None, rule) if rule[0] == 0 else (rule, None)
            place = name.removesuffix("weight")
            found[f"{place}lora_A.weight"] = (shape.lora.rank, given), own[0]
            found[f"{place}lora_B.weight"] = (made, shape.lora.rank), own[1]
    return found


def tensors(shape: Shape) -> Table:
    """The tensors that are sent: the whole model, or only its adapters."""
    if shape.lora is not None:
        own = adapter_tensors(shape)
        return {f"model.layers.{layer}.{name}": what for layer in range(shape.layers) for name, what in own.items()}
    found: Table = {"model.embed_tokens.weight": ((shape.vocab, shape.hidden), (0, 0))}
    for layer in range(shape.layers):
        own = layer_tensors(shape, dense=not shape.experts or layer < shape.dense_layers)
        found |= {f"model.layers.{layer}.{name}": what for name, what in own.items()}
    found["model.norm.weight"] = (shape.hidden,), None
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocab, shape.hidden), (0, 0)
    return found


def stages(shape: Shape, count: int) -> dict[str, tuple[int, ...]]:
    """The pipeline stages that hold each tensor: layers in runs of nearly equal length."""
    found: dict[str, tuple[int, ...]] = {}
    for name in tensors(shape):
        if name.startswith("model.layers."):
            found[name] = (stage_of_layer(int(name.split(".")[2]), shape.layers, count),)
        else:
            found[name] = (0,) if "embed" in name and not shape.tied else (count - 1,)
    # A tied embedding is also the head: both ends of the pipeline hold it.
    if shape.tied and shape.lora is None:
        found["model.embed_tokens.weight"] = tuple(sorted({0, count - 1}))
    return found


@lru_cache(maxsize=64)
def layout(shape: Shape, mesh: Parallel, dtype: str, *, decodes: bool = False) -> Layout:
    """The layout on a mesh: matrices in `dtype`, norms and biases in bf16. `ep` cuts the tensors of routed experts.
    With `ep`, a rank that `decodes` has all other tensors whole."""
    axes, every = Mesh(mesh.axes or (("replica", 1),)), tensors(shape)
    listed = [(name, size, dtype if len(size) > 1 else "bfloat16") for name, (size, _) in every.items()]
    # Rules apply to the ends of names: one rule for a tensor of all layers.
    rules = {name.split(".", 3)[-1] if ".layers." in name else name: rule for name, (_, rule) in every.items()}
    held = stages(shape, mesh.pp)
    if not decodes or mesh.ep == 1:
        return sharded(listed, axes, rules, held)
    routed = [each for each in listed if ".experts." in each[0]]
    others = [each for each in listed if each not in routed]
    parts = sharded(routed, axes, rules, held), sharded(others, axes, rules, held, sharding_axes=())
    return Layout(parts[0].tensors + parts[1].tensors)


# The format in which weights are sent: none narrower than fp8 yet.
DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp4": "float8_e4m3fn"}


@dataclass(frozen=True)
class Traffic:
    """Traffic to one replica: bytes of the busiest sender and of the busiest receiver, and the most senders that one
    receiver has."""

    sent: int
    received: int
    peers: int


@lru_cache(maxsize=256)
def traffic(shape: Shape, trainer: Parallel, generator: Parallel, precision: Precision) -> Traffic:
    """The traffic of a sync from the trainer's mesh to one replica of a generator, from its resharding plan."""
    plan = reshard(layout(shape, trainer, DTYPE[precision]), layout(shape, generator, DTYPE[precision], decodes=True))
    # The first and the last rank have what others have, plus the embedding or the head.
    ends = {0, plan.destinations - 1}
    peers = max(len({route.source for route in plan.routes(destination=rank)}) for rank in ends)
    return Traffic(max(plan.bytes_out), max(plan.bytes_in), peers)


def sync_cost(
    moved: Traffic, replicas: int, trainer: Gpu, generator: Gpu, *, together: bool = False, chained: bool = False
) -> Cost:
    """Seconds of a sync to `replicas` replicas: over NICs, or over NVLink if both roles are on one host (`together`).
    `chained`: along chains if that is faster, as in a run across hosts."""
    heads = num_heads(moved.sent, moved.received, replicas) if chained else replicas
    out = moved.sent * heads / (trainer.nvlink if together else trainer.nic)
    into = moved.received / (generator.nvlink if together else generator.nic)
    # All chains are fed in parallel, and each link passes a round on while the next one arrives.
    latency_s, hops = max(trainer.latency_s, generator.latency_s), ceil(replicas / heads) - 1
    parts = {"wire": max(out, into), "messages": moved.peers * latency_s, "swap": generator.engine.swap_s}
    behind = nccl_round(ceil(moved.received), 1) / generator.nic + latency_s
    return Cost({**parts, "chain": hops * behind} if hops else parts)


def switch_cost(gpu: Gpu, leaving: float, coming: float) -> Cost:
    """Seconds of a switch between two roles that share a GPU: `leaving` bytes go to the host, then `coming` bytes come
    back (there is no room for both at once), plus half of `switch_s` each way."""
    fixed = gpu.engine.switch_s / 2
    return Cost({"to the host": leaving / gpu.pcie + fixed, "from the host": coming / gpu.pcie + fixed})
