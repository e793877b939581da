"""One update of a policy: rollouts in, the next version out, with metrics.

Sums first, the normaliser last: each micro-batch adds the gradient of its weighted sum of token losses, and the total
is divided once per optimizer step. Equal rollouts make equal weights, to the bit for the same number of threads.

In order: the requirements of calls, the nodes `policy_update`, `term` and `aipo_update`, and the metrics, which are
sums over tokens until the end.

Shapes: P sampled tokens of a micro-batch, L lags.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from penstock.graph import node, requires
from penstock.graph.context import BatchPart
from penstock.graph.deferred import shape_of, widened
from penstock.graph.imports import encode, names_function, path_of, resolve, short
from penstock.graph.protocols import Array
from penstock.graph.requires import Call
from penstock.graph.types import BY_LAG, LONGEST_LAG, Advantages, AnyPolicy, LearningRate, Logprobs, Metrics, Rollouts
from penstock.nodes.learn.batching import (
    Aggregation,
    Packed,
    check_shape,
    group_rows,
    normaliser,
    of_its_rows,
    optimizer_steps,
    sampled_lengths,
    token_weights,
)
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.losses import NEEDED, Loss, Sampled, aipo, kl_estimate, reads, reads_groups
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, changed_by_flags, update_options
from penstock.nodes.open_model import reads_tokens
from penstock.nodes.option_checks import finite, not_negative, positive
from penstock.nodes.policy import language_policy
from penstock.nodes.trainable import Learner, Model

# The names of an update's metrics, beside those of `BY_LAG`.
METRICS = {
    *("loss", "tokens", "entropy", "ratio_clipped", "ratio_mean", "ratio_max", "ess", "kl", "lag_mean", "lag_max"),
    *("replayed_tokens", "replayed_lag_max", "grad_norm", "optimizer_steps", "lr"),
}
# Ends the names of the sums of a loss's own figures.
OF_LOSS = " of the loss"
# By name: sums over the tokens of an optimizer step, and `*_max`, the largest.
Sums = dict[str, float]
# (a model, a micro-batch) → (a number for each target, with a gradient, and the entropy of each target).
Forward = Callable[[Model, Packed], tuple[Tensor, Tensor]]


def penalty(call: Call) -> None:
    """Requirement of `kl`: the log-probabilities of a reference."""
    if call.options["kl"] and "reference" in call.left_out:
        raise call.lack(
            f"{call.options['kl']} without a reference", NEEDED["reference"], "kl", code="missing-reference"
        )


def one_rate(call: Call) -> None:
    """Requirement of the learning rate: it is given only once."""
    if "rate" in call.left_out:
        return
    if "lr" in call.node.given:
        raise call.lack("a learning rate beside the input `rate`", "one of the two", "lr", code="two-learning-rates")
    if changed_by_flags(call):
        given = "--lr-warmup or --lr-decay beside the input `rate`"
        raise call.lack(given, "one of the two", "lr", code="two-learning-rates")


def own_names(call: Call) -> None:
    """Requirement of terms: different names, since the names of their metrics begin with them."""
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


@dataclass
class Scored(Rollouts):
    """Rollouts with the other inputs of an update: `values_N`, the advantages, [N] or [N, T], and log-probabilities of
    the tokens."""

    values_N: Array = None
    reference_NT: Array = None
    proximal_NT: Array = None

    numbers: ClassVar[dict[str, str]] = {
        "behaviour": "logprobs_NT",
        "reference": "reference_NT",
        "proximal": "proximal_NT",
    }
    """The fields with a number for each token, by their names in `Sampled`; a field is None if there are none."""

    def check(self) -> None:
        """Raises ValueError for inputs that do not have the shapes of the rollouts."""
        shape = shape_of(self, "values_N") or []
        check_shape("advantage: given values", shape, self, each="token" if len(shape) == 2 else "response")
        for name, field in self.numbers.items():
            if (shape_NT := shape_of(self, field)) is not None:
                check_shape(f"{name}: given values", shape_NT, self, each="token")


@dataclass
class Term(Rollouts):
    """One more term of an update's loss: the fields of `Scored`, and the options of the node `term`.

    `loss` is the loss function as JSON (`graph.imports.encode`), so that a term can cross processes.
    """

    values_N: Array = None
    reference_NT: Array = None
    proximal_NT: Array = None
    name: str = ""
    loss: str = ""
    weight: float = 1.0
    average: Aggregation = "token_mean"
    kl: float = 0.0
    entropy: float = 0.0


@reads_tokens
@requires(of_its_rows, penalty, not_negative("kl"), finite("weight", "entropy"), one_rate, own_names)
@node(pool="trainer", clock="update")
@update_options()
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
    entropy: float = 0.0,
    epochs: int = 1,
    minibatches: int = 1,
    lr: float | Schedule = 1e-4,
    part: BatchPart | None = None,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyPolicy, Metrics]:
    """The next version of the policy: `epochs` · `minibatches` AdamW steps on a loss of single tokens.

    `loss` is a function of log π and `Sampled`, such as those of `losses`; its own options are bound with
    functools.partial. `average` says how token losses become one (see `batching.normaliser`); "constant" takes the
    run's `max_tokens` as the longest response, also in conversations, where it bounds a turn. `kl` times the divergence
    from the `reference` (k3, not weighted by π/μ) is added to each token's loss, and `entropy` times the entropy of its
    distribution over the whole vocabulary is subtracted (the bonus of PPO, arXiv 1707.06347, equation 9); then logits
    are computed twice. `lr` is a number or a schedule (see `optimizer`); a `rate` that a node has computed takes its
    place. For the other options see `UpdateOptions`.

    `beside` are more terms of the same loss, made by `term`: each step minimises Σ weight · average of the term's token
    losses, where an average is over the term's own tokens or responses. All terms take part in each step, with a
    minibatch of their own prompt groups; a term with fewer groups than minibatches takes part in as many steps.

    A batch is cut into minibatches by whole prompt groups, in an order keyed by the run's seed, the version and the
    epoch. If the number of groups does not divide, such as with replay, some minibatches have one group more than
    others. The update makes one version, for any number of steps. Raises ValueError for inputs that do not fit
    together, FloatingPointError for a gradient that is not finite; earlier steps are not undone.

    It can `accumulate` in one step on one term: each part of the batch adds to the gradient and to the sums, and the
    last one divides, clips and makes the step.

    Metrics: those of `update_metrics` and `lr`. `loss` is the weighted sum of all terms, also of a single one, and
    `tokens` are those of all terms. With terms `beside`, NAME_loss and NAME_tokens are those of each term by itself,
    without its weight, including the first term. The other metrics of a term are NAME_entropy and so on; without a name
    they are of the first term.
    """
    learner = language_policy(policy)
    scored = _scored(rollouts, advantage, reference, proximal)
    terms = [LossTerm(scored, loss, loss_name(loss), weight, average, kl, entropy)]
    for each in beside:
        rows = Scored(**{field.name: getattr(each, field.name) for field in fields(Scored)})
        own = each.name, each.weight, each.average, each.kl, each.entropy
        terms.append(LossTerm(rows, resolve(json.loads(each.loss)), *own))
    names = [each.name for each in terms]
    if len(set(names)) < len(names):
        raise ValueError(f"{learner.context.node}: given terms {', '.join(names)}, needed {SAME}")
    rate_or_schedule = lr if rate is None else rate.value
    forward = partial(packed_logprobs, entropy_gradient=any(each.entropy for each in terms))
    if part is not None:
        if (epochs, minibatches, len(terms)) != (1, 1, 1):
            given = f"epochs={epochs}, minibatches={minibatches} and {len(terms)} terms for a part of a batch"
            raise ValueError(f"{learner.context.node}: given {given}, needed one of each: a step has the whole batch")
        return policy, accumulate(learner, forward, terms[0], part, rate_or_schedule, options)
    taken, figures = descend(learner, forward, terms, epochs, minibatches, rate_or_schedule, options)
    metrics, *others = map(update_metrics, taken)
    found = {f"{name}_{key}": x for name, each in zip(names[1:], others, strict=True) for key, x in each.items()}
    if others:
        found |= {f"{names[0]}_{key}": metrics[key] for key in ("loss", "tokens")}
    # The minimised loss, also for one term.
    whole = sum(own.weight * each["loss"] for own, each in zip(terms, (metrics, *others), strict=True))
    tokens = sum(each["tokens"] for each in (metrics, *others))
    return policy, {**found, **metrics, "loss": whole, "tokens": tokens, **figures}


@requires(of_its_rows, penalty, not_negative("kl"), finite("weight", "entropy"), plain_name)
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
    entropy: float = 0.0,
    name: str = "",
) -> Term:
    """One more term of an update's loss, over the same rollouts or others: `policy_update(…, beside=[term(…)])`.

    Inputs and options are as in `policy_update`. Without an `advantage` each response has 1. `name` begins the names of
    its metrics, by default the loss function's name. A term without a sampled token adds nothing.
    """
    worth = Advantages(torch.ones(len(rollouts))) if advantage is None else advantage
    return Term(
        **vars(_scored(rollouts, worth, reference, proximal)),
        name=name or loss_name(loss),
        loss=json.dumps(encode(loss, "term: option 'loss'")),
        weight=weight,
        average=average,
        kl=kl,
        entropy=entropy,
    )


@reads_tokens
@requires(of_its_rows, reads("behaviour"), positive("rho"))
@node(pool="trainer", clock="update")
@update_options()
def aipo_update(
    policy: AnyPolicy,
    rollouts: Rollouts,
    advantage: Advantages,
    *,
    rho: float = 4.0,
    lr: float | Schedule = 1e-4,
    part: BatchPart | None = None,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyPolicy, Metrics]:
    """`policy_update` with AIPO's loss, averaged over tokens (LlamaRL, arXiv 2505.24034, section 6).

    `rho` bounds each token's importance ratio π / μ from above.
    """
    loss = partial(aipo, rho=rho)
    return policy_update.fn(policy, rollouts, advantage, loss=loss, lr=lr, part=part, **options)  # type: ignore[no-any-return]


def _scored(rollouts: Rollouts, advantage: Advantages, reference: Logprobs | None, proximal: Logprobs | None) -> Scored:
    given = {"reference_NT": reference, "proximal_NT": proximal}
    others = {name: None if each is None else (each, "logprobs_NT") for name, each in given.items()}
    return widened(Scored, rollouts, values_N=(advantage, "values_N"), **others)


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss of an update: its rows, the loss of tokens, its name and weight, the average of token losses,
    and the factors of the divergence from the reference and of the entropy."""

    rows: Scored
    loss: Loss
    name: str = ""
    weight: float = 1.0
    average: Aggregation = "token_mean"
    kl: float = 0.0
    entropy: float = 0.0

    def backward(
        self,
        learner: Learner[Model],
        forward: Forward[Model],
        lengths_N: Tensor,
        scale: float,
        micro_tokens: int | None,
        *,
        last: bool = True,
    ) -> Sums:
        """Add `scale` times the gradient of the weighted sum of token losses to the learner's. Return the sums over
        tokens, {} for rows without a sampled token. `last`: no rows of the same term follow before the step."""
        # Whole groups pack worse, so only for losses that read them.
        whole_groups = reads_groups(self.loss)
        group_N = group_rows(self.rows.groups).to(lengths_N.device) if whole_groups else None

        def loss(model: Model, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs_P, entropy_P = forward(model, packed)
            sequence_P, rows, place = packed.sequence_P, packed.rollouts, (packed.row_P, packed.step_P)
            assert isinstance(rows, Scored)
            here = {name: getattr(rows, field) for name, field in rows.numbers.items()}
            values_N = rows.values_N.to(sequence_P.device)
            sampled = Sampled(
                advantages_P=values_N[packed.row_P if values_N.ndim == 1 else place],
                lengths_P=lengths_N[sequence_P],
                versions_P=rows.versions_NT.to(sequence_P.device)[place],
                sequence_P=sequence_P,
                given={name: x.to(sequence_P.device)[place] for name, x in here.items() if x is not None},
                replayed_P=None if rows.replayed_N is None else rows.replayed_N.to(sequence_P.device)[packed.row_P],
                whole_groups_N=group_N,
            )
            loss_P, own = self._figures(self.loss(logprobs_P, sampled), logprobs_P)
            clipped_P = own.pop("ratio_clipped", torch.zeros_like(logprobs_P, dtype=torch.bool))
            # k3, as in GRPO: over samples of π its gradient is that of KL(π_ref ‖ π), and it is never negative.
            if self.kl:
                loss_P = loss_P + self.kl * kl_estimate(logprobs_P, sampled.reference_P, estimator="k3")
            if self.entropy:
                loss_P = loss_P - self.entropy * entropy_P
            if not loss_P.requires_grad:
                needed = "one that follows from log π, its first argument"
                raise ValueError(f"loss {loss_name(self.loss)}: given a result without a gradient, needed {needed}")
            total = (token_weights(sampled.lengths_P, aggregation=self.average) * loss_P).sum()
            sums = token_sums(logprobs_P, entropy_P.detach(), clipped_P, sampled, learner.version)
            sums |= {f"{key}{OF_LOSS}": own[key].detach().double().sum() for key in sorted(own)}
            return total * scale, {"loss": total.detach().double(), **sums}

        items = learner.pack(self.rows, micro_tokens, whole_groups=whole_groups)
        if not (found := learner.backward(items, loss, last=last)):
            return {}
        some = set[str]().union(*found) - set(found[0]).intersection(*found)
        if some:
            names = ", ".join(sorted(key.removesuffix(OF_LOSS) for key in some))
            given = f"figures for some micro-batches alone: {names}"
            raise ValueError(f"loss {loss_name(self.loss)}: given {given}, needed the same names each time")
        # Only one copy from the device for all micro-batches.
        table = torch.stack([torch.stack(list(sums.values())) for sums in found]).tolist()
        return add_up([dict(zip(found[0], row, strict=True)) for row in table])

    def _figures(self, result: object, logprobs_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token and its figures by name, of what the loss function has returned."""
        loss_P, *more = result if isinstance(result, tuple) else (result,)
        if len(more) == 1 and isinstance(more[0], Mapping):
            figures = dict(more[0])
            more = [*figures.values()]
        else:
            figures = dict(zip(("ratio_clipped",), more, strict=False))
        where, shape = f"loss {loss_name(self.loss)}", list(logprobs_P.shape)
        shapes = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (loss_P, *more)]
        if len(more) != len(figures) or shapes != [shape] * len(shapes):
            given = " and ".join(map(str, shapes))
            needed = f"a loss for each token, shape {shape}, or that and which tokens it clipped, or figures by name"
            raise ValueError(f"{where}: given a result of shape {given}, needed {needed}")
        for name in figures.keys() - {"ratio_clipped"}:
            if not (isinstance(name, str) and name.isidentifier()):
                raise ValueError(f"{where}: given a figure {name!r}, needed a name of letters, digits and _")
            if name in METRICS or name.startswith(BY_LAG):
                raise ValueError(f"{where}: given a figure {name!r}, needed a name that no metric of an update has")
        return loss_P, figures


def descend(
    learner: Learner[Model],
    forward: Forward[Model],
    terms: Sequence[LossTerm],
    epochs: int,
    minibatches: int,
    lr: float | Schedule,
    options: UpdateOptions,
) -> tuple[list[list[Sums]], Metrics]:
    """Make the AdamW steps of an update on the weighted sum of its terms.

    `forward` computes a number for each target of a micro-batch, which is the first argument of the losses, and the
    entropy of its distribution. Returns, for each term, the sums of the steps in which it had tokens, with their mean
    `loss` and the `epoch`; and the metrics that all terms share.
    """
    rate = learner.rate(lr)
    shares = [
        optimizer_steps(learner.context, learner.version, each.rows.groups, epochs, minibatches, number)
        for number, each in enumerate(terms)
    ]
    for each in terms:
        each.rows.check()
    taken: list[list[Sums]] = [[] for _ in terms]
    norms: list[float] = []
    for number, steps in enumerate(zip(*shares, strict=True), 1):
        # Gradients are summed in units of the first normaliser; the sum is divided by it once at the end.
        unit = 0.0
        for whole, found, (epoch, rows) in zip(terms, taken, steps, strict=True):
            share = replace(whole, rows=whole.rows.take(rows))
            # A term's number of responses may depend on rewards: having none is no fault if another term has some.
            if len(terms) > 1 and not int(share.rows.sampled_N.sum()):
                continue
            lengths_N = sampled_lengths(share.rows).to(learner.device)
            divisor = normaliser(lengths_N, aggregation=share.average, max_tokens=learner.context.max_tokens)
            unit = unit or divisor
            scale = share.weight * (unit / divisor)
            sums = share.backward(learner, forward, lengths_N, scale, options["micro_tokens"])
            found.append({**sums, "loss": sums["loss"] / divisor, "epoch": epoch})
        if not unit:
            given = f"{len(terms)} terms, {' and '.join(each.name for each in terms)}, without a sampled token"
            raise ValueError(f"{learner.context.node}: given {given}, needed at least one in each minibatch")
        norms.append(learner.apply(options, lr=rate, normaliser=unit, last=number == len(shares[0])))
    return taken, {"grad_norm": sum(norms) / len(norms), "optimizer_steps": float(len(norms)), "lr": rate}


def accumulate(
    learner: Learner[Model],
    forward: Forward[Model],
    own: LossTerm,
    part: BatchPart,
    lr: float | Schedule,
    options: UpdateOptions,
) -> Metrics:
    """Make one part of an update that takes its batch in parts. `own` is its only term, with the rows of this part.
    Return the metrics of the update for the last part, {} for the others. Raises ValueError as `descend` does, for the
    whole batch."""
    own.rows.check()
    rate, lengths_N = learner.rate(lr), own.rows.sampled_N.to(learner.device)
    if len(learner.parts) != part.number:
        given = f"part {part.number} of {part.count} after {len(learner.parts)}"
        raise ValueError(f"{learner.context.node}: given {given}, needed the parts of a batch in order")
    sums = own.backward(learner, forward, lengths_N, own.weight, options["micro_tokens"], last=part.last)
    divisor = normaliser(lengths_N, aggregation=own.average, max_tokens=learner.context.max_tokens)
    learner.parts.append((divisor, sums))
    if not part.last:
        return {}
    taken, learner.parts = learner.parts, []
    if not (found := [sums for _, sums in taken if sums]):
        given = f"{part.count} parts of a batch without a sampled token (all versions are -1)"
        raise ValueError(f"{learner.context.node}: given {given}, needed at least one")
    unit, whole = sum(divisor for divisor, _ in taken), add_up(found)
    norm = learner.apply(options, lr=rate, normaliser=unit)
    metrics = update_metrics([{**whole, "loss": own.weight * whole["loss"] / unit, "epoch": 0}])
    return {**metrics, "grad_norm": norm, "optimizer_steps": 1.0, "lr": rate}


def loss_name(loss: Loss) -> str:
    """The name of a loss function."""
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__name__", repr(loss))


def token_sums(
    logprobs_P: Tensor, entropy_P: Tensor, clipped_P: Tensor, sampled: Sampled, version: int
) -> dict[str, Tensor]:
    """The sums of one micro-batch, float64 scalars on its device. `version` is that of the policy that learns."""
    sums = {
        "tokens": torch.ones_like(entropy_P, dtype=torch.float64).sum(),
        "entropy": entropy_P.double().sum(),
        "ratio_clipped": clipped_P.double().sum(),
    }
    if "behaviour" not in sampled.given:  # no policy of this run sampled the tokens: there is no lag, and no ratio
        return sums
    # Rows that no policy sampled, joined with others, have NaN as log μ: they have no lag and no ratio either.
    recorded_P = ~sampled.behaviour_P.isnan()
    replayed_P = torch.zeros_like(recorded_P) if sampled.replayed_P is None else sampled.replayed_P & recorded_P
    lag_P = (version - sampled.versions_P).double()
    fresh_P = (recorded_P & ~replayed_P).double()
    sums |= {"recorded": recorded_P.double().sum(), "fresh": fresh_P.sum()}
    sums |= {"lag": (lag_P * fresh_P).sum(), "lag_max": (lag_P * fresh_P).max()}
    counted_PL = lag_P.clamp(0, LONGEST_LAG)[:, None] == torch.arange(LONGEST_LAG + 1, device=lag_P.device)
    by_lag_L = (counted_PL * fresh_P[:, None]).sum(0)
    sums |= {f"{BY_LAG}{lag}": count for lag, count in enumerate(by_lag_L.unbind())}
    if sampled.replayed_P is not None:
        sums |= {"replayed": replayed_P.double().sum(), "replayed_lag_max": (lag_P * replayed_P).max()}
    # In float64: the square of a ratio that float32 can hold does not overflow.
    now_P = logprobs_P.detach().double()
    # Without a recorded log μ use a ratio of 1, which is multiplied by 0 below; NaN would stay.
    behaviour_P = torch.where(recorded_P, sampled.behaviour_P.double(), now_P)
    ratio_P = torch.exp(now_P - behaviour_P) * recorded_P
    sums |= {"ratio": ratio_P.sum(), "ratio_max": ratio_P.max(), "ratio_squared": ratio_P.square().sum()}
    sums["kl"] = kl_estimate(behaviour_P, now_P, estimator="k3").sum()
    return sums


def add_up(parts: Sequence[Sums]) -> Sums:
    """The sums of several micro-batches, parts of a batch or steps as one. A missing sum counts as none."""
    names = dict.fromkeys(name for part in parts for name in part)
    joined = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: max(values) if name.endswith("_max") else sum(values) for name, values in joined.items()}


def update_metrics(steps: Sequence[Sums]) -> Metrics:
    """The metrics of a term of the loss, as means over the steps of an update in which it had tokens.

    A step's `loss` is its mean already. `tokens` counts those of one epoch. `entropy` is that of the distribution
    sampled from, at its temperature.

    Lags, ratios, `ess` and `kl` are means over tokens with a recorded log μ: demonstrations have none. `kl` is the last
    epoch's estimate (k3) of KL(μ ‖ π), the distance of the policy from the one that sampled. `ess` is the effective
    sample size (Kish) of the ratios π / μ, as a share of the tokens.

    Figures of a loss's own are means over all tokens of the steps in which it gave them.

    `lag_mean` and `lag_max` are of fresh tokens, 0 without any; `tokens_lag_K` counts the fresh tokens of one epoch
    that are K updates old, if there are any. With a replay buffer, `replayed_tokens` counts replayed tokens (of one
    epoch) and `replayed_lag_max` is their largest lag. All other metrics, such as `ess` and the ratios, are of fresh
    and replayed tokens together.
    """
    if not steps:
        return {"loss": 0.0, "tokens": 0.0}  # the term had no tokens
    whole = add_up(steps)
    last = add_up([step for step in steps if step["epoch"] == steps[-1]["epoch"]])
    tokens = whole["tokens"]
    metrics = {
        "loss": whole["loss"] / len(steps),
        "tokens": last["tokens"],
        "entropy": whole["entropy"] / tokens,
        "ratio_clipped": whole["ratio_clipped"] / tokens,
    }
    if recorded := whole.get("recorded"):
        metrics["lag_mean"] = whole["lag"] / max(1.0, whole["fresh"])
        metrics["lag_max"] = whole["lag_max"]
        metrics |= {name: count for name, count in last.items() if name.startswith(BY_LAG) and count}
        metrics["ratio_mean"] = whole["ratio"] / recorded
        metrics["ratio_max"] = whole["ratio_max"]
        # Squares of ratios may overflow float64: then there is no `ess`.
        squared = whole["ratio_squared"] * recorded
        metrics["ess"] = whole["ratio"] / squared * whole["ratio"] if 0 < squared < math.inf else math.nan
        metrics["kl"] = last["kl"] / max(1.0, last["recorded"])
    if "replayed_lag_max" in whole:
        metrics["replayed_tokens"] = last["replayed"]
        metrics["replayed_lag_max"] = whole["replayed_lag_max"]
    for key in whole:
        if key.endswith(OF_LOSS):
            given = sum(step["tokens"] for step in steps if key in step)
            metrics[key.removesuffix(OF_LOSS)] = whole[key] / given
    return metrics
