"""Log-probabilities of given tokens from hidden states, without storing a large tokens × vocabulary matrix.

If the vocabulary is sharded over ranks (`VocabShard`), each rank computes only the logits of its own words, and sends
four numbers per token to the others: the largest logit, and three sums.

Shapes: P predicted tokens, Q the same in whole steps, D hidden width, V vocabulary, W words of a rank, C tokens of one
chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.nodes.learn.batching import STEP, Packed
from penstock.nodes.model import CausalLM, Decoder, invariant
from penstock.nodes.model.decoder import LOGIT_ELEMENTS, attend_end_to_end
from penstock.nodes.model.kernels import linear
from penstock.nodes.model.mlp import Route, replay
from penstock.nodes.model.vocab_parallel import VocabShard


def packed_logprobs(model: CausalLM, packed: Packed, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """log π of each target of a micro-batch, and the entropy of its distribution; both float32 [P], nats.

    π is softmax(logits / T), T the temperature that the target was sampled at. The entropy has a gradient only with
    `entropy_gradient`.
    """
    hidden_QD, vocab = _hidden(model, packed), model.vocab
    count = len(packed.targets_P)
    # The padding may have any targets: it is cut off below, so it has no gradient.
    more = (0, len(hidden_QD) - count)
    targets_Q = F.pad(packed.targets_P, more)
    temperature_Q = None if packed.temperature_P is None else F.pad(packed.temperature_P, more, value=1.0)

    def compute(hidden_QD: Tensor, weight_WD: Tensor) -> tuple[Tensor, Tensor]:
        given, most = (hidden_QD, weight_WD, targets_Q, temperature_Q), model.logit_elements
        options: Any = {"chunk_elements": most, "entropy_gradient": entropy_gradient}
        if vocab.parts == 1:
            return token_logprobs(*given, by_rows=model.invariant, **options)
        return logprobs_over_ranks(*given, vocab, **options)

    logprobs_Q, entropy_Q = model.with_head(vocab.shared(hidden_QD), compute)
    return logprobs_Q[:count], entropy_Q[:count]


def _hidden(model: CausalLM, packed: Packed) -> Tensor:
    """The hidden states that predict the targets, [Q, D], padded to whole steps with that of any token."""
    at_Q = packed.at_P
    # The number of targets differs in each micro-batch: without padding oneDNN would compile the head's products each
    # time, and keep them (3.3 million parameters: 5 MB an update).
    if at_Q.device.type == "cpu" and not model.invariant:
        at_Q = F.pad(at_Q, (0, -len(at_Q) % STEP))
    return hidden_states(model, packed)[at_Q]


def hidden_states(model: Decoder, packed: Packed) -> Tensor:
    """The hidden state of each token of a micro-batch, [R · W, D]."""
    attend = None if packed.starts_C is None else attend_end_to_end(packed.starts_C, packed.families_F)
    hidden_RWD: Tensor = model(packed.tokens_RW, packed.positions_W, attend, route_of(model, packed))
    return hidden_RWD.flatten(0, 1)


def packed_distributions(model: CausalLM, packed: Packed, words: int | None = None) -> Tensor:
    """log π of every word that this rank has, for each target, at the target's temperature, with a gradient: float32
    [P, W]. Memory grows with tokens × words.

    With `words`, only of the first so many words, over which π is then normalised. The vocabulary must be in one part.
    """
    logits_PW, vocab = model.own_logits(_hidden(model, packed))[: len(packed.targets_P)].float(), model.vocab
    if words is not None:
        if vocab.parts > 1:
            raise ValueError(f"packed_distributions: given a vocabulary in {vocab.parts} parts, needed one")
        logits_PW = logits_PW[:, :words]
    if packed.temperature_P is not None:
        logits_PW = logits_PW / packed.temperature_P[:, None]
    if vocab.parts == 1:
        return torch.log_softmax(logits_PW, dim=-1)
    largest_P = vocab.max(logits_PW.amax(-1))
    sum_P = vocab.shared(vocab.sum((logits_PW - largest_P[:, None]).exp().sum(-1)))
    return logits_PW - (largest_P + sum_P.log())[:, None]


def route_of(model: Decoder, packed: Packed) -> Route | None:
    """The recorded route of a micro-batch's tokens through a model's experts; None if its routers choose."""
    if not model.replays_routing or packed.rollouts is None or packed.rollouts.experts_NSLK is None:
        return None
    width = packed.tokens_RW.shape[1]
    experts_RWLK = packed.rollouts.experts_NSLK[:, :width]
    # Rows that were joined with others may have no experts, and be longer. One copy to the device is for all layers.
    padded_RWLK = F.pad(experts_RWLK, (0, 0, 0, 0, 0, width - experts_RWLK.shape[1]))
    return replay(padded_RWLK.flatten(0, 1).to(packed.tokens_RW.device))


def token_logprobs(
    hidden_PD: Tensor,
    weight_VD: Tensor,
    targets_P: Tensor,
    temperature_P: Tensor | None = None,
    *,
    chunk_elements: int = LOGIT_ELEMENTS,
    by_rows: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log π of each target (with a gradient) and the entropy of each distribution (without, unless `entropy_gradient`);
    both float32, nats.

    Logits are divided by `temperature_P` in float32, as a generator does; None is 1. If the logits fit in one chunk,
    autograd keeps them. Otherwise they are computed by chunks of tokens, and again in the backward pass, so that memory
    does not grow with tokens × vocabulary. `by_rows`: as a generator computes them with `--invariant`.
    """
    if not by_rows and not entropy_gradient and hidden_PD.shape[0] * weight_VD.shape[0] <= chunk_elements:
        logprobs_PV = torch.log_softmax(_logits(hidden_PD, weight_VD, temperature_P), dim=-1)
        # No view: see `CausalLM.with_head`.
        return _gather(logprobs_PV, targets_P).clone(), _entropy(logprobs_PV.detach())
    size = max(1, chunk_elements // weight_VD.shape[0])
    given = hidden_PD, weight_VD, targets_P, temperature_P, size, entropy_gradient, by_rows
    logprobs_P, entropy_P = _Chunked.apply(*given)  # type: ignore[no-untyped-call]
    return logprobs_P, entropy_P


class _Chunked(torch.autograd.Function):
    """`token_logprobs` by chunks: forward keeps only log-probabilities, backward computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        targets_P: Tensor,
        temperature_P: Tensor | None,
        size: int,
        entropy_gradient: bool,
        by_rows: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for rows in _chunks(len(targets_P), size):
            temperature_C = None if temperature_P is None else temperature_P[rows]
            if by_rows:
                logprobs_CV = invariant.log_softmax(invariant.linear(hidden_PD[rows], weight_VD), temperature_C)
            else:
                logprobs_CV = torch.log_softmax(_logits(hidden_PD[rows], weight_VD, temperature_C), dim=-1)
            logprobs.append(_gather(logprobs_CV, targets_P[rows]))
            entropies.append(_entropy(logprobs_CV))
            del logprobs_CV  # before those of the next chunk
        entropy_P = torch.cat(entropies)
        _keep(ctx, size, entropy_P, entropy_gradient, hidden_PD, weight_VD, targets_P, temperature_P)
        return torch.cat(logprobs), entropy_P

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor, grad_entropy_P: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_P, grad_entropy_P, lambda logits_CV, rows: torch.softmax(logits_CV, dim=-1))


def logprobs_over_ranks(
    hidden_PD: Tensor,
    weight_WD: Tensor,
    targets_P: Tensor,
    temperature_P: Tensor | None,
    vocab: VocabShard,
    *,
    chunk_elements: int = LOGIT_ELEMENTS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, for a vocabulary sharded over ranks; results are equal on all ranks. `weight_WD` are this
    rank's rows of the head. The gradient of `hidden_PD` is this rank's summand.

    Always by chunks of tokens, whose logits the backward pass computes again. For any number of chunks there are two
    exchanges between ranks: the largest logit of each token, then its sums.
    """
    size = max(1, chunk_elements // weight_WD.shape[0])
    given = hidden_PD, weight_WD, targets_P, temperature_P, size, entropy_gradient, vocab
    logprobs_P, entropy_P = _OverRanks.apply(*given)  # type: ignore[no-untyped-call]
    return logprobs_P, entropy_P


class _OverRanks(torch.autograd.Function):
    """With l a logit, m the largest of a token and Z = Σ exp(l − m) over all ranks' words: log π = l − m − log Z, and
    the entropy is log Z − Σ exp(l − m) · (l − m) / Z."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_WD: Tensor,
        targets_P: Tensor,
        temperature_P: Tensor | None,
        size: int,
        entropy_gradient: bool,
        vocab: VocabShard,
    ) -> tuple[Tensor, Tensor]:
        rows_P, here_P = vocab.index(targets_P)
        # For this rank's words: the largest logit, Σ exp(l − m), Σ exp(l − m) · (l − m), and the target's logit or 0.
        own_4P = torch.empty(4, len(targets_P), device=hidden_PD.device)
        for rows in _chunks(len(targets_P), size):
            temperature_C = None if temperature_P is None else temperature_P[rows]
            logits_CW = _logits(hidden_PD[rows], weight_WD, temperature_C)
            own_4P[3, rows] = _gather(logits_CW, rows_P[rows])
            own_4P[0, rows] = logits_CW.amax(-1)
            below_CW = logits_CW.sub_(own_4P[0, rows, None])
            weight_CW = below_CW.exp()
            own_4P[1, rows] = weight_CW.sum(-1)
            own_4P[2, rows] = weight_CW.mul_(below_CW).sum(-1)
            del logits_CW, below_CW, weight_CW
        largest_P, sums_3P = vocab.max(own_4P[0]), own_4P[1:]
        # From relative to this rank's largest logit to relative to that of all ranks.
        lower_P = own_4P[0] - largest_P
        sums_3P[1] = lower_P.exp() * (sums_3P[1] + lower_P * sums_3P[0])
        sums_3P[0] *= lower_P.exp()
        sums_3P[2] = (sums_3P[2] - largest_P) * here_P
        sum_P, weighted_P, target_P = vocab.sum(sums_3P)
        log_P = sum_P.log()
        entropy_P = log_P - weighted_P / sum_P
        given = hidden_PD, weight_WD, rows_P, temperature_P, here_P, largest_P + log_P
        _keep(ctx, size, entropy_P, entropy_gradient, *given)
        return target_P - log_P, entropy_P

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor, grad_entropy_P: Tensor) -> tuple[Tensor | None, ...]:
        *_, here_P, log_P = ctx.saved_tensors

        def probabilities(logits_CW: Tensor, rows: slice) -> Tensor:
            return logits_CW.sub_(log_P[rows, None]).exp_()

        return _gradients(ctx, grad_P, grad_entropy_P, probabilities, here_P)


def _keep(ctx: Any, size: int, entropy_P: Tensor, entropy_gradient: bool, *tensors: Tensor | None) -> None:
    """Keep what `_gradients` needs."""
    ctx.save_for_backward(*tensors)
    ctx.size, ctx.entropy_P = size, entropy_P.clone() if entropy_gradient else None
    if not entropy_gradient:
        # Entropy is only a metric.
        ctx.mark_non_differentiable(entropy_P)


def _gradients(
    ctx: Any,
    grad_P: Tensor,
    grad_entropy_P: Tensor,
    probabilities: Callable[[Tensor, slice], Tensor],
    here_P: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of hidden states and of the head, and None for the other five inputs, by chunks of tokens whose
    logits are computed again: ∂ log π(y) / ∂ logit_v = (1[v = y] − π(v)) / T, and of the entropy
    ∂ H / ∂ logit_v = −π(v) · (log π(v) + H) / T.

    `probabilities` computes π from the logits of some tokens. `here_P` is True for targets among this rank's words;
    None if all are.
    """
    hidden_PD, weight_VD, targets_P, temperature_P, *_ = ctx.saved_tensors
    entropy_P = ctx.entropy_P
    grad_hidden_PD = torch.empty_like(hidden_PD)
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
    # The gradient with respect to a logit before the division by its temperature.
    if temperature_P is not None:
        grad_P = grad_P / temperature_P
        grad_entropy_P = grad_entropy_P if entropy_P is None else grad_entropy_P / temperature_P
    grad_target_P = grad_P if here_P is None else grad_P * here_P
    for rows in _chunks(len(targets_P), ctx.size):
        temperature_C = None if temperature_P is None else temperature_P[rows]
        grad_CV = probabilities(_logits(hidden_PD[rows], weight_VD, temperature_C), rows)
        if entropy_P is None:
            grad_CV.mul_(-grad_P[rows, None])
        else:
            # xlogy: a word whose probability is 0 in float32 has no gradient.
            of_entropy_CV = torch.xlogy(grad_CV, grad_CV).addcmul_(grad_CV, entropy_P[rows, None])
            grad_CV.mul_(-grad_P[rows, None]).addcmul_(of_entropy_CV, grad_entropy_P[rows, None], value=-1)
            del of_entropy_CV
        grad_CV.scatter_add_(1, targets_P[rows, None], grad_target_P[rows, None])
        # Products in the weights' dtype, as in autograd; their sum over chunks is in float32.
        grad_CV = grad_CV.to(weight_VD.dtype)
        grad_hidden_PD[rows] = grad_CV @ weight_VD
        if grad_weight_VD is not None:
            grad_weight_VD += grad_CV.T @ hidden_PD[rows]
        del grad_CV  # before the logits of the next chunk
    grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
    return grad_hidden_PD, grad_weight_VD, None, None, None, None, None


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, length, size))


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor | None) -> Tensor:
    logits_CV = linear(hidden_CD, weight_VD).float()
    return logits_CV if temperature_C is None else logits_CV / temperature_C[:, None]


def _gather(logprobs_CV: Tensor, targets_C: Tensor) -> Tensor:
    return logprobs_CV.gather(1, targets_C[:, None]).squeeze(1)


def _entropy(logprobs_CV: Tensor) -> Tensor:
    # In place: a chunk has at most two matrices in memory at once.
    return -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
