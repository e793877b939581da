"""Calls of a user's function that are in work at once, each in a thread of its own and with a deadline.

A thread cannot be killed. A call that is overdue is given up: its firing fails, its thread gets an exception that ends
it as soon as it runs Python again (a loop at once, a blocked read when it returns), and its result is never looked at.
Threads that have not ended yet are counted. They are daemons, so that none of them holds up the end of the process.
C code that keeps Python's lock for itself stops all threads, this node's deadline with them: such code belongs into a
process, as that of `python_tool` is.
"""

import ctypes
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic
from types import FrameType
from typing import Any

from penstock.graph.types import Metrics

STEP_S = 0.001
"""The longest that one step waits, so that messages are not kept waiting."""
_PENDING = object()


class OverdueError(RuntimeError):
    """A call had no end at its deadline: whose it was, the deadline, and where it hangs."""


class _GivenUp(BaseException):
    """Raised in a thread whose call has been given up. No `except Exception` keeps it."""


@dataclass
class _Call:
    """A firing in work; `outcome` is what its function returned or raised."""

    function: Callable[..., Any]
    inputs: Mapping[str, Any]
    until: float
    news: Event
    outcome: Any = _PENDING
    thread: Thread = field(init=False)

    def start(self, name: str) -> None:
        self.thread = Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        with suppress(_GivenUp):
            try:
                self.outcome = self.function(**self.inputs)
            except BaseException as error:  # sys.exit() in an environment is a failure of its firing, too
                self.outcome = error
            self.news.set()

    def give_up(self) -> None:
        """End the thread as soon as it runs Python again."""
        ident = ctypes.c_ulong(self.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_GivenUp))

    def place(self) -> str:
        """Where its thread is now, as in a traceback, from the function on."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_list(_below_this_file(frame)))


def _below_this_file(frame: FrameType) -> list[traceback.FrameSummary]:
    frames = traceback.extract_stack(frame)
    ours = [index for index, summary in enumerate(frames) if summary.filename == __file__]
    return frames[ours[-1] + 1 :] if ours else frames


def _reporting_nothing(function: Callable[..., Any]) -> Callable[..., tuple[Any, Metrics]]:
    return lambda **inputs: (function(**inputs), {})


class Calls:
    """State of an environment's node: a `Stream`. As many firings are in work as the plan gives its replica.

    `function` takes the inputs and returns the outputs, with `Metrics` at the end if it `reports` any; `step` hands
    them over with metrics in any case. A call that takes longer than `deadline` seconds fails with OverdueError; one
    that raises, with what it raised. The metric `abandoned` is the number of threads of overdue calls that have not
    ended, if there are any.
    """

    def __init__(self, function: Callable[..., Any], deadline: float, *, reports: bool = True) -> None:
        if not deadline > 0:
            raise ValueError(f"environment: given deadline {deadline!r}, needed more than 0 seconds")
        self.function = function if reports else _reporting_nothing(function)
        self.deadline = deadline
        self.calls: dict[Any, _Call] = {}
        self.abandoned: list[Thread] = []
        self.news = Event()

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        call = _Call(self.function, inputs, monotonic() + self.deadline, self.news)
        call.start(str(tag))
        self.calls[tag] = call

    def step(self) -> Sequence[tuple[Any, Any]]:
        """The calls that have ended, and the failures of those that are overdue; a moment's wait for the first one."""
        self.news.wait(STEP_S)
        self.news.clear()  # before looking: what ends meanwhile is seen now or ends the next wait
        now, finished = monotonic(), []
        for tag, call in list(self.calls.items()):
            if call.outcome is not _PENDING:
                finished.append((tag, self._counted(call.outcome)))
            elif now >= call.until:
                finished.append((tag, self._overdue(tag, call)))
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

    def _overdue(self, tag: Any, call: _Call) -> OverdueError:
        place = call.place()
        self._give_up(call)
        text = f"{tag}: given no reply within {self.deadline:g} s, needed one (deadline={self.deadline:g}); it was at"
        return OverdueError(f"{text}\n{place}")

    def _give_up(self, call: _Call) -> None:
        call.give_up()
        self.abandoned.append(call.thread)

    def _counted(self, outcome: Any) -> Any:
        """The outcome, with the number of abandoned threads among its metrics."""
        self.abandoned = [thread for thread in self.abandoned if thread.is_alive()]
        if not self.abandoned or not isinstance(outcome, tuple) or not isinstance(outcome[-1], dict):
            return outcome
        return (*outcome[:-1], {**outcome[-1], "abandoned": float(len(self.abandoned))})
