"""A language model as a carried value: the policy that learns, or one that never changes."""

from dataclasses import replace
from typing import ClassVar

from penstock.graph import opens, requires
from penstock.graph.protocols import Carried
from penstock.graph.types import Context, FrozenModel, Policy, Reference, Rollouts
from penstock.nodes.learn.batching import MicroBatches
from penstock.nodes.model import Llama
from penstock.nodes.open_model import open_model, require_model, run_spec
from penstock.nodes.trainable import Frozen, Learner, SequenceModel, expect


class LanguageModel(SequenceModel[Llama]):
    """A model that gives log-probabilities to tokens."""

    def pack(self, rollouts: Rollouts, max_tokens: int | None = None, *, whole_groups: bool = False) -> MicroBatches:
        """The same, of rollouts whose tokens this model can score.

        Raises ValueError for greedy rows, whose tokens all have probability 1, and for rows that were sampled from a
        part of the vocabulary: which part it was, they do not say.
        """
        for name, odd_N, needed in (
            ("temperature 0", rollouts.temperature_N == 0, "a temperature above 0"),
            ("top_k or top_p", rollouts.cut_N, "samples of the whole vocabulary: top_k=0, top_p=1"),
        ):
            if bool(odd_N.any()):
                given = f"{int(odd_N.sum())} of {len(rollouts)} responses sampled with {name}"
                raise ValueError(f"rollouts whose tokens are scored: given {given}, needed {needed}")
        return super().pack(rollouts, max_tokens, whole_groups=whole_groups)


class LanguagePolicy(LanguageModel, Learner[Llama], Policy):
    """The policy that learns."""

    called: ClassVar[str] = "policy"


class FrozenPolicy(LanguageModel, Frozen[Llama], Reference):
    """A policy that never changes."""


class FrozenLanguageModel(LanguageModel, Frozen[Llama], FrozenModel):
    """A language model of any directory."""


@opens(run_spec, base=True)
@requires(require_model(Llama))
def make_policy(context: Context) -> Carried:
    """The policy of `context.model`, or a small new one, with an optimizer that has not stepped yet."""
    # Whatever the run's dtype: these are the master weights.
    return LanguagePolicy(*open_model(Llama, context, "float32"), context)


@opens(run_spec, base=True)
@requires(require_model(Llama))
def make_reference(context: Context) -> Carried:
    """The same model, frozen, in the run's dtype."""
    model, tokenizer = open_model(Llama, context)
    return FrozenPolicy(model.requires_grad_(False), tokenizer, context)


def _own(context: Context) -> Context:
    return replace(context, model=str(context.options.get(f"{context.node}_model") or context.model))


@opens(lambda context: run_spec(_own(context)))
@requires(lambda context: require_model(Llama)(_own(context)))
def open_frozen(context: Context) -> Carried:
    """The model of the directory that the program's option `NAME_model` names, in the run's dtype; NAME is the carried
    value's. It is the run's own model where there is no such option.

    Raises ModelError for a directory that holds no language model.
    """
    model, tokenizer = open_model(Llama, _own(context))
    return FrozenLanguageModel(model.requires_grad_(False), tokenizer, context)


def language_policy(policy: Policy) -> LanguagePolicy:
    """The policy as this file makes it; raises TypeError for one that another maker made."""
    return expect(LanguagePolicy, policy, "policy")


def language_model(policy: Policy) -> LanguageModel:
    """Any policy's model, frozen or not; raises TypeError for a policy that has none."""
    return expect(LanguageModel, policy, "policy")
