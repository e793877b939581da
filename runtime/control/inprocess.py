"""The whole run in one process and one thread: nodes are called directly, so that a debugger steps through them.

The same scheduler, stages and executors as with processes; only the messages are missing.
"""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from penstock.graph.ir import Firing
from penstock.runtime.control.config import RunConfig
from penstock.runtime.control.executor import Executor, Key, Setup
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.session import Session
from penstock.runtime.control.weights import LocalWays, channels_of
from penstock.runtime.schedule.tables import Channel, compile_tables


class InProcess:
    """One executor per rank, all in this thread; they share their values, so that none crosses memory."""

    def __init__(self, config: RunConfig, session: Session, folder: Path, restore: Path | None = None) -> None:
        self.session = session
        self.values: dict[Key, Any] = {}
        peers: dict[str, LocalWays] = {}
        channels: dict[str, Channel] = {}
        for graph in config.graphs:
            channels |= compile_tables(graph, config.plan).channels
        self.executors: dict[str, list[Executor]] = {}
        for replica in config.plan.replicas:
            self.executors[replica.name] = [
                Executor(
                    Setup(
                        config.graphs,
                        config.plan,
                        replica.name,
                        index,
                        config.contexts(replica.name.rpartition("/")[0], rank),
                        folder,
                        restore,
                    ),
                    LocalWays(channels_of(channels, replica.name), replica.name, index, rank.device, peers),
                    self.values,
                )
                for index, rank in enumerate(replica.ranks)
            ]

    def run(self) -> str:
        """Run all stages; the status. Ctrl-C asks for a checkpoint and the end, twice ends at once."""
        pending: deque[tuple[Executor, Order]] = deque()
        handles: Mapping[tuple[Firing, str], Any] = {}
        self._queue(pending, self.session.begin(monotonic(), handles))
        while self.session.running:
            try:
                results = self._work(pending)
                for result in results:
                    self._queue(pending, self.session.answer(result, monotonic()))
                self._queue(pending, self.session.watch(monotonic()))
            except KeyboardInterrupt:
                if self.session.stopping is not None:
                    raise
                self._queue(pending, self.session.stop(monotonic()))
        return self.session.status

    def _queue(self, pending: deque[tuple[Executor, Order]], orders: Mapping[str, Order]) -> None:
        for replica, order in orders.items():
            pending.extend((executor, order) for executor in self.executors[replica])

    def _work(self, pending: deque[tuple[Executor, Order]]) -> list[Result]:
        """Carry out one order if there is one, else one step of every executor's streams."""
        if pending:
            executor, order = pending.popleft()
            return executor.carry_out(order)
        results = [result for ranks in self.executors.values() for executor in ranks for result in executor.step()]
        if not results and not any(e.busy() for ranks in self.executors.values() for e in ranks):
            awaited = self.session.stage.scheduler.awaited() if self.session.stage else {}
            raise RuntimeError(f"nothing is left to do, and still awaited: {awaited}")
        return results
