"""Sampled tokens under another model: log-probabilities under a reference, and on-policy distillation from a teacher,
by the sampled tokens alone or over the whole vocabulary.

Shapes: N responses, T tokens of a response, P tokens of a micro-batch, W words of a rank. Log-probabilities are in
nats.
"""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from penstock.graph import node, opens, requires
from penstock.graph.context import Context
from penstock.graph.protocols import STAGE, TENSOR, Carried
from penstock.graph.requires import Call, opened
from penstock.graph.types import (
    AnyPolicy,
    Logprobs,
    Mean,
    Metrics,
    Policy,
    Reference,
    Rollouts,
    Teacher,
    TokenAdvantages,
)
from penstock.nodes.learn.batching import Packed, behaviour_logprobs, sampled_lengths, sampled_mask
from penstock.nodes.learn.logprobs import packed_distributions, packed_logprobs
from penstock.nodes.learn.losses import reads, reverse_kl
from penstock.nodes.learn.optimizer import Schedule, UpdateOptions, update_options
from penstock.nodes.model import CausalLM, ModelError
from penstock.nodes.open_model import ModelSpec, directory_spec, open_frozen_model, reads_tokens, run_spec
from penstock.nodes.parallel.mesh import Ranks
from penstock.nodes.policy import LanguageModel, language_model, language_policy
from penstock.nodes.tokenizer import Tokenizer
from penstock.nodes.trainable import Frozen


class FrozenTeacher(LanguageModel, Frozen[CausalLM], Teacher):
    """A teacher with the student's tokenizer."""


def require_teacher(context: Context) -> None:
    """Raises ModelError if the program's option `teacher_model` names no directory, or one without a model that has the
    policy's tokenizer; its weights are not read."""
    _open(replace(context, device="meta"))


def teacher_spec(context: Context) -> ModelSpec:
    """The teacher's shape and tokenizer. Raises ModelError without a directory."""
    return directory_spec(_directory(context))


@opens(teacher_spec)
@requires(require_teacher)
def open_teacher(context: Context) -> Carried:
    """The model of the directory that the program's option `teacher_model` names, in the run's dtype.

    Raises ModelError as `require_teacher` does.
    """
    return FrozenTeacher(*_open(context), replace(context, model=_directory(context)))


def _directory(context: Context) -> str:
    folder = str(context.options.get("teacher_model") or "")
    if not folder:
        needed = "a model directory with the policy's tokenizer: --teacher-model DIR"
        raise ModelError(f"teacher_model: given no directory, needed {needed}")
    return folder


def _open(context: Context) -> tuple[CausalLM, Tokenizer]:
    folder = _directory(context)
    model, tokenizer = open_frozen_model(CausalLM, replace(context, model=folder))
    own = run_spec(context).tokenizer
    # They are compared token by token, so each token number must mean the same text.
    theirs, ours = tokenizer.backend.get_vocab(), own.backend.get_vocab()
    if theirs != ours:
        given, needed = f"a tokenizer of {len(theirs)} tokens", f"the policy's own tokenizer, which has {len(ours)}"
        raise ModelError(f"teacher_model {folder}: given {given}, needed {needed}")
    return model, tokenizer


@requires(reads("behaviour"))
@node(pool="teacher")
def distillation_advantage(rollouts: Rollouts, teacher: Logprobs) -> tuple[TokenAdvantages, Metrics]:
    """log π_T − log μ of each sampled token, the reward of reverse-KL distillation.

    Thinking Machines Lab, "On-Policy Distillation" (2025); the policy gradient of MiniLLM (Gu et al. 2023,
    arXiv 2306.08543), section 2.2, with discount 0: a token answers for its own divergence, not for later ones. With
    the loss `reinforce` the mean gradient over tokens sampled with π is that of `reverse_kl`; tokens sampled with older
    weights need the loss `distillation`, which has log π in place of log μ.

    `teacher` is at the sampling temperature, as from `reference_logprobs`.

    Metric: `teacher_kl`, the negative mean of the advantages, which estimates KL(μ ‖ π_T) per token (k1, nats). Raises
    ValueError for rollouts without μ.
    """
    mask_NT, behaviour_NT = sampled_mask(rollouts), behaviour_logprobs(rollouts, "distillation_advantage")
    advantages_NT = (teacher.logprobs_NT - behaviour_NT).masked_fill(~mask_NT, 0.0)
    return TokenAdvantages(advantages_NT), {"teacher_kl": Mean.of((-advantages_NT[mask_NT]).tolist())}


def whole_distributions(call: Call) -> None:
    """Requirement of `distill_update`: a mesh on which each rank has both distributions, by equal parts. Checked for a
    run only. Raises GraphError."""
    if call.context is None:
        return
    ranks = Ranks(call.context.mesh)
    # A loss is called on the last stage only, which does not have the teacher's first layers.
    if ranks.size(STAGE) > 1:
        raise call.lack(f"a mesh of {ranks}", f"one without stages ({STAGE})", code="mesh-cut")
    sizes = []
    for name in ("policy", "teacher") if ranks.size(TENSOR) > 1 else ():
        argument = call.carried(name)
        made = None if argument is None else opened(argument.maker)
        spec = None if argument is None or made is None else made.spec(call.view.contexts[argument.name])
        sizes += [spec.config.vocab_size] if isinstance(spec, ModelSpec) else []
    # Each rank would have other words of the one than of the other.
    if len(set(sizes)) > 1:
        given = f"a policy of vocab_size {sizes[0]} and a teacher of {sizes[1]}, over a mesh of {ranks}"
        raise call.lack(given, f"equal sizes, or a mesh without {TENSOR}", code="mesh-cut")


@requires(whole_distributions)
@reads_tokens
@node(pool="trainer", clock="update")
@update_options()
def distill_update(
    policy: AnyPolicy,
    teacher: Teacher,
    rollouts: Rollouts,
    *,
    lr: float | Schedule = 1e-4,
    **options: Unpack[UpdateOptions],
) -> tuple[AnyPolicy, Metrics]:
    """One AdamW step on KL(π ‖ π_T) over the whole vocabulary, averaged over sampled tokens (GKD, arXiv 2306.13649).

    The divergence at each token is under π; only the contexts come from μ. Both distributions are at the sampling
    temperature (Hinton et al. 2015, arXiv 1503.02531, section 2, without the factor T²), so that the divergence is 0 if
    the student has its teacher's logits. Policy and teacher are in one pool, and memory grows with the tokens of a
    micro-batch times the vocabulary.

    Models of one tokenizer may have more rows than it has tokens, and not equally many. Rows that only one of the two
    has are padding: they are left out, and both distributions are normalised over the others.
    """
    learner, guide = language_policy(policy), language_model(teacher)
    sizes = {each.config.vocab_size for each in (learner.model, guide.model)}
    words = min(sizes) if len(sizes) > 1 else None

    def loss(model: CausalLM, packed: Packed) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_PW = packed_distributions(guide.model, packed, words)
        # Student and teacher are sharded over the same ranks: each rank has the same words of both.
        total = model.vocab.sum(reverse_kl(packed_distributions(model, packed, words), teacher_PW).sum())
        return total, total.detach()

    tokens = int(sampled_lengths(rollouts).sum())
    items = learner.pack(rollouts, options["micro_tokens"], readers=[guide])
    sums, metrics = learner.step(items, loss, options, lr=lr, normaliser=tokens)
    mean = float(torch.stack(sums).sum()) / tokens
    return policy, {"loss": mean, "teacher_kl": mean, "tokens": float(tokens), **metrics}


@reads_tokens
@node(pool="reference")
def reference_logprobs(reference: Reference, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Logprobs:
    """log π_ref of each sampled token, float32 [N, T]; zero elsewhere.

    π_ref is at the sampling temperature, as π is, so a policy that has not moved from it has divergence 0.
    """
    return Logprobs(language_model(reference).score_tokens(rollouts, micro_tokens, packed_logprobs))


@reads_tokens
@node(pool="trainer", clock="update")
def policy_logprobs(policy: Policy, rollouts: Rollouts, *, micro_tokens: int | None = None) -> Logprobs:
    """log π of each sampled token by the policy before its update, at the sampling temperature, float32 [N, T]; zero
    elsewhere."""
    return Logprobs(language_model(policy).score_tokens(rollouts, micro_tokens, packed_logprobs))
