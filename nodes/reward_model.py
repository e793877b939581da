"""The reward model: a decoder whose number at a response's last token says how good the response is.

Shapes: N responses (of pairs: the chosen, then the rejected), P tokens of a micro-batch.
"""

from typing import ClassVar

import torch
from torch import Tensor

from penstock.graph import node, opens, requires
from penstock.graph.protocols import Carried
from penstock.graph.sharding import num_ranks
from penstock.graph.types import AnyPreferenceModel, Context, Metrics, PreferenceModel, RewardModel, Rewards, Rollouts
from penstock.nodes.base import ModelSpec, directory_spec, open_scorer, require_scorer, run_spec
from penstock.nodes.learn.packing import Packed
from penstock.nodes.learn.preference import bradley_terry_accuracy, bradley_terry_loss
from penstock.nodes.learn.schedules import Schedule
from penstock.nodes.learn.scores import pack_ends, packed_values, sequence_scores
from penstock.nodes.learner import Learner, Step
from penstock.nodes.model import ModelError, Scorer, load_scorer
from penstock.nodes.numbers import ADAMW
from penstock.nodes.preference_data import Pairs
from penstock.nodes.sequence_model import Frozen
from penstock.nodes.tokenizer import load_tokenizer


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


@opens(run_spec, words=False)
@requires(require_scorer)
def make_preference_model(context: Context) -> Carried:
    """A reward model on the decoder of `context.model`, whose head is zero: it has no preference yet."""
    return LearningRewardModel(*open_scorer(context, "float32"), context)


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


@requires(*ADAMW)
@node(pool="trainer", clock="update")
def preference_update(
    reward_model: AnyPreferenceModel,
    pairs: Pairs,
    *,
    lr: float | Schedule = 3e-4,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    micro_tokens: int | None = None,
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
    micro_batches = pack_ends(reward_model, *tokens, micro_tokens)
    scores_N = sequence_scores(reward_model, micro_batches, 2 * count).requires_grad_()
    losses_N = bradley_terry_loss(*scores_N.chunk(2))
    (weights_N,) = torch.autograd.grad(losses_N.sum(), scores_N)

    def loss(model: Scorer, packed: Packed) -> tuple[Tensor, None]:
        return (weights_N[packed.sequence_P] * packed_values(model, packed)).sum(), None

    reward_model.backward(micro_batches, loss)
    rate = reward_model.rate(lr)
    grad_norm = reward_model.apply(Step(rate, clip_norm, betas, weight_decay), normaliser=count)
    chosen_N, rejected_N = scores_N.detach().chunk(2)
    return reward_model, {
        "loss": float(losses_N.detach().mean()),
        "accuracy": float(bradley_terry_accuracy(chosen_N, rejected_N).mean()),
        "margin": float((chosen_N - rejected_N).mean()),
        "grad_norm": grad_norm,
        "lr": rate,
    }
