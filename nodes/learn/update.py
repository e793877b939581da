"""One update of a policy: rollouts in, the next version out, with the figures that say whether it went well.

Sums first, the normaliser last: each micro-batch adds the gradient of its weighted sum of token losses, and the total
is divided once per optimizer step. Equal rollouts make equal weights, to the bit for the same number of threads.

Shapes: P sampled tokens of a micro-batch.

The figures of an update: what its optimizer steps say of it, as sums over tokens until the end.

Shapes: P sampled tokens of a micro-batch, L lags.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.imports import encode, names_function, path_of, resolve, short
from penstock.graph.requires import Call
from penstock.graph.types import Advantages, AnyPolicy, LearningRate, Logprobs, Metrics, Rollouts
from penstock.nodes.learn.batching import (
    Aggregation,
    Batch,
    Packed,
    Term,
    normaliser,
    optimizer_steps,
    sampled_mask,
    token_weights,
)
from penstock.nodes.learn.losses import NEEDED, Loss, Sampled, aipo, kl_estimate, reads, reads_groups
from penstock.nodes.learn.schedules import Schedule
from penstock.nodes.option_checks import ADAMW, finite, not_negative, positive
from penstock.nodes.policy import LanguagePolicy, language_policy
from penstock.nodes.trainable import Step

LAGS = 16
"""Lags that tokens are counted by, each for itself; the last count is of all that are as old or older."""

Sums = dict[str, float]
"""By name: sums over the tokens of an optimizer step, and `*_max`, the largest."""


def token_sums(
    logprobs_P: Tensor, entropy_P: Tensor, clipped_P: Tensor, sampled: Sampled, version: int
) -> dict[str, Tensor]:
    """The sums of one micro-batch, float64 scalars on its device. `version` is that of the policy that learns."""
    sums = {
        "tokens": torch.ones_like(entropy_P, dtype=torch.float64).sum(),
        "entropy": entropy_P.double().sum(),
        "ratio_clipped": clipped_P.double().sum(),
    }
    if "behaviour" not in sampled.given:  # no policy of this run sampled them: there is no lag, and no ratio
        return sums
    # Of rows that nobody sampled, which were joined with others, log μ is NaN: they have no lag and no ratio either.
    recorded_P = ~sampled.behaviour_P.isnan()
    replayed_P = torch.zeros_like(recorded_P) if sampled.replayed_P is None else sampled.replayed_P & recorded_P
    lag_P = (version - sampled.versions_P).double()
    fresh_P = (recorded_P & ~replayed_P).double()
    sums |= {"recorded": recorded_P.double().sum(), "fresh": fresh_P.sum()}
    sums |= {"lag": (lag_P * fresh_P).sum(), "lag_max": (lag_P * fresh_P).max()}
    counted_PL = lag_P.clamp(0, LAGS - 1)[:, None] == torch.arange(LAGS, device=lag_P.device)
    by_lag_L = (counted_PL * fresh_P[:, None]).sum(0)
    sums |= {f"tokens_lag_{lag}": count for lag, count in enumerate(by_lag_L.unbind())}
    if sampled.replayed_P is not None:
        sums |= {"replayed": replayed_P.double().sum(), "replayed_lag_max": (lag_P * replayed_P).max()}
    # in float64, where the square of no float32's exponential is infinite
    now_P = logprobs_P.detach().double()
    behaviour_P = torch.where(recorded_P, sampled.behaviour_P.double(), now_P)
    ratio_P = torch.exp(now_P - behaviour_P) * recorded_P
    sums |= {"ratio": ratio_P.sum(), "ratio_max": ratio_P.max(), "ratio_squared": ratio_P.square().sum()}
    sums["kl"] = kl_estimate(behaviour_P, now_P, estimator="k3").sum()
    return sums


def add_up(parts: Sequence[Mapping[str, Tensor]]) -> Sums:
    """The sums of several micro-batches as one, by a single copy from the device."""
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name] for name in names]) for part in parts])
    totals, peaks = table.sum(0).tolist(), table.amax(0).tolist()
    return {name: peaks[i] if name.endswith("_max") else totals[i] for i, name in enumerate(names)}


@dataclass(frozen=True)
class Taken:
    """An optimizer step on a term of the loss: the sums over its tokens, its mean loss, the norm of the whole gradient,
    its epoch."""

    sums: Sums
    loss: float
    grad_norm: float
    epoch: int


def update_figures(steps: Sequence[Taken]) -> Metrics:
    """The figures of a term of the loss, of the steps of an update in which it had tokens. Means are over all of these.

    `tokens` counts those of one epoch. `loss` and `grad_norm` are means over the steps, `entropy` that of the
    distribution that was sampled from, at its temperature.

    Lags, ratios, `ess` and `kl` are of the tokens that a policy sampled, those with a recorded log μ, and are means
    over these: demonstrations have none. `kl` is the last epoch's estimate (k3) of KL(μ ‖ π): how far the policy had
    gone from the one that sampled. `ess` is the effective sample size (Kish) of the ratios π / μ, as a share of the
    tokens.

    `lag_mean` and `lag_max` are of fresh tokens, 0 of none; `tokens_lag_K` counts those of one epoch that are K updates
    old, where there are any. Where past groups are learnt from beside them,
    `replayed_tokens` counts theirs (of one epoch) and `replayed_lag_max` is the largest lag of them. All other figures,
    `ess` and the ratios among them, are of fresh and replayed tokens alike: of what the update used.
    """
    if not steps:
        return {"loss": 0.0, "tokens": 0.0}  # of a term that had nothing to learn from
    whole = _total([step.sums for step in steps])
    last = _total([step.sums for step in steps if step.epoch == steps[-1].epoch])
    tokens = whole["tokens"]
    figures = {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "optimizer_steps": float(len(steps)),
        "tokens": last["tokens"],
        "entropy": whole["entropy"] / tokens,
        "ratio_clipped": whole["ratio_clipped"] / tokens,
    }
    if recorded := whole.get("recorded"):
        figures["lag_mean"] = whole["lag"] / max(1.0, whole["fresh"])
        figures["lag_max"] = whole["lag_max"]
        figures |= {name: count for name, count in last.items() if name.startswith("tokens_lag_") and count}
        figures["ratio_mean"] = whole["ratio"] / recorded
        figures["ratio_max"] = whole["ratio_max"]
        figures["ess"] = whole["ratio"] ** 2 / (whole["ratio_squared"] * recorded)
        figures["kl"] = last["kl"] / max(1.0, last["recorded"])
    if "replayed_lag_max" in whole:
        figures["replayed_tokens"] = last["replayed"]
        figures["replayed_lag_max"] = whole["replayed_lag_max"]
    return figures


def _total(parts: Sequence[Sums]) -> Sums:
    joined = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: max(values) if name.endswith("_max") else sum(values) for name, values in joined.items()}


def penalty(call: Call) -> None:
    """What `kl` requires: a reference to stay close to."""
    if call.options["kl"] and "reference" in call.left_out:
        raise call.lack(
            f"{call.options['kl']} without a reference", NEEDED["reference"], "kl", code="missing-reference"
        )


def one_rate(call: Call) -> None:
    """What the learning rate requires: to be said once."""
    if "rate" not in call.left_out and "lr" in call.node.given:
        raise call.lack("a learning rate beside the input `rate`", "one of the two", "lr", code="two-learning-rates")


def own_names(call: Call) -> None:
    """What terms require: a name for each, since their figures begin with it."""
    beside = [call.view.nodes.get(item.ref.node) for item in call.node.inputs if item.name.startswith("beside[")]
    options = [dict(node.options) for node in beside if node is not None and node.op == path_of(term)]
    losses = [(own.get("name"), own["loss"]) for own in (call.options, *options)]
    names = [name or short(loss["path"]) for name, loss in losses if names_function(loss)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise call.lack(f"two terms of the name {twice[0]!r}", f"{SAME}: {', '.join(names)}", code="duplicate-term")


def plain_name(call: Call) -> None:
    name = call.options["name"]
    if name and not (isinstance(name, str) and name.isidentifier()):
        needed = "letters, digits and _, which the names of its figures begin with"
        raise call.lack(repr(name), needed, "name", code="bad-name")


SAME = 'names of their own, which the figures of each begin with: term(…, name="…")'


@requires(penalty, not_negative("kl"), finite("weight"), plain_name)
@node(pool="trainer", clock="update")
def term(
    rollouts: Rollouts,
    advantage: Advantages | None = None,
    reference: Logprobs | None = None,
    proximal: Logprobs | None = None,
    *,
    loss: Loss,
    weight: float = 1.0,
    average: Aggregation = "token_mean",
    kl: float = 0.0,
    name: str = "",
) -> Term:
    """One more term of an update's loss, over the same rollouts or others: `policy_update(…, beside=[term(…)])`.

    Inputs and options are as those of `policy_update`. Without an `advantage` each response has 1. `name` is what the
    names of its figures begin with, by default the loss function's. A term without a sampled token adds nothing.
    """
    values_N = torch.ones(len(rollouts)) if advantage is None else advantage.values_N
    return Term(
        **{field.name: getattr(rollouts, field.name) for field in fields(Rollouts)},
        values_N=values_N,
        reference_NT=None if reference is None else reference.logprobs_NT,
        proximal_NT=None if proximal is None else proximal.logprobs_NT,
        name=name or _named(loss),
        loss=json.dumps(encode(loss, "term: option 'loss'")),
        weight=weight,
        average=average,
        kl=kl,
    )


@requires(penalty, not_negative("kl"), finite("weight"), one_rate, own_names, *ADAMW)
@node(pool="trainer", clock="update")
def policy_update(
    policy: AnyPolicy,
    rollouts: Rollouts,
    advantage: Advantages,
    reference: Logprobs | None = None,
    proximal: Logprobs | None = None,
    rate: LearningRate | None = None,
    beside: Sequence[Term] = (),
    *,
    loss: Loss,
    weight: float = 1.0,
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

    `beside` are more terms of the same loss, made by `term`: what each step goes down along is Σ weight · average of
    the term's token losses, each average over the term's own tokens or responses. All terms take part in each step,
    with a minibatch of their own prompt groups; one of fewer groups than minibatches takes part in as many steps.

    A batch is cut into minibatches by whole prompt groups, in an order keyed by the run's seed, the version and the
    epoch; where their number does not divide, as replay may have it, some have one group more than others. However many
    steps are taken, the update makes one version. Raises ValueError for what does not fit together, FloatingPointError
    for a gradient that is not finite: the steps before it stay taken.

    Figures: those of `update_figures` and `lr`. With terms
    beside it, `loss` is the weighted sum of all terms, NAME_loss that of each term by itself, the first one included,
    and the other figures of a term are NAME_tokens, NAME_entropy and so on; without a name they are of the first term.
    """
    learner = language_policy(policy)
    first = Batch.of(rollouts, advantage, learner.device, reference=reference, proximal=proximal)
    parts = [_Part(_named(loss), first, loss, weight, average, kl)]
    parts += (_part(each, learner.device) for each in beside)
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"{learner.context.node}: given terms {', '.join(names)}, needed {SAME}")
    step = Step(learner.rate(lr if rate is None else rate.value), clip_norm, betas, weight_decay)
    steps = optimizer_steps(learner.context, learner.version, rollouts.ordinals, epochs, minibatches)
    cuts = [[rows for _, rows in steps]]
    for number, part in enumerate(parts[1:], 1):
        key = learner.context, learner.version, part.batch.rollouts.ordinals, epochs, minibatches, number
        cuts.append([rows for _, rows in optimizer_steps(*key)])
    taken: list[list[Taken]] = [[] for _ in parts]
    norms: list[float] = []
    for number, ((epoch, _), *rows) in enumerate(zip(steps, *cuts, strict=True), 1):
        minibatch = [replace(part, batch=part.batch.take(chosen)) for part, chosen in zip(parts, rows, strict=True)]
        norms.append(_take_step(learner, minibatch, step, epoch, micro_tokens, taken, last=number == len(steps)))
    of_steps = {"grad_norm": sum(norms) / len(norms), "optimizer_steps": float(len(norms)), "lr": step.lr}
    return policy, {**_figures(parts, [update_figures(each) for each in taken]), **of_steps}


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
class _Part:
    """A term of the loss: what it is about, a loss of tokens, how they are averaged, and a penalty on leaving."""

    name: str
    batch: Batch
    loss: Loss
    weight: float
    average: Aggregation
    kl: float

    def total(self, logprobs_P: Tensor, sampled: Sampled) -> tuple[Tensor, Tensor]:
        """(the weighted sum of the tokens' losses, whether each was clipped)."""
        result = self.loss(logprobs_P, sampled)
        unclipped_P = torch.zeros_like(logprobs_P, dtype=torch.bool)
        loss_P, clipped_P = result if isinstance(result, tuple) else (result, unclipped_P)
        if not isinstance(loss_P, Tensor) or loss_P.shape != logprobs_P.shape:
            given = list(loss_P.shape) if isinstance(loss_P, Tensor) else type(loss_P).__name__
            needed = f"a loss for each token, shape {list(logprobs_P.shape)}"
            raise ValueError(f"loss {_named(self.loss)}: given a result of shape {given}, needed {needed}")
        if self.kl:
            loss_P = loss_P + self.kl * kl_estimate(logprobs_P, sampled.reference_P, estimator="k3")
        weights_P = token_weights(sampled.lengths_P, aggregation=self.average)
        return (weights_P * loss_P).sum(), clipped_P


def _part(beside: Term, device: torch.device) -> _Part:
    loss = resolve(json.loads(beside.loss))
    return _Part(beside.name, beside.batch(device), loss, beside.weight, beside.average, beside.kl)


def _named(loss: Loss) -> str:
    """What a loss function is called."""
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__name__", repr(loss))


def _figures(parts: Sequence[_Part], figures: Sequence[Metrics]) -> Metrics:
    """The figures of an update, by those of each of its terms."""
    if len(parts) == 1:
        return figures[0]
    pairs = list(zip(parts, figures, strict=True))
    found = {f"{part.name}_{name}": figure for part, own in pairs[1:] for name, figure in own.items()}
    found = {name: figure for name, figure in found.items() if not name.endswith(("_grad_norm", "_optimizer_steps"))}
    whole = sum(part.weight * own["loss"] for part, own in pairs)
    return {**found, **figures[0], "loss": whole, f"{parts[0].name}_loss": figures[0]["loss"]}


def _take_step(
    learner: LanguagePolicy,
    parts: Sequence[_Part],
    step: Step,
    epoch: int,
    micro_tokens: int | None,
    taken: Sequence[list[Taken]],
    *,
    last: bool,
) -> float:
    """One optimizer step on the whole of a (mini)batch, noted in `taken` for each term; the gradient's 2-norm.

    Gradients add up in units of the first normaliser, by which the sum is divided at the end.
    """
    unit, made = 0.0, []
    for part, notes in zip(parts, taken, strict=True):
        batch = part.batch
        if len(parts) > 1 and not sampled_mask(batch.rollouts).any():
            continue
        lengths_N, whole_groups = batch.lengths(), reads_groups(part.loss)
        divisor = normaliser(lengths_N, aggregation=part.average, max_tokens=learner.context.max_tokens)
        unit = unit or divisor
        micro = partial(_micro, learner, part, lengths_N, whole_groups, part.weight * (unit / divisor))
        packed = learner.pack(batch.rollouts, micro_tokens, whole_groups=whole_groups)
        sums = add_up(learner.accumulate(packed, micro))
        made.append((notes, sums, sums["loss"] / divisor))
    if not unit:
        given = f"{len(parts)} terms, {' and '.join(part.name for part in parts)}, without a sampled token"
        raise ValueError(f"{learner.context.node}: given {given}, needed at least one in each minibatch")
    grad_norm = learner.apply(step, normaliser=unit, last=last)
    for notes, sums, mean in made:
        notes.append(Taken(sums, mean, grad_norm, epoch))
    return grad_norm


def _micro(
    learner: LanguagePolicy,
    part: _Part,
    lengths_N: Tensor,
    whole_groups: bool,
    scale: float,
    packed: Packed,
    logprobs_P: Tensor,
    entropy_P: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch of a term, times `scale`, and the sums over its tokens."""
    sampled = part.batch.sampled(packed, lengths_N, whole_groups=whole_groups)
    total, clipped_P = part.total(logprobs_P, sampled)
    sums = token_sums(logprobs_P, entropy_P, clipped_P, sampled, learner.version)
    return total * scale, {"loss": total.detach().double(), **sums}
