"""The signals that ask a run to end, who sends them, and the exit status that follows.

| status | a run |
|---|---|
| `DONE`, 0 | is done |
| `FAILED`, 1 | failed |
| `PREEMPTED`, 75 | was stopped for the cluster manager that gave the machine (SIGTERM, SIGUSR1): start it again |
| `INTERRUPTED`, 130 | was stopped by its user: Ctrl-C, a closed terminal, a pipe without a reader |
"""

import importlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any

DONE, FAILED, PREEMPTED, INTERRUPTED = 0, 1, 75, 130

# Signals by which a cluster manager (Slurm, Kubernetes) announces that it takes the machine away.
PREEMPTIONS = (signal.SIGTERM, signal.SIGUSR1)
STOPS = (signal.SIGINT, signal.SIGHUP, *PREEMPTIONS)
# Default seconds from the first of these signals to the end of everything.
GRACE_S = 4.5
# Equal signals within so many seconds count as one: a shell script may forward a signal that also came directly.
ONE_SIGNAL_S = 0.5

# Seconds that an interrupt waits each time that it finds an import in progress.
IMPORTING_S = 0.02
# The waiting signal, if any.
_WAITING: list[int] = []
# The file name in the code of Python's import statement.
_IMPORTING = importlib.__import__.__code__.co_filename
# Signals with codes up to this one were sent by kill(2) and the like; the kernel's own, as of a terminal, have more.
_SENT_BY_A_PROCESS = 0

Act = Callable[[int, FrameType | None], None]
Tell = Callable[[dict[str, Any]], None]


def asked_by(number: int) -> int:
    """The exit status that a signal asks for."""
    return PREEMPTED if number in PREEMPTIONS else INTERRUPTED


class StopRequest:
    """What signals have asked a process for so far. `status` is the exit status that the first one asked for; 0 if none
    has come. `number` is that signal; 0 for a display that is lost. `at_once`: end without waiting for anything.
    `handed_on`: a parent forwards signals, so that one Ctrl-C may come twice.
    """

    def __init__(self, handed_on: bool = False) -> None:
        self.status, self.number, self.at_once = 0, 0, False
        self._handed_on = handed_on
        self._first: dict[int, float] = {}

    def hear(self, number: int) -> None:
        """Note a signal. A Ctrl-C after any signal, or a second SIGTERM, asks for the end at once. Other signals may be
        repeated, and a SIGTERM may follow an early SIGUSR1, without more urgency."""
        now = monotonic()
        again = number in self._first and now - self._first[number] > ONE_SIGNAL_S
        self._first.setdefault(number, now)
        if number == signal.SIGINT and not self._handed_on:
            again = self.status != 0
        self.at_once = self.at_once or (again and number in (signal.SIGINT, signal.SIGTERM))
        self.ask(number)

    def ask(self, number: int = 0) -> None:
        """Ask for the end. Only the first call counts."""
        if not self.status:
            self.status, self.number = asked_by(number), number


class Preempted(KeyboardInterrupt):
    """A cluster manager asks this process to end."""


@contextmanager
def on_stop(act: Act, numbers: Sequence[signal.Signals] = STOPS) -> Iterator[None]:
    """Let these signals call `act` within the block. Outside the main thread, where Python handles no signals, nothing
    changes. An ignored SIGHUP stays ignored, as `nohup` wants it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, act)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Delay signals that have a Python handler to the end of the block, so that what begins in it, such as a child, is
    always recorded."""
    came: list[int] = []
    numbers = [number for number in STOPS if callable(signal.getsignal(number))]
    try:
        with on_stop(lambda number, _: came.append(number), numbers):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def heard() -> Iterator[set[int]]:
    """The signals that come within the block and have a Python handler; complete at its end. In the main thread."""
    found: set[int] = set()
    told, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield found
    finally:
        signal.set_wakeup_fd(before)
        os.close(written)
        with os.fdopen(told, "rb") as file:
            found.update(file.read())


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler that raises Preempted or KeyboardInterrupt, as Ctrl-C does in Python. During an import it waits
    until the import is done; of several waiting signals the first one counts."""
    if _imports(frame):
        # Libraries in C may crash on an exception while they initialise (msgspec, when it builds a decoder).
        _WAITING[:] = _WAITING or [number]
        signal.signal(signal.SIGALRM, _interrupt_now)
        signal.setitimer(signal.ITIMER_REAL, IMPORTING_S)
        return
    raise Preempted if number in PREEMPTIONS else KeyboardInterrupt


def _interrupt_now(number: int, frame: FrameType | None) -> None:
    if _WAITING:
        signal.raise_signal(_WAITING.pop())


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame is not None


def carry_on(number: int, frame: FrameType | None) -> None:
    """A signal handler that does nothing, for a process that is ending already but still has to write something."""


# Signals that this process ignores since `ignore_stop_signals`.
_LEFT: list[signal.Signals] = []
# By thread: the signal mask before a fork, and whether the child ignores the signals, too.
_FORKING = threading.local()


def ignore_stop_signals() -> None:
    """Ignore the stop signals in a process whose parent decides when it ends: a cluster manager may signal all
    processes of a host at once, and a rank must live until the checkpoint is made. Children of this process do not
    ignore them, except those of `fork_leaving_end`."""
    if _LEFT:
        return
    _LEFT.extend(number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN)
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_hear_again)
    for number in _LEFT:
        # Not SIG_IGN, which a program that is started would inherit.
        signal.signal(number, carry_on)
        signal.siginterrupt(number, False)


def fork_leaving_end() -> int:
    """`os.fork()` of a child that ignores the stop signals as this process does, from its first instant on."""
    _FORKING.leaves = True
    try:
        return os.fork()
    finally:
        _FORKING.leaves = False


def _hold() -> None:
    # A signal to the child before `_hear_again` has reset its handlers would be lost.
    _FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.mask)


def _hear_again() -> None:
    if not getattr(_FORKING, "leaves", False):
        for number in _LEFT:
            if signal.getsignal(number) is carry_on:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _LEFT.clear()
    _let_go()


def wait_handing_on(child: subprocess.Popen[bytes], stop_request: StopRequest) -> int:
    """Wait until the child has ended, and return its status. Signals that ask this process to end, or have done so
    already (`stop_request`), are forwarded to the child, except Ctrl-C of a terminal, which reaches all its processes.
    For a child that such a signal killed before it handled signals, return the status that the signal asks for.
    """
    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    heard = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    # Blocked while `sigtimedwait` waits for them: one that came between two calls would end this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*heard, signal.SIGCHLD])
    try:
        if stop_request.number:
            child.send_signal(stop_request.number)
        while (status := child.poll()) is None:
            told = signal.sigtimedwait([*heard, signal.SIGCHLD], 1.0)
            if told is not None and told.si_signo in heard and told.si_code <= _SENT_BY_A_PROCESS:
                child.send_signal(told.si_signo)
        return asked_by(-status) if -status in STOPS else status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def output_closed(descriptor: int) -> bool:
    """True for a pipe without a reader, or a terminal that is gone."""
    watch = select.poll()
    watch.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(watch.poll(0))


def output_fault(stop_request: StopRequest) -> str:
    """Why a run was asked to end, if its user did not ask; "" if the user did."""
    if output_closed(1):
        return "stopped, since its output was closed"
    # Such as a log on a full disk.
    return "stopped, since its output cannot be written" if stop_request.status and not stop_request.number else ""


def stop_if_output_closes(tell: Tell, lost: Callable[[], None]) -> Tell:
    """A function that calls `tell`. The first time that this raises OSError (closed pipe, lost terminal, full disk), it
    calls `lost`."""
    deaf = False

    def told(line: dict[str, Any]) -> None:
        nonlocal deaf
        try:
            tell(line)
        except OSError:
            if not deaf:
                deaf = True
                lost()

    return told
