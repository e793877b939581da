"""A model's layers in stages, each on ranks of its own, and what passes between them: GPipe's schedule.

Each stage computes all micro-batches forward, in order, then all of them backward; the last one, which has the loss,
does both for each in turn (Huang et al., 2019, arXiv 1811.06965, section 2). Activations and their gradients go from
rank to rank, point to point, in the order of the micro-batches. Left out: 1F1B and interleaved stages; a stage keeps
what the backward pass needs of all micro-batches.

Shapes: B rows, S tokens of a row, D hidden width.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.graph.protocols import STAGE
from penstock.nodes.learn.batching import Packed
from penstock.nodes.model import Decoder
from penstock.nodes.model.llama import Attend
from penstock.nodes.model.tensor_parallel import pipeline_stages
from penstock.nodes.open_model import check_stages
from penstock.nodes.parallel.mesh import Ranks

Result = TypeVar("Result")
# (a micro-batch, whether it counts) → its result, after its backward pass if there is one.
Work = Callable[[Packed, bool], Result]


class PipelineStage:
    """This rank's stage of `model`, which is cut in place; `dtype` is that of activations.

    Raises ModelError for a model whose head is its embedding, or with fewer layers than stages.
    """

    def __init__(self, model: Decoder, ranks: Ranks, dtype: torch.dtype) -> None:
        count, stage = ranks.size(STAGE), ranks.place(STAGE)
        check_stages(model.config, count)
        self.model, self.dtype, self.ranks = model, dtype, ranks
        self.first, self.last = stage == 0, stage == count - 1
        stages = pipeline_stages(model.config, count)
        kept = [
            i for i in range(len(model.model.layers)) if stage in stages[f"model.layers.{i}.input_layernorm.weight"]
        ]
        self.layers = _StageLayers(model.model, kept, self.first, self.last)
        model.add_module("model", self.layers)
        for name, _ in list(model.named_children()):
            if name != "model" and not self.last:
                model.add_module(name, None)
        self._sent: list[tuple[Any, Tensor]] = []

    def run(self, work: Work[Result], todo: Sequence[tuple[Packed, bool]]) -> list[Result]:
        """All stages call it with the same micro-batches; the last one gets what `work` finds, the others nothing.

        There is a backward pass where gradients are enabled.
        """
        found, kept = [], []
        for item, counts in todo:
            given_BSD = None
            if not self.first:
                shape = (*item.tokens_RW.shape, self.model.config.hidden_size)
                given_BSD = self._receive(shape, -1).requires_grad_(torch.is_grad_enabled())
            self.layers.given_BSD = given_BSD
            if self.last:
                found.append(work(item, counts))
                self._send_gradient(given_BSD)
            else:
                out_BSD = self.model(item.tokens_RW)
                self._send(out_BSD.detach(), 1)
                kept.append((given_BSD, out_BSD))
        for given_BSD, out_BSD in kept if torch.is_grad_enabled() else ():
            torch.autograd.backward(out_BSD, self._receive(out_BSD.shape, 1))
            self._send_gradient(given_BSD)
        # What is sent must stay in memory until it has left: `_sent` holds it.
        for handle, _ in self._sent:
            handle.wait()
        self._sent.clear()
        return found

    def _send_gradient(self, given_BSD: Tensor | None) -> None:
        if given_BSD is not None and given_BSD.grad is not None:
            self._send(given_BSD.grad, -1)

    def _receive(self, shape: Sequence[int], step: int) -> Tensor:
        tensor = torch.empty(*shape, dtype=self.dtype, device=self.model.device)
        dist.recv(tensor, self.ranks.neighbour(STAGE, step))
        return tensor

    def _send(self, tensor: Tensor, step: int) -> None:
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, self.ranks.neighbour(STAGE, step)), tensor))


class _StageLayers(nn.Module):
    """Some of a decoder's layers, under the names that they have in all of it."""

    def __init__(self, whole: Any, kept: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = whole.embed_tokens if first else None
        self.layers = nn.ModuleDict({str(index): whole.layers[index] for index in kept})
        self.norm = whole.norm if last else None
        self.given_BSD: Tensor | None = None

    def forward(self, tokens_BS: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x_BSD: Any = self.given_BSD if self.embed_tokens is None else self.embed_tokens(tokens_BS)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, rope, attend)
        out_BSD: Tensor = x_BSD if self.norm is None else self.norm(x_BSD)
        return out_BSD
