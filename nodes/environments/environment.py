"""`@environment`: a plain function that answers turns of many conversations at once, each within a deadline."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from penstock.graph.definition import NodeDef
from penstock.graph.faults import defined, fault
from penstock.graph.interface import Interface, interface
from penstock.graph.types import Context, Metrics
from penstock.nodes.environments.calls import Calls
from penstock.nodes.numbers import positive

P = ParamSpec("P")
T = TypeVar("T")
DEADLINE_S = 60.0


class EnvironmentDef(NodeDef[P, T], Generic[P, T]):
    """A node whose firings are calls of `fn`, several in work at once: its state is a `Stream` of them.

    It has one option more than `fn`: `deadline`, in seconds. Called outside of a program it is `fn`.
    """

    def __init__(self, fn: Callable[..., Any], pool: str, deadline: float) -> None:
        super().__init__(fn, pool, "group", self._begin)
        self.deadline = deadline
        self.requires = (positive("deadline"),)

    @functools.cached_property
    def interface(self) -> Interface:
        """That of the function, without a state, with the option `deadline`; metrics may always come with a reply."""
        own = interface(self.fn, stateful=False)
        if "deadline" in own.options:
            needed = "another name: it is the option that every environment has, the seconds of one call"
            raise fault(f"{self.__name__}: option 'deadline'", "one of the function's own", needed, defined(self.fn))
        return replace(own, options={**own.options, "deadline": self.deadline}, metrics=True, stream=True)

    def _begin(self, context: Context, *, deadline: float, **options: Any) -> Calls:
        own = interface(self.fn, stateful=False)
        options |= {own.context: context} if own.context else {}
        return Calls(functools.partial(self.fn, **options), deadline, reports=own.metrics)


class Decorator(Protocol):
    """What `@environment(…)` is."""

    @overload
    def __call__(self, fn: Callable[P, tuple[T, Metrics]], /) -> EnvironmentDef[P, T]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /) -> EnvironmentDef[P, T]: ...


@overload
def environment(fn: Callable[P, tuple[T, Metrics]], /) -> EnvironmentDef[P, T]: ...
@overload
def environment(fn: Callable[P, T], /) -> EnvironmentDef[P, T]: ...
@overload
def environment(*, pool: str = ..., deadline: float = ...) -> Decorator: ...
def environment(
    fn: Callable[..., Any] | None = None, /, *, pool: str = "environment", deadline: float = DEADLINE_S
) -> Any:
    """Make a function of `Rollouts` that returns `Replies` (or `Replies` and `Metrics`) an environment for `converse`.

    The conversations of several prompt groups are answered at once, each by a call in a thread of its own; so the
    function must not change anything that its calls share. A call that takes longer than `deadline` seconds, waiting
    and computing, fails its group's firing (`calls.py` says what becomes of its thread). `deadline` is also an option
    of the call, `converse(…, environment=shop, turns=4, deadline=5.0)`, and should be shorter than the run's, which
    ends the run.

        @environment(deadline=10.0)
        def shop(rollouts: Rollouts, *, url: str) -> Replies: ...
    """
    if fn is not None:
        return EnvironmentDef(fn, pool, deadline)
    return lambda fn: EnvironmentDef(fn, pool, deadline)
