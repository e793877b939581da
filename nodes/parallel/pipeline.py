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
from penstock.nodes.model.tensor_parallel import stages_of
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
        stages = stages_of(model.config, (name for name, _ in model.named_parameters()), count)
        for name in [name for name, _ in model.model.layers.named_children()]:
            if stage not in stages[f"model.layers.{name}.input_layernorm.weight"]:
                del model.model.layers[name]
        self.given = _Given()
        if not self.first:
            model.model.add_module("embed_tokens", self.given)
        if not self.last:
            model.model.norm = nn.Identity()
            # Of whatever kind the head is: only the last stage computes with it.
            for name in {name for name, _ in model.named_children()} - {"model"}:
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
            self.given.hidden_BSD = given_BSD
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


class _Given(nn.Module):
    """In place of the embedding: what the stage before has sent."""

    hidden_BSD: Tensor | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor | None:
        return self.hidden_BSD
