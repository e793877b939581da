"""A language model as a carried value: the weights that learn, their optimizer, and the version.

Master weights are float32. Where the run's dtype is another, the model that computes holds a copy in that dtype,
the same numbers that are broadcast, so that trainer and generator work with equal weights.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.graph.types import Carried, Context, Policy, Reference
from penstock.nodes.base import open_model
from penstock.nodes.learn.logprobs import token_logprobs
from penstock.nodes.learn.packing import Packed
from penstock.nodes.model import Llama, save_model, torch_dtype
from penstock.nodes.model.hf import check_names, check_shape
from penstock.nodes.tokenizer import Tokenizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer's tensors, each as large as the weights."""


@dataclass(frozen=True)
class Step:
    """How to take an optimizer step; `clip_norm` bounds the 2-norm of the whole gradient."""

    lr: float
    clip_norm: float
    betas: tuple[float, float]
    weight_decay: float


class LanguageModel:
    """A model with its tokenizer."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def device(self) -> torch.device:
        return self.model.head_weight().device

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """log π of each target of a micro-batch, and the entropy of its distribution; float32 [P], nats."""
        hidden_RWD = self.model.hidden(packed.tokens_RW, packed.positions_RW, packed.segments_RW)
        hidden_PD = hidden_RWD.flatten(0, 1)[packed.at_P]
        return token_logprobs(hidden_PD, self.model.head_weight(), packed.targets_P)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


class LanguagePolicy(LanguageModel, Policy):
    """The policy that learns. `updates` is the length of the run, for schedules of the learning rate."""

    def __init__(self, master: Llama, tokenizer: Tokenizer, context: Context) -> None:
        dtype = torch_dtype(context.dtype)
        super().__init__(master if dtype == torch.float32 else deepcopy(master).to(dtype), tokenizer)
        self.masters = dict(master.named_parameters())
        self.optimizer = torch.optim.AdamW(self.masters.values(), fused=True)
        self.version, self.updates = 0, context.updates

    def backward(self, loss: Tensor) -> Tensor:
        """Add the gradient of `loss` to the masters' gradients; the loss without its graph."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.model.named_parameters():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None
        return loss.detach()

    def apply(self, step: Step, *, normaliser: float) -> float:
        """One AdamW step on the collected gradient divided by `normaliser`; its 2-norm before clipping.

        Raises FloatingPointError, and leaves the weights alone, where that norm is no finite number.
        """
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / normaliser
        if not math.isfinite(norm):
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

    def tokenize(self, texts: Sequence[str], responses: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Demonstrations as tokens [N, S], with the lengths [N] of prompts and of responses, end token included."""
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
        return tokens_NS.to(self.device), prompt_lengths_N, lengths_N - prompt_lengths_N

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
    return FrozenPolicy(model.requires_grad_(False), tokenizer)


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
