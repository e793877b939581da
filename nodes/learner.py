"""Weights that learn: float32 masters with their optimizer, and the model that computes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.graph.types import Context
from penstock.nodes.learn.packing import Packed
from penstock.nodes.learn.schedules import Schedule
from penstock.nodes.mastered import MASTER, Mastered
from penstock.nodes.sequence_model import Model
from penstock.nodes.tokenizer import Tokenizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer's tensors, each as large as the weights."""

Figures = TypeVar("Figures")


@dataclass(frozen=True)
class Step:
    """How to take an optimizer step; `clip_norm` bounds the 2-norm of the whole gradient."""

    lr: float
    clip_norm: float
    betas: tuple[float, float]
    weight_decay: float


class Learner(Mastered[Model]):
    """A model that learns by AdamW. `updates` is the length of the run, for schedules of the learning rate; `context`
    says how the run was started, and keys what updates draw."""

    def __init__(self, master: Model, tokenizer: Tokenizer, context: Context) -> None:
        super().__init__(master, tokenizer, context)
        self.optimizer = torch.optim.AdamW(self.masters.values(), fused=True)
        self.updates, self.context = context.updates, context

    def backward(
        self, items: Sequence[Packed], loss: Callable[[Model, Packed], tuple[Tensor, Figures]]
    ) -> list[Figures]:
        """Add the gradient of each micro-batch's loss to the masters'; what `loss` gave beside it, in order.

        Workers call `loss` at the same time, each with a model of its own: it changes nothing.
        """
        try:
            found = self.workers.backward(loss, items)
        except BaseException:
            self._forget_gradients()  # the firing may be tried again
            raise
        for name, gradient in self.workers.collect().items():
            master = self.masters[name]
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        return found

    def rate(self, lr: float | Schedule) -> float:
        """The learning rate of the update under way. Raises ValueError for one that is negative or not finite."""
        rate = float(lr(self.version, self.updates)) if callable(lr) else lr
        if not 0 <= rate < math.inf:
            where = f"update {self.version} of {self.updates}"
            raise ValueError(f"{where}: given a learning rate of {rate}, needed a finite number of at least 0")
        return rate

    def apply(self, step: Step, *, normaliser: float, last: bool = True) -> float:
        """One AdamW step on the collected gradient divided by `normaliser`; its 2-norm before clipping.

        An update may take several; its `last` one makes the next version. Raises FloatingPointError, and
        leaves the weights alone, where that norm is no finite number.
        """
        gradients = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        norm = self.workers.norm(gradients) / normaliser
        if not math.isfinite(norm):
            self._forget_gradients()
            raise FloatingPointError(f"update of version {self.version}: given a gradient of norm {norm}")
        scale = min(1.0, step.clip_norm / (norm + 1e-6)) / normaliser
        for gradient in gradients.values():
            gradient.mul_(scale)
        self.optimizer.param_groups[0].update(lr=step.lr, betas=tuple(step.betas), weight_decay=step.weight_decay)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.copy_masters()
        self.version += int(last)
        return norm

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        tensors, facts = super().state()
        return {**tensors, **self._moments()}, {**facts, "steps": self._steps()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().restore(tensors, facts)
        self.optimizer.state.clear()
        for name, parameter in self.masters.items() if facts["steps"] else ():
            moments = {moment: tensors[f"{moment}.{name}"].to(parameter, copy=True) for moment in MOMENTS}
            step = torch.tensor(float(facts["steps"]), device=parameter.device)
            self.optimizer.state[parameter] = {"step": step, **moments}

    def offloadable(self) -> Mapping[str, Tensor]:
        """The optimizer's moments too: only its steps read them."""
        return {**super().offloadable(), **self._moments()}

    def _moments(self) -> dict[str, Tensor]:
        """By their names in a state; none before the first step."""
        return {
            f"{moment}.{name}": self.optimizer.state[parameter][moment]
            for name, parameter in self.masters.items()
            for moment in MOMENTS
            if parameter in self.optimizer.state
        }

    def _kinds(self, facts: Mapping[str, Any]) -> tuple[str, ...]:
        return (MASTER, *MOMENTS) if facts["steps"] else (MASTER,)

    def _forget_gradients(self) -> None:
        self.workers.collect()
        self.optimizer.zero_grad()

    def _steps(self) -> int:
        """The optimizer's own count, which its bias correction needs."""
        return next((int(state["step"]) for state in self.optimizer.state.values()), 0)
