"""A language model as a carried value: the weights that learn, their optimizer, and the version.

Master weights are float32. Where the run's dtype is another, the model that computes holds a copy in that dtype,
the same numbers that are broadcast, so that trainer and generator work with equal weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.graph.types import Carried, Context, Policy, Reference, Rollouts
from penstock.nodes.base import open_model
from penstock.nodes.learn.lanes import Lanes
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.packing import Packed, pack
from penstock.nodes.model import Llama, save_model, torch_dtype
from penstock.nodes.model.hf import check_names, check_shape
from penstock.nodes.tokenizer import Tokenizer

CPU_MICRO_TOKENS, MICRO_TOKENS = 1024, 16384
"""Tokens of a micro-batch, padding included: on a CPU what stays in its caches, elsewhere what fills the device
without too many activations for the backward pass to keep."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer's tensors, each as large as the weights."""


Figures = TypeVar("Figures")
MicroLoss = Callable[[Packed, Tensor, Tensor], tuple[Tensor, Figures]]
"""(a micro-batch, log π of its targets with a gradient, their entropies) → (the loss to add, figures without one).
Lanes call it at the same time: it changes nothing."""


@dataclass(frozen=True)
class Step:
    """How to take an optimizer step; `clip_norm` bounds the 2-norm of the whole gradient."""

    lr: float
    clip_norm: float
    betas: tuple[float, float]
    weight_decay: float


class LanguageModel:
    """A model with its tokenizer. On a CPU its rank's threads work on micro-batches of their own (`Lanes`)."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, context: Context) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.lanes = Lanes(model, context.threads if context.device == "cpu" else 1)

    @property
    def device(self) -> torch.device:
        return self.model.head_weight().device

    def pack(self, rollouts: Rollouts, max_tokens: int | None = None) -> list[Packed]:
        """Micro-batches of at most `max_tokens` tokens with padding; by default what suits the device."""
        tokens_NS = rollouts.tokens_NS.to(self.device)
        return self._pack(tokens_NS, rollouts.prompt_lengths_N, rollouts.response_lengths_N, max_tokens)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[Packed]) -> list[Tensor]:
        """log π of each target of each micro-batch, float32 [P], nats, without a gradient."""
        return self.lanes.map(lambda model, packed: packed_logprobs(model, packed)[0], micro_batches)

    def _pack(self, tokens_NS: Tensor, prompts_N: Tensor, responses_N: Tensor, max_tokens: int | None) -> list[Packed]:
        bound = max_tokens or (CPU_MICRO_TOKENS if self.device.type == "cpu" else MICRO_TOKENS)
        return pack(tokens_NS, prompts_N, responses_N, bound, len(self.lanes.models))

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


class LanguagePolicy(LanguageModel, Policy):
    """The policy that learns. `updates` is the length of the run, for schedules of the learning rate."""

    def __init__(self, master: Llama, tokenizer: Tokenizer, context: Context) -> None:
        dtype = torch_dtype(context.dtype)
        super().__init__(master if dtype == torch.float32 else deepcopy(master).to(dtype), tokenizer, context)
        self.masters = dict(master.named_parameters())
        self.optimizer = torch.optim.AdamW(self.masters.values(), fused=True)
        self.version, self.updates = 0, context.updates

    def accumulate(self, micro_batches: Sequence[Packed], loss: MicroLoss[Figures]) -> list[Figures]:
        """Add the gradient of each micro-batch's loss to the masters'; what `loss` gave beside it, in order."""

        def work(model: Llama, packed: Packed) -> Figures:
            total, figures = loss(packed, *packed_logprobs(model, packed))
            total.backward()  # type: ignore[no-untyped-call]
            return figures

        try:
            found = self.lanes.map(work, micro_batches)
        except BaseException:
            self._forget_gradients()  # the firing may be tried again
            raise
        for name, gradient in self.lanes.collect().items():
            master = self.masters[name]
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        return found

    def apply(self, step: Step, *, normaliser: float) -> float:
        """One AdamW step on the collected gradient divided by `normaliser`; its 2-norm before clipping.

        Raises FloatingPointError, and leaves the weights alone, where that norm is no finite number.
        """
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / normaliser
        if not math.isfinite(norm):
            self._forget_gradients()
            raise FloatingPointError(f"update of version {self.version}: given a gradient of norm {norm}")
        scale = min(1.0, step.clip_norm / (norm + 1e-6)) / normaliser
        for gradient in gradients:
            gradient.mul_(scale)
        self.optimizer.param_groups[0].update(lr=step.lr, betas=tuple(step.betas), weight_decay=step.weight_decay)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._copy_masters()
        self.version += 1
        return norm

    def pack_texts(
        self, texts: Sequence[str], responses: Sequence[str], max_tokens: int | None = None
    ) -> tuple[list[Packed], int]:
        """Demonstrations in micro-batches, and the number of their responses' tokens, end tokens included.

        Raises ValueError for one that is longer than the model's context.
        """
        prompts = [self.tokenizer.encode_prompt(text) for text in texts]
        wholes = [
            prompt + self.tokenizer.encode(response) + [self.tokenizer.eos]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        limit = self.model.config.max_position_embeddings
        prompt_lengths_N = torch.tensor([len(p) for p in prompts])
        lengths_N = torch.tensor([len(w) for w in wholes])
        if int(lengths_N.max()) > limit:
            row = int(lengths_N.argmax())
            raise ValueError(f"demonstration {texts[row]!r}: given {len(wholes[row])} tokens, needed at most {limit}")
        tokens_NS = torch.zeros(len(wholes), int(lengths_N.max()), dtype=torch.long)
        for row, whole in enumerate(wholes):
            tokens_NS[row, : len(whole)] = torch.tensor(whole)
        responses_N = lengths_N - prompt_lengths_N
        packed = self._pack(tokens_NS.to(self.device), prompt_lengths_N, responses_N, max_tokens)
        return packed, int(responses_N.sum())

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        tensors = {f"master.{name}": p.detach() for name, p in self.masters.items()}
        for name, parameter in self.masters.items():
            moments = self.optimizer.state.get(parameter, {})
            tensors |= {f"{moment}.{name}": moments[moment] for moment in MOMENTS if moment in moments}
        return tensors, {"version": self.version, "steps": self._steps()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Raises ModelError for the state of another model."""
        kinds = ("master", *MOMENTS) if facts["steps"] else ("master",)
        needed = {f"{kind}.{name}": p for kind in kinds for name, p in self.masters.items()}
        check_names(needed, tensors, "state of the policy")
        for name, parameter in needed.items():
            check_shape(name, tensors[name], parameter, "state of the policy")
        for name, parameter in self.masters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"master.{name}"])
            self.optimizer.state.pop(parameter, None)
            if facts["steps"]:
                moments = {moment: tensors[f"{moment}.{name}"].to(parameter, copy=True) for moment in MOMENTS}
                step = torch.tensor(float(facts["steps"]), device=parameter.device)
                self.optimizer.state[parameter] = {"step": step, **moments}
        self._copy_masters()
        self.version = facts["version"]

    def export(self, folder: str) -> None:
        """Write an HF directory: configuration, weights in the run's dtype, tokenizer."""
        save_model(self.model, folder)
        self.tokenizer.save(folder)

    def _forget_gradients(self) -> None:
        self.lanes.collect()
        self.optimizer.zero_grad()

    def _steps(self) -> int:
        """The optimizer's own count, which its bias correction needs."""
        return next((int(state["step"]) for state in self.optimizer.state.values()), 0)

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


class FrozenPolicy(LanguageModel, Reference):
    """A policy that never changes, so that its directory is all the state it has."""

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        return {}, {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Nothing was saved."""

    def export(self, folder: str) -> None:
        """It is the model that the run was given."""


def make_policy(context: Context) -> Carried:
    """The policy of `context.model`, or a small new one, with an optimizer that has not stepped yet."""
    return LanguagePolicy(*open_model(context, "float32"), context)


def make_reference(context: Context) -> Carried:
    """The same model, frozen, in the run's dtype."""
    model, tokenizer = open_model(context)
    return FrozenPolicy(model.requires_grad_(False), tokenizer, context)


def language_policy(policy: Policy) -> LanguagePolicy:
    """The policy as this file makes it; raises TypeError for one that another maker made."""
    if not isinstance(policy, LanguagePolicy):
        raise TypeError(f"policy: given a {type(policy).__name__}, needed a LanguagePolicy")
    return policy


def language_model(policy: Policy) -> LanguageModel:
    """Any policy's model, frozen or not; raises TypeError for a policy that has none."""
    if not isinstance(policy, LanguageModel):
        raise TypeError(f"policy: given a {type(policy).__name__}, needed one with a language model")
    return policy
