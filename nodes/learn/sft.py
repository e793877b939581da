"""Imitation of demonstrations, to make the base model that RL starts from; and demonstrations as rollouts."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
from torch.nn.utils.rnn import pad_sequence

from penstock.graph import node, requires
from penstock.graph.types import Advantages, AnyPolicy, Metrics, Policy, Rollouts
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.losses import imitate
from penstock.nodes.learn.optimizer import UpdateOptions, cosine, update_options
from penstock.nodes.learn.update import policy_update
from penstock.nodes.open_model import rows_fit
from penstock.nodes.option_checks import count, not_negative
from penstock.nodes.policy import language_model
from penstock.nodes.tokenizer import Tokenizer

fits = rows_fit("policy", "demonstrations", "a demonstration")


@requires(count(0, "warmup"), not_negative("final"), fits)
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

    The learning rate rises over `warmup` updates to `lr`, and falls along a cosine to `final` times `lr` at the end.
    """
    rollouts = demonstrated.fn(policy, demonstrations)
    worth = Advantages(torch.ones(len(rollouts)))  # imitation does not read it
    schedule = partial(cosine, peak=lr, warmup=warmup, final=final)
    policy, metrics = policy_update.fn(policy, rollouts, worth, loss=imitate, lr=schedule, **options)
    return policy, {name: metrics[name] for name in ("loss", "lr", "grad_norm", "tokens")}


def rollouts_of(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    responses: Sequence[str],
    *,
    ordinals: Sequence[int] | None = None,
    answers: Sequence[str] | None = None,
    limit: int | None = None,
) -> Rollouts:
    """Texts and the response to each as rollouts that no policy sampled: version 0, and no μ (`logprobs_NT` is None).

    `tokenizer` is that of the policy that learns from them: `language_model(policy).tokenizer` in a node that reads the
    policy, `run_spec(context).tokenizer` (`nodes.open_model`) in the `init` of a node with state. Each response ends
    with `tokenizer.end`. Rows of one prompt group have the same text and the same of `ordinals`; without ordinals, each
    row is a group of its own. Raises ValueError for a row of more than `limit` tokens, and for lists of different
    lengths.
    """
    for name, each in (("responses", responses), ("ordinals", ordinals), ("answers", answers)):
        if each is not None and len(each) != len(texts):
            raise ValueError(f"rollouts_of: given {len(each)} {name}, needed {len(texts)}, one for each text")
    prompts = [tokenizer.encode_prompt(text) for text in texts]
    replies = [[*tokenizer.encode_response(response), tokenizer.end] for response in responses]
    wholes = [torch.tensor(prompt + reply) for prompt, reply in zip(prompts, replies, strict=True)]
    for text, whole in zip(texts, wholes, strict=True):
        if limit is not None and len(whole) > limit:
            raise ValueError(f"demonstration {text!r}: given {len(whole)} tokens, needed at most {limit}")
    return Rollouts(
        ordinals=tuple(range(len(texts)) if ordinals is None else ordinals),
        prompts=tuple(texts),
        answers=("",) * len(texts) if answers is None else tuple(answers),
        texts=tuple(responses),
        tokens_NS=pad_sequence(wholes, batch_first=True) if wholes else torch.zeros(0, 0, dtype=torch.long),
        prompt_lengths_N=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long),
        response_lengths_N=torch.tensor([len(reply) for reply in replies], dtype=torch.long),
        logprobs_NT=None,
        versions_NT=torch.zeros(len(texts), max(map(len, replies), default=0), dtype=torch.long),
        finished_N=torch.ones(len(texts), dtype=torch.bool),
    )


@requires(fits)
@node(pool="trainer", clock="update")
def demonstrated(policy: Policy, demonstrations: Demonstrations) -> Rollouts:
    """Demonstrations as rollouts, with the tokenizer of the policy that learns from them (see `rollouts_of`).

    Raises ValueError for a demonstration that is longer than the model's context.
    """
    model = language_model(policy)
    limit = model.model.config.max_position_embeddings
    return rollouts_of(model.tokenizer, demonstrations.texts, demonstrations.responses, limit=limit)
