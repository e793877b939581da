"""One update of a policy: rollouts in, the next version out, with the figures that say whether it went well.

Sums first, the normaliser last: each micro-batch adds the gradient of its weighted sum of token losses, and the total
is divided once per optimizer step. Equal rollouts make equal weights, to the bit for the same number of threads.

Shapes: P sampled tokens of a micro-batch.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.call import Call
from penstock.graph.types import Advantages, AnyPolicy, LearningRate, Logprobs, Metrics, Rollouts
from penstock.nodes.learn.aggregation import Aggregation, normaliser, token_weights
from penstock.nodes.learn.batch import Batch
from penstock.nodes.learn.figures import Taken, add_up, token_sums, update_figures
from penstock.nodes.learn.losses import kl_to_reference
from penstock.nodes.learn.minibatches import optimizer_steps
from penstock.nodes.learn.objectives import aipo
from penstock.nodes.learn.packing import Packed
from penstock.nodes.learn.sampled import NEEDED, Loss, Sampled, reads
from penstock.nodes.learn.schedules import Schedule
from penstock.nodes.numbers import ADAMW, not_negative, positive
from penstock.nodes.policy import LanguagePolicy, Step, language_policy


def penalty(call: Call) -> None:
    """What `kl` requires: a reference to stay close to."""
    if call.options["kl"] and "reference" in call.left_out:
        raise call.lack(f"{call.options['kl']} without a reference", NEEDED["reference"], "kl")


def one_rate(call: Call) -> None:
    """What the learning rate requires: to be said once."""
    if "rate" not in call.left_out and "lr" in call.node.given:
        raise call.lack("a learning rate beside the input `rate`", "one of the two", "lr")


@requires(penalty, not_negative("kl"), one_rate, *ADAMW)
@node(pool="trainer", clock="update")
def policy_update(
    policy: AnyPolicy,
    rollouts: Rollouts,
    advantage: Advantages,
    reference: Logprobs | None = None,
    proximal: Logprobs | None = None,
    rate: LearningRate | None = None,
    *,
    loss: Loss,
    average: Aggregation = "token_mean",
    kl: float = 0.0,
    epochs: int = 1,
    minibatches: int = 1,
    lr: float | Schedule = 1e-4,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    micro_tokens: int | None = None,
) -> tuple[AnyPolicy, Metrics]:
    """The next version of the policy: `epochs` · `minibatches` AdamW steps on a loss of single tokens.

    `loss` is a function of log π and `Sampled`, such as those of `objectives`; its own options are bound with
    functools.partial. `average` says how token losses become one (see `aggregation.normaliser`); "constant" takes the
    run's `max_tokens` as the longest response. `kl` times the divergence from the `reference` is added to each token's
    loss. `lr` is a number or a schedule (see `schedules`); a `rate` that a node has computed takes its place.
    `clip_norm` bounds the 2-norm of each step's gradient.

    A batch is cut into minibatches by whole prompt groups, in an order keyed by the run's seed, the version and the
    epoch; where their number does not divide, as replay may have it, some have one group more than others. However many
    steps are taken, the update makes one version. For the figures see `update_figures`. Raises ValueError for what does
    not fit together, FloatingPointError for a gradient that is not finite: the steps before it stay taken.
    """
    learner = language_policy(policy)
    objective = _Objective(loss, average, kl)
    batch = Batch.of(rollouts, advantage, learner.device, reference=reference, proximal=proximal)
    step = Step(learner.rate(lr if rate is None else rate.value), clip_norm, betas, weight_decay)
    shares = optimizer_steps(learner.context, learner.version, rollouts.ordinals, epochs, minibatches)
    taken = [
        _take_step(learner, batch.take(rows), objective, step, epoch, micro_tokens, last=number == len(shares))
        for number, (epoch, rows) in enumerate(shares, 1)
    ]
    return policy, {**update_figures(taken), "lr": step.lr}


@requires(reads("behaviour"), positive("rho"), *ADAMW)
@node(pool="trainer", clock="update")
def aipo_update(
    policy: AnyPolicy,
    rollouts: Rollouts,
    advantage: Advantages,
    *,
    rho: float = 4.0,
    lr: float | Schedule = 1e-4,
    clip_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    micro_tokens: int | None = None,
) -> tuple[AnyPolicy, Metrics]:
    """`policy_update` with AIPO's loss, averaged over tokens (LlamaRL, arXiv 2505.24034, section 6).

    `rho` bounds each token's importance ratio π / μ from above, `clip_norm` the gradient's 2-norm.
    """
    return policy_update.fn(  # type: ignore[no-any-return]
        policy,
        rollouts,
        advantage,
        loss=partial(aipo, rho=rho),
        lr=lr,
        clip_norm=clip_norm,
        betas=betas,
        weight_decay=weight_decay,
        micro_tokens=micro_tokens,
    )


@dataclass(frozen=True)
class _Objective:
    """What the policy goes down along: a loss of tokens, how they are averaged, and a penalty on leaving."""

    loss: Loss
    average: Aggregation
    kl: float

    def __call__(self, logprobs_P: Tensor, sampled: Sampled) -> tuple[Tensor, Tensor]:
        """(the weighted sum of the tokens' losses, whether each was clipped)."""
        result = self.loss(logprobs_P, sampled)
        unclipped_P = torch.zeros_like(logprobs_P, dtype=torch.bool)
        loss_P, clipped_P = result if isinstance(result, tuple) else (result, unclipped_P)
        if not isinstance(loss_P, Tensor) or loss_P.shape != logprobs_P.shape:
            name = getattr(getattr(self.loss, "func", self.loss), "__name__", repr(self.loss))
            given = list(loss_P.shape) if isinstance(loss_P, Tensor) else type(loss_P).__name__
            needed = f"a loss for each token, shape {list(logprobs_P.shape)}"
            raise ValueError(f"loss {name}: given a result of shape {given}, needed {needed}")
        if self.kl:
            loss_P = loss_P + self.kl * kl_to_reference(logprobs_P, sampled.reference_P)
        weights_P = token_weights(sampled.lengths_P, aggregation=self.average)
        return (weights_P * loss_P).sum(), clipped_P


def _take_step(
    learner: LanguagePolicy,
    batch: Batch,
    objective: _Objective,
    step: Step,
    epoch: int,
    micro_tokens: int | None,
    *,
    last: bool,
) -> Taken:
    """One optimizer step on the whole of a (mini)batch."""
    lengths_N = batch.lengths()

    def micro(packed: Packed, logprobs_P: Tensor, entropy_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sampled = batch.sampled(packed, lengths_N)
        total, clipped_P = objective(logprobs_P, sampled)
        sums = token_sums(logprobs_P, entropy_P, clipped_P, sampled, learner.version)
        return total, {"loss": total.detach().double(), **sums}

    sums = add_up(learner.accumulate(learner.pack(batch.rollouts, micro_tokens), micro))
    divisor = normaliser(lengths_N, aggregation=objective.average, max_tokens=learner.context.max_tokens)
    grad_norm = learner.apply(step, normaliser=divisor, last=last)
    return Taken(sums, sums["loss"] / divisor, grad_norm, epoch)
