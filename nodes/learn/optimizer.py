"""AdamW, its options, declared once for all updates, and learning rates that change.

    policy_update(policy, rollouts, advantage, loss=ppo, lr=partial(cosine, peak=1e-5, warmup=20), weight_decay=0.01)

Your own schedule is a function like `cosine` at the top of your own file. An update calls it with the number of updates
before it (0, 1, …) and the updates of the whole run (`--updates`), so that a resumed run continues at the same rate.
Bind its own options with functools.partial. The run's `--lr-warmup` and `--lr-decay` change numbers and the schedules
of this file.
"""

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from penstock.graph import requires
from penstock.graph.imports import imported, names_function, short
from penstock.graph.requires import Call
from penstock.nodes.option_checks import count, not_negative, positive

P = ParamSpec("P")
R = TypeVar("R")
# (the update's number from 0, the run's updates) → its learning rate.
Schedule = Callable[[int, int], float]


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with the bits of `torch.optim.AdamW(fused=True)`.

    For each parameter that a step has changed, `state` has its moments `exp_avg` and `exp_avg_sq`, of its shape, and
    the number of its steps, `step`. All parameters are float32 and on one device. torch's own class imports torch's
    compiler, which takes a second of a run's start and 100 MB.
    """

    EPSILON = 1e-8

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.lr, self.betas, self.weight_decay = 1e-3, (0.9, 0.999), 0.0

    @torch.no_grad()
    def step(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Update those of `parameters`, by default of all, that have a gradient. Threads may update different
        parameters at the same time."""
        parameters = self.parameters if parameters is None else parameters
        changed = [parameter for parameter in parameters if parameter.grad is not None]
        if not changed:
            return
        for parameter in changed:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in changed]
        firsts, seconds, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            changed,
            [parameter.grad for parameter in changed if parameter.grad is not None],
            firsts,
            seconds,
            [],
            steps,
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class UpdateOptions(TypedDict, total=False):
    """Options of every update by AdamW, besides its learning rate `lr`, a number or a schedule.

    `clip_norm` bounds the 2-norm of each step's gradient, by default 1. `betas` are AdamW's decay rates of the two
    moments, by default 0.9 and 0.95, `weight_decay` is its decoupled weight decay, by default 0, of norms and
    biases too. `micro_tokens` bounds the tokens of a micro-batch, padding included; None, the default, chooses by the
    device.
    """

    clip_norm: float
    betas: tuple[float, float]
    weight_decay: float
    micro_tokens: int | None


DEFAULTS = UpdateOptions(clip_norm=1.0, betas=(0.9, 0.95), weight_decay=0.0, micro_tokens=None)


def update_options(**changed: Unpack[UpdateOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give an update the options of `UpdateOptions`, with their requirements, in place of its parameter `**options`.

    `changed` are defaults of its own. Write it below `@node`, which reads the options from the signature:

        @node(pool="trainer", clock="update")
        @update_options(weight_decay=0.01)
        def my_update(policy: Policy, rollouts: Rollouts, *, lr: float = 1e-4, **options: Unpack[UpdateOptions]): ...
    """
    defaults: UpdateOptions = {**DEFAULTS, **changed}

    def give(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def update(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **{**defaults, **kwargs})  # type: ignore[arg-type]

        types = UpdateOptions.__annotations__
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            for name, default in defaults.items()
        ]
        # `@node` reads the options from the signature, and `check` their types from the annotations.
        made: Any = update
        made.__signature__ = signature.replace(parameters=[*own, *more])
        made.__annotations__ = {each.name: each.annotation for each in (*own, *more)}
        made.__annotations__["return"] = signature.return_annotation
        checks = learning_rate, not_negative("weight_decay"), positive("clip_norm"), count(1, "micro_tokens"), betas
        return requires(*checks)(update)

    return give


def learning_rate(call: Call) -> None:
    """Requirement of the option `lr`: a number, or a schedule whose own options are bound."""
    given = call.options.get("lr")
    if given is None or not names_function(given):
        call.numbers("a finite number of at least 0, or a schedule", lambda number: 0 <= number < math.inf, "lr")
        return
    schedule, bound = imported(given["path"]), given.get("options", {})
    parameters = inspect.signature(schedule).parameters.values() if callable(schedule) else ()
    # Otherwise a missing option would be noticed only in the first update, after the first batch.
    free = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in bound]
    if free:
        name = short(given["path"])
        needed = f"partial({name}, {', '.join(f'{option}=…' for option in free)})"
        raise call.lack(f"{name} without {', '.join(free)}", needed, "lr", code="unbound-schedule")
    try:
        inspect.signature(schedule).bind(0, 1, **bound) if callable(schedule) else None
    except TypeError as error:
        needed = "a function of (update, updates), such as cosine; partial gives what else it takes"
        raise call.lack(f"{short(given['path'])}: {error}", needed, "lr", code="wrong-option-type") from None
    if changed_by_flags(call) and schedule not in SHAPES:
        given, needed = f"--lr-warmup or --lr-decay beside the schedule {short(given['path'])}", "one of the two"
        raise call.lack(given, f"{needed}; they change a number, linear and cosine", "lr", code="two-learning-rates")


def changed_by_flags(call: Call) -> bool:
    """True if the run has `--lr-warmup` or `--lr-decay`."""
    context = call.context
    return context is not None and (context.lr_warmup is not None or context.lr_decay != "")


def betas(call: Call) -> None:
    """Requirement of the option `betas`: two numbers from 0 to below 1."""
    given = call.options.get("betas")
    fit = isinstance(given, list) and len(given) == 2 and all(type(b) in (int, float) and 0 <= b < 1 for b in given)
    if given is not None and not fit:
        raise call.lack(repr(given), "two numbers from 0 to below 1", "betas", code="out-of-range")


@requires(not_negative("peak", "final"), count(0, "warmup"))
def cosine(update: int, updates: int, *, peak: float, warmup: int = 0, final: float = 0.0) -> float:
    """A line over `warmup` updates up to `peak`, then half a cosine down to the share `final` of it at the run's end.

    The cosine of Loshchilov and Hutter 2016 (arXiv 1608.03983), equation 5, without restarts.
    """
    fall = 0.5 * (1 + math.cos(math.pi * _after(warmup, update, updates)))
    return peak * (_rise(update, warmup) * (final + (1 - final) * fall))


@requires(not_negative("peak", "final"), count(0, "warmup"))
def linear(update: int, updates: int, *, peak: float, warmup: int = 0, final: float = 0.0) -> float:
    """A line over `warmup` updates up to `peak`, then a line down to the share `final` of it at the run's end.

    `final=1.0` stays at the peak: only a warm-up.
    """
    fall = 1 - _after(warmup, update, updates)
    return peak * (_rise(update, warmup) * (final + (1 - final) * fall))


SHAPES = linear, cosine
"""The schedules that `scheduled` can change."""


def scheduled(lr: float | Schedule, warmup: int | None, decay: str) -> float | Schedule:
    """A number or one of `SHAPES` with the changes of `--lr-warmup` and `--lr-decay`; None and "" change nothing."""
    if warmup is None and not decay:
        return lr
    bound = dict(lr.keywords) if isinstance(lr, functools.partial) else {"peak": lr, "final": 1.0}
    shape = lr.func if isinstance(lr, functools.partial) else linear
    if decay:
        shape = cosine if decay == "cosine" else linear
        bound["final"] = 1.0 if decay == "constant" else 0.0
    if warmup is not None:
        bound["warmup"] = warmup
    return functools.partial(shape, **bound)


def _rise(update: int, warmup: int) -> float:
    """The share of the peak at update 0, 1, … of a warm-up; 1 from update `warmup` on."""
    # Above 0 for the first update: with a rate of 0 its batch would be useless.
    return min(1.0, (update + 1) / (warmup + 1))


def _after(warmup: int, update: int, updates: int) -> float:
    """The share of the updates after a warm-up that are done; 0 during the warm-up, and 1 after the run."""
    return min(1.0, max(0, update - warmup) / max(1, updates - warmup))
