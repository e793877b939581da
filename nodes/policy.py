"""A language model as a carried value: the policy that learns, or one that never changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from penstock.graph import opens, requires
from penstock.graph.context import Context
from penstock.graph.protocols import Carried
from penstock.graph.types import FrozenModel, LoraPolicy, Policy, Reference, Rollouts
from penstock.nodes.learn.batching import MicroBatches
from penstock.nodes.model import CausalLM, ModelConfig, ModelError
from penstock.nodes.model.hf import read_adapters
from penstock.nodes.model.lora import LoraLinear
from penstock.nodes.open_model import (
    ModelSpec,
    lora_of,
    open_frozen_model,
    open_model,
    require_model,
    run_spec,
)
from penstock.nodes.tokenizer import Tokenizer
from penstock.nodes.trainable import Frozen, Learner, SequenceModel, expect


class LanguageModel(SequenceModel[CausalLM]):
    """A model that computes log-probabilities of tokens."""

    def pack(
        self,
        rollouts: Rollouts,
        max_tokens: int | None = None,
        *,
        whole_groups: bool = False,
        readers: Sequence[SequenceModel[Any]] = (),
    ) -> MicroBatches:
        """As `SequenceModel.pack`, for rollouts whose tokens this model can score.

        Raises ValueError for greedy rows, whose tokens all have probability 1, and for rows that were sampled from a
        part of the vocabulary: they do not record which part.
        """
        for name, odd_N, needed in (
            ("temperature 0", rollouts.temperature_N == 0, "a temperature above 0"),
            ("top_k or top_p", rollouts.cut_N, "samples of the whole vocabulary: top_k=0, top_p=1"),
        ):
            if bool(odd_N.any()):
                given = f"{int(odd_N.sum())} of {len(rollouts)} responses sampled with {name}"
                raise ValueError(f"rollouts whose tokens are scored: given {given}, needed {needed}")
        return super().pack(rollouts, max_tokens, whole_groups=whole_groups, readers=readers)


class LanguagePolicy(LanguageModel, Learner[CausalLM], Policy):
    """The policy that learns."""

    called: ClassVar[str] = "policy"
    replays: ClassVar[bool] = True


class FrozenPolicy(LanguageModel, Frozen[CausalLM], Reference):
    """A policy that never changes."""


class FrozenLanguageModel(LanguageModel, Frozen[CausalLM], FrozenModel):
    """A language model of any directory."""


def policy_spec(context: Context) -> ModelSpec:
    """The run's model, with the adapters that `--lora` asks for."""
    return run_spec(context, lora_of(context))


def require_policy(context: Context, rank: int = 0) -> None:
    """Raises ModelError for a directory without a language model, for adapters that the model cannot have, for new ones
    of a rank above the shorter side of every matrix, and for `--replay-routing` of a model without experts;
    TokenizerError for variables that the chat template does not read."""
    model, tokenizer = open_model(CausalLM, replace(context, device="meta"), lora=lora_of(context, rank))
    tokenizer.require_variables(context.chat_template_kwargs)
    if model.lora is not None and not (context.model and read_adapters(context.model)[1]):
        side = max(min(x.weight.shape) for x in model.model.modules() if isinstance(x, LoraLinear))
        if model.lora.rank > side:
            given = f"rank {model.lora.rank} for matrices whose shorter sides are at most {side}"
            raise ModelError(f"LoRA: given {given}, needed at most {side}")
    if context.replay_routing and not model.config.family.experts:
        raise ModelError(f"--replay-routing: given a {model.config.model_type}, needed a model with experts")


def open_learning(context: Context, rank: int = 0) -> tuple[CausalLM, Tokenizer]:
    """The run's model, with the weights that learn in float32: adapters if `lora_of` returns some, else all weights."""
    lora = lora_of(context, rank)
    # float32 for any dtype of the run: these are the master weights. The base of adapters has none.
    return open_model(CausalLM, context, "float32" if lora is None else context.dtype, lora)


@opens(policy_spec, base=True, lora=True, config=ModelConfig.from_json)
@requires(require_policy)
def make_policy(context: Context) -> Carried:
    """The policy of `context.model`, or a small new one, with an optimizer that has not stepped yet."""
    return LanguagePolicy(*open_learning(context), context)


@opens(
    lambda context: run_spec(context, lora_of(context, LoraPolicy.rank)),
    base=True,
    lora=True,
    config=ModelConfig.from_json,
)
@requires(lambda context: require_policy(context, LoraPolicy.rank))
def make_lora_policy(context: Context) -> Carried:
    """The same, with adapters of rank `LoraPolicy.rank` unless flags or options of the program give another one."""
    return LanguagePolicy(*open_learning(context, LoraPolicy.rank), context)


@opens(run_spec, base=True, config=ModelConfig.from_json)
@requires(require_model(CausalLM))
def make_reference(context: Context) -> Carried:
    """The same model, frozen, in the run's dtype."""
    return FrozenPolicy(*open_frozen_model(CausalLM, context), context)


def _own(context: Context) -> Context:
    return replace(context, model=str(context.options.get(f"{context.node}_model") or context.model))


@opens(lambda context: run_spec(_own(context)))
@requires(lambda context: open_model(CausalLM, replace(_own(context), device="meta")))
def open_frozen(context: Context) -> Carried:
    """The model of the directory that the program's option `NAME_model` names, in the run's dtype; NAME is the name of
    the carried value. Without that option it is the run's own model.

    Raises ModelError for a directory without a language model.
    """
    return FrozenLanguageModel(*open_frozen_model(CausalLM, _own(context)), _own(context))


def language_policy(policy: Policy) -> LanguagePolicy:
    """The policy, if a maker of this file made it; raises TypeError for any other."""
    return expect(LanguagePolicy, policy, "policy")


def language_model(policy: Policy) -> LanguageModel:
    """The language model of any policy, frozen or not; raises TypeError for a policy without one."""
    return expect(LanguageModel, policy, "policy")
