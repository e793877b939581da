"""What asks a run to end, who wants it, and the exit status that says so.

| status | a run |
|---|---|
| `DONE`, 0 | is done |
| `FAILED`, 1 | failed |
| `PREEMPTED`, 75 | was stopped for the engine that gave the machine (SIGTERM, SIGUSR1): start it again |
| `INTERRUPTED`, 130 | was stopped by its user: Ctrl-C, a terminal that closes, a pipe that nobody reads any more |
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

# By which an engine (Slurm, Kubernetes) tells that it takes the machine away.
PREEMPTIONS = (signal.SIGTERM, signal.SIGUSR1)
STOPS = (signal.SIGINT, signal.SIGHUP, *PREEMPTIONS)
# Seconds from the first of them to the end of everything, where nobody says another number.
GRACE_S = 4.5
# Signals of one kind that come closer together are one: of an engine and of the shell script that hands it on.
ONE_SIGNAL_S = 0.5

# How long an interrupt waits each time that it meets an import.
IMPORTING_S = 0.02
# The signal that waits, if one does.
_WAITING: list[int] = []
# The file that Python gives for the code of its import statement.
_IMPORTING = importlib.__import__.__code__.co_filename
# Codes of signals up to this one come of kill(2) and its like; the kernel's own, as of a terminal, are above it.
_SENT_BY_A_PROCESS = 0

Act = Callable[[int, FrameType | None], None]
Tell = Callable[[dict[str, Any]], None]


def asked_by(number: int) -> int:
    """The exit status that a signal asks for."""
    return PREEMPTED if number in PREEMPTIONS else INTERRUPTED


class Wish:
    """What signals have asked a process for so far. `status` is the exit status that they ask for, that of the first
    one; 0 for none. `number` is that signal; 0 for a display that is lost. `at_once`: nothing is to be waited for.
    `handed_on`: a parent hands signals on, so that a Ctrl-C may come twice.
    """

    def __init__(self, handed_on: bool = False) -> None:
        self.status, self.number, self.at_once = 0, 0, False
        self._handed_on = handed_on
        self._first: dict[int, float] = {}

    def hear(self, number: int) -> None:
        """A signal. A Ctrl-C after any other, or a second SIGTERM, wants the end at once; others may come several times
        for one wish, and a SIGTERM follows a SIGUSR1 that came ahead of time."""
        now = monotonic()
        again = number in self._first and now - self._first[number] > ONE_SIGNAL_S
        self._first.setdefault(number, now)
        if number == signal.SIGINT and not self._handed_on:
            again = self.status != 0
        self.at_once = self.at_once or (again and number in (signal.SIGINT, signal.SIGTERM))
        self.ask(number)

    def ask(self, number: int = 0) -> None:
        """The end is wanted, however often that is said."""
        if not self.status:
            self.status, self.number = asked_by(number), number


class Preempted(KeyboardInterrupt):
    """An engine wants this process to end."""


@contextmanager
def on_stop(act: Act, numbers: Sequence[signal.Signals] = STOPS) -> Iterator[None]:
    """Meanwhile these signals call `act`; then they do again what they did before. Outside the main thread, where
    Python hears no signal, nothing changes. A SIGHUP that is ignored stays so: that is what `nohup` is for.
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
    """Meanwhile signals that call a function here wait, and come at the end: for what somebody has to know of once it
    has begun, such as a child."""
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
    """Which signals come meanwhile that this process hears, whoever acts on them: complete at the end. In the main
    thread."""
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
    """What Ctrl-C does in Python, for the signals that would end the process where it stands: raises Preempted or
    KeyboardInterrupt. Within an import it waits until that is done; of several that wait the first one comes."""
    if _imports(frame):
        # Libraries in C crash if an exception comes while they begin (msgspec where it builds a decoder).
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
    """For a process that is ending already, and has something left to write."""


# Signals whose meaning `leave_end_to_parent` took from this process.
_LEFT: list[signal.Signals] = []
# By thread, the signals that were blocked before it began to fork, and whether the child is to hear them.
_FORKING = threading.local()


def leave_end_to_parent() -> None:
    """For a process whose parent decides when it ends: an engine may signal all processes of a host at once, and a
    rank has to live until the checkpoint is made. What this process starts or forks hears signals as ever, but for what
    `fork_leaving_end` forks."""
    if _LEFT:
        return
    _LEFT.extend(number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN)
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_hear_again)
    for number in _LEFT:
        # No SIG_IGN, which a program that is started would keep.
        signal.signal(number, carry_on)
        signal.siginterrupt(number, False)


def fork_leaving_end() -> int:
    """`os.fork()`, whose child leaves its end to its parent as this process does, from its first instant on."""
    _FORKING.leaves = True
    try:
        return os.fork()
    finally:
        _FORKING.leaves = False


def _hold() -> None:
    # One that came to a child before it hears signals again would be lost.
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


def wait_handing_on(child: subprocess.Popen[bytes], wish: Wish) -> int:
    """Until the child has ended; its status. What asks this process to end, or has done so already (`wish`), goes to
    the child, but for the Ctrl-C of a terminal, which has told all processes that it has. A child that it ends before
    it hears signals has the status that they ask for.
    """
    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    heard = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    # Held back while they are waited for, or one that comes between two looks would end this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*heard, signal.SIGCHLD])
    try:
        if wish.number:
            child.send_signal(wish.number)
        while (status := child.poll()) is None:
            told = signal.sigtimedwait([*heard, signal.SIGCHLD], 1.0)
            if told is not None and told.si_signo in heard and told.si_code <= _SENT_BY_A_PROCESS:
                child.send_signal(told.si_signo)
        return asked_by(-status) if -status in STOPS else status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def nobody_reads(descriptor: int) -> bool:
    """Is it a pipe without a reader, or a terminal that is gone?"""
    watch = select.poll()
    watch.register(descriptor, 0)  # errors and hang-ups are told unasked
    return bool(watch.poll(0))


def unheard(wish: Wish) -> str:
    """Why a run was asked to end, where it was not the user who said so; "" where it was."""
    if nobody_reads(1):
        return "stopped, since its output was closed"
    # As of a log on a disk that is full.
    return "stopped, since its output cannot be written" if wish.status and not wish.number else ""


def while_heard(tell: Tell, lost: Callable[[], None]) -> Tell:
    """`tell`, and `lost()` the first time that it raises OSError, since its pipe is closed, its terminal gone or
    its disk full."""
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
