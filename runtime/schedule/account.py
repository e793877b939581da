"""Where a simulated run's time goes: what each replica does, and how many groups wait for each node. Pure.

A cluster has a thousand replicas, and a run hundreds of thousands of events, most of them about one replica. Those that
are idle for one cause share a clock, so that time passes once for each pool, not for each replica.
"""

from penstock.runtime.schedule.scheduler import Scheduler

Kind = tuple[str, tuple[bool, ...]]
"""Idle replicas that have one cause: their pool, and which weights they have had at all."""


class Account:
    """Follows one scheduler. Between two calls of `let` each replica does one thing.

    busy, idle: seconds of each replica with something in work, and without by cause; complete after `close`.
    depths: for each node but sources the seconds in which so many groups waited for it: ready, and not begun.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.now = scheduler, 0.0
        tables = scheduler.tables
        self.busy = dict.fromkeys(tables.replicas, 0.0)
        self.idle: dict[str, dict[str, float]] = {replica: {} for replica in tables.replicas}
        self.depths: dict[str, dict[int, float]] = {
            s.name: {} for s in tables.steps.values() if not s.source and (not s.per_update or s.groups)
        }
        self._queues = [(self.depths[s], scheduler.ready[s]) for s in self.depths if not tables.steps[s].per_update]
        self._updates = [self.depths[s] for s in self.depths if tables.steps[s].per_update]
        self._ways = {
            replica: tuple(way.receivers[replica] for way in scheduler.ways.values() if replica in way.receivers)
            for replica in tables.replicas
        }
        self._clocks: dict[Kind, dict[str, float]] = {}
        self._idling: dict[Kind, dict[str, dict[str, float]]] = {}
        self._doing: dict[str, float | Kind] = {}
        for replica in tables.replicas:
            self._begin(replica)

    def let(self, time: float) -> None:
        """Let the clock go on to `time`."""
        seconds, self.now = time - self.now, time
        for kind, replicas in self._idling.items():
            if replicas:
                clock, cause = self._clocks[kind], self.scheduler.cause(next(iter(replicas)))
                clock[cause] = clock.get(cause, 0.0) + seconds
        for depths, queue in self._queues:
            depths[len(queue)] = depths.get(len(queue), 0.0) + seconds
        waiting = self.scheduler.ledger.finished - len(self.scheduler.batch or ())
        for depths in self._updates:
            depths[waiting] = depths.get(waiting, 0.0) + seconds

    def note(self, replica: str) -> None:
        """Something was begun or has ended on a replica, or weights went live there."""
        doing = self._doing[replica]
        if self.scheduler.load[replica]:
            if isinstance(doing, tuple):
                self._end(replica)
                self._begin(replica)
        elif doing != self._kind(replica):
            self._end(replica)
            self._begin(replica)

    def close(self) -> None:
        """The run is over."""
        for replica in self._doing:
            self._end(replica)

    def _kind(self, replica: str) -> Kind:
        return self.scheduler.tables.pool_of[replica], tuple(receiver.live < 0 for receiver in self._ways[replica])

    def _begin(self, replica: str) -> None:
        if self.scheduler.load[replica]:
            self._doing[replica] = self.now
        else:
            kind = self._doing[replica] = self._kind(replica)
            clock = self._clocks.setdefault(kind, {})
            self._idling.setdefault(kind, {})[replica] = dict(clock)

    def _end(self, replica: str) -> None:
        """Add what a replica has done since it began to."""
        doing = self._doing[replica]
        if not isinstance(doing, tuple):
            self.busy[replica] += self.now - doing
            return
        idle, before = self.idle[replica], self._idling[doing].pop(replica)
        for cause, seconds in self._clocks[doing].items():
            if seconds > before.get(cause, 0.0):
                idle[cause] = idle.get(cause, 0.0) + seconds - before.get(cause, 0.0)
