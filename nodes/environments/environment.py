"""`@environment`: a plain function that answers turns of many conversations at once, each within a deadline. And what a
conversation was worth to its environment: `outcome`, `turn_rewards`.

Each call of the function has a thread of its own. A thread cannot be killed. A call that is overdue is given up: its
firing fails, its thread gets an exception that ends it as soon as it runs Python again (a loop at once, a blocked read
when it returns), and its result is never looked at. Threads that have not ended yet are counted. C code that keeps
Python's lock for itself stops all threads, this node's deadline with them: such code belongs into a process, as that
of `python_tool` is.

Shapes: N rows, K turns.
"""

import ctypes
import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event, Thread
from time import monotonic
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch
from torch.nn.utils.rnn import pad_sequence

from penstock.graph import node
from penstock.graph.errors import defined, fault
from penstock.graph.interface import Interface, interface
from penstock.graph.node import NodeDef
from penstock.graph.types import Context, Metrics, Replies, Rewards, Rollouts, TurnRewards
from penstock.nodes.option_checks import positive

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
            what, given = f"{self.__name__}: option 'deadline'", "one of the function's own"
            needed = "another name: it is the option that every environment has, the seconds of one call"
            raise fault("duplicate-name", what, given, needed, defined(self.fn))
        return replace(own, options={**own.options, "deadline": self.deadline}, metrics=True, stream=True)

    def _begin(self, context: Context, *, deadline: float, **options: Any) -> "Calls":
        own = interface(self.fn, stateful=False)
        options |= {own.context: context} if own.context else {}
        fn = functools.partial(self.fn, **options)
        return Calls(fn if own.metrics else lambda **inputs: (fn(**inputs), {}), deadline)


class _Decorator(Protocol):
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
def environment(*, pool: str = ..., deadline: float = ...) -> _Decorator: ...
def environment(
    fn: Callable[..., Any] | None = None, /, *, pool: str = "environment", deadline: float = DEADLINE_S
) -> Any:
    """Make a function of `Rollouts` that returns `Replies` (or `Replies` and `Metrics`) an environment for `converse`.

    The conversations of several prompt groups are answered at once, each by a call in a thread of its own; so the
    function must not change anything that its calls share. A call that takes longer than `deadline` seconds, waiting
    and computing, fails its group's firing (this module says what becomes of its thread). `deadline` is also an option
    of the call, `converse(…, environment=shop, turns=4, deadline=5.0)`, and should be shorter than the run's, which
    ends the run.

        @environment(deadline=10.0)
        def shop(rollouts: Rollouts, *, url: str) -> Replies: ...
    """
    if fn is not None:
        return EnvironmentDef(fn, pool, deadline)
    return lambda fn: EnvironmentDef(fn, pool, deadline)


@node(pool="scorer")
def outcome(replies: Replies) -> Rewards:
    """The rewards that the environment gave with its last replies. Raises ValueError if it gave none."""
    if replies.rewards_N is None:
        raise ValueError("outcome: given an environment that gives no rewards, needed one that does, or a scorer")
    return Rewards(torch.as_tensor(replies.rewards_N, dtype=torch.float32))


@node(pool="scorer")
def turn_rewards(rollouts: Rollouts, replies: Replies) -> TurnRewards:
    """What the environment gave after each turn of the model, with both outputs of `converse`: not only its last word.

    A row that is done gets nothing more, whatever is said of it at the others' later turns. Raises ValueError for an
    environment that gave no reward at some turn.
    """
    rewards, turns = rollouts.rewarded(replies), rollouts.turns()
    for row, given in enumerate(rewards):
        if None in given:
            where = f"turn_rewards, group {rollouts.ordinals[row]}, row {row}"
            raise ValueError(f"{where}: given no reward for turn {given.index(None)}, needed one for each turn")
    values_NK = pad_sequence([torch.tensor(given) for given in rewards], batch_first=True)
    return TurnRewards(values_NK, torch.tensor(turns))


# The longest that one step waits, so that messages are not kept waiting.
STEP_S = 0.001
# Seconds between two looks at the clock that count at most: where there are more, this process stood still, and its
# calls with it. Or it was at other work, again and again: so the longest such time alone is given back to a call.
PAUSE_S = 1.0
_PENDING = object()


class OverdueError(RuntimeError):
    """A call had no end at its deadline: whose it was, the deadline, and where it hangs."""


class _GivenUp(BaseException):
    """Raised in a thread whose call has been given up. No `except Exception` keeps it."""


@dataclass
class _Call:
    """A firing in work; `outcome` is what its function returned or raised."""

    thread: Thread
    until: float
    stood: float = 0.0
    outcome: Any = _PENDING


class Calls:
    """State of an environment's node: a `Stream`. As many firings are in work as the plan gives its replica.

    `function` takes the inputs and returns the outputs, with `Metrics` at the end. A call that takes longer than
    `deadline` seconds fails with OverdueError; one that raises, with what it raised. The metric `abandoned` is the
    number of threads of overdue calls that have not ended, if there are any.
    """

    def __init__(self, function: Callable[..., Any], deadline: float) -> None:
        self.function, self.deadline = function, deadline
        self.calls: dict[Any, _Call] = {}
        self.abandoned: list[Thread] = []
        self.news = Event()
        self._looked = monotonic()

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        # Daemons, so that a call that never ends does not hold up the end of the process.
        thread = Thread(target=lambda: self._work(call, inputs), name=str(tag), daemon=True)
        now = self._look()
        call = self.calls[tag] = _Call(thread, now + self.deadline)
        thread.start()

    def _look(self) -> float:
        """The time. Calls in work have as much longer as this process stood still."""
        now = monotonic()
        stood, self._looked = max(0.0, now - self._looked - PAUSE_S), now
        for call in self.calls.values():
            call.until += max(0.0, stood - call.stood)
            call.stood = max(stood, call.stood)
        return now

    def _work(self, call: _Call, inputs: Mapping[str, Any]) -> None:
        with suppress(_GivenUp):
            try:
                call.outcome = self.function(**inputs)
            # sys.exit() in an environment is a failure of its firing, too.
            except BaseException as error:
                call.outcome = error
            self.news.set()

    def step(self) -> Sequence[tuple[Any, Any]]:
        """The calls that have ended, and the failures of those that are overdue; a moment's wait for the first one."""
        self.news.wait(STEP_S)
        # Before looking: what ends meanwhile is seen now or ends the next wait.
        self.news.clear()
        now, finished = self._look(), []
        for tag, call in list(self.calls.items()):
            if call.outcome is not _PENDING:
                finished.append((tag, self._counted(call.outcome)))
            elif now >= call.until:
                # Its place has to be read before it is given up: the exception would move it.
                place, needed = stack_of(call.thread), f"needed one (deadline={self.deadline:g})"
                self._give_up(call)
                given = f"{tag}: given no reply within {self.deadline:g} s"
                finished.append((tag, OverdueError(f"{given}, {needed}; it was at\n{place}")))
            else:
                continue
            del self.calls[tag]
        return finished

    def busy(self) -> bool:
        return bool(self.calls)

    def reset(self) -> None:
        for call in self.calls.values():
            self._give_up(call)
        self.calls.clear()

    def _give_up(self, call: _Call) -> None:
        """End the thread of a call as soon as it runs Python again."""
        # The number of one that has ended may be another thread's by now.
        if not call.thread.is_alive():
            return
        ident = ctypes.c_ulong(call.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_GivenUp))
        self.abandoned.append(call.thread)

    def _counted(self, outcome: Any) -> Any:
        """The outcome, with the number of abandoned threads among its metrics."""
        self.abandoned = [thread for thread in self.abandoned if thread.is_alive()]
        if not self.abandoned or not isinstance(outcome, tuple):
            return outcome
        return (*outcome[:-1], {**outcome[-1], "abandoned": float(len(self.abandoned))})


def stack_of(thread: Thread) -> str:
    """Where a call's thread is now, as in a traceback, from the user's function on."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    ours = [index for index, summary in enumerate(frames) if summary.filename == __file__]
    return "".join(traceback.format_list(frames[ours[-1] + 1 :] if ours else frames))
