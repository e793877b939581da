"""Bars of what replicas did; what is remembered of weights on their way does not grow."""

import json
from pathlib import Path

import pytest

from penstock.runtime.control import recorder as module
from penstock.runtime.control.messages import Result
from penstock.runtime.control.recorder import Bars
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.events import Arrived, Published, Send, Swapped

CHANNEL, REPLICAS = "policy>generator", ("generator/0", "generator/1")


def publish(bars: Bars, version: int, began: float) -> None:
    event = Published(CHANNEL, version, "trainer/0")
    bars.publishes(event, Result(event, began=began, ended=began + 0.5))


def test_weights_on_their_way_are_remembered_once_per_channel_and_replica() -> None:
    bars = Bars()
    for version in range(100):
        publish(bars, version, began=10.0 * version)
        for replica in REPLICAS:
            bars.sends(Send(CHANNEL, version, "trainer/0", replica), 10.0 * version + 1)
            bars.arrived(Arrived(CHANNEL, version, replica), 10.0 * version + 3)
        assert (len(bars.published), len(bars.sent)) == (1, 2)
        waited = [bars.swapped(Swapped(CHANNEL, version, replica), 10.0 * version + 4) for replica in REPLICAS]
        assert waited == [4.0, 4.0]
        assert bars.live == dict.fromkeys(REPLICAS, version)
    sends = [bar for bar in bars.bars if bar.kind == "send"]
    assert [(bar.lane, bar.index, bar.seconds) for bar in sends[:2]] == [(replica, 0, 2.0) for replica in REPLICAS]
    assert len(bars.bars) == 300


def test_a_version_that_is_swapped_in_late_is_counted_from_its_own_publication() -> None:
    bars = Bars()
    publish(bars, 0, began=1.0)
    bars.sends(Send(CHANNEL, 0, "trainer/0", "generator/0"), 2.0)
    bars.arrived(Arrived(CHANNEL, 0, "generator/0"), 3.0)
    publish(bars, 1, began=6.0)
    assert bars.swapped(Swapped(CHANNEL, 0, "generator/0"), 7.0) == 6.0


def test_the_trace_holds_the_first_bars_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BARS", 3)
    folder, bars = RunFolder.create(tmp_path / "run"), Bars()
    for version in range(5):
        publish(bars, version, began=float(version))
    bars.write(folder, "title")
    folder.unlock()
    trace = json.loads((folder.path / "trace.json").read_text())
    assert trace["otherData"] == {"title": "title", "note": "the first 3 bars of the run"}
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == 3
