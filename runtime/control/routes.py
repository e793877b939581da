"""From whom a replica gets a version of some weights, and to whom it passes it on. Pure, and the same on every rank.

A chain (`tensor/broadcast_chain`) relieves the trainers' network cards, so it is for weights that cross a network: for
replicas on other hosts than the trainers, or for all of them where messages are asked for, through the hosts or by
NCCL. A sender of the same host writes the receivers' memory itself. Deltas have no chain, either: they are few bytes, a
hop cannot pass on any of them before it has them all, and a receiver that is not on the predecessor needs another delta
than the one that follows it.

A replica gets a version from the one before it in the chain if both are sent it at once, and from the trainers
otherwise, so that nobody waits for a replica whose shadow is not free yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.runtime.cluster.placement import Replica
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.tensor.layout import Mesh
from penstock.runtime.tensor.reshard import chain
from penstock.runtime.tensor.wire_format import SyncLayouts

# Transports that are sent as messages even between ranks of one host.
BY_MESSAGES = ("messages", "nccl")
# By what share of the deadline the last link of a chain waits longer than the first: whoever is next to the one that
# stands still finds it out before the others, and names it.
GRACE = 0.25


class Routes:
    """The routes of one channel. The layouts decide them, which come with the first version: until it is settled,
    nothing may be asked. `alone`: there is no chain, since replicas may be lost.
    """

    def __init__(self, channel: Channel, transport: str, delta: int, *, alone: bool = False) -> None:
        chained = () if alone or delta or transport not in ("auto", *BY_MESSAGES) else channel.replicas
        self._replicas = [r for r in chained if transport in BY_MESSAGES or len(hosts(r, channel.source)) > 1]
        self._depths: dict[str, int] = {}
        self._sources: dict[str, str] = {}
        # One replica alone has nobody to get weights from but the trainers, whatever the layouts are.
        self._settled = len(self._replicas) < 2

    def settle(self, description: Mapping[str, Any]) -> None:
        """`description` is the sender's of its weights (`WeightPublisher.description`)."""
        if self._settled:
            return
        first, names = self._replicas[0], [replica.name for replica in self._replicas]
        plan = SyncLayouts.of(description, Mesh.of(first.mesh or None, len(first.ranks))).plan
        for destination, source in enumerate(chain(plan, len(names))):
            if source is not None:
                self._sources[names[destination]] = names[source]
            self._depths[names[destination]] = 0 if source is None else self._depths[names[source]] + 1
        self._settled = True

    def chained(self, replica: str) -> bool:
        """Whether a replica may be in a chain, so that weights come to it as messages."""
        return bool(self._sources) and replica in self._depths

    def source(self, replica: str, together: Sequence[str]) -> str:
        """The replica that passes on to this one what is sent to those `together` at once; "" if the trainers do."""
        source = self._sources.get(replica, "")
        return source if source in together else ""

    def next(self, replica: str, together: Sequence[str]) -> str:
        """The replica that this one passes it on to; "" for none."""
        return next((name for name in together if self._sources.get(name) == replica), "")

    def patience(self, replica: str) -> float:
        """By what factor the link to a replica waits longer than one from the trainers."""
        return 1 + GRACE * self._depths.get(replica, 0) / max([1, *self._depths.values()])


def hosts(*replicas: Replica) -> set[str]:
    """By the names of the cluster file."""
    return {host for replica in replicas for host in replica.hosts}
