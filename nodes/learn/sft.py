"""Imitation of demonstrations, which makes the base model that RL starts from; and demonstrations as rollouts."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.types import AnyPolicy, Metrics, Policy, Rollouts
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.batching import Packed
from penstock.nodes.learn.optimizer import UpdateOptions, cosine, update_options
from penstock.nodes.option_checks import count, not_negative
from penstock.nodes.policy import language_model, language_policy
from penstock.nodes.tokenizer import Tokenizer
from penstock.nodes.trainable import encode_texts


@requires(count(0, "warmup"), not_negative("final"))
@node(pool="trainer", clock="update")
@update_options(weight_decay=0.01)
def sft_update(
    policy: AnyPolicy,
    demonstrations: Demonstrations,
    *,
    lr: float = 2e-3,
    warmup: int = 20,
    final: float = 0.0,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyPolicy, Metrics]:
    """One AdamW step on the cross-entropy of the demonstrated responses, averaged over their tokens.

    The learning rate rises over `warmup` updates to `lr`, and falls along a cosine to `final` · `lr` at the run's end.
    """
    learner = language_policy(policy)

    def loss(packed: Packed, logprobs_P: Tensor, entropy_P: Tensor) -> tuple[Tensor, Tensor]:
        total = -logprobs_P.sum()  # cross-entropy
        return total, total.detach()

    micro_batches, tokens = learner.pack_texts(demonstrations.texts, demonstrations.responses, options["micro_tokens"])
    losses = learner.accumulate(micro_batches, loss)
    rate = cosine(learner.version, learner.updates, peak=lr, warmup=warmup, final=final)
    grad_norm = learner.apply(options, lr=rate, normaliser=tokens)
    mean = float(torch.stack(losses).sum()) / tokens
    return policy, {"loss": mean, "lr": rate, "grad_norm": grad_norm, "tokens": float(tokens)}


def rollouts_of(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    responses: Sequence[str],
    *,
    ordinals: Sequence[int] | None = None,
    answers: Sequence[str] | None = None,
    limit: int | None = None,
) -> Rollouts:
    """Texts and what follows each as rollouts that no policy sampled: version 0, and no μ (`logprobs_NT` is None).

    `tokenizer` is that of the policy that is to learn from them: `language_model(policy).tokenizer` in a node that
    reads the policy, `run_spec(context).tokenizer` (`nodes.base`) in the `init` of a node with state. Each response
    ends with an end token. Rows of one prompt group have one of the `ordinals`; without, each row is a group of its
    own. Raises ValueError for a row of more than `limit` tokens, and for lists of different lengths.
    """
    for name, each in (("responses", responses), ("ordinals", ordinals), ("answers", answers)):
        if each is not None and len(each) != len(texts):
            raise ValueError(f"rollouts_of: given {len(each)} {name}, needed {len(texts)}, one for each text")
    tokens_NS, prompts_N, lengths_N = encode_texts(tokenizer, texts, responses, limit)
    longest = int(lengths_N.max()) if len(texts) else 0
    return Rollouts(
        ordinals=tuple(range(len(texts)) if ordinals is None else ordinals),
        prompts=tuple(texts),
        answers=("",) * len(texts) if answers is None else tuple(answers),
        texts=tuple(responses),
        tokens_NS=tokens_NS,
        prompt_lengths_N=prompts_N,
        response_lengths_N=lengths_N,
        logprobs_NT=None,
        versions_NT=torch.zeros(len(texts), longest, dtype=torch.long),
        finished_N=torch.ones(len(texts), dtype=torch.bool),
    )


@node(pool="trainer", clock="update")
def demonstrated(policy: Policy, demonstrations: Demonstrations) -> Rollouts:
    """Demonstrations as rollouts, by the tokenizer of the policy that is to learn from them (see `rollouts_of`).

    Raises ValueError for one that is longer than the model's context.
    """
    model = language_model(policy)
    limit = model.model.config.max_position_embeddings
    return rollouts_of(model.tokenizer, demonstrations.texts, demonstrations.responses, limit=limit)
