"""A layer's MLP: one for all tokens, or experts of which each token uses some.

Shapes: D hidden width, N tokens, L layers, E experts, K those of a token, M = N · K; any number of dimensions before D.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.elementwise import gated
from penstock.nodes.model.expert_parallel import ExpertPlacement
from penstock.nodes.model.kernels import Linear, linear, together
from penstock.nodes.model.vocab_parallel import own_part, shared, summed

# Rows of an expert are padded to a multiple of this, so that a token's bits do not depend on how many others have
# chosen the same expert: a product of one row uses another kernel, and element-wise kernels treat the last, odd
# elements differently.
ROW_TILE = 16

# (layer, the experts_NK that its router chooses) → the experts that each token uses, [N, K].
Route = Callable[[int, Tensor], Tensor]


class RouteRecorder:
    """A `Route` that uses the router's experts, and records their numbers, counted from 1."""

    def __init__(self) -> None:
        self._layers: list[Tensor] = []

    def __call__(self, layer: int, chosen_NK: Tensor) -> Tensor:
        self._layers.append((chosen_NK + 1).to(torch.int16))
        return chosen_NK

    @property
    def experts_NLK(self) -> Tensor:
        return torch.stack(self._layers, dim=1)


def replay(experts_NLK: Tensor) -> Route:
    """A `Route` that uses recorded experts, and the router's own where none are recorded (0)."""

    def route(layer: int, chosen_NK: Tensor) -> Tensor:
        recorded_NK = experts_NLK[:, layer].to(chosen_NK)
        return torch.where(recorded_NK > 0, recorded_NK - 1, chosen_NK)

    return route


class Mlp(nn.Module):
    """down(activation(gate(x)) · up(x)), with the inner width `width`."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, width)
        self.up_proj = Linear(config.hidden_size, width)
        self.down_proj = Linear(width, config.hidden_size)
        self.activation = config.family.activation

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(gated(gate, up, self.activation))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Σ p · expert(x) over the experts that a router chooses (Shazeer et al., 2017, arXiv 1701.06538, section 2). p is
    the softmax of its logits over all experts, in float32; with `norm_topk_prob` the p of a token's experts sum to 1.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index, self.count, self.normed = index, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = ExpertMlps(config)
        # With tensor parallelism while training: the ranks that each have a part of every expert's inner width.
        self.sharers: dist.ProcessGroup | None = None
        # With expert parallelism: the distribution of the experts over ranks.
        self.placement: ExpertPlacement | None = None

    def distribute(self, placement: ExpertPlacement) -> None:
        """Keep only this rank's experts; other ranks have the others."""
        self.placement = placement
        for other in set(range(len(self.experts))) - set(placement.own(len(self.experts))):
            del self.experts[str(other)]

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        x_ND = x.flatten(0, -2)
        probs_NE = torch.softmax(self.gate(x_ND), dim=-1, dtype=torch.float32)
        chosen_NK = probs_NE.topk(self.count).indices
        if route is not None:
            chosen_NK = route(self.index, chosen_NK)
        top_NK = probs_NE.gather(1, chosen_NK)
        if self.normed:
            top_NK = top_NK / top_NK.sum(-1, keepdim=True)
        if self.sharers is not None:
            x_ND, top_NK = shared(x_ND, self.sharers), shared(top_NK, self.sharers)
        # Tokens by expert, in order.
        order_M = chosen_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(chosen_NK.flatten(), minlength=probs_NE.shape[1])
        rows_MD = x_ND[order_M // self.count]
        if self.placement is None:
            out_MD = self.experts(rows_MD, counts_E.tolist())
        else:
            out_MD = self.placement.outputs(rows_MD, counts_E, self.experts)
        out_NKD = out_MD[order_M.argsort()].view(*chosen_NK.shape, -1)
        out_ND = (out_NKD * top_NK[..., None]).sum(1).to(x.dtype)
        return (out_ND if self.sharers is None else summed(out_ND, self.sharers)).view_as(x)


class ExpertMlps(nn.ModuleDict):
    """This rank's experts of a layer, by their numbers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__({str(i): Mlp(config, config.moe_intermediate_size) for i in range(config.num_experts)})

    def forward(self, x_MD: Tensor, counts: list[int]) -> Tensor:
        """The outputs of rows in the order of their experts; `counts` is the number of rows of each expert."""
        parts = torch.split(x_MD, counts)
        return torch.cat([_rows(expert, part) for expert, part in zip(self.values(), parts, strict=True)])


def _rows(expert: nn.Module, x: Tensor) -> Tensor:
    """An expert's outputs for its tokens' rows."""
    assert isinstance(expert, Mlp)
    # In training every expert needs a gradient, even if it is zero: ranks reduce those of all experts.
    if not len(x) and not torch.is_grad_enabled():
        return x
    padded = F.pad(x, (0, 0, 0, max(1, -(-len(x) // ROW_TILE)) * ROW_TILE - len(x)))
    if expert.gate_proj.row_scales is not None:
        return expert(padded)[: len(x)]  # type: ignore[no-any-return]
    gate, up, down = (own_part(each.weight) for each in (expert.gate_proj, expert.up_proj, expert.down_proj))
    return linear(gated(linear(padded, gate), linear(padded, up), expert.activation), down)[: len(x)]
