"""`@environment`: a plain function that answers turns of many conversations at once, each within a deadline. Also the
environment's rewards of a conversation: `outcome`, `turn_rewards`.

Each call of the function has a thread of its own. A thread cannot be killed. At its deadline a call is given up: its
firing fails, its thread gets an exception that ends it as soon as it runs Python again (a loop at once, a blocked read
when it returns), and its result is ignored. Threads that have not ended yet are counted. C code that holds Python's
lock stops all threads, and this node's deadline with them: run such code in a process, as `python_tool` does.

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
from penstock.graph.context import Context
from penstock.graph.errors import defined, fault
from penstock.graph.interface import Interface, interface
from penstock.graph.node import NodeDef
from penstock.graph.types import Metrics, Replies, Rewards, Rollouts, TurnRewards, uneven
from penstock.nodes.option_checks import positive

P = ParamSpec("P")
T = TypeVar("T")
DEADLINE_S = 60.0


class EnvironmentDef(NodeDef[P, T], Generic[P, T]):
    """A node whose firings are calls of `fn`, several in work at once: its state is a `Stream` of them.

    It has one more option than `fn`: `deadline`, in seconds. Called outside of a program it is `fn`.
    """

    def __init__(self, fn: Callable[..., Any], pool: str, deadline: float) -> None:
        super().__init__(fn, pool, "group", self._begin)
        self.deadline = deadline
        self.requires = (positive("deadline"),)

    @functools.cached_property
    def interface(self) -> Interface:
        """The function's interface with the option `deadline`. It has no state, and may always return metrics."""
        own = interface(self.fn, stateful=False)
        if "deadline" in own.options:
            what, given = f"{self.__name__}: option 'deadline'", "one of the function's own"
            needed = "another name: it is the option that every environment has, the seconds of one call"
            raise fault("duplicate-name", what, given, needed, defined(self.fn))
        return replace(own, options={**own.options, "deadline": self.deadline}, metrics=True, stream=True)

    def _begin(self, context: Context, *, deadline: float, **options: Any) -> "Calls":
        own = interface(self.fn, stateful=False)
        options |= {own.context: context} if own.context else {}

        def called(**inputs: Any) -> Any:
            made = self.fn(**inputs, **options)
            replies, *others = made if own.metrics and isinstance(made, tuple) and made else (made,)
            said = [value for value in inputs.values() if isinstance(value, Rollouts)]
            # `split` tells what is wrong with malformed ones. Of several rollouts, any may be the conversation.
            if len(said) == 1 and isinstance(replies, Replies) and not (replies.lack() or uneven(replies)):
                if len(replies) != len(said[0]):
                    given, needed = f"{len(replies)} replies", f"{len(said[0])}, one for each row of the conversation"
                    raise ValueError(f"{self.__name__} returned {given}, needed {needed}")
                replies = said[0].settled(replies)
                made = (replies, *others) if others else replies
            return made if own.metrics else (made, {})

        return Calls(called, deadline)


class _Decorator(Protocol):
    """The type of `@environment(…)`."""

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

    The conversations of several prompt groups are answered at once, each by a call in a thread of its own, so the
    function must not change anything that its calls share. If a call takes longer than `deadline` seconds, waiting or
    computing, its group's firing fails (for its thread see this module). `deadline` is also an option of the call,
    `converse(…, environment=shop, turns=4, deadline=5.0)`, and should be shorter than the run's, which ends the run.

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
    """The environment's rewards after each turn of the model, from both outputs of `converse`: not only the last one.

    A row that is done gets no more rewards, whatever the environment returns for it at later turns of other rows.
    Raises ValueError for an environment that gave no reward at some turn.
    """
    rewards, turns = rollouts.rewarded(replies), rollouts.turns()
    for row, given in enumerate(rewards):
        if None in given:
            where = f"turn_rewards, group {rollouts.ordinals[row]}, row {row}"
            raise ValueError(f"{where}: given no reward for turn {given.index(None)}, needed one for each turn")
    values_NK = pad_sequence([torch.tensor(given) for given in rewards], batch_first=True)
    return TurnRewards(values_NK, torch.tensor(turns))


# The longest wait of one step, so that messages do not wait.
STEP_S = 0.001
# The most seconds that count between two looks at the clock. With more, this process was suspended, and its calls with
# it; or it was repeatedly busy with other work. So only the longest such time is added to a call's deadline.
PAUSE_S = 1.0
_PENDING = object()


class OverdueError(RuntimeError):
    """A call had not ended at its deadline: its firing, the deadline, and where it hangs."""


class _GivenUp(BaseException):
    """Raised in a thread whose call has been given up. `except Exception` does not catch it."""


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
    `deadline` seconds fails with OverdueError; a call that raises fails with its exception. The metric `abandoned` is
    the number of threads of overdue calls that have not ended, if there are any.
    """

    def __init__(self, function: Callable[..., Any], deadline: float) -> None:
        self.function, self.deadline = function, deadline
        self.calls: dict[Any, _Call] = {}
        self.abandoned: list[Thread] = []
        self.news = Event()
        self._looked = monotonic()

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        # Daemons, so that a call that never ends does not block the end of the process.
        thread = Thread(target=lambda: self._work(call, inputs), name=str(tag), daemon=True)
        now = self._look()
        call = self.calls[tag] = _Call(thread, now + self.deadline)
        thread.start()

    def _look(self) -> float:
        """The time. Extends the deadlines of calls in work by the time for which this process was suspended."""
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
            # BaseException, since sys.exit() in an environment is a failure of its firing, too.
            except BaseException as error:
                call.outcome = error
            self.news.set()

    def step(self) -> Sequence[tuple[Any, Any]]:
        """The calls that have ended, and the failures of overdue ones. Waits at most `STEP_S` for the first."""
        self.news.wait(STEP_S)
        # Cleared before looking: a call that ends meanwhile is seen now, or ends the next wait.
        self.news.clear()
        now, finished = self._look(), []
        for tag, call in list(self.calls.items()):
            if call.outcome is not _PENDING:
                finished.append((tag, self._counted(call.outcome)))
            elif now >= call.until:
                # Read its place before giving it up: the exception would change it.
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
        # If it has ended, its number may be another thread's by now.
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
    """The present stack of a call's thread, as in a traceback, from the user's function on."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    ours = [index for index, summary in enumerate(frames) if summary.filename == __file__]
    return "".join(traceback.format_list(frames[ours[-1] + 1 :] if ours else frames))
