"""The reward model: a decoder whose number at a response's last token is the response's score; and learning from pairs
of responses, one preferred to the other.

Losses of pairs are not averaged. Their log-probabilities are those of whole responses: `segment_sum` of the tokens'
(nats).

Shapes: N responses or pairs (of pairs in a batch: the chosen, then the rejected), G prompts, S padded length of a
sequence, P predicted tokens of a micro-batch, D hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from penstock.graph import node, opens, requires
from penstock.graph.context import Context
from penstock.graph.protocols import Carried, num_ranks
from penstock.graph.types import AnyPreferenceModel, Mean, Metrics, PreferenceModel, RewardModel, Rewards, Rollouts
from penstock.nodes.advantage import uniform_groups
from penstock.nodes.data import Pairs
from penstock.nodes.learn.batching import Packed
from penstock.nodes.learn.logprobs import hidden_states
from penstock.nodes.learn.losses import segment_lengths
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, update_options
from penstock.nodes.learn.sft import rollouts_of
from penstock.nodes.learn.update import Forward
from penstock.nodes.model import ModelConfig, ModelError, Scorer, load_model
from penstock.nodes.open_model import (
    ModelSpec,
    directory_spec,
    open_model,
    reads_tokens,
    require_model,
    rows_fit,
    run_spec,
)
from penstock.nodes.tokenizer import load_tokenizer
from penstock.nodes.trainable import Frozen, Learner, Model, SequenceModel, expect


def dpo_loss(
    chosen_N: Tensor, rejected_N: Tensor, reference_chosen_N: Tensor, reference_rejected_N: Tensor, *, beta: float
) -> Tensor:
    """−log σ(β · (log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l))) of each pair.

    DPO (Rafailov et al. 2023, arXiv 2305.18290), equation 7. With pairs that the policy has just sampled and a judge
    has ordered, it is online DPO (Guo et al. 2024, arXiv 2402.04792), section 3.
    """
    margins_N = (chosen_N - reference_chosen_N) - (rejected_N - reference_rejected_N)
    return -logsigmoid(beta * margins_N)


def best_and_worst(rewards_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row of each group's best response, row of its worst, weight of the pair), each [G].

    Among equals the first row is taken. The weight is 1, or 0 if all rewards of the group are equal: then there is no
    preference, and best and worst are the same row. `group_N` (int64) holds each of 0 to G − 1.
    """
    weight_G = (~uniform_groups(rewards_N, group_N)).to(rewards_N.dtype)
    return _first_by(-rewards_N, group_N), _first_by(rewards_N, group_N), weight_G


def bradley_terry_loss(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """−log σ(r(y_w) − r(y_l)) of each pair of scores: the loss of a reward model.

    InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), equation 1; the same as DPO (arXiv 2305.18290), equation 2.
    """
    return -logsigmoid(chosen_N - rejected_N)


def bradley_terry_accuracy(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """1 if the chosen response has the higher score, 0 if it has the lower one, ½ if they are equal [N]."""
    return (1 + torch.sign(chosen_N - rejected_N).detach()) / 2


def _first_by(keys_N: Tensor, group_N: Tensor) -> Tensor:
    """The row of each group's lowest key, the first one among equals."""
    # Both sorts are stable, so that the first among equals stays the first.
    by_key_N = torch.argsort(keys_N, stable=True)
    by_group_N = by_key_N[torch.argsort(group_N[by_key_N], stable=True)]
    lengths_G = segment_lengths(group_N)
    return by_group_N[lengths_G.cumsum(0) - lengths_G]


def packed_values(model: Scorer, packed: Packed) -> tuple[Tensor, Tensor]:
    """(the number at the token before each target, V(s_t) for target t as the action, float32 [P]; zeros in place of
    entropies)."""
    values_P = model.values(hidden_states(model, packed)[packed.at_P])
    return values_P, torch.zeros_like(values_P)


def ends(rollouts: Rollouts) -> Rollouts:
    """Rollouts with one sampled token in each row: the one that would follow its last token.

    `packed_values` of them are the sequences' scores, as `LlamaForSequenceClassification` pools them: at the last token
    that is not padding, which therefore is no token that ends a response (`Tokenizer.for_scores`).
    """
    lengths_N = rollouts.response_lengths_N
    longest = int(lengths_N.max()) if len(lengths_N) else 0
    after_NT = torch.arange(longest + 1) == lengths_N.cpu()[:, None]
    return replace(
        rollouts,
        tokens_NS=pad(rollouts.tokens_NS, (0, 1)),
        response_lengths_N=lengths_N + 1,
        versions_NT=after_NT.long() - 1,
        # A score is no probability: no temperature divides it.
        temperature_N=torch.ones(len(rollouts)),
    )


@torch.no_grad()
def sequence_sums(model: SequenceModel[Model], items: Sequence[Packed], count: int, forward: Forward[Model]) -> Tensor:
    """The sum over each sequence's targets of the numbers that `forward` computes, float32 [N], without a gradient."""
    sums_N = torch.zeros(count, device=model.device)
    found = model.workers.map(lambda model, packed: forward(model, packed)[0], items)
    for packed, values_P in zip(items, found, strict=True):
        sums_N.index_add_(0, packed.sequence_P, values_P)
    return sums_N


def learn_pairs(
    learner: Learner[Model],
    items: Sequence[Packed],
    count: int,
    forward: Forward[Model],
    loss: Callable[[Tensor, Tensor], Tensor],
    options: UpdateOptions,
    lr: float | Schedule,
) -> tuple[Tensor, Metrics]:
    """Make one AdamW step on the mean of `loss(chosen, rejected)` over `count` pairs. Their sequences are first all
    chosen ones, then all rejected ones. Returns (the sums of the sequences before the step, float32 [N]; its metrics).

    The two sequences of a pair may be in different micro-batches. So sums are computed first, without a gradient, and
    each token then gets the loss's gradient with respect to its sequence's sum as its weight. Without pairs the metrics
    have no `loss`.
    """
    sums_N = sequence_sums(learner, items, 2 * count, forward).requires_grad_()
    losses_N = loss(*sums_N.chunk(2))
    # The loss of a pair depends on its sequences only by their sums, so this is the weight of each of their tokens.
    (weights_N,) = torch.autograd.grad(losses_N.sum(), sums_N)

    def weighted(model: Model, packed: Packed) -> tuple[Tensor, None]:
        return (weights_N[packed.sequence_P] * forward(model, packed)[0]).sum(), None

    _, metrics = learner.step(items, weighted, options, lr=lr, normaliser=max(1, count))
    return sums_N.detach(), {**({"loss": float(losses_N.detach().mean())} if count else {}), **metrics}


class FrozenRewardModel(Frozen[Scorer], RewardModel):
    """A trained reward model."""


class LearningRewardModel(Learner[Scorer], PreferenceModel):
    """A reward model that learns."""

    called: ClassVar[str] = "reward model"


def require_reward_model(context: Context) -> None:
    """Raises ModelError without the directory of a reward model, or for a model without a head."""
    load_model(Scorer, _directory(context), context.dtype, "meta")


def reward_model_spec(context: Context) -> ModelSpec:
    """The reward model's shape and tokenizer. Raises ModelError without a directory."""
    return directory_spec(_directory(context))


def _directory(context: Context) -> str:
    folder = str(context.options.get("reward_model") or "")
    if not folder:
        wrote = "a directory that a run of the program reward_model has written, checkpoints/NUMBER/reward_model"
        raise ModelError(f"reward_model: given no directory, needed {wrote}: --reward-model DIR")
    return folder


@opens(reward_model_spec, lm_head=False)
@requires(require_reward_model)
def open_reward_model(context: Context) -> Carried:
    """The reward model of the directory that the program's option `reward_model` names, in the run's dtype.

    Raises ModelError without a directory, or for a model without a head.
    """
    folder = _directory(context)
    unread = num_ranks(context.mesh) > 1  # each rank reads the regions that it keeps
    model = load_model(Scorer, folder, context.dtype, context.device, unread=unread).requires_grad_(False)
    tokenizer = load_tokenizer(folder, context.chat_template_kwargs)
    return FrozenRewardModel(model, tokenizer, replace(context, model=folder))


@opens(run_spec, lm_head=False, base=True, config=ModelConfig.from_json)
@requires(require_model(Scorer))
def make_preference_model(context: Context) -> Carried:
    """A reward model on the decoder of `context.model`, whose head is zero: it has no preference yet."""
    return LearningRewardModel(*open_model(Scorer, context, "float32"), context)


@reads_tokens
@node(pool="reward")
def reward_scores(
    reward_model: RewardModel, rollouts: Rollouts, *, micro_tokens: int | None = None
) -> tuple[Rewards, Metrics]:
    """The reward model's score of each response, float32 [N]. Metric: `learned_reward`, their mean.

    The rollouts' tokens are read as they are, so the policy's tokenizer must be the reward model's.
    """
    model = expect(FrozenRewardModel, reward_model, "reward_scores")
    items = model.pack(ends(rollouts), micro_tokens)
    scores_N = sequence_sums(model, items, len(rollouts), packed_values).cpu()
    return Rewards(scores_N), {"learned_reward": Mean.of(scores_N.tolist())}


@requires(rows_fit("reward_model", "pairs", "a response with its prompt"))
@node(pool="trainer", clock="update")
@update_options()
def preference_update(
    reward_model: AnyPreferenceModel,
    pairs: Pairs,
    *,
    lr: float | Schedule = 3e-4,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyPreferenceModel, Metrics]:
    """One AdamW step on the Bradley-Terry loss, averaged over the pairs (InstructGPT, arXiv 2203.02155, equation 1).

    Metrics of the model before the step: `loss`, `accuracy` (share of pairs in the right order), `margin` (mean
    difference of the scores); and `tokens`, those of the responses.
    """
    learner = expect(LearningRewardModel, reward_model, "preference_update")
    limit = learner.model.config.max_position_embeddings
    rollouts = rollouts_of(learner.tokenizer, pairs.texts * 2, pairs.chosen + pairs.rejected, limit=limit)
    items = learner.pack(ends(rollouts), options["micro_tokens"])
    given = learner, items, len(pairs.texts), packed_values
    scores_N, metrics = learn_pairs(*given, bradley_terry_loss, options, lr)
    chosen_N, rejected_N = scores_N.chunk(2)
    return reward_model, {
        "accuracy": float(bradley_terry_accuracy(chosen_N, rejected_N).mean()),
        "margin": float((chosen_N - rejected_N).mean()),
        "tokens": float(rollouts.response_lengths_N.sum()),
        **metrics,
    }
