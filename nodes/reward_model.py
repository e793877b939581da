"""The reward model: a decoder whose number at a response's last token says how good the response is; and how models
learn from pairs of responses, one better than the other.

Losses of pairs are not averaged. Their log-probabilities are of whole responses, that is `segment_sum` of the tokens'
(nats).

Shapes: N responses or pairs (of pairs in a batch: the chosen, then the rejected), G prompts, S padded length of a
sequence, P predicted tokens of a micro-batch, D hidden width.
"""

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.graph import node, opens, requires
from penstock.graph.protocols import Carried, num_ranks
from penstock.graph.types import AnyPreferenceModel, Context, Metrics, PreferenceModel, RewardModel, Rewards, Rollouts
from penstock.nodes.advantage import uniform_groups
from penstock.nodes.data import Pairs
from penstock.nodes.learn.batching import Packed
from penstock.nodes.learn.losses import segment_lengths
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, update_options
from penstock.nodes.model import ModelError, Scorer, load_scorer
from penstock.nodes.open_model import ModelSpec, directory_spec, open_scorer, reads_tokens, require_scorer, run_spec
from penstock.nodes.tokenizer import load_tokenizer
from penstock.nodes.trainable import Frozen, Learner, SequenceModel


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

    Among equals the first row is taken. The weight is 1, or 0 where all rewards of the group are equal: there is no
    preference then, and best and worst are the same row. `group_N` (int64) holds each of 0 to G − 1.
    """
    weight_G = (~uniform_groups(rewards_N, group_N)).to(rewards_N.dtype)
    return _first_by(-rewards_N, group_N), _first_by(rewards_N, group_N), weight_G


def bradley_terry_loss(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """−log σ(r(y_w) − r(y_l)) of each pair of scores, what a reward model learns by.

    InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), equation 1; the same as DPO (arXiv 2305.18290), equation 2.
    """
    return -logsigmoid(chosen_N - rejected_N)


def bradley_terry_accuracy(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """1 where the chosen response has the higher score, 0 where it has the lower one, ½ where they are equal [N]."""
    return (1 + torch.sign(chosen_N - rejected_N).detach()) / 2


def _first_by(keys_N: Tensor, group_N: Tensor) -> Tensor:
    """The row of each group's lowest key, the first one among equals."""
    by_key_N = torch.argsort(keys_N, stable=True)
    by_group_N = by_key_N[torch.argsort(group_N[by_key_N], stable=True)]
    lengths_G = segment_lengths(group_N)
    return by_group_N[lengths_G.cumsum(0) - lengths_G]


def packed_values(model: Scorer, packed: Packed) -> Tensor:
    """The number at the token before each target: V(s_t), where target t is the action. float32 [P]."""
    hidden_PD = model(packed.tokens_RW).flatten(0, 1)[packed.at_P]
    return model.values(hidden_PD)


def pack_ends(
    model: SequenceModel[Any], tokens_NS: Tensor, prompts_N: Tensor, responses_N: Tensor, max_tokens: int | None
) -> list[Packed]:
    """Micro-batches that hold whole sequences, with one target for each: what would follow its last token.

    `packed_values` of them are the sequences' scores, as `LlamaForSequenceClassification` pools them.
    """
    count, width = len(tokens_NS), int(responses_N.max()) + 1
    ends_NT = torch.arange(width) == responses_N.cpu()[:, None]
    padded_NS = torch.cat([tokens_NS, tokens_NS.new_zeros(count, 1)], dim=1).to(model.device)
    return model.pack_tokens(padded_NS, prompts_N, responses_N + 1, max_tokens, ends_NT)


@torch.no_grad()
def sequence_scores(model: SequenceModel[Scorer], micro_batches: list[Packed], num_sequences: int) -> Tensor:
    """The score of each sequence of `pack_ends`, float32 [N], without a gradient."""
    scores_N = torch.zeros(num_sequences, device=model.device)
    values = model.workers.map(packed_values, micro_batches)
    for packed, values_P in zip(micro_batches, values, strict=True):
        scores_N[packed.sequence_P] = values_P
    return scores_N


class FrozenRewardModel(Frozen[Scorer], RewardModel):
    """A reward model that has learnt."""


class LearningRewardModel(Learner[Scorer], PreferenceModel):
    """A reward model that learns."""

    called: ClassVar[str] = "reward model"


def require_reward_model(context: Context) -> None:
    """Raises ModelError without a reward model's directory, or for one without a head; its weights are not read."""
    load_scorer(_directory(context), context.dtype, "meta")


def reward_model_spec(context: Context) -> ModelSpec:
    """Its shape and its tokenizer. Raises ModelError without a directory."""
    return directory_spec(_directory(context))


def _directory(context: Context) -> str:
    folder = str(context.options.get("reward_model") or "")
    if not folder:
        wrote = "a directory that a run of the program reward_model has written, checkpoints/NUMBER/reward_model"
        raise ModelError(f"reward_model: given no directory, needed {wrote}: --reward-model DIR")
    return folder


@opens(reward_model_spec, words=False)
@requires(require_reward_model)
def open_reward_model(context: Context) -> Carried:
    """The reward model of the directory that the program's option `reward_model` names, in the run's dtype.

    Raises ModelError without a directory, or for one without a head.
    """
    folder = _directory(context)
    unread = num_ranks(context.mesh) > 1  # each rank reads what it cuts, layer by layer
    model = load_scorer(folder, context.dtype, context.device, unread=unread).requires_grad_(False)
    return FrozenRewardModel(model, load_tokenizer(folder), context)


@opens(run_spec, words=False, base=True)
@requires(require_scorer)
def make_preference_model(context: Context) -> Carried:
    """A reward model on the decoder of `context.model`, whose head is zero: it has no preference yet."""
    return LearningRewardModel(*open_scorer(context, "float32"), context)


@reads_tokens
@node(pool="reward")
def reward_scores(
    reward_model: RewardModel, rollouts: Rollouts, *, micro_tokens: int | None = None
) -> tuple[Rewards, Metrics]:
    """The reward model's number for each response, float32 [N]. Figure: `learned_reward`, their mean.

    The rollouts' tokens are read as they are, so the policy's tokenizer must be the reward model's.
    """
    if not isinstance(reward_model, FrozenRewardModel):
        raise TypeError(f"reward_scores: given a {type(reward_model).__name__}, needed a FrozenRewardModel")
    lengths = rollouts.prompt_lengths_N, rollouts.response_lengths_N
    micro_batches = pack_ends(reward_model, rollouts.tokens_NS, *lengths, micro_tokens)
    scores_N = sequence_scores(reward_model, micro_batches, len(rollouts)).cpu()
    return Rewards(scores_N), {"learned_reward": float(scores_N.mean())}


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

    The two responses of a pair may be in different micro-batches: scores are computed first, without a gradient, and
    each response then gets the weight that the loss's gradient gives it. Figures, of the model before the step:
    `loss`, `accuracy` (share of pairs in the right order), `margin` (mean difference of the scores).
    """
    if not isinstance(reward_model, LearningRewardModel):
        given = type(reward_model).__name__
        raise TypeError(f"preference_update: given a {given}, needed a LearningRewardModel")
    count = len(pairs.texts)
    tokens = reward_model.encode(pairs.texts * 2, pairs.chosen + pairs.rejected)
    micro_batches = pack_ends(reward_model, *tokens, options["micro_tokens"])
    scores_N = sequence_scores(reward_model, micro_batches, 2 * count).requires_grad_()
    losses_N = bradley_terry_loss(*scores_N.chunk(2))
    # The two responses of a pair may be in different micro-batches, so each gets its own share of the gradient.
    (weights_N,) = torch.autograd.grad(losses_N.sum(), scores_N)

    def loss(model: Scorer, packed: Packed) -> tuple[Tensor, None]:
        return (weights_N[packed.sequence_P] * packed_values(model, packed)).sum(), None

    reward_model.backward(micro_batches, loss)
    rate = reward_model.rate(lr)
    grad_norm = reward_model.apply(options, lr=rate, normaliser=count)
    chosen_N, rejected_N = scores_N.detach().chunk(2)
    return reward_model, {
        "loss": float(losses_N.detach().mean()),
        "accuracy": float(bradley_terry_accuracy(chosen_N, rejected_N).mean()),
        "margin": float((chosen_N - rejected_N).mean()),
        "grad_norm": grad_norm,
        "lr": rate,
    }
