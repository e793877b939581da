"""FLOPs and bytes of a decoder's parts, per token and per sequence. Pure.

Matrix products: 2 FLOPs for each weight that a token is multiplied with (Kaplan et al., 2020, section 2.1). Causal
attention: 2 · L · s² · d per sequence of s tokens and width d of all heads, half of the square (Narayanan et al., 2021,
appendix, with the causal half left out). Backward: twice the forward; without gradients of weights, once.
"""

from typing import Any

from penstock.runtime.plan.shape import Shape


def product_flops(shape: Shape) -> float:
    """Forward, of one token: all matrix products but attention's own."""
    return 2.0 * shape.active_parameters


def attention_flops(shape: Shape, squares: float) -> float:
    """Forward, of sequences whose squared lengths sum to `squares`: queries by keys and weights by values, causal."""
    return shape.layers * squares * (shape.qk_width + shape.value_width)


def decode_attention_flops(shape: Shape, context: float) -> float:
    """Of one new token that sees `context` tokens. A latent cache is read as it is, by each head (DeepSeek-V2, section
    2.1.2: the up-projections are absorbed)."""
    width = shape.qk_width + shape.value_width
    if shape.latent is not None:
        width = shape.heads * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
    return 2.0 * shape.layers * context * width


def elementwise_bytes(shape: Shape, tp: int = 1) -> float:
    """Forward, of one token in bfloat16: what fused kernels read and write between matrix products: two norms with
    residual (each reads two and writes two of the width), rotary embedding, the gated activation, and for experts the
    two permutations. With sequence parallelism all of it is cut by `tp` (Korthikanti et al., 2022)."""
    norms = 8 * shape.hidden
    rotary = 2 * (shape.qk_width + shape.cache_width)
    used = shape.active * shape.expert_inner + shape.shared * shape.expert_inner
    routed = 3 * used + 4 * shape.active * shape.hidden
    dense = 3 * shape.inner
    mlps = (shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed
    return 2.0 * (shape.layers * (norms + rotary) + mlps) / tp


def cache_bytes(shape: Shape, itemsize: float, tp: int = 1, pp: int = 1) -> float:
    """Of one token on the rank that holds most: heads are shared out, a latent cache is on every rank."""
    parts = 1 if shape.latent is not None else min(tp, shape.kv_heads)
    layers = -(-shape.layers // pp)
    return layers * shape.cache_width * itemsize / parts


def weights_per_rank(shape: Shape, tp: int, pp: int, ep: int = 1, fsdp: int = 1) -> float:
    """Parameters on one rank of a stage: dense ones cut by tp and fsdp; experts by the same, or over ep where that is
    more. Embedding and head count as spread over the stages."""
    spread = tp * fsdp
    return (shape.dense_parameters / spread + shape.expert_parameters / max(ep, spread)) / pp


def touched(shape: Shape, tokens: Any) -> Any:
    """The expected share of the experts that `tokens` tokens (a number, or an array of them) use between them, routed
    evenly: 1 - (1 - k/E)^n."""
    return 1.0 - (1.0 - shape.active / shape.experts) ** tokens if shape.experts else 0.0
