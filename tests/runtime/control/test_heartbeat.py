"""A pulse goes on while its main thread is busy, and is no second peer."""

from pathlib import Path
from time import monotonic

import pytest

from penstock.runtime.control import sockets
from penstock.runtime.control.messages import Note
from penstock.runtime.control.rendezvous import Pulse

from .sockets import bench, until

pytestmark = pytest.mark.timeout(300)


def test_a_pulse_keeps_a_silent_rank_from_being_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path, silence=50.0) as b:
        b.client("generator/0", 1)
        pulse = Pulse(b.join(), "generator/0", 1, interval=0.02).start()
        future = monotonic() + 100
        monkeypatch.setattr(sockets, "monotonic", lambda: future)
        until(lambda: b.hear() == [] and b.server.heard("generator/0:1") == future)
        pulse.stop()
        assert b.server.peers == ("generator/0:1",)
        assert len(b.heard) == 1
        assert not b.server.counts


def test_a_pulse_may_begin_before_its_rank_and_ends_when_told(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        pulse = Pulse(b.join(), "generator/0", 0, interval=0.02).start()
        until(lambda: b.hear() == [] and b.server.heard("generator/0:0") > 0)
        assert not b.server.peers
        b.client("generator/0", 0)
        assert "generator/0:0" in b.server.peers
        pulse.stop()
        assert not pulse._thread.is_alive()


def test_a_pulse_that_has_seen_its_end_before_it_is_woken_may_be_woken_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path) as b:
        pulse = Pulse(b.join(), "generator/0", 0, interval=0.02).start()
        wake = pulse._client.wake

        def wake_late() -> None:
            pulse._thread.join(20)
            wake()

        monkeypatch.setattr(pulse._client, "wake", wake_late)
        pulse.stop()
        assert pulse._client._socket.closed


def test_a_pulse_says_what_the_main_thread_has_no_time_for(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        pulse = Pulse(b.join(), "generator/0", 0, interval=60.0).start()
        note = Note("error", "generator/0 rank 0: a thread ended")
        pulse.say(note)
        assert b.wait_for(1) == [("generator/0:0", note)]
        pulse.stop()
