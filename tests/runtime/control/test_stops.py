import errno
import os
import pty
import signal
from typing import Any

import pytest

from penstock.runtime.control.signals import STOPS, carry_on, interrupt, nobody_reads, on_stop, while_heard


def test_all_that_asks_to_stop_calls_the_act_and_is_given_back() -> None:
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPS}
    with on_stop(lambda number, frame: heard.append(number)):
        for number in STOPS:
            signal.raise_signal(number)
    assert heard == list(STOPS)
    assert {number: signal.getsignal(number) for number in STOPS} == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_stop(interrupt):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_polite_kill_can_be_like_ctrl_c_or_come_too_late() -> None:
    with pytest.raises(KeyboardInterrupt), on_stop(interrupt, (signal.SIGTERM,)):
        signal.raise_signal(signal.SIGTERM)
    with on_stop(carry_on):
        signal.raise_signal(signal.SIGINT)


def test_a_pipe_without_a_reader_is_told_from_one_with() -> None:
    read, write = os.pipe()
    assert not nobody_reads(write)
    os.close(read)
    assert nobody_reads(write)
    os.close(write)


def test_a_terminal_that_is_gone_is_told_from_one_that_is_there() -> None:
    master, slave = pty.openpty()
    assert not nobody_reads(slave)
    os.close(master)
    assert nobody_reads(slave)
    os.close(slave)


def test_a_display_is_lost_once_and_still_hears_all() -> None:
    heard: list[dict[str, Any]] = []
    lost: list[int] = []

    def tell(line: dict[str, Any]) -> None:
        heard.append(line)
        raise OSError(errno.EIO, "the terminal is gone")

    told = while_heard(tell, lambda: lost.append(1))
    for number in range(3):
        told({"number": number})
    assert (len(heard), len(lost)) == (3, 1)
