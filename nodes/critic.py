"""The critic: its values, the advantages computed from them, and its update.

Only tokens that the policy sampled count (version ≥ 0): an environment's tokens are part of the state, not actions.

Shapes: N responses, T tokens of a response, P tokens that count, of all responses or of a micro-batch, laid end to end;
`sequence_P` (int64) says which response each token belongs to. `values_P` is V(s_t), the critic's prediction before
token t; the state after a response's last token has value 0.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.graph import node, opens, requires
from penstock.graph.context import Context
from penstock.graph.deferred import shape_of, widened
from penstock.graph.protocols import Array, Carried
from penstock.graph.types import (
    AnyCritic,
    Critic,
    Logprobs,
    Metrics,
    Returns,
    Rewards,
    Rollouts,
    TokenAdvantages,
    Values,
)
from penstock.nodes.advantage import whiten
from penstock.nodes.learn.batching import behaviour_logprobs, check_shape, of_its_rows, sampled_mask
from penstock.nodes.learn.losses import Sampled, segment_lengths
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, update_options
from penstock.nodes.learn.update import LossTerm, Scored, descend, penalty
from penstock.nodes.model import Scorer
from penstock.nodes.open_model import open_model, reads_tokens, require_model, run_spec
from penstock.nodes.option_checks import bound, not_negative, share
from penstock.nodes.reward_model import packed_values
from penstock.nodes.trainable import Learner, expect


def last_tokens(sequence_P: Tensor) -> Tensor:
    """True for the last token of each response, bool [P]."""
    return torch.cat([sequence_P[1:] != sequence_P[:-1], sequence_P.new_ones(1, dtype=torch.bool)])


def terminal_rewards(rewards_N: Tensor, sequence_P: Tensor) -> Tensor:
    """Each response's reward at its last token, 0 at the others [P]."""
    return rewards_N[sequence_P].masked_fill(~last_tokens(sequence_P), 0.0)


def discounted_sums(values_P: Tensor, sequence_P: Tensor, *, discount: float) -> Tensor:
    """Σ_{l ≥ 0} discount^l · x_{t+l} within each response [P]."""
    sums_P, reach, longest = values_P, 1, int(segment_lengths(sequence_P).max())
    # each row has the sum of its next `reach` terms, so the row `reach` further on has that of the terms after these
    while reach < longest:
        further_P = sums_P[reach:].masked_fill(sequence_P[reach:] != sequence_P[:-reach], 0.0)
        sums_P = sums_P + discount**reach * pad(further_P, (0, reach))
        reach *= 2
    return sums_P


def generalized_advantages(
    rewards_P: Tensor, values_P: Tensor, sequence_P: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(A, returns) of each token, without a gradient: A_t = Σ_l (γλ)^l · δ_{t+l}, δ_t = r_t + γ · V_{t+1} − V_t.

    GAE (Schulman et al. 2015, arXiv 1506.02438), equation 16. The returns, A + V, are what the critic learns.
    """
    values_P = values_P.detach()
    # The value after the end is 0 also for a response that was cut short: its reward is for the response as it is.
    next_P = values_P.roll(-1).masked_fill(last_tokens(sequence_P), 0.0)
    deltas_P = rewards_P + gamma * next_P - values_P
    advantages_P = discounted_sums(deltas_P, sequence_P, discount=gamma * lam)
    return advantages_P, advantages_P + values_P


def value_loss(values_P: Tensor, old_P: Tensor, returns_P: Tensor, *, clip: float | None = None) -> Tensor:
    """½ · max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) of each token; ½ · (V − R)² without `clip`.

    The clipped value loss of OpenAI Baselines' PPO, described by Engstrom et al. 2020, arXiv 2005.12729, section 3. It
    takes the larger of the two: with the smaller one the critic could move away from R at no cost.
    """
    errors_P = (values_P - returns_P).square()
    if clip is not None:
        old_P = old_P.detach()
        clipped_P = values_P.clamp(old_P - clip, old_P + clip)
        errors_P = torch.maximum(errors_P, (clipped_P - returns_P).square())
    return errors_P / 2


def explained_variance(values_P: Tensor, returns_P: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R), a scalar: 1 for a perfect critic, 0 for a constant one, below 0 for a worse one.

    0 if the returns do not differ.
    """
    variance = returns_P.var(correction=0)
    unexplained = (returns_P - values_P).var(correction=0)
    return torch.where(variance > 0, 1 - unexplained / variance.clamp(min=torch.finfo(variance.dtype).tiny), 0.0)


class LanguageCritic(Learner[Scorer], Critic):
    """The policy's decoder with a head of its own, which computes one number for each token."""

    called: ClassVar[str] = "critic"


@opens(run_spec, lm_head=False)
@requires(require_model(Scorer))
def make_critic(context: Context) -> Carried:
    """A critic on the decoder of `context.model`; its head is zero, so that it first predicts 0."""
    return LanguageCritic(*open_model(Scorer, context, "float32"), context)


@reads_tokens
@node(pool="critic", clock="update")
def critic_values(critic: Critic, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Values:
    """V(s_t) before each token of each response, float32 [N, T]; zero past the end."""
    model = expect(LanguageCritic, critic, "critic")
    return Values(model.score_tokens(rollouts, micro_tokens, packed_values))


@requires(of_its_rows, penalty, not_negative("kl"), share("gamma", "lam"))
@node(pool="critic", clock="update")
def gae(
    rewards: Rewards,
    values: Values,
    rollouts: Rollouts,
    reference: Logprobs | None = None,
    proximal: Logprobs | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl: float = 0.0,
    whitened: bool = True,
) -> tuple[TokenAdvantages, Returns, Metrics]:
    """Generalised advantages of all sampled tokens, and the returns that the critic learns (arXiv 1506.02438, eq. 16).

    The reward comes at a response's last sampled token. With a `reference`, each token's reward is reduced by
    `kl` · (log π − log π_ref) (InstructGPT, arXiv 2203.02155, equation 2). `proximal` is log π, from `policy_logprobs`;
    without it μ stands for π, which is exact for samples of the newest weights only. `whitened` advantages have mean 0
    and deviation 1 over the batch. Raises ValueError for numbers of another shape than the rollouts', and for rollouts
    without μ if there is a `reference` and no `proximal`.
    """
    check_shape("gae: given values", values.values_NT.shape, rollouts, each="token")
    check_shape("gae: given rewards", rewards.values_N.shape, rollouts, each="response")
    place = sampled_mask(rollouts).nonzero(as_tuple=True)
    sequence_P, _ = place
    rewards_P = terminal_rewards(rewards.values_N, sequence_P)
    # In the reward and not in the loss: the cost of a token counts for the tokens before it, too.
    if reference is not None:
        check_shape("gae: given reference", reference.logprobs_NT.shape, rollouts, each="token")
        if proximal is None:
            policy_NT = behaviour_logprobs(rollouts, "gae, with a reference")
        else:
            check_shape("gae: given proximal", proximal.logprobs_NT.shape, rollouts, each="token")
            policy_NT = torch.as_tensor(proximal.logprobs_NT)
        rewards_P = rewards_P - kl * (policy_NT[place] - reference.logprobs_NT[place])
    values_P = values.values_NT[place]
    advantages_P, returns_P = generalized_advantages(rewards_P, values_P, sequence_P, gamma=gamma, lam=lam)
    metrics = {
        "explained_variance": float(explained_variance(values_P, returns_P)),
        "value_mean": float(values_P.mean()),
        "return_mean": float(returns_P.mean()),
    }
    if whitened:
        advantages_P = whiten(advantages_P, torch.ones_like(advantages_P, dtype=torch.bool))
    advantages_NT, returns_NT = torch.zeros_like(values.values_NT), torch.zeros_like(values.values_NT)
    advantages_NT[place], returns_NT[place] = advantages_P, returns_P
    return TokenAdvantages(advantages_NT), Returns(returns_NT), metrics


@reads_tokens
@requires(of_its_rows, bound("clip"))
@node(pool="critic", clock="update")
@update_options()
def critic_update(
    critic: AnyCritic,
    rollouts: Rollouts,
    values: Values,
    returns: Returns,
    *,
    clip: float | None = 0.2,
    lr: float | Schedule = 1e-4,
    epochs: int = 1,
    minibatches: int = 1,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyCritic, Metrics]:
    """`epochs` times `minibatches` AdamW steps on the clipped value loss, averaged over sampled tokens.

    `values` are the critic's own before the update, and `clip` is how far it may move from them (None: no limit).
    Raises ValueError for values or returns of another shape than the rollouts'.
    """
    for name, shape in (("values", shape_of(values, "values_NT")), ("returns", shape_of(returns, "returns_NT"))):
        check_shape(f"critic_update: given {name}", shape or [], rollouts, each="token")
    # Rows of an update need advantages; a loss of values does not read them.
    unread_N = torch.zeros(len(rollouts))
    given = {"expected_NT": (values, "values_NT"), "returns_NT": (returns, "returns_NT")}
    terms = [LossTerm(widened(Expected, rollouts, values_N=unread_N, **given), partial(_value_loss, clip=clip))]
    learner = expect(LanguageCritic, critic, "critic")
    (steps,), metrics = descend(learner, packed_values, terms, epochs, minibatches, lr, options)
    loss = sum(step["loss"] for step in steps) / len(steps)
    return critic, {"critic_loss": loss, "critic_grad_norm": metrics["grad_norm"], "critic_lr": metrics["lr"]}


@dataclass
class Expected(Scored):
    """Rollouts with the critic's values before the update, and the returns. Log-probabilities and advantages are not
    read."""

    expected_NT: Array = None
    returns_NT: Array = None

    numbers: ClassVar[dict[str, str]] = {"expected": "expected_NT", "returns": "returns_NT"}


def _value_loss(values_P: Tensor, sampled: Sampled, *, clip: float | None) -> Tensor:
    return value_loss(values_P, sampled.given["expected"], sampled.given["returns"], clip=clip)
