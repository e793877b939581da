"""What asks a run to end: Ctrl-C, a polite kill, a terminal that closes, a pipe that nobody reads any more."""

import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Codes of signals up to this one come of kill(2) and its like; the kernel's own, as of a terminal, are above it.
_SENT_BY_A_PROCESS = 0

Act = Callable[[int, FrameType | None], None]
Tell = Callable[[dict[str, Any]], None]


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


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """What Ctrl-C does in Python, for the signals that would end the process where it stands."""
    raise KeyboardInterrupt


def carry_on(number: int, frame: FrameType | None) -> None:
    """For a process that is ending already, and has something left to write."""


def wait_handing_on(child: subprocess.Popen[bytes]) -> int:
    """Until the child has ended; its status. What asks this process to end goes to the child, but for the Ctrl-C of a
    terminal, which has told all processes that it has.
    """
    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    heard = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    # Held back while they are waited for, or one that comes between two looks would end this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*heard, signal.SIGCHLD])
    try:
        while (status := child.poll()) is None:
            told = signal.sigtimedwait([*heard, signal.SIGCHLD], 1.0)
            if told is not None and told.si_signo in heard and told.si_code <= _SENT_BY_A_PROCESS:
                child.send_signal(told.si_signo)
        return status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def nobody_reads(descriptor: int) -> bool:
    """Is it a pipe without a reader, or a terminal that is gone?"""
    watch = select.poll()
    watch.register(descriptor, 0)  # errors and hang-ups are told unasked
    return bool(watch.poll(0))


def unheard() -> str:
    """Why a run was asked to end, where it was not the user who said so; "" where it was."""
    return "stopped, since its output was closed" if nobody_reads(1) else ""


def while_heard(tell: Tell, lost: Callable[[], None]) -> Tell:
    """`tell`, and `lost()` the first time that it raises OSError, since its pipe is closed or its terminal gone."""
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
