"""Pipeline parallelism: a model's layers in stages, each on ranks of its own, by the 1F1B schedule.

A stage first makes as many forward passes as stages follow it, then one backward pass for each forward pass, then the
remaining backward passes (PipeDream-Flush, Narayanan et al., 2021, arXiv 2104.04473, section 2.2.1; the last stage,
which has the loss, makes both for each micro-batch in turn). So a stage keeps activations of at most `stages - stage`
micro-batches. Backward passes are in the order of the micro-batches, so gradients are summed in this order, with the
bits of GPipe. Without gradients there are only forward passes.

Two neighbours post the same exchanges in the same order, and a send and a receive that are posted together are one
batch: nothing waits for a buffer on the other side, nor for a message that the peer would post only after the one that
it waits for. NCCL needs that: it works through the operations of a rank in order, and a send ends when it has been
received.

torch's `Schedule1F1B` does not fit: its stage receives every micro-batch into buffers of the first one's shape, but
micro-batches here are rows of different lengths; it refuses fewer micro-batches than stages; and its loss returns one
tensor, but `work` returns any result of a node. Left out: interleaved stages.

Shapes: B rows, S tokens of a row, D hidden width.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.graph.protocols import STAGE
from penstock.nodes.learn.batching import Packed
from penstock.nodes.learn.logprobs import route_of
from penstock.nodes.model import Decoder
from penstock.nodes.model.tensor_parallel import stages_of
from penstock.nodes.open_model import check_stages
from penstock.nodes.parallel.mesh import Ranks

Result = TypeVar("Result")
# (a micro-batch, whether it counts) → its result, after its backward pass if there is one.
Work = Callable[[Packed, bool], Result]


class PipelineStage:
    """This rank's stage of `model`, whose other layers are removed in place; `dtype` is that of activations.

    Raises ModelError for a model with tied embeddings, or with fewer layers than stages.
    """

    def __init__(self, model: Decoder, ranks: Ranks, dtype: torch.dtype) -> None:
        count, stage = ranks.size(STAGE), ranks.place(STAGE)
        check_stages(model.config, count)
        self.model, self.dtype = model, dtype
        self.first, self.last = stage == 0, stage == count - 1
        # How many micro-batches this stage is ahead of the last one.
        self.ahead = count - 1 - stage
        before = None if self.first else ranks.neighbour(STAGE, -1)
        after = None if self.last else ranks.neighbour(STAGE, 1)
        self._before, self._after = _Neighbour(before), _Neighbour(after)
        stages = stages_of(model.config, (name for name, _ in model.named_parameters()), count)
        for name in [name for name, _ in model.model.layers.named_children()]:
            if stage not in stages[f"model.layers.{name}.input_layernorm.weight"]:
                del model.model.layers[name]
        self.given = _Given()
        if not self.first:
            model.model.add_module("embed_tokens", self.given)
        if not self.last:
            model.model.norm = nn.Identity()
            # The head, of any kind: only the last stage uses it.
            for name in {name for name, _ in model.named_children()} - {"model"}:
                model.add_module(name, None)

    def run(
        self,
        work: Work[Result],
        todo: Sequence[tuple[Packed, bool]],
        before_backward: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """Run all micro-batches. All stages call it with the same ones; the last stage gets the results of `work`, the
        others an empty list.

        If gradients are enabled, there are backward passes; `before_backward` is called before each that is not made in
        `work`.
        """
        learns, found = torch.is_grad_enabled(), list[Result]()
        ahead = self.ahead if learns else len(todo)
        # (input, output) of the micro-batches whose backward pass is still to come.
        kept: deque[tuple[Tensor | None, Tensor]] = deque()
        # The input's gradient of the last backward pass: sent together with the next receive from the same neighbour.
        grad_BSD: Tensor | None = None
        for number, (item, counts) in enumerate(todo):
            shape = (*item.tokens_RW.shape, self.model.config.hidden_size)
            given_BSD = self._before.exchange(grad_BSD, None if self.first else self._empty(shape))
            grad_BSD = None
            if given_BSD is not None:
                given_BSD.requires_grad_(learns)
            self.given.hidden_BSD = given_BSD
            if self.last:
                found.append(work(item, counts))
                grad_BSD = given_BSD.grad if given_BSD is not None else None
                continue
            out_BSD = self.model(item.tokens_RW, route=route_of(self.model, item))
            if learns:
                kept.append((given_BSD, out_BSD))
            if number < ahead:
                self._after.exchange(out_BSD.detach(), None)
            else:
                returned_BSD = self._after.exchange(out_BSD.detach(), self._empty(kept[0][1].shape))
                before_backward()
                grad_BSD = _backward(*kept.popleft(), returned_BSD)
            del out_BSD  # else its graph would stay in memory until the next output
        while kept:
            self._before.exchange(grad_BSD, None)
            returned_BSD = self._after.exchange(None, self._empty(kept[0][1].shape))
            before_backward()
            grad_BSD = _backward(*kept.popleft(), returned_BSD)
        self._before.exchange(grad_BSD, None)
        for neighbour in (self._before, self._after):
            neighbour.finish()
        self.given.hidden_BSD = None
        return found

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.model.device)


class _Neighbour:
    """The stage before or after this one, None at an end of the pipeline."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        # A send under way: it must stay in memory until it has left.
        self._sent: tuple[dist.Work, Tensor] | None = None

    def exchange(self, sent: Tensor | None, received: Tensor | None) -> Tensor | None:
        """Send and receive at once. Returns `received` when it has arrived. At most one send is under way."""
        if self.rank is None or (sent is None and received is None):
            return received
        ops = []
        if sent is not None:
            self.finish()
            sent = sent.contiguous()
            ops.append(dist.P2POp(dist.isend, sent, self.rank))
        if received is not None:
            ops.append(dist.P2POp(dist.irecv, received, self.rank))
        # gloo returns a work for each operation, NCCL one for all: then the first is the last.
        works = dist.batch_isend_irecv(ops)
        if sent is not None:
            self._sent = works[0], sent
        if received is not None:
            works[-1].wait()
        return received

    def finish(self) -> None:
        """Wait until the send under way has ended."""
        if self._sent is not None:
            self._sent[0].wait()
        self._sent = None


def _backward(given_BSD: Tensor | None, out_BSD: Tensor, grad_BSD: Tensor | None) -> Tensor | None:
    """The gradient of a stage's input, from that of its output."""
    torch.autograd.backward(out_BSD, grad_BSD)
    return None if given_BSD is None else given_BSD.grad


class _Given(nn.Module):
    """In place of the embedding: the hidden states from the previous stage."""

    hidden_BSD: Tensor | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor | None:
        return self.hidden_BSD
