"""A decoder's logical tensors and how they are cut, as `tensor.parallel` lays them out: for the cost of a sync. Pure.

The same tables as those of the models that run (a test compares them), for any shape: a layer's routed experts are one
tensor per matrix, dealt out by expert.
"""

from functools import lru_cache

from penstock.graph.sharding import Rule
from penstock.runtime.plan.parallel import Parallel
from penstock.runtime.plan.shape import Shape
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.mesh import Mesh
from penstock.runtime.tensor.parallel import sharded


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
