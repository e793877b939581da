"""What a run's replicas did and when, as the bars of its trace; and how long weights are on their way.

What is remembered does not grow with the run: one entry per channel and replica, and the first bars.
"""

from dataclasses import dataclass, field

from penstock.graph.ir import Firing
from penstock.runtime.control.messages import Result
from penstock.runtime.record.chrome import chrome_trace
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.timeline import Bar, Kind
from penstock.runtime.schedule.events import Arrived, Published, Send, Swapped

MAX_BARS = 200_000
"""Bars kept for the trace: beyond them it holds the run's first part only, and says so."""


@dataclass
class Bars:
    """`live` is the version that each replica works with. Times are seconds on one clock.

    `published` is when each channel's newest version was, and `sent` when a replica's next version was asked for and
    when it had been published: only the newest is ever sent, and the next one when a replica has swapped the last.
    """

    bars: list[Bar] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    sent: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def fired(self, replica: str, firing: Firing, result: Result, kind: Kind, detail: str = "") -> None:
        """A firing has ended, well or not."""
        version = self.live.get(replica)
        self._add(Bar(replica, firing.node, firing.index, result.began, result.ended, kind, version, detail))

    def publishes(self, event: Published, result: Result) -> None:
        self.published[event.channel] = result.began
        self.fired(event.replica, Firing(event.channel, event.version), result, "publish")

    def sends(self, send: Send, now: float) -> None:
        self.sent[send.channel, send.replica] = (now, self.published[send.channel])

    def arrived(self, event: Arrived, now: float) -> None:
        asked, _ = self.sent[event.channel, event.replica]
        self._add(Bar(event.replica, event.channel, event.version, asked, now, "send", event.version))

    def swapped(self, event: Swapped, now: float) -> float:
        """Seconds since the version was published."""
        self.live[event.replica] = event.version
        _, published = self.sent[event.channel, event.replica]
        return now - published

    def write(self, folder: RunFolder, title: str) -> None:
        """Write `trace.json`."""
        trace = chrome_trace(self.bars, title)
        if len(self.bars) >= MAX_BARS:
            trace["otherData"]["note"] = f"the first {MAX_BARS} bars of the run"
        folder.write_json("trace.json", trace)

    def _add(self, bar: Bar) -> None:
        if len(self.bars) < MAX_BARS:
            self.bars.append(bar)
